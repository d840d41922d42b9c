"""Reads a dump without running code from it. Imports no sglang.

:mod:`g4debug.dumps.archive` opens the zip, :mod:`g4debug.dumps.check` builds the values, and
:mod:`g4debug.dumps.plain` checks every field. Each of them refuses what g4debug does not write. A
file of at most MAX_READ_BYTES takes at most some two seconds and 200 MB to read or to refuse. A
file that is no zip of ``torch.save`` is never unpickled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from g4debug.dumps import check, heads
from g4debug.dumps.archive import Archive
from g4debug.dumps.file import CodeError, DamagedError, DumpError, NewerError, NotADumpError
from g4debug.dumps.plain import from_plain
from g4debug.findings.record import KIND, SCHEMA, TrapRecord


def read(path: Path) -> TrapRecord:
    """Open a dump. Runs no code from the file.

    Raises DumpError with one line that says what is wrong. The file may be missing, a directory,
    empty, truncated, damaged, not a dump, or of a newer schema, or it may contain pickled code.
    """
    payload = _load(path)
    if payload.get("kind") != KIND:
        raise DumpError(f"{path}: a torch file, but not a g4debug dump (no kind={KIND!r} in it)")
    schema = payload.get("schema")
    if type(schema) is not int:
        raise DumpError(f"{path}: damaged dump (no schema number)")
    if schema > SCHEMA:
        raise DumpError(f"{path}: {_newer(schema)}")
    try:
        return from_plain(payload)
    except Exception as e:  # whatever a damaged field causes, the dump is damaged
        raise DumpError(f"{path}: damaged dump ({_one_line(e)})") from e


def _load(path: Path) -> dict[str, Any]:
    try:
        with heads.opened(path) as (file, size):
            beginning = file.read(4)
            if not beginning.startswith(b"PK"):
                raise DumpError(f"{path}: {heads.no_zip(beginning)}")
            archive = Archive(file, size)
            if "data.pkl" not in archive:
                raise NotADumpError("a zip file, but not made by torch.save (it has no data.pkl)")
            _schema_of_head(archive)
            pickled = archive.read("data.pkl") if _fits(archive) else bytearray()
            return check.build(pickled, _Tensors(archive), SCHEMA)
    except CodeError as e:
        raise DumpError(
            f"{path}: refused: it holds pickled code or objects ({_one_line(e)}), which no "
            "g4debug dump has; nothing in it was executed"
        ) from e
    except NewerError as e:
        raise DumpError(f"{path}: {_newer(int(str(e)))}") from e
    except NotADumpError as e:
        raise DumpError(f"{path}: {_one_line(e)}") from e
    except DamagedError as e:
        raise DumpError(f"{path}: truncated or damaged: {_one_line(e)}") from e


def _fits(archive: Archive) -> bool:
    size = archive.size("data.pkl")
    if size > check.MAX_PICKLE_BYTES:
        raise DamagedError(f"its values take {size >> 20} MiB, more than any dump's")
    return True


def _schema_of_head(archive: Archive) -> None:
    """Raise NewerError if the head says so: what follows may then be of an unknown form."""
    if heads.RECORD in archive and archive.size(heads.RECORD) <= heads.MAX_HEAD_BYTES:
        try:
            schema = heads.decode(bytes(archive.read(heads.RECORD))).schema
        except ValueError as e:
            raise DamagedError(str(e)) from e
        if schema > SCHEMA:
            raise NewerError(str(schema))


def _newer(schema: int) -> str:
    return (
        f"written by a newer g4debug (it has schema {schema}, this g4debug reads up to {SCHEMA}); "
        "run: pip install -U g4debug"
    )


class _Tensors:
    """The tensors of a dump. What is asked for has been checked."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._read: dict[str, torch.Tensor] = {}

    def size(self, key: str) -> int:
        return self.archive.size(f"data/{key}")

    def tensor(self, key: str, offset: int, shape: list[int], strides: list[int]) -> torch.Tensor:
        stored = self._read.get(key)
        if stored is None:
            order = "byteorder"
            if order in self.archive and self.archive.size(order) < 16:
                found = self.archive.read(order).decode("ascii", "replace")
                if found != sys.byteorder:
                    raise DamagedError(f"its tensors are in the byte order {found!r}")
            data = self.archive.read(f"data/{key}")
            stored = torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0)
            stored = self._read[key] = stored.to(torch.int64)
        return stored.as_strided(shape, strides, offset)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]
