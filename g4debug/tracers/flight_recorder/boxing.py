"""Keeps the black box of this scheduler (:mod:`g4debug.findings.black_box`) while it runs.

The box is made before the scheduler's ``__init__``, and removed when the scheduler ends in Python,
because then the flight recorder itself has seen the end. A failure of ours ends the box, because
one that is not written any more would show other steps than the last ones.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from g4debug.backends import phases
from g4debug.dumps import patience
from g4debug.dumps.plain import to_plain
from g4debug.findings import file_systems, kinds, process_end
from g4debug.findings.black_box import BlackBox, BoxError, Owner
from g4debug.findings.record import Evidence, Location, PageEvent
from g4debug.hooking.hooks import Order
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder.completed_steps import Waited
from g4debug.tracers.flight_recorder.request_events import RequestEvents
from g4debug.trapping.describe import Describer

LIMIT = "a scheduler that is killed leaves no dump"
DISK = 5.0  # seconds that the disk of the dump folder may take to make a box
STATUS_NS = 10**9  # between two notes of what was checked
# What a dump has that changes from step to step, that a finding brings, or that is not plain.
ELSEWHERE = (
    "finding", "created", "tracers", "table", "steps", "events", "transitions", "holdings",
    "allocator", "asserts", "lookups", "tape", "requests", "requests_lost", "held", "kind",
)  # fmt: skip


class Boxing:
    """earlier: what the flight recorder's dump says of findings that did not stop the server."""

    def __init__(self, context: Context, waited: Waited, earlier: Callable[[], str]) -> None:
        self.context, self.waited, self.earlier = context, waited, earlier
        self.recorder = context.recorder
        self.box: BlackBox | None = None
        self.requests: RequestEvents | None = None  # if they are kept
        self.look: Callable[[], None] = lambda: None  # called when the checks are noted
        self._told_at = 0  # Unix time, which may be set back
        self._due = False  # the checks are to be noted when this step was launched
        # The last step that was finished, and the last of which the checks were read.
        # Each with the replays up to it.
        self._finished = self._read = (0, 0)

    def install(self) -> None:
        context = self.context
        if not context.settings.max_dumps:
            return
        context.before("scheduler.init", self.begin)
        context.before("runner.init", self.tell)  # the scheduler has its arguments by now
        context.after("scheduler.run_batch", self.returned)
        for site in ("scheduler.init", "scheduler.run_event_loop"):
            context.hooks.around(site, Order.LAST, context.tracer_id, self._around(site))

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """A scheduler is about to be made."""
        if self.box is not None:
            return
        context = self.context
        memory = context.trap.others.memory
        server = -1 if memory is None else memory.server
        if server == os.getpid():
            return  # no server has its scheduler in its first process: this is a replay or a test
        describer = context.trap.describe
        owner = Owner(
            pid=os.getpid(),
            server=server,
            server_began=process_end.began(server),
            born_ns=time.time_ns(),
            host=os.uname().nodename,
            launch=describer.launch if isinstance(describer, Describer) else "",
            folder=os.path.abspath(context.settings.debug_dir),
        )
        try:
            self.box = self._beside(owner) or BlackBox(owner)
        except BoxError as e:
            context.limit(LIMIT, str(e))
            return
        Finalize(None, self.remove, exitpriority=0)  # an end by exit(), or by an exception
        try:
            self.tell()
            self._told()
        except Exception as e:  # a box without steps would say that there was none
            self._off(e)
            return
        self.recorder.also = self.step
        if self.requests is not None:
            self.requests.also = self.note
        context.trap.left = self.left
        if context.ledger is not None:
            context.ledger.log.also = self.event

    def _beside(self, owner: Owner) -> BlackBox | None:
        """A box in the folder of the dumps, if it is asked for and can be there."""
        settings, lock = self.context.settings, threading.Lock()
        if settings.black_box != "dumps":
            return None
        folder, kept, given_up = Path(owner.folder), list[BlackBox](), list[bool]()

        def make() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            kind = file_systems.kind(folder)
            if kind not in file_systems.HOLDING:
                raise BoxError(
                    f"{folder} lies on {kind or 'an unknown file system'}, and a box only on "
                    f"{', '.join(file_systems.HOLDING)}: there all see whether its process lives"
                )
            box = BlackBox(owner, folder, beside=True)
            with lock:
                if given_up:  # a disk has answered too late: nobody will write to this one
                    box.remove()
                else:
                    kept.append(box)

        problem: Exception | str = ""
        try:
            patience.within(folder, make, DISK)
        except (BoxError, OSError, patience.HungDiskError) as e:
            problem = e
        with lock:
            given_up.append(True)
            if kept:
                return kept[0]
        self.context.limit("the black box lies in /dev/shm, not in the dump folder", str(problem))
        return None

    def tell(self, *args: Any, **kwargs: Any) -> None:
        """Write what a dump has beside steps and events. It has changed, or may have."""
        if self.box is None:
            return
        describer = self.context.trap.describe
        found = kinds.KINDS["flight-recorder"]["gone"].finding(
            site="", headline="", location=Location(), expected="", got=""
        )
        if isinstance(describer, Describer):
            record = describer(found, Evidence(), history=False)
        else:
            record = describer(found, Evidence())
        payload = to_plain(record)
        about = {name: value for name, value in payload.items() if name not in ELSEWHERE}
        args_ = getattr(self.recorder.scheduler, "server_args", None)
        extra = {
            "location": payload["finding"]["location"],
            "backends": dict(phases.asked(args_)),
            "oom_kills": process_end.oom_kills(),
        }
        try:
            self._write("about", {"dump": about, **extra})
            return
        except BoxError:
            about.pop("defaults", None)  # the least of it goes
        try:
            self._write("about", {"dump": about, **extra})
        except BoxError as e:
            about.pop("memory", None)
            self.context.limit("the dump of a killed scheduler has no memory map", str(e))
            self._write("about", {"dump": about, **extra})

    def _told(self) -> None:
        status = self.recorder.status
        self._write(
            "status",
            {
                "tracers": [record.plain() for record in status.records()],
                "finished": self._read[0],
                "replays": self._read[1],
                "earlier": self.earlier(),
            },
        )

    def _write(self, name: str, values: dict[str, Any]) -> None:
        if self.box is not None:
            self.box.write(name, json.dumps(values).encode())

    def step(self, rids: list[str], packed: bytes, at: int) -> None:
        """A step begins."""
        box = self.box
        if box is not None:
            try:
                box.step(rids, packed)
                # What the checks of a step left is read behind the step in which it is finished.
                self._read = self._finished
                self._finished = self.waited.last, self.waited.replays
                if abs(at - self._told_at) >= STATUS_NS:
                    self._told_at, self._due = at, True
                    self.look()
            except Exception as e:
                self._off(e)

    def event(self, event: PageEvent) -> None:
        """An allocator's event was entered."""
        box = self.box
        if box is not None:
            try:
                box.event(event)
            except Exception as e:
                self._off(e)

    def note(self, event: tuple[Any, ...]) -> None:
        """Something happened to a request."""
        box = self.box
        if box is not None:
            try:
                box.note(event)
            except Exception as e:
                self._off(e)

    def returned(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """A step was launched, and the device works."""
        if self.box is not None:
            self.box.returned(self.recorder.step)
            if self._due:
                self._due = False
                try:
                    self._told()
                except Exception as e:
                    self._off(e)
        return result

    def left(self, path: Path) -> None:
        """A dump of this process's end was written."""
        if self.box is not None:
            self.box.left(str(path))

    def asked(self, well: bool = True) -> None:
        """Somebody asked this process to end. well: nothing is known to be wrong with it."""
        if self.box is not None:
            self.box.asked(time.time_ns() if well else 0)

    def _off(self, error: Exception) -> None:
        self.context.status.limit(LIMIT, f"it failed: {type(error).__name__}: {error}", error)
        self.remove()

    def remove(self) -> None:
        box, self.box = self.box, None
        if box is not None:
            box.remove()

    def _around(self, site: str) -> Callable[..., Any]:
        """Around a site of which the flight recorder sees the end, if it is an end in Python."""

        def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                result = call_next(*args, **kwargs)
            except BaseException:
                self.remove()
                raise
            if site != "scheduler.init":
                self.remove()
            return result

        return around
