"""The black box: what a dump is made of, in a file that outlives a scheduler that is killed.

A scheduler writes its last steps, the allocators' and the requests' last events and what was
checked into a file of ``/dev/shm``, in place, as they happen. After SIGKILL, a crash in a library
or the OOM killer, another process makes a dump of it
(:mod:`g4debug.tracers.flight_recorder.box_dumps`). The file lies in memory, because a write to a
mapped file on a disk may have to wait for that disk. All of it is reserved when it is made:
otherwise a full ``/dev/shm`` would kill the scheduler with SIGBUS. Who asks for it
(``G4DEBUG_BLACK_BOX=dumps``) has the file in the folder of the dumps, where it outlives a container
with its own ``/dev/shm``; its dump goes to that folder, whatever the folder is called by then.

The layout is fixed, and nothing in the file says how long anything is, except within a record,
where it is bounded. Integers are little-endian.

| part | records |
|---|---|
| head | magic, process, server, and where the dumps go |
| marks | the step that returned last; number of steps and path of a dump of its end; asked when |
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4debug.findings import process_end, step_bytes

if TYPE_CHECKING:
    from g4debug.findings.record import PageEvent

FOLDER = Path("/dev/shm")
PREFIX = "g4debug-box-"
BESIDE = ".beside"  # how one ends whose dump goes to the folder in which it lies itself
MAGIC = b"g4debug-box 2\n"  # another layout gets another magic
_OLDER = (b"g4debug-box 1\n",)  # of layouts that are not read any more
STEPS, STEP_BYTES = 64, 16 << 10
EVENTS, EVENT_BYTES = 256, 256
NOTES, NOTE_BYTES = 512, 384
REQUESTS = 256  # of a step that are kept
RIDS_BYTES = 10 << 10  # of all of them together
BLOBS = {"about": 160 << 10, "status": 64 << 10}  # name -> bytes, at most
LEAVES = 16 << 20  # bytes of the folder that must stay free for others: it may be small
GOES_ON_NS = 10 * 10**9  # in which a process that was asked to end may still begin steps
MOST = 16  # boxes of dead processes that are kept

_HEAD = struct.Struct("<16sqqqq64s64s1024s")
_HEAD_BYTES = 2048
_MARKS_AT = _HEAD_BYTES
_MARK = struct.Struct("<q")
_DUMP = struct.Struct("<q1024s")
_ASKED_AT = _MARKS_AT + _MARK.size + _DUMP.size
_NUMBER = struct.Struct("<q")
_BLOB = struct.Struct("<qII")
_PAGE = 4096
_RIDS_AT = 8 + step_bytes.size(REQUESTS)  # in a step's record; how many bytes of them, then they
_RIDS = struct.Struct("<I")
# Of an event, behind its number: step, count, how many pages, stopped, texts, pages.
_SHOWN = 8
_EVENTS_OF = [struct.Struct(f"<qqBB160s{shown}q") for shown in range(_SHOWN + 1)]
_PACK_EVENT = [of.pack_into for of in _EVENTS_OF]
_TEXTS = struct.Struct("<12s6s40s64s38s")  # kind, pool, request, caller and note
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
assert _RIDS_AT + _RIDS.size + RIDS_BYTES <= STEP_BYTES
assert 8 + _EVENTS_OF[_SHOWN].size <= EVENT_BYTES
assert 8 + _NOTE.size <= NOTE_BYTES
assert _ASKED_AT + _MARK.size <= _PAGE


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
    """The box of this process. Raises BoxError if there can be none.

    beside: it lies in the folder of the dumps.
    """

    def __init__(self, owner: Owner, folder: Path = FOLDER, beside: bool = False) -> None:
        self.path = folder / f"{PREFIX}{secrets.token_hex(8)}{BESIDE * beside}"
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
            self._lie_in(mmap.mmap(self._fd, TOTAL_BYTES))
        except OSError as e:
            self.remove()
            raise BoxError(f"it cannot be made in {folder} ({e.strerror})") from e
        self._versions = dict.fromkeys(BLOBS, 0)
        self._steps = self._events = self._notes = 0
        self._rids: list[str] = []
        self._packed = b""
        self._texts: dict[tuple[str, ...], bytes] = {}
        texts = (owner.host, owner.launch, owner.folder)
        numbers = (owner.pid, owner.server, owner.server_began, owner.born_ns)
        # Last, so that who sees the magic sees a file of the right size.
        _HEAD.pack_into(self._map, 0, MAGIC, *numbers, *map(os.fsencode, texts))
        os.register_at_fork(after_in_child=self._give_up)

    def step(self, rids: list[str], packed: bytes) -> None:
        """Write a step, see :mod:`g4debug.findings.step_bytes`."""
        self._steps = number = self._steps + 1
        place = _STEPS_AT + number % STEPS * STEP_BYTES
        box, numbers, at = self._map, self._numbers, place >> 3
        numbers[at] = 0
        if len(rids) > REQUESTS or len(packed) > _RIDS_AT - 8:
            packed = step_bytes.shortened(packed, REQUESTS)
        box[place + 8 : place + 8 + len(packed)] = packed
        if rids != self._rids:
            self._rids, self._packed = rids, _pack_rids(rids)
        place += _RIDS_AT
        box[place : place + len(self._packed)] = self._packed
        numbers[at] = number

    def returned(self, step: int) -> None:
        """The scheduler's call that runs this step has returned."""
        self._numbers[_MARKS_AT >> 3] = step

    def event(self, event: PageEvent) -> None:
        """Write an event of an allocator."""
        self._events = number = self._events + 1
        place = _EVENTS_AT + number % EVENTS * EVENT_BYTES
        words = event.kind, event.pool, event.request, event.caller, event.note
        texts = self._texts.get(words) or self._text_of(words)
        pages, numbers, at = event.pages, self._numbers, place >> 3
        shown = len(pages)
        if shown > _SHOWN:
            pages, shown = pages[:_SHOWN], _SHOWN
        numbers[at] = 0
        _PACK_EVENT[shown](
            self._map, place + 8, event.step, event.count, shown, event.stopped, texts, *pages
        )
        numbers[at] = number

    def note(self, event: tuple[Any, ...]) -> None:
        """Write an event of a request: the fields of a RequestEvent."""
        step, time_ns, request, kind, *of, note = event
        self._notes = number = self._notes + 1
        place = _NOTES_AT + number % NOTES * NOTE_BYTES
        texts = (text.encode("utf-8", "replace") for text in (kind, request, note))
        numbers = self._numbers
        numbers[place >> 3] = 0
        _NOTE.pack_into(self._map, place + 8, step, time_ns, *of, *texts)
        numbers[place >> 3] = number

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

    def asked(self, time_ns: int) -> None:
        """Somebody has asked this process to end, by a signal, at that Unix time. 0: it hung."""
        self._numbers[_ASKED_AT >> 3] = time_ns

    def remove(self) -> None:
        """The process ends well, or has left a dump: nobody needs the box any more."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self._give_up()

    def _give_up(self) -> None:
        """A fork has no box of its own, and must not hold its parent's lock."""
        if self._fd >= 0:
            self._lie_in(bytearray(TOTAL_BYTES))  # what is still written goes nowhere
            os.close(self._fd)
            self._fd = -1

    def _lie_in(self, memory: mmap.mmap | bytearray) -> None:
        self._map: Any = memory
        # The store of one number, which marks a record as whole, cannot be torn.
        self._numbers = memoryview(memory).cast("q")

    def _text_of(self, words: tuple[str, ...]) -> bytes:
        """The texts of an event as bytes. Most events have those of an earlier one."""
        if len(self._texts) > 4096:
            self._texts.clear()
        packed = _TEXTS.pack(*(word.encode("utf-8", "replace") for word in words))
        if sum(map(len, words)) <= EVENT_BYTES:  # a client may choose an id of megabytes
            self._texts[words] = packed
        return packed


def _pack_rids(rids: list[str]) -> bytes:
    """At most REQUESTS of them, with NUL between them, behind the number of their bytes."""
    packed = "\0".join(map(str, rids[:REQUESTS])).encode("utf-8", "replace")
    if len(packed) > RIDS_BYTES or packed.count(0) >= max(1, min(len(rids), REQUESTS)):
        each = RIDS_BYTES // min(len(rids), REQUESTS) - 1
        one_by_one = (str(rid).encode("utf-8", "replace") for rid in rids[:REQUESTS])
        packed = b"\0".join(rid.replace(b"\0", b"?")[:each] for rid in one_by_one)
    return _RIDS.pack(len(packed)) + packed


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """What a box holds. Steps, events and notes are oldest first, as plain values of the dump's
    classes.

    returned: the step whose call has returned last. dump: the one that the process has left of its
    end. cut: how many requests the largest step had, if that is more than are kept, else 0. lost:
    how many notes were before those that are kept. asked: somebody asked the process to end, and it
    did not go on after that, as far as the steps tell.
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
    asked: bool = False


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
    asked_ns = _MARK.unpack_from(data, _ASKED_AT)[0]
    most = max((step.pop("count") for step in steps), default=0)
    return Content(
        owner=owner(data),
        returned=_MARK.unpack_from(data, _MARKS_AT)[0],
        dump=_text(dump) if left_at == newest else "",
        asked=asked_ns > 0 and all(s["time_ns"] <= asked_ns + GOES_ON_NS for s in steps[-1:]),
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
    rids_at = at - 8 + _RIDS_AT
    begin = rids_at + _RIDS.size
    size = min(_RIDS.unpack_from(data, rids_at)[0], RIDS_BYTES)
    rids = data[begin : begin + size].decode("utf-8", "replace").split("\0") if size else []
    return step_bytes.unpack(data[at:rids_at], rids, REQUESTS)


def _read_event(data: bytes, at: int) -> dict[str, Any]:
    step, count, shown, stopped, texts, *pages = _EVENTS_OF[_SHOWN].unpack_from(data, at)
    kind, pool, request, caller, note = map(_text, _TEXTS.unpack(texts))
    return {
        "step": step,
        "kind": kind,
        "pool": pool,
        "pages": pages[:shown],
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

    @property
    def folder(self) -> Path:
        """Where its dump goes. A folder may have another name in each container that has it."""
        return self.path.parent if self.path.name.endswith(BESIDE) else Path(self.owner.folder)

    def goes_to(self, folder: Path) -> bool:
        """True if its dump goes to this folder."""
        return os.path.realpath(self.folder) == os.path.realpath(folder)

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


def remove_older() -> list[Path]:
    """Remove boxes of this user's dead processes that an older g4debug has written in a layout
    which is not read any more: else nobody ever would. Returns those that were removed.
    """
    removed = []
    for path in paths():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if mine and os.pread(fd, _HEAD.size, 0).startswith(_OLDER) and _lock(fd):
                    os.unlink(path)
                    removed.append(path)
            finally:
                os.close(fd)
    return removed


def of_others() -> int:
    """How many files that may be boxes are of other users, who alone can read them."""
    count = 0
    for path in paths():
        with contextlib.suppress(OSError):
            count += os.lstat(path).st_uid != os.geteuid()
    return count


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def everywhere(dumps: Path | None) -> list[Path]:
    """The files that may be boxes, also those in a folder of dumps."""
    return list(dict.fromkeys((*paths(), *(paths(dumps) if dumps is not None else ()))))


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
