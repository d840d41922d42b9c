"""The CPU engine's `sgl_kernel`. What it lacks is an error, so that nothing fails silently.

The real wheel is for CUDA only. SGLang always imports `kvcacheio` of it, and only that part exists
here. Any other name raises an error. So each `try: from sgl_kernel import X` in SGLang takes its
own fallback, and any other use of X is an error that says what is missing.
"""

__version__ = "0.0.0+g4debug.cpu"


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"sgl_kernel.{name} is a CUDA kernel, and the CPU engine has only sgl_kernel.kvcacheio. "
        "If SGLang really needs it on a CPU, add a stand-in to g4debug/cpu."
    )
