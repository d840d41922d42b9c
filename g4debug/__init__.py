"""g4debug: from an SGLang illegal-memory-access crash to a diagnosis.

Importing this package imports neither sglang nor CUDA.
"""

__version__ = "1.0.0"
