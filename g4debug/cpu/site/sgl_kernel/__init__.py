"""The CPU engine's `sgl_kernel`: strict, so that nothing on the CPU path fails silently.

The real wheel is CUDA only. SGLang imports a part of it unconditionally (`kvcacheio`); only that
part exists here. Everything else raises by name, so each `try: from sgl_kernel import X` in SGLang
takes its own fallback and each unguarded use is an error that says what is missing.
"""

__version__ = "0.0.0+g4debug.cpu"


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"sgl_kernel.{name}: got a request for a CUDA kernel on the CPU engine, expected only "
        "sgl_kernel.kvcacheio. If the CPU path really needs it, add a stand-in to g4debug/cpu."
    )
