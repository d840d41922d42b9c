"""The other ranks of this launch, on this host: who has stopped, and who must be told.

A rank that stops with a finding says so in the memory that the ranks share
(:mod:`g4debug.findings.launch_memory`), wakes the others, and waits a moment for them to save what
they have: soon afterwards SGLang kills them. A rank with its main thread inside a collective is
reached, too: a second thread waits for the word on a pipe, at no cost. Ranks on other hosts are not
reached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import threading
import time
from collections.abc import Callable

from g4debug.findings import launch_memory
from g4debug.findings.launch_memory import LaunchMemory, LaunchMemoryError, Seat, Stop

CHECK, OTHER_RANK = "flight-recorder", "other-rank"  # of a dump that another rank's finding caused
# A rank that is about to make a finding of its own, or to die because the first one is gone, says
# more than its watcher could.
GRACE = 0.15  # seconds
WAIT = 2.0  # seconds that a rank with a finding waits for the others
LOOK = 1.0  # seconds between two looks of a watcher that could not be woken
logger = logging.getLogger("g4debug")


class PeerRanks:
    """Does nothing until this process has joined.

    memory: what the ranks share; None if there is none. ending: True as soon as this process has
    something to say about its own end, so that the watcher need not say it.
    """

    def __init__(self) -> None:
        self.memory: LaunchMemory | None = None
        self.ending = False
        self._wake = -1
        self._read = -1
        self.seated = False
        self._joined = 0  # Unix time in ns

    def make(self, launch: str) -> None:
        """This is the first process of a server. Raises LaunchMemoryError if it cannot share."""
        self.memory = launch_memory.make(launch)

    def join(self, launch: str) -> None:
        """This process has a scheduler. Raises LaunchMemoryError if there is nothing to share."""
        if self.seated:
            return
        if self.memory is None:
            self.memory = launch_memory.find(launch)
        self._read, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        try:
            self.memory.take()
        except LaunchMemoryError:
            os.close(self._read)
            os.close(self._wake)
            raise
        self.seated = True
        self._joined = time.time_ns()

    def close(self) -> None:
        """Leave the memory as it is, and look at it no more."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
            self.seated = False

    def name_ranks(self, dp: int, tp: int, pp: int) -> None:
        if self.memory is not None and self.seated:
            self.memory.name_ranks(dp, tp, pp)

    def watch(self, on_stop: Callable[[Seat], None]) -> None:
        """Call ``on_stop`` once, in a thread, when another rank has stopped.

        It is not called if this process ends by itself within GRACE.
        """
        if self.memory is None or not self.seated:
            return
        self.memory.may_be_woken(self._wake)
        threading.Thread(
            target=self._watch, args=(on_stop,), name="g4debug-other-ranks", daemon=True
        ).start()

    def _watch(self, on_stop: Callable[[Seat], None]) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while self.memory is not None:
            if poll.poll(LOOK * 1000):
                os.read(self._read, 4096)
            if self.ending:
                return
            first = self.first()
            if first is None:
                continue
            time.sleep(GRACE)
            if not self.ending:
                try:
                    on_stop(first)
                except Exception:
                    logger.exception("g4debug: flight-recorder failed. Please report this.")
            return

    def first(self) -> Seat | None:
        """The rank that stopped first, None if no other rank has stopped with a finding."""
        if self.memory is None:
            return None
        stopped = [
            seat
            for seat in self.memory.others()
            if seat.state == launch_memory.STOPPED
            and seat.stop.kind != OTHER_RANK
            # An earlier engine of the same process may have left its seat.
            and seat.time_ns >= self._joined
        ]
        return min(stopped, key=lambda seat: seat.time_ns, default=None)

    def found(self) -> bool:
        """True if a tracer's finding stopped a rank, and it was no crash that was only recorded."""
        if self.memory is None:
            return False
        seats = (self.memory.seat(n) for n in range(launch_memory.SEATS))
        return any(s.state == launch_memory.STOPPED and s.stop.check != CHECK for s in seats)

    def stop(self, stop: Stop) -> None:
        """This process stops: tell the others, and wait at most WAIT seconds until they know.

        Only the first time counts, and nobody waits for a rank that ends because of another one.
        """
        memory = self.memory
        if memory is None or not self.seated:
            return
        if memory.seat(memory.mine).state == launch_memory.STOPPED:
            return
        memory.stop(stop, time.time_ns())
        if stop.kind != OTHER_RANK:
            self._wake_all(memory)

    def stop_for(self, pid: int, stop: Stop) -> None:
        """The same, for a scheduler of this launch that is dead. Called by the server's process."""
        memory = self.memory
        if memory is None:
            return
        for seat in memory.others():
            if seat.pid == pid and seat.state == launch_memory.ALIVE:
                memory.stop_for(seat, stop, time.time_ns())
                self._wake_all(memory)

    def leads(self) -> bool:
        """False if another rank on this host decides the same as this one, and tells it.

        The tensor-parallel ranks of a group get the same requests and serve them alike. The first
        of them leads. A rank that does not know its number, or whose first one is elsewhere or has
        ended, leads itself.
        """
        memory = self.memory
        if memory is None or not self.seated:
            return True
        me = memory.seat(memory.mine)
        return me.tp < 0 or not any(
            seat.state == launch_memory.ALIVE
            and (seat.dp, seat.pp) == (me.dp, me.pp)
            and 0 <= seat.tp < me.tp
            and launch_memory.is_alive(seat.pid)
            for seat in memory.others()
        )

    def say_busy(self, busy: bool) -> None:
        """Whether the main thread of this process is in work that takes minutes."""
        if self.memory is not None and self.seated:
            self.memory.say_busy(busy)

    def busy(self, coupled: bool) -> str:
        """The name of another rank on this host that is in such work, '' if there is none.

        coupled: the data-parallel ranks wait for each other, too.
        """
        memory = self.memory
        if memory is None or not self.seated:
            return ""
        dp = memory.seat(memory.mine).dp
        mine = (s for s in memory.others() if s.busy and (coupled or s.dp == dp))
        return next((seat.name for seat in mine), "")

    def schedulers(self) -> list[int]:
        """The numbers of the processes that have a scheduler of this launch, or had one."""
        memory = self.memory
        return [] if memory is None else [seat.pid for seat in memory.others()]

    def _wake_all(self, memory: LaunchMemory) -> None:
        for seat in self._running(memory):
            wake(seat)
        end = time.monotonic() + WAIT
        while self._running(memory) and time.monotonic() < end:
            time.sleep(0.005)

    def _running(self, memory: LaunchMemory) -> list[Seat]:
        """The others that can still leave a dump."""
        return [
            seat
            for seat in memory.others()
            if seat.state == launch_memory.ALIVE
            and seat.wake >= 0
            and launch_memory.is_alive(seat.pid)
        ]


def wake(seat: Seat) -> None:
    """Wake the watcher of another process. One that cannot be woken looks by itself.

    The seat of a dead process keeps its number, which another process may have got meanwhile, with
    a file of its own there.
    """
    with contextlib.suppress(OSError):
        path = f"/proc/{seat.pid}/fd/{seat.wake}"
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.write(fd, b"!")
        finally:
            os.close(fd)
