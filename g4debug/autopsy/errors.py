"""The error of this room. Its text is one line for a user, without the file's name."""


class CoreError(Exception):
    """A file is not a CUDA core dump, is damaged, or has a layout that is not known."""
