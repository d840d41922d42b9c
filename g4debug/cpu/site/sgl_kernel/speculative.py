"""The kernels that SGLang imports from this part of sgl_kernel: those of the same table."""


def __getattr__(name: str) -> object:
    from g4debug.cpu import attach  # imports torch, which SGLang has imported by then

    return attach.kernel(name, __name__)
