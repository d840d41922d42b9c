"""The zip archive of a dump: small, uncompressed, and read record by record.

A zip file can be a trap. Its directory may list a million records, a small compressed record may
hold gigabytes, and records may overlap. So the directory is bounded before Python's zipfile reads
it, and no record is larger than the file. Every checksum is checked when a record is read. This
module does not import torch.
"""

from __future__ import annotations

import zipfile
from typing import IO

from g4debug.dumps.file import DamagedError, NotADumpError

MAX_RECORDS = 64
MAX_DIRECTORY_BYTES = 64 << 10
END = b"PK\x05\x06"
END_BYTES = 22  # the end of a zip without a comment
CHUNK = 1 << 20


class Archive:
    """The records of an uncompressed zip, by name, without the top folder.

    Raises NotADumpError if the zip is compressed (torch compresses nothing, and in a small
    compressed file a huge record could hide). Raises DamagedError if it is no zip, has too many
    records, or is cut off. So does each method if a record is missing or its checksum is wrong.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        file.seek(max(0, size - END_BYTES))
        if not file.read(END_BYTES).startswith(END):
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
