"""In the server's main process: makes a dump of the black box of a scheduler that is gone.

SGLang looks at its processes once in a second. If one has died it sends SIGQUIT to itself, and that
kills all of them. So this process waits for the schedulers, too, in a thread that sleeps until one
ends, and all calls of ``kill_process_tree`` wait until the dump is there. If the main process dies
first, ``g4debug list`` makes the dump, or the next server with the same dump folder. The other
ranks are told, so that they save what they have.

A healthy server ends in the same way: it kills its schedulers by SIGKILL. So a box whose scheduler
still runs is removed before it is killed.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import select
import threading
import time
from collections import ChainMap, deque
from pathlib import Path
from typing import Any

from g4debug.dumps.errors import DumpError
from g4debug.findings import black_box, launch_memory, process_end
from g4debug.findings.black_box import BoxError, Owner
from g4debug.findings.launch_memory import Stop
from g4debug.hooking import roles
from g4debug.hooking.resolved import server_argument
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import box_dumps, core_autopsy, coredump
from g4debug.tracers.flight_recorder.box_dumps import Maker
from g4debug.trapping.trap import lines

TRIES = 40  # 2 s in all
LOOK = 1.0  # seconds between two looks for schedulers that are new
RECENT = 60  # looks; one that is killed may take long to give back its memory
PATIENCE = 20.0  # seconds that the end of the server waits for the dumps, at most
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
KILL = "server.kill"
UNMADE = "no dump can be made of a black box. g4debug list tries again. Please report this."
logger = logging.getLogger("g4debug")


class SchedulerWatch:
    def __init__(self, context: Context, part: roles.Role) -> None:
        self.context, self.part = context, part
        self.others = context.trap.others
        self.lock = threading.Lock()  # held while dumps are made
        self.settling = False  # the main thread has it, or waits for it
        self.pid = -1  # of the process in which it runs
        # Of the last looks: a count of last week would blame the OOM killer for a kill -9 of today.
        self.oom_kills: deque[dict[str, int]] = deque(maxlen=RECENT)
        self._seen: set[int] = set()  # schedulers that are waited for, or have ended
        self.short = False  # the user was told of a shortage of descriptors
        self.keeps_cores = False  # by --crash-dump-folder, the user has asked for them

    def install(self) -> None:
        self.context.before("server_args.check", self.start)
        self.context.before(KILL, self.before_kill)

    def start(self, *args: Any, **kwargs: Any) -> None:
        """This process is about to start the schedulers. It begins with the server's arguments."""
        self.keeps_cores = bool(server_argument(next(iter(args), None), "crash_dump_folder"))
        if self.pid != os.getpid() and self.context.settings.max_dumps:
            self.pid = os.getpid()
            # A fork's parent may hold the lock, and nobody gives the child's copy back.
            self.lock, self.settling, self._seen = threading.Lock(), False, set()
            threading.Thread(target=self._watch, name="g4debug-black-boxes", daemon=True).start()
            atexit.register(self._settle)

    def _watch(self) -> None:
        folder = self.context.settings.debug_dir
        try:
            with self.lock:
                try:
                    box_dumps.collect(
                        folder, f"the next server (pid {self.pid})", self._beside() is not None
                    )
                except (
                    Exception
                ):  # of an earlier launch; those of this one are watched all the same
                    logger.exception("g4debug: %s", UNMADE)
            poll, of = select.poll(), {}
            while True:
                self.oom_kills.append(process_end.oom_kills())
                for pid in self.others.schedulers():
                    if pid not in self._seen and (fd := self._wait_for(pid)) >= 0:
                        of[fd] = pid
                        poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll(LOOK * 1000):
                    poll.unregister(fd)
                    os.close(fd)
                    self._ended(of.pop(fd))
        except Exception:  # the server goes on; g4debug list makes the dumps
            logger.exception("g4debug: the schedulers are not watched any more. Please report it.")

    def _wait_for(self, pid: int) -> int:
        """A descriptor that can be read when the scheduler ends; -1 if there is none for now."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            fd = -1
        except OSError as e:
            if e.errno not in SHORTAGES:
                raise
            if not self.short:
                self.short = True
                logger.warning(
                    "g4debug: scheduler %d is not watched yet: %s. It is tried again each second. "
                    "If this lasts, raise the limit of open files (ulimit -n).", pid, e,
                )  # fmt: skip
            return -1
        self._seen.add(pid)
        if fd < 0:
            self._ended(pid)
        elif self.short:
            logger.info("g4debug: scheduler %d is watched now", pid)
        return fd

    def _ended(self, pid: int) -> None:
        with self.lock:
            self._make(pid)

    def _make(self, pid: int) -> None:
        """Make the dump of a scheduler of this launch. The others are watched also if it fails."""
        try:
            self._of(pid)
        except Exception:
            logger.exception("g4debug: scheduler %d: %s", pid, UNMADE)

    def _of(self, pid: int) -> None:
        """Make the dump of a scheduler of this launch that has ended."""
        end, now = process_end.of(pid), time.time_ns()
        before = dict(ChainMap(*self.oom_kills))  # the oldest look at each counter
        who = f"the server's main process (pid {self.pid})"
        maker = Maker(who, end, now, oom_kills=before)
        for _ in range(TRIES):
            busy = [path for path in self._paths() if not self._made(path, pid, maker)]
            if not busy or launch_memory.is_alive(pid):
                break
            time.sleep(0.05)  # somebody else looks at it
        else:
            logger.error(
                "g4debug: scheduler %d is gone (%s); another process holds its black box %s: "
                "g4debug list makes the dump once that one has ended",
                pid,
                end.words,
                busy[0],
            )

    def _made(self, path: Path, pid: int, maker: Maker) -> bool:
        """False if this is the scheduler's box, and another process has it."""
        with black_box.opened(path) as box:
            if box is None or box.owner.pid != pid or not _is_of(box.owner, self.pid):
                return True
            if not box.dead:
                return False
            born = box.owner.born_ns / 1e9
            try:
                made = box_dumps.make(box, maker)
            except (BoxError, DumpError) as e:
                kept = isinstance(e, DumpError)  # a full disk may have room again
                if not kept:
                    box.remove()
                logger.error(
                    "g4debug: scheduler %d is gone (%s); no dump can be made of its black box: "
                    "%s%s",
                    pid,
                    maker.end.words,
                    e,
                    f". It stays in {path}: g4debug list tries again" if kept else "",
                )
                return True
        if made is not None:
            finding, dump = made
            logger.error("\n".join(lines(finding, dump, "")))
            said = Stop(finding.check, finding.kind, finding.headline, str(dump))
            self.others.stop_for(pid, said)
            self._look_into_core(pid, dump, born)
        return True

    def _look_into_core(self, pid: int, dump: Path, born: float) -> None:
        """A scheduler without skip_abort is aborted by the driver, behind its core dump.

        With skip_abort, as we set it, NCCL's watchdog may abort it before Python sees the error.
        """
        settings = self.context.settings
        if settings.core != "off" and coredump.is_enabled(os.environ):
            remove = settings.removes_cores and not self.keeps_cores
            core_autopsy.put_into(dump, os.environ, pid, born, wait=False, remove=remove)

    def _beside(self) -> Path | None:
        """The folder of the dumps, if the boxes lie there: else its disk is not asked for them."""
        settings = self.context.settings
        return settings.debug_dir if settings.black_box == "dumps" else None

    def _paths(self) -> list[Path]:
        """The files that may be boxes of this launch, or of another one."""
        return black_box.everywhere(self._beside())

    def before_kill(self, *args: Any, **kwargs: Any) -> None:
        """A process of SGLang's is about to be killed with all that it has started."""
        target = args[0] if args else kwargs.get("parent_pid")
        if target is None:
            target = os.getpid()
        if target == self.pid:
            self._settle()
        for path in self._paths():
            with black_box.opened(path) as box:
                if box is None or box.dead or target not in (box.owner.server, box.owner.pid):
                    continue
                if box.owner.server < 0 or _is_of(box.owner, box.owner.server):
                    box.remove()

    def _settle(self) -> None:
        """Make the dumps of all schedulers of this launch that have ended by now."""
        main = threading.current_thread() is threading.main_thread()
        if self.pid != os.getpid() or (main and self.settling):
            return  # of a fork, or a signal handler in the middle of this: it would wait for itself
        self.settling = self.settling or main
        try:
            if not self.lock.acquire(timeout=PATIENCE):
                return  # of a thread that is stuck: the server must end
            try:
                for pid in self.others.schedulers():
                    self._make(pid)
            finally:
                self.lock.release()
        finally:
            if main:
                self.settling = False


def _is_of(owner: Owner, server: int) -> bool:
    """True if this process runs, and is the server's first one of this box.

    Containers may share ``/dev/shm``, and in each of them the server has the same number.
    """
    return owner.server == server and process_end.runs(server, owner.server_began)
