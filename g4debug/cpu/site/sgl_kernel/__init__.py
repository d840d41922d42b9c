"""The CPU engine's `sgl_kernel`. A missing name is an error, so that nothing fails silently.

The real wheel is for CUDA only. SGLang always imports `kvcacheio` of it, and from 0.5.18 on some
kernels for CPUs, by name. It gets those that the table in `g4debug.cpu.attach` has for this
release. Any other name raises an error. So each `try: from sgl_kernel import X` in SGLang takes its
own fallback, and any other use of X is an error that names X.
"""

__version__ = "0.0.0+g4debug.cpu"


def merge_state_v2(*_args: object, **_options: object) -> None:
    """What SGLang's FlashAttention backend imports always, for drafts with several branches."""
    raise NotImplementedError(
        "sgl_kernel.merge_state_v2 has no CPU stand-in. Use speculative_eagle_topk=1."
    )


def __getattr__(name: str) -> object:
    from g4debug.cpu import attach  # imports torch, which SGLang has imported by then

    return attach.kernel(name)
