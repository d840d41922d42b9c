"""The errors of a dump, or of a file that should be one."""

from __future__ import annotations


class DumpError(Exception):
    """A dump cannot be written or read. The text says why, in one line."""


class TooLargeError(DumpError):
    """A record has more values than a dump may have. With fewer, it can be written."""


class RefusedError(Exception):
    """A file is not read, for one of the following reasons."""


class DamagedError(RefusedError):
    """A file is not an intact dump. The text names the damage."""


class NotADumpError(RefusedError):
    """A file may be intact, but it is not a dump. The text says which sort of file it is."""


class NewerError(RefusedError):
    """A dump has a newer schema. The text is the schema's number."""


class CodeError(RefusedError):
    """A file contains something that would run code or build an object."""
