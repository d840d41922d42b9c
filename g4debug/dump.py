"""Dumps: written atomically and within a budget, read without running code.

Imports no sglang. A dump is a ``torch.save`` zip of plain values and CPU tensors
(:func:`g4debug.plain.to_plain`); it is checked by :mod:`g4debug.dump_check` and then read
with ``weights_only=True``. A file that is no such zip is never unpickled at all.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import stat
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from g4debug import dump_check
from g4debug.plain import from_plain, to_plain
from g4debug.record import KIND, SCHEMA, TrapRecord

SUFFIX = ".pt"
TEMPORARY = ".tmp"
PREFIX = "g4debug-"
OLD_SECONDS = 600  # age from which a temporary file is nobody's; a write takes seconds
MAX_LOOKED_AT = 4096  # directory entries that a write looks at for old temporary files
_TEMPORARY = re.compile(re.escape(f".{PREFIX}") + r"(\d+)-\w+" + re.escape(TEMPORARY))
MAX_READ_BYTES = 256 << 20  # nothing that g4debug writes comes near


class DumpError(Exception):
    """A dump could not be written or read; the text is one line for a person."""


def dump_name(check: str, created: datetime, pid: int, number: int) -> str:
    """``g4debug-page-table-20260101T000000Z-4711-1.pt``: sorts by check, then time."""
    return f"{PREFIX}{check}-{created:%Y%m%dT%H%M%SZ}-{pid}-{number}{SUFFIX}"


def encode(record: TrapRecord) -> bytes:
    """The dump's bytes.

    Raises ValueError, with the field, for a record that :func:`read` would refuse: a value of
    the wrong type, a tensor that is not int64 on the CPU.
    """
    plain = to_plain(record)
    from_plain(plain)
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def write(data: bytes, directory: Path, name: str) -> Path:
    """Write ``data`` as ``directory/name``: whole, or not at all.

    The bytes go to a temporary name in the same directory, are flushed to disk and
    then renamed. A process that is killed meanwhile leaves the temporary file, which no
    command takes for a dump; a later write removes it. Raises
    DumpError (directory cannot be made, no space, no permission).
    """
    path = directory / name
    temporary: str | None = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _clean_up(directory)
        fd, temporary = tempfile.mkstemp(
            prefix=f".{PREFIX}{os.getpid()}-", suffix=TEMPORARY, dir=directory
        )
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as e:
        raise DumpError(f"cannot write {path}: {e.strerror or e}") from e
    finally:  # an interrupt too must not leave a half-written file
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path


def _clean_up(directory: Path) -> None:
    """Remove what killed writers left: old temporary files of processes that are gone.

    Old, because a process that is not here may live in another container.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:  # a write comes first
        for entry in itertools.islice(entries, MAX_LOOKED_AT):
            found = _TEMPORARY.fullmatch(entry.name)
            if found is None or _alive(int(found[1])):
                continue
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > OLD_SECONDS:
                os.unlink(entry.path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def read(path: Path) -> TrapRecord:
    """Open a dump. Runs no code from the file.

    Raises DumpError, one line that says what is wrong: missing, a directory, empty,
    truncated, not a dump, holding pickled code, of a newer schema, damaged.
    """
    payload = _load(path)
    if payload.get("kind") != KIND:
        raise DumpError(f"{path}: a torch file, but not a g4debug dump (no kind={KIND!r} in it)")
    schema = payload.get("schema")
    if type(schema) is not int or schema > SCHEMA:
        raise DumpError(f"{path}: damaged dump (no schema number)")
    try:
        return from_plain(payload)
    except Exception as e:  # whatever a damaged field provokes, it is a damaged dump
        raise DumpError(f"{path}: damaged dump ({_one_line(e)})") from e


def _load(path: Path) -> dict[str, Any]:
    data = _bytes(path)
    if not data.startswith(b"PK"):
        what = "a bare pickle" if data.startswith(b"\x80") else "not a torch file"
        raise DumpError(f"{path}: not a g4debug dump ({what}); nothing in it was executed")
    try:
        records = dump_check.open_archive(data)
        dump_check.check_pickle(records, SCHEMA)
        payload = torch.load(dump_check.pack(records), map_location="cpu", weights_only=True)
    except dump_check.CodeError as e:
        raise DumpError(
            f"{path}: refused: it holds pickled code or objects ({_one_line(e)}), which no "
            "g4debug dump does; nothing in it was executed"
        ) from e
    except dump_check.NewerError as e:
        raise DumpError(
            f"{path}: written by a newer g4debug (schema {e}, this one reads up to {SCHEMA}); "
            "run: pip install -U g4debug"
        ) from e
    except dump_check.NotADumpError as e:
        raise DumpError(f"{path}: {_one_line(e)}") from e
    except Exception as e:  # torch raises many types on a damaged file; all are final
        raise DumpError(f"{path}: truncated or damaged: {_one_line(e)}") from e
    if not isinstance(payload, dict):
        raise DumpError(f"{path}: a torch file, but not a g4debug dump")
    return payload


def _bytes(path: Path) -> bytes:
    """The file's bytes. Opened without waiting: a FIFO or a device must not hang a reader."""
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


def now() -> datetime:
    return datetime.now(UTC)
