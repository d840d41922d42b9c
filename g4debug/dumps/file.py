"""The file that a dump is: its name, and the error where it cannot be written or read."""

from __future__ import annotations

from datetime import datetime

SUFFIX = ".pt"
TEMPORARY = ".tmp"
PREFIX = "g4debug-"


class DumpError(Exception):
    """A dump could not be written or read; the text is one line for a person."""


def dump_name(check: str, created: datetime, pid: int, number: int) -> str:
    """``g4debug-page-table-20260101T000000Z-4711-1.pt``: sorts by check, then time."""
    return f"{PREFIX}{check}-{created:%Y%m%dT%H%M%SZ}-{pid}-{number}{SUFFIX}"
