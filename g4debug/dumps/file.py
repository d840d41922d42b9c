"""The name of a dump's file, and the error if it cannot be written or read."""

from __future__ import annotations

from datetime import datetime

SUFFIX = ".pt"
TEMPORARY = ".tmp"
PREFIX = "g4debug-"


class DumpError(Exception):
    """A dump cannot be written or read. The text says why, in one line."""


def dump_name(check: str, created: datetime, pid: int, number: int) -> str:
    """``g4debug-page-table-20260101T000000Z-4711-1.pt``: names sort by check, then by time."""
    return f"{PREFIX}{check}-{created:%Y%m%dT%H%M%SZ}-{pid}-{number}{SUFFIX}"
