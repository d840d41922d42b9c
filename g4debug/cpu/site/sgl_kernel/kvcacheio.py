"""The kernels for copying KV between host and device, whose names SGLang always imports.

None of them works without CUDA: calling one raises an error. They are for hierarchical caching,
which is off on the CPU engine.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if not name.startswith("transfer_kv_"):
        raise AttributeError(f"sgl_kernel.kvcacheio has no {name}")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.kvcacheio.{name} needs CUDA and has no CPU stand-in. "
            "Run without hierarchical caching."
        )

    fail.__name__ = name
    return fail
