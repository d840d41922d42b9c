"""The black box: what a dump is made of, in a file that outlives a scheduler that is killed.

A scheduler writes its last steps, the allocators' and the requests' last events and what was
checked into a file of ``/dev/shm``, in place, as they happen. After SIGKILL, a crash in a library
or the OOM killer, another process makes a dump of it
(:mod:`g4debug.tracers.flight_recorder.box_dumps`). The file lies in memory, because a write to a
mapped file on a disk may have to wait for that disk. All of it is reserved when it is made:
otherwise a full ``/dev/shm`` would kill the scheduler with SIGBUS.

The layout is fixed, and nothing in the file says how long anything is, except within a record,
where it is bounded. Integers are little-endian.

| part | records |
|---|---|
| head | magic, process, server, and where the dumps go |
| marks | the step that returned last; the number of steps and the path of a dump of its end |
| blobs | ``about`` and ``status``, each twice: number, length, CRC-32, bytes |
| steps | ``STEPS`` records; record n is at n modulo ``STEPS`` |
| events | ``EVENTS`` records, the same |
| notes | ``NOTES`` records, the same: the events of requests |

A step, an event and a note have a number, which is 0 while they are written. A blob is written
beside its last version. So whatever is half written when the process dies is left out, and nothing
else is.

A living process holds a lock on its file (``flock``). So a file without one is of a dead process,
whatever process has its number now, and also if it lived in another container. This module imports
neither torch nor sglang.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4debug.findings import process_end

if TYPE_CHECKING:
    from g4debug.findings.record import PageEvent

FOLDER = Path("/dev/shm")
PREFIX = "g4debug-box-"
MAGIC = b"g4debug-box 2\n"  # another layout gets another magic
STEPS, STEP_BYTES = 64, 16 << 10
EVENTS, EVENT_BYTES = 256, 256
NOTES, NOTE_BYTES = 512, 384
REQUESTS = 256  # of a step that are kept
RIDS_BYTES = 10 << 10  # of all of them together
BLOBS = {"about": 160 << 10, "status": 64 << 10}  # name -> bytes, at most
LEAVES = 16 << 20  # bytes of the folder that must stay free for others: it may be small
MOST = 16  # boxes of dead processes that are kept

_HEAD = struct.Struct("<16sqqqq64s64s1024s")
_HEAD_BYTES = 2048
_MARKS_AT = _HEAD_BYTES
_MARK = struct.Struct("<q")
_DUMP = struct.Struct("<q1024s")
_NUMBER = struct.Struct("<q")
_BLOB = struct.Struct("<qII")
_PAGE = 4096
# Of a step, behind its number: step, use of the full and the SWA pool, time, waiting requests; how
# many requests it had; how many numbers each of five columns has; bytes of the rids; two names.
_STEP = struct.Struct("<qqqqiI5HH24s48s")
_COLUMNS_AT = 8 + _STEP.size
_RIDS_AT = _COLUMNS_AT + 5 * REQUESTS * 4
# Of an event, behind its number: step, count, eight pages, how many these are, stopped; five texts.
_EVENT = struct.Struct("<qq8qBB12s6s40s64s38s")
# Of a note, behind its number: step, time; ``NUMBERS``; three texts.
_NOTE = struct.Struct("<qq8q12s128s144s")
NUMBERS = ("begin", "end", "tokens", "output", "longest", "number", "allocated", "evicted")


def _places() -> tuple[dict[str, int], int, int, int, int]:
    """Where blobs, steps, events and notes begin, and the size of the file. All in bytes."""
    at, blobs = _PAGE, {}
    for name, size in BLOBS.items():
        blobs[name] = at
        at += 2 * (_PAGE + size)
    events = at + STEPS * STEP_BYTES
    notes = events + EVENTS * EVENT_BYTES
    return blobs, at, events, notes, notes + NOTES * NOTE_BYTES


_BLOBS_AT, _STEPS_AT, _EVENTS_AT, _NOTES_AT, TOTAL_BYTES = _places()
assert _RIDS_AT + RIDS_BYTES <= STEP_BYTES
assert 8 + _EVENT.size <= EVENT_BYTES
assert 8 + _NOTE.size <= NOTE_BYTES
assert _MARKS_AT + _MARK.size + _DUMP.size <= _PAGE


class BoxError(Exception):
    """There can be no black box, or a file is none. The text says why."""


@dataclass(frozen=True)
class Owner:
    """Whose box it is. server: the first process of the server, -1 if not known, and when that
    began, in clock ticks since the machine's start. born_ns: Unix time. folder: where its dumps go.
    """

    pid: int
    server: int
    server_began: int
    born_ns: int
    host: str
    launch: str
    folder: str


class BlackBox:
    """The box of this process. Raises BoxError if there can be none."""

    def __init__(self, owner: Owner, folder: Path = FOLDER) -> None:
        self.path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        self._fd = -1
        try:
            room = os.statvfs(folder)
            free = room.f_bavail * room.f_frsize
            if free < LEAVES + TOTAL_BYTES:
                raise BoxError(
                    f"{folder} has {free >> 20} MiB free, and {LEAVES >> 20} are left to NCCL and "
                    "to SGLang"
                )
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, TOTAL_BYTES)
            self._map: Any = mmap.mmap(self._fd, TOTAL_BYTES)
        except OSError as e:
            self.remove()
            raise BoxError(f"it cannot be made in {folder} ({e.strerror})") from e
        self._versions = dict.fromkeys(BLOBS, 0)
        self._steps = self._events = self._notes = 0
        self._rids: list[str] = []
        self._packed = b""
        self._names: dict[str, bytes] = {}
        texts = (owner.host, owner.launch, owner.folder)
        numbers = (owner.pid, owner.server, owner.server_began, owner.born_ns)
        # Last, so that who sees the magic sees a file of the right size.
        _HEAD.pack_into(self._map, 0, MAGIC, *numbers, *map(os.fsencode, texts))
        os.register_at_fork(after_in_child=self._give_up)

    def step(self, kept: tuple[Any, ...]) -> None:
        """Write a step, see :meth:`g4debug.findings.steps.Recorder.record`."""
        step, mode, rids, lengths, spec, used, at, waiting, *columns = kept
        self._steps += 1
        box, place = self._map, _STEPS_AT + self._steps % STEPS * STEP_BYTES
        _NUMBER.pack_into(box, place, 0)
        count = len(rids)
        if rids != self._rids:
            self._rids, self._packed = rids, _pack_rids(rids)
        if count > REQUESTS:
            lengths, *columns = (column[:REQUESTS] for column in (lengths, *columns))
        rows, committed, allocated, evicted = columns
        try:
            numbers = array("i", lengths + rows + committed + allocated + evicted)
        except (TypeError, OverflowError):  # SGLang does not say one of them
            lengths, rows, committed, allocated, evicted = map(
                _known, (lengths, rows, committed, allocated, evicted)
            )
            numbers = array("i", lengths + rows + committed + allocated + evicted)
        _STEP.pack_into(
            box,
            place + 8,
            step,
            *((*used, -1, -1)[:2]),
            at,
            waiting,
            count,
            len(lengths),
            len(rows),
            len(committed),
            len(allocated),
            len(evicted),
            len(self._packed),
            self._name(mode),
            self._name(spec),
        )
        place_of = place + _COLUMNS_AT
        box[place_of : place_of + 4 * len(numbers)] = numbers.tobytes()
        place_of = place + _RIDS_AT
        box[place_of : place_of + len(self._packed)] = self._packed
        _NUMBER.pack_into(box, place, self._steps)

    def returned(self, step: int) -> None:
        """The scheduler's call that runs this step has returned."""
        _MARK.pack_into(self._map, _MARKS_AT, step)

    def event(self, event: PageEvent) -> None:
        """Write an event of an allocator."""
        self._events += 1
        box, place = self._map, _EVENTS_AT + self._events % EVENTS * EVENT_BYTES
        pages, shown = event.pages, min(len(event.pages), 8)
        _NUMBER.pack_into(box, place, 0)
        _EVENT.pack_into(
            box,
            place + 8,
            event.step,
            event.count,
            *(pages + _NO_PAGES)[:8],
            shown,
            event.stopped,
            self._name(event.kind),
            self._name(event.pool),
            event.request.encode("utf-8", "replace"),
            self._name(event.caller),
            event.note.encode("utf-8", "replace"),
        )
        _NUMBER.pack_into(box, place, self._events)

    def note(self, event: tuple[Any, ...]) -> None:
        """Write an event of a request: the fields of a RequestEvent."""
        step, time_ns, request, kind, *numbers, note = event
        self._notes += 1
        box, place = self._map, _NOTES_AT + self._notes % NOTES * NOTE_BYTES
        _NUMBER.pack_into(box, place, 0)
        _NOTE.pack_into(
            box,
            place + 8,
            step,
            time_ns,
            *numbers,
            self._name(kind),
            request.encode("utf-8", "replace"),
            self._name(note),
        )
        _NUMBER.pack_into(box, place, self._notes)

    def write(self, name: str, data: bytes) -> None:
        """Write a new version of a blob. Raises BoxError if it is too large."""
        if len(data) > BLOBS[name]:
            raise BoxError(f"{name} has {len(data)} bytes, at most {BLOBS[name]} are kept")
        version = self._versions[name] = self._versions[name] + 1
        place = _BLOBS_AT[name] + version % 2 * (_PAGE + BLOBS[name])
        _BLOB.pack_into(self._map, place, 0, 0, 0)
        self._map[place + _PAGE : place + _PAGE + len(data)] = data
        _BLOB.pack_into(self._map, place, version, len(data), zlib.crc32(data))

    def left(self, dump: str) -> None:
        """This process has left a dump of its end, so that none need be made of the box.

        That holds as long as no step follows: a scheduler that hung may go on.
        """
        _DUMP.pack_into(self._map, _MARKS_AT + _MARK.size, self._steps, os.fsencode(dump)[:1023])

    def remove(self) -> None:
        """The process ends well, or has left a dump: nobody needs the box any more."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self._give_up()

    def _give_up(self) -> None:
        """A fork has no box of its own, and must not hold its parent's lock."""
        if self._fd >= 0:
            self._map = bytearray(TOTAL_BYTES)  # what is still written goes nowhere
            os.close(self._fd)
            self._fd = -1

    def _name(self, text: str) -> bytes:
        """The bytes of a text of which there are few."""
        found = self._names.get(text)
        if found is None:
            if len(self._names) > 4096:
                self._names.clear()
            found = self._names[text] = text.encode("utf-8", "replace")
        return found


_NO_PAGES = (0,) * 8


def _pack_rids(rids: list[str]) -> bytes:
    packed = "\0".join(rids[:REQUESTS]).encode("utf-8", "replace")
    if len(packed) <= RIDS_BYTES:
        return packed
    each = RIDS_BYTES // min(len(rids), REQUESTS) - 1
    return b"\0".join(rid.encode("utf-8", "replace")[:each] for rid in rids[:REQUESTS])


def _known(column: list[Any]) -> list[int]:
    """What a dump has in place of numbers that are not known, see ``steps._step``."""
    return [-1 if n is None else min(max(int(n), -1), (1 << 31) - 1) for n in column]


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """What a box holds. Steps, events and notes are oldest first, as plain values of the dump's
    classes.

    returned: the step whose call has returned last. dump: the one that the process has left of its
    end. cut: how many requests the largest step had, if that is more than are kept, else 0. lost:
    how many notes were before those that are kept.
    """

    owner: Owner
    returned: int
    dump: str
    blobs: dict[str, bytes]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    cut: int
    notes: list[dict[str, Any]]
    lost: int


def content(data: bytes) -> Content:
    """What is in a box. Raises BoxError if it is none.

    The bytes may be anything: what does not fit is left out.
    """
    if len(data) != TOTAL_BYTES or not data.startswith(MAGIC):
        raise BoxError("it is not a black box, or one of another g4debug")
    blobs = {name: blob for name in BLOBS if (blob := _blob(data, name)) is not None}
    newest, steps = _records(data, _STEPS_AT, STEPS, STEP_BYTES, _read_step)
    _, events = _records(data, _EVENTS_AT, EVENTS, EVENT_BYTES, _read_event)
    noted, notes = _records(data, _NOTES_AT, NOTES, NOTE_BYTES, _read_note)
    left_at, dump = _DUMP.unpack_from(data, _MARKS_AT + _MARK.size)
    most = max((step.pop("count") for step in steps), default=0)
    return Content(
        owner=owner(data),
        returned=_MARK.unpack_from(data, _MARKS_AT)[0],
        dump=_text(dump) if left_at == newest else "",
        blobs=blobs,
        steps=steps,
        events=events,
        cut=most if most > REQUESTS else 0,
        notes=notes,
        lost=noted - len(notes),
    )


def owner(data: bytes) -> Owner:
    """Whose box it is, from its first bytes."""
    _, pid, server, began, born, *texts = _HEAD.unpack_from(data)
    return Owner(pid, server, began, born, *map(_text, texts))


def _blob(data: bytes, name: str) -> bytes | None:
    """The newest version that is whole."""
    found = []
    for half in range(2):
        place = _BLOBS_AT[name] + half * (_PAGE + BLOBS[name])
        version, size, crc = _BLOB.unpack_from(data, place)
        blob = data[place + _PAGE : place + _PAGE + min(size, BLOBS[name])]
        if version > 0 and zlib.crc32(blob) == crc:
            found.append((version, blob))
    return max(found)[1] if found else None


def _records(
    data: bytes, at: int, count: int, size: int, read: Callable[[bytes, int], dict[str, Any]]
) -> tuple[int, list[dict[str, Any]]]:
    """The newest number of a ring, and the records up to it without a gap, oldest first."""
    numbers = {}
    for place in range(count):
        number = _NUMBER.unpack_from(data, at + place * size)[0]
        if number > 0 and number % count == place:
            numbers[number] = at + place * size + 8
    newest = max(numbers, default=0)
    kept = range(newest, max(0, newest - count), -1)
    found = []
    for number in kept:
        if number not in numbers:
            # The one that is being written is the oldest one, so there is no gap before it.
            break
        found.append(read(data, numbers[number]))
    return newest, found[::-1]


def _read_step(data: bytes, at: int) -> dict[str, Any]:
    values = _STEP.unpack_from(data, at)
    step, full, swa, time_ns, waiting, count, *sizes, rids_bytes, mode, spec = values
    at -= 8
    numbers = array("i")
    kept = [min(size, REQUESTS) for size in sizes]
    numbers.frombytes(data[at + _COLUMNS_AT : at + _COLUMNS_AT + 4 * sum(kept)])
    columns, begin = [], 0
    for size in kept:
        columns.append(numbers[begin : begin + size].tolist())
        begin += size
    lengths, rows, committed, allocated, evicted = columns
    packed = data[at + _RIDS_AT : at + _RIDS_AT + min(rids_bytes, RIDS_BYTES)]
    rids = packed.decode("utf-8", "replace").split("\0") if packed else []
    n = min(count, REQUESTS)
    rids = [*rids, *[""] * n][:n]
    return {
        "step": step,
        "forward_mode": _text(mode),
        "rids": rids,
        "seq_lens": lengths,
        "spec_info": _text(spec),
        "full_used": full,
        "swa_used": swa,
        "time_ns": time_ns,
        "waiting": waiting,
        "rows": rows,
        "committed": [] if -1 in committed else committed,
        "allocated": [max(0, n) for n in allocated],
        "evicted": [] if -1 in evicted else evicted,
        "count": count,
    }


def _read_event(data: bytes, at: int) -> dict[str, Any]:
    step, count, *rest = _EVENT.unpack_from(data, at)
    pages, (shown, stopped, *texts) = rest[:8], rest[8:]
    kind, pool, request, caller, note = map(_text, texts)
    return {
        "step": step,
        "kind": kind,
        "pool": pool,
        "pages": pages[: min(shown, 8)],
        "count": count,
        "request": request,
        "caller": caller,
        "note": note,
        "stopped": bool(stopped),
    }


def _read_note(data: bytes, at: int) -> dict[str, Any]:
    step, time_ns, *numbers = _NOTE.unpack_from(data, at)
    kind, request, note = map(_text, numbers[len(NUMBERS) :])
    known = dict(zip(NUMBERS, numbers, strict=False))
    return {
        "step": step,
        "time_ns": time_ns,
        "request": request,
        "kind": kind,
        **known,
        "note": note,
    }


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "ignore")


@dataclass(frozen=True)
class Found:
    """A box in the folder. dead: its process has ended; then nobody else gets it meanwhile."""

    path: Path
    owner: Owner
    dead: bool
    file: int

    @property
    def left_behind(self) -> bool:
        """The server's first process is dead, too: else it makes the dump, and knows more."""
        owner = self.owner
        return self.dead and not process_end.runs(owner.server, owner.server_began)

    def goes_to(self, folder: Path) -> bool:
        """True if its dump goes to this folder."""
        return os.path.realpath(self.owner.folder) == os.path.realpath(folder)

    def read(self) -> Content:
        """Raises BoxError."""
        return content(os.pread(self.file, TOTAL_BYTES + 1, 0))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Found | None]:
    """A file that may be a box of this user. None if it is none, or has gone.

    A box of a dead process is locked meanwhile, so that only one process makes a dump of it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(fd)
        mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        start = os.pread(fd, _HEAD.size, 0) if mine and status.st_size == TOTAL_BYTES else b""
        if not start.startswith(MAGIC):
            yield None
            return
        dead = _lock(fd) and os.fstat(fd).st_nlink > 0  # somebody else may just have removed it
        yield Found(path, owner(start), dead, fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def paths(folder: Path = FOLDER) -> list[Path]:
    """The files that may be boxes, the newest first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # if there is such a folder
        for entry in entries:
            # Another rank may just remove its own: the others' are there all the same.
            with contextlib.suppress(OSError):
                if entry.name.startswith(PREFIX):
                    found.append((entry.stat(follow_symlinks=False).st_ctime_ns, entry.path))
    return [Path(path) for _, path in sorted(found, reverse=True)]
