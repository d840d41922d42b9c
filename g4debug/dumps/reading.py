"""Reads a dump without running code from it. Imports no sglang.

A dump is a zip of ``torch.save``, and a zip file can be a trap. Its directory may list a million
records, a small compressed record may hold gigabytes, and records may overlap. So the directory is
bounded before Python's zipfile reads it, nothing is compressed, no record is larger than the file,
and every checksum is checked when a record is read. :mod:`g4debug.dumps.check` then builds the
values, and :mod:`g4debug.dumps.plain` checks every field. Each of them refuses what g4debug does
not write. A file of at most MAX_READ_BYTES takes at most some two seconds and 200 MB to read or to
refuse. A file that is no zip of ``torch.save`` is never unpickled.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from g4debug.dumps import check, heads
from g4debug.dumps.errors import CodeError, DamagedError, DumpError, NewerError, NotADumpError
from g4debug.dumps.plain import from_plain
from g4debug.findings.record import KIND, SCHEMA, IntArray, TrapRecord

MAX_RECORDS = 64
MAX_DIRECTORY_BYTES = 64 << 10
CHUNK = 1 << 20


def read(path: Path) -> TrapRecord:
    """Open a dump. Runs no code from the file.

    Raises DumpError with one line that gives the reason. The file may be missing, a directory,
    empty, truncated, damaged, not a dump, or of a newer schema, or it may contain pickled code.
    """
    try:
        payload = _load(path)
        if payload.get("kind") != KIND:
            raise NotADumpError(f"a torch file, but not a g4debug dump (no kind={KIND!r} in it)")
        schema = payload.get("schema")
        if type(schema) is not int:
            raise DumpError(f"{path}: damaged dump (no schema number)")
        if schema > SCHEMA:
            raise NewerError(str(schema))
    except CodeError as e:
        raise DumpError(
            f"{path}: refused: it holds pickled code or objects ({_one_line(e)}), which no "
            "g4debug dump has; nothing in it was executed"
        ) from e
    except NewerError as e:
        raise DumpError(
            f"{path}: written by a newer g4debug (it has schema {e}, this g4debug reads up to "
            f"{SCHEMA}); run: pip install -U g4debug"
        ) from e
    except NotADumpError as e:
        raise DumpError(f"{path}: {_one_line(e)}") from e
    except DamagedError as e:
        raise DumpError(f"{path}: truncated or damaged: {_one_line(e)}") from e
    try:
        return from_plain(payload)
    except Exception as e:  # whatever a damaged field causes, the dump is damaged
        raise DumpError(f"{path}: damaged dump ({_one_line(e)})") from e


def _load(path: Path) -> dict[str, Any]:
    with heads.opened(path) as (file, size):
        beginning = file.read(4)
        if not beginning.startswith(b"PK"):
            raise NotADumpError(heads.no_zip(beginning))
        archive = Archive(file, size)
        if "data.pkl" not in archive:
            raise NotADumpError("a zip file, but not made by torch.save (it has no data.pkl)")
        _schema_of_head(archive)
        check.refuse_size(archive.size("data.pkl"))
        return check.build(archive.read("data.pkl"), _Tensors(archive), SCHEMA)


def _schema_of_head(archive: Archive) -> None:
    """Raise NewerError if the head says so: what follows may then be of an unknown form."""
    if heads.RECORD in archive and archive.size(heads.RECORD) <= heads.MAX_HEAD_BYTES:
        try:
            schema = heads.decode(bytes(archive.read(heads.RECORD))).schema
        except ValueError as e:
            raise DamagedError(str(e)) from e
        if schema > SCHEMA:
            raise NewerError(str(schema))


class Archive:
    """The records of an uncompressed zip, by name, without the top folder.

    Raises NotADumpError if the zip is compressed (torch compresses nothing, and in a small
    compressed file a huge record could hide). Raises DamagedError if it is no zip, has too many
    records, or is cut off. So does each method if a record is missing or its checksum is wrong.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        file.seek(max(0, size - heads.END_BYTES))
        if not file.read(heads.END_BYTES).startswith(heads.END):
            raise DamagedError("its zip directory is missing")
        bounded = _Bounded(file)
        try:
            self._zip = zipfile.ZipFile(bounded)
        except DamagedError:
            raise
        except Exception as e:  # zipfile raises many types for a damaged file
            raise DamagedError(str(e) or type(e).__name__) from e
        bounded.limit = size
        entries = self._zip.infolist()
        if len(entries) > MAX_RECORDS:
            raise DamagedError(f"{len(entries)} records, at most {MAX_RECORDS} expected")
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise NotADumpError("a compressed zip file; a dump is not compressed")
        if sum(e.file_size for e in entries) > size:
            raise DamagedError("claims to hold more bytes than the file has")
        self._entries = {e.filename.partition("/")[2]: e for e in entries}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def size(self, name: str) -> int:
        """The bytes of a record."""
        if name not in self._entries:
            raise DamagedError(f"it has no record {name!r}")
        return self._entries[name].file_size

    def read(self, name: str) -> bytearray:
        """A record's contents."""
        data = bytearray(self.size(name))
        view, at = memoryview(data), 0
        try:
            with self._zip.open(self._entries[name]) as record:
                while part := record.read(CHUNK):
                    view[at : at + len(part)] = part
                    at += len(part)
        except Exception as e:  # zipfile raises many types for a damaged file
            raise DamagedError(str(e) or type(e).__name__) from e
        if at != len(data):
            raise DamagedError(f"its record {name!r} is cut off")
        return data


class _Bounded:
    """A file that refuses to read more than ``limit`` bytes at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self.limit = MAX_DIRECTORY_BYTES
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self._read = file.read

    def read(self, size: int = -1) -> bytes:
        data = self._read(size if 0 <= size <= self.limit else self.limit + 1)
        if len(data) > self.limit:
            raise DamagedError("its zip directory is longer than any dump's")
        return data

    def close(self) -> None:
        """Whoever opened the file closes it."""


class _Tensors:
    """The tensors of a dump. The caller has checked the offsets, shapes and strides."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._read: dict[str, IntArray] = {}

    def size(self, key: str) -> int:
        return self.archive.size(f"data/{key}")

    def tensor(self, key: str, offset: int, shape: list[int], strides: list[int]) -> IntArray:
        stored = self._read.get(key)
        if stored is None:
            order = "byteorder"
            if order in self.archive and self.archive.size(order) < 16:
                found = self.archive.read(order).decode("ascii", "replace")
                if found != sys.byteorder:
                    raise DamagedError(f"its tensors are in the byte order {found!r}")
            stored = np.frombuffer(self.archive.read(f"data/{key}"), dtype=np.int64)
            self._read[key] = stored
        steps = [stride * stored.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(stored[offset:], shape, steps, writeable=False)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]
