"""Writes a dump as a whole or not at all. Imports no sglang.

A dump is a zip of ``torch.save`` with plain values and CPU tensors
(:func:`g4debug.dumps.plain.to_plain`).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from g4debug.dumps.file import PREFIX, TEMPORARY, DumpError
from g4debug.dumps.plain import from_plain, to_plain
from g4debug.findings.record import TrapRecord

OLD_SECONDS = 600  # a temporary file of this age was left behind; a write takes seconds
MAX_LOOKED_AT = 4096  # a write looks for old temporary files among so many directory entries
_TEMPORARY = re.compile(re.escape(f".{PREFIX}") + r"(\d+)-\w+" + re.escape(TEMPORARY))


def now() -> datetime:
    """The time that a dump is marked with."""
    return datetime.now(UTC)


def encode(record: TrapRecord) -> bytes:
    """The dump's bytes.

    Raises ValueError with the name of the field if the record could not be read back: a value has
    the wrong type, or a tensor is not int64 on the CPU.
    """
    plain = to_plain(record)
    from_plain(plain)
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def write(data: bytes, directory: Path, name: str) -> Path:
    """Write ``data`` to ``directory/name`` as a whole or not at all.

    The bytes go to a temporary file in the same directory, which is flushed to disk and then
    renamed. If the process is killed meanwhile, the temporary file stays. No command takes it for
    a dump, and a later write removes it. Raises DumpError if the directory cannot be made, there
    is no space, or no permission.
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
    finally:  # an interrupt must not leave a half-written file either
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path


def _clean_up(directory: Path) -> None:
    """Remove old temporary files of processes that were killed while they wrote.

    Only old ones, because a process that is not visible here may live in another container.
    """
    with (
        contextlib.suppress(OSError),
        os.scandir(directory) as entries,
    ):  # a failure here must not prevent the write
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
