"""Writes a dump as a whole or not at all. Imports no sglang.

A dump is a zip as ``torch.save`` makes it, of plain values and int64 arrays
(:func:`g4debug.dumps.plain.to_plain`), and with the dump's head as its first record
(:mod:`g4debug.dumps.heads`). It is written without torch (:mod:`g4debug.dumps.pickling`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import secrets
import socket
import tempfile
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from g4debug.dumps import check, heads, patience
from g4debug.dumps.errors import DumpError, RefusedError, TooLargeError
from g4debug.dumps.heads import PREFIX, TEMPORARY, dump_name
from g4debug.dumps.pickling import pickled
from g4debug.dumps.plain import to_plain
from g4debug.findings.record import TrapRecord

OLD_SECONDS = 600  # a temporary file of this age was left behind; a write takes seconds
MAX_LOOKED_AT = 4096  # a write looks for old temporary files among so many directory entries
TOP = "archive"  # the folder of torch.save's records
TRIES = 16  # names with another random part
# The errors of file systems without hard links, and of a sandbox that forbids them.
NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_TEMPORARY = re.compile(re.escape(f".{PREFIX}") + r"(\d+)-\w+" + re.escape(TEMPORARY))


def now() -> datetime:
    """The time that a dump is marked with."""
    return datetime.now(UTC)


def encode(record: TrapRecord) -> bytes:
    """The dump's bytes: the records that ``torch.load`` asks for, with the head before them.

    Raises ValueError with the name of the field if the record could not be read back: a value has
    the wrong type, or an array is not int64. Raises TooLargeError if it has more values than the
    reader takes.
    """
    values, arrays = pickled(to_plain(record))
    try:
        sizes = {str(number): len(data) for number, data in enumerate(arrays)}
        check.build(values, check.Sizes(sizes), record.schema)
    except RefusedError as e:
        raise TooLargeError(f"the dump could not be read again: {e}") from e
    records = {heads.RECORD: heads.encode(heads.of(record)), "data.pkl": values}
    records["byteorder"] = b"little"
    records |= {f"data/{number}": data for number, data in enumerate(arrays)}
    records["version"] = b"3\n"  # of torch's format
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in records.items():
            archive.writestr(f"{TOP}/{name}", data)
    return out.getvalue()


def write_dump(
    record: TrapRecord, data: bytes, directory: Path, number: int, *, dead: bool = False
) -> Path:
    """Write ``data``, a dump of a process, under a name of its own. Replaces no other file.

    number: which of the process's dumps this is, from 1. dead: it is not of this process but of a
    dead one, which the record names. Raises DumpError as :func:`write` does, and if the disk does
    not answer in time: the server that writes it must go on, or end.
    """
    finding, at = record.finding, record.finding.location
    created, host = now(), (at.host if dead else "") or socket.gethostname()
    pid = at.pid if dead else os.getpid()
    ranks = (at.dp_rank, at.rank, at.pp_rank)
    for _ in range(TRIES):
        random = secrets.token_hex(4)  # from the system, so that a fork does not repeat it
        name = dump_name(finding.check, created, host, ranks, pid, number, random)
        with contextlib.suppress(FileExistsError):
            write = partial(_write, data, directory, name, _create)
            return patience.within(directory, write)
    raise DumpError(f"cannot write {directory / name}: {TRIES} names of this kind are taken")


def write(data: bytes, directory: Path, name: str) -> Path:
    """Write ``data`` to ``directory/name`` as a whole or not at all. An older file is replaced.

    The bytes go to a temporary file in the same directory, which is flushed to disk and then
    renamed. If the process is killed meanwhile, the temporary file stays. No command takes it for
    a dump, and a later write removes it. Raises DumpError if the directory cannot be made, there
    is no space, or no permission.
    """
    return _write(data, directory, name, os.replace)


def _write(data: bytes, directory: Path, name: str, give: Callable[[str, Path], None]) -> Path:
    """Write a temporary file; ``give(temporary, path)`` gives it its name.

    Raises FileExistsError only from ``give``.
    """
    path = directory / name
    temporary: str | None = None
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError as e:
            raise NotADirectoryError(e.errno, e.strerror) from e
        _clean_up(directory)
        fd, temporary = tempfile.mkstemp(
            prefix=f".{PREFIX}{os.getpid()}-", suffix=TEMPORARY, dir=directory
        )
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        give(temporary, path)
        if give is os.replace:
            temporary = None
    except FileExistsError:
        raise
    except OSError as e:
        raise DumpError(f"cannot write {path}: {e.strerror or e}") from e
    finally:  # an interrupt must not leave a half-written file either
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return path


def _create(temporary: str, path: Path) -> None:
    """Give a file a second name, which must not exist yet. Raises FileExistsError if it does.

    A hard link is the way that also holds between the hosts of a network file system. Some file
    systems have no links: there the name is reserved by an empty file, which is then replaced. If
    the process is killed between the two, the empty file stays.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        if os.path.samefile(temporary, path):
            return  # a network file system made the link, lost its answer, and tried again
        raise
    except OSError as e:
        if e.errno not in NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


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
