"""A piece of memory that the processes of one launch of a server share, on one host.

The server's first process makes it (``memfd_create``), and shows it as it shows its status
(:mod:`g4debug.findings.status_file`): it has a name but lies in no folder, and is gone with the
last process that uses it, however that ends. The processes that the server starts find it as an
open file of one of their ancestors. Linux only.

It has a *seat* for each scheduler. A process writes only to its own seat and reads the other seats.
So nobody waits for anybody, except for the moment in which a seat is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

NAME = "g4debug-launch"
SEATS = 64
SEAT_BYTES = 4096
RING_BYTES = 2 << 20  # behind the seats, one for each: for whoever compares the ranks
HEAD_BYTES = 4096
TOTAL_BYTES = HEAD_BYTES + SEATS * (SEAT_BYTES + RING_BYTES)  # only written pages take memory
MAX_ANCESTORS = 16
# The head: magic, and the name of the launch. Another format gets another magic.
_MAGIC = b"g4debug-launch 1\n"
_NUMBERS = struct.Struct("<8q")  # of a seat: see Seat
_STATE = struct.Struct("<8xq")  # the second of them alone
_BUSY_AT = _NUMBERS.size - 8  # the last of them alone
_TEXT_BYTES = (64, 64, 2400, 1024)  # of a seat, behind the numbers: see Stop
FREE, ALIVE, STOPPED = range(3)  # states of a seat
UNKNOWN = -1


class LaunchMemoryError(Exception):
    """There can be no such memory, or none is found. The text says why."""


@dataclass(frozen=True)
class Stop:
    """Why a scheduler has stopped: its finding, and the dump; '' if there is no dump."""

    check: str = ""
    kind: str = ""
    headline: str = ""
    dump: str = ""


@dataclass(frozen=True)
class Seat:
    """One scheduler of this launch. A rank of -1 is not known.

    wake: the number of the file in that process to which a byte is written to wake its watcher; -1
    if it has none. time_ns: Unix time when it stopped. stop: why, if it has stopped. busy: its main
    thread is in work that takes minutes, as compiling does, or was so when it ended.
    """

    number: int
    pid: int
    state: int
    dp: int
    tp: int
    pp: int
    wake: int
    time_ns: int
    stop: Stop
    busy: bool = False

    @property
    def name(self) -> str:
        """The name of the scheduler: ``dp0/tp1/pp0``, or its pid if its ranks are not known."""
        known = (("dp", self.dp), ("tp", self.tp), ("pp", self.pp))
        return "/".join(f"{n}{r}" for n, r in known if r >= 0) or f"pid {self.pid}"


class LaunchMemory:
    """The memory, mapped into this process. ``take`` gives this process a seat.

    Raises OSError if the file cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd  # stays open: others find the memory by it
        self.map = mmap.mmap(fd, TOTAL_BYTES)
        self.mine = -1  # the number of this process's seat
        self.server = -1  # the server's first process

    def take(self) -> int:
        """Take a free seat, or the seat of a dead process; returns its number.

        Raises LaunchMemoryError if all are taken.
        """
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        try:
            for number in range(SEATS):
                seat = self.seat(number)
                if seat.state == FREE or seat.pid == os.getpid() or not is_alive(seat.pid):
                    self.mine = number
                    if seat.state != FREE:
                        self.ring(number)[:] = bytes(RING_BYTES)
                    self.claim()
                    return number
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        raise LaunchMemoryError(f"more than {SEATS} schedulers on this host")

    def claim(self) -> None:
        """Sit down in seat ``mine``, which is known to be free."""
        self._write(ALIVE, (-1, -1, -1), -1, 0, Stop())

    def may_be_woken(self, wake: int) -> None:
        """``wake``: see Seat. This process's watcher begins to wait."""
        seat = self.seat(self.mine)
        self._write(seat.state, (seat.dp, seat.tp, seat.pp), wake, seat.time_ns, seat.stop)

    def name_ranks(self, dp: int, tp: int, pp: int) -> None:
        """The ranks of this process's scheduler are known now."""
        seat = self.seat(self.mine)
        self._write(seat.state, (dp, tp, pp), seat.wake, seat.time_ns, seat.stop)

    def stop(self, stop: Stop, time_ns: int) -> None:
        """Say that this process's scheduler stops. Only the first reason counts."""
        seat = self.seat(self.mine)
        if seat.state != STOPPED:
            self._write(STOPPED, (seat.dp, seat.tp, seat.pp), seat.wake, time_ns, stop)

    def stop_for(self, seat: Seat, stop: Stop, time_ns: int) -> None:
        """Say that a scheduler has stopped that could not say so itself."""
        mine, self.mine = self.mine, seat.number
        try:
            ranks = (seat.dp, seat.tp, seat.pp)
            self._write(STOPPED, ranks, -1, time_ns, stop, seat.pid)
        finally:
            self.mine = mine

    def close(self) -> None:
        """Give up this process's view of it. What others see stays."""
        with contextlib.suppress(BufferError):  # somebody still looks at a ring
            self.map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def seat(self, number: int) -> Seat:
        """The present content of the seat."""
        at = self._at(number)
        pid, state, dp, tp, pp, wake, time_ns, busy = _NUMBERS.unpack_from(self.map, at)
        stop = Stop(*self._texts(at + _NUMBERS.size)) if state == STOPPED else Stop()
        return Seat(number, pid, state, dp, tp, pp, wake, time_ns, stop, bool(busy))

    def say_busy(self, busy: bool) -> None:
        """Whether this process's main thread is in work that takes minutes."""
        struct.pack_into("<q", self.map, self._at(self.mine) + _BUSY_AT, busy)

    def others(self) -> list[Seat]:
        """The seats of the other schedulers: those that run, and those that have stopped."""
        # A thread asks once in a second, and the scheduler waits for the GIL meanwhile. So a seat
        # that nobody has taken is not read any further.
        state = _STATE.unpack_from
        taken = [n for n in range(SEATS) if state(self.map, self._at(n))[0] != FREE]
        return [s for s in map(self.seat, taken) if s.number != self.mine and s.state != FREE]

    def ring(self, number: int) -> memoryview:
        """RING_BYTES behind the seats, for the seat's own process to write."""
        start = HEAD_BYTES + SEATS * SEAT_BYTES + number * RING_BYTES
        return memoryview(self.map)[start : start + RING_BYTES]

    def _at(self, number: int) -> int:
        return HEAD_BYTES + number * SEAT_BYTES

    def _write(
        self,
        state: int,
        ranks: tuple[int, int, int],
        wake: int,
        time_ns: int,
        stop: Stop,
        pid: int = 0,
    ) -> None:
        at = self._at(self.mine)
        place = at + _NUMBERS.size
        texts = (stop.check, stop.kind, stop.headline, stop.dump)
        for text, size in zip(texts, _TEXT_BYTES, strict=True):
            data = text.encode("utf-8", "replace")[: size - 1]
            self.map[place : place + size] = data.ljust(size, b"\0")
            place += size
        # The state is written after the texts, so that who sees it finds them.
        _NUMBERS.pack_into(self.map, at, pid or os.getpid(), state, *ranks, wake, time_ns, 0)

    def _texts(self, place: int) -> list[str]:
        found = []
        for size in _TEXT_BYTES:
            found.append(self.map[place : place + size].partition(b"\0")[0].decode(errors="ignore"))
            place += size
        return found


def make(launch: str) -> LaunchMemory:
    """Make the memory of a launch, in the server's first process. Raises LaunchMemoryError."""
    try:
        fd = os.memfd_create(NAME)  # not inherited by programs that are started
        os.ftruncate(fd, TOTAL_BYTES)
        made = LaunchMemory(fd)
    except (AttributeError, OSError) as e:
        raise LaunchMemoryError(f"this system has no memory to share ({e})") from e
    head = _MAGIC + launch.encode()
    made.map[: len(head)] = head
    made.server = os.getpid()
    return made


def find(launch: str) -> LaunchMemory:
    """The memory of this launch, as the nearest ancestor has it open. Raises LaunchMemoryError."""
    pid = os.getpid()
    for _ in range(MAX_ANCESTORS):
        pid = _parent(pid)
        if pid <= 0:
            break
        found = _of_process(pid, launch)
        if found is not None:
            found.server = pid
            return found
    raise LaunchMemoryError(
        "no process that this one was started by has it; another launcher started it, or the "
        "server was started without tracers"
    )


def _of_process(pid: int, launch: str) -> LaunchMemory | None:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # it belongs to another user: then it is not our server either
        return None
    for name in names:
        path = f"{folder}/{name}"
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or of another format
            if not os.readlink(path).startswith(f"/memfd:{NAME} "):
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_size == TOTAL_BYTES:
                found = LaunchMemory(fd)
                if found.map[:HEAD_BYTES].rstrip(b"\0") == _MAGIC + launch.encode():
                    return found
                found.map.close()
            os.close(fd)
    return None


def _parent(pid: int) -> int:
    """The process that started it, 0 if there is none that can be seen."""
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def is_alive(pid: int) -> bool:
    """True if there is such a process, and it has not ended yet (a zombie has).

    Also if that cannot be seen, for example where this process has no file number left: the seat of
    one that is taken for dead is given away.
    """
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return bool(fields) and fields[0] not in ("Z", "X")


def stat(pid: int) -> list[str]:
    """``/proc/PID/stat`` behind the name: state, parent, … [] if there is no such process, or if
    that cannot be seen."""
    try:
        return _stat(pid)
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    # The name is in brackets and may have any character in it.
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
