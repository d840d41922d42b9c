"""Reads a dump without running code from it. Imports no sglang.

:mod:`g4debug.dumps.check` checks the file before torch reads it, with ``weights_only=True``. A
file that is no zip of ``torch.save`` is never unpickled.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import torch

from g4debug.dumps import check
from g4debug.dumps.file import DumpError
from g4debug.dumps.plain import from_plain
from g4debug.findings.record import KIND, SCHEMA, TrapRecord

MAX_READ_BYTES = 256 << 20  # far more than g4debug ever writes


def read(path: Path) -> TrapRecord:
    """Open a dump. Runs no code from the file.

    Raises DumpError with one line that says what is wrong. The file may be missing, a directory,
    empty, truncated, damaged, not a dump, or of a newer schema, or it may contain pickled code.
    """
    payload = _load(path)
    if payload.get("kind") != KIND:
        raise DumpError(f"{path}: a torch file, but not a g4debug dump (no kind={KIND!r} in it)")
    schema = payload.get("schema")
    if type(schema) is not int or schema > SCHEMA:
        raise DumpError(f"{path}: damaged dump (no schema number)")
    try:
        return from_plain(payload)
    except Exception as e:  # whatever a damaged field causes, the dump is damaged
        raise DumpError(f"{path}: damaged dump ({_one_line(e)})") from e


def _load(path: Path) -> dict[str, Any]:
    data = _bytes(path)
    if not data.startswith(b"PK"):
        what = "a bare pickle" if data.startswith(b"\x80") else "not a torch file"
        raise DumpError(f"{path}: not a g4debug dump ({what}); nothing in it was executed")
    try:
        records = check.open_archive(data)
        check.check_pickle(records, SCHEMA)
        payload = torch.load(check.pack(records), map_location="cpu", weights_only=True)
    except check.CodeError as e:
        raise DumpError(
            f"{path}: refused: it holds pickled code or objects ({_one_line(e)}), which no "
            "g4debug dump has; nothing in it was executed"
        ) from e
    except check.NewerError as e:
        raise DumpError(
            f"{path}: written by a newer g4debug (it has schema {e}, this g4debug reads up to "
            f"{SCHEMA}); "
            "run: pip install -U g4debug"
        ) from e
    except check.NotADumpError as e:
        raise DumpError(f"{path}: {_one_line(e)}") from e
    except Exception as e:  # torch raises many types for a damaged file, and none can be mended
        raise DumpError(f"{path}: truncated or damaged: {_one_line(e)}") from e
    if not isinstance(payload, dict):
        raise DumpError(f"{path}: a torch file, but not a g4debug dump")
    return payload


def _bytes(path: Path) -> bytes:
    """The file's bytes. It is opened without waiting, because a FIFO or a device might hang."""
    try:
        with open(path, "rb", opener=_open_at_once) as f:
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DumpError(f"{path}: not a regular file")
            if status.st_size == 0:
                raise DumpError(f"{path}: empty file")
            if status.st_size > MAX_READ_BYTES:
                raise DumpError(f"{path}: {status.st_size >> 20} MiB; no dump is that large")
            return f.read(MAX_READ_BYTES)
    except FileNotFoundError:
        raise DumpError(f"{path}: no such file; try: g4debug list") from None
    except IsADirectoryError:
        raise DumpError(f"{path}: is a directory; try: g4debug list {path}") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise DumpError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from e


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]
