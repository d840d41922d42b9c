"""Many corruptions of one warmed server: each in a fork of its scheduler.

An engine is started once. Its scheduler serves the traffic and notes the requests as they come from
the tokenizer. Then it stands still in ``recv_requests`` and forks for each case. A fork goes on in
SGLang's own event loop with all that is warm, is given the same requests at the same rounds of the
loop, and sends nothing to anybody. It writes its result into a file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import pkgutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from g4debug.hooking import targets
from g4debug.trapping.trap import TrapError
from suites.fuzz.corruption import draw
from suites.fuzz.strike import Strike, put_in

VARIABLE = "REPRO_FUZZ_CORRUPT"  # the order, as JSON: folder, seeds, mtp
GO, DONE = "go", "done"  # files by which the engine's process and the scheduler's agree
EVERY = 4  # rounds of the event loop between two requests
IDLE = 40  # rounds without work at the end: an idle server counts its pages in slices
ROUNDS = 4000  # of a case; it takes some hundred
SECONDS = 90.0  # of a case


class Forks:
    """The state in the scheduler's process. name: the case of this fork, '' in the parent."""

    def __init__(self, folder: Path, seeds: list[int], mtp: bool) -> None:
        self.folder, self.seeds, self.mtp = folder, seeds, mtp
        self.recorded: list[bytes] = []
        self.strike: Strike | None = None
        self.name = ""  # of the case, in a fork
        self.script: list[Any] = []
        self.round = self.idle = self.first_step = 0
        # What was told and stopped nobody: check, kind, and the step in which it was seen.
        self.told: list[tuple[str, str, int]] = []

    @property
    def scheduler(self) -> Any:
        from g4debug import plugin

        assert plugin.in_force is not None, "every tracer is armed here"
        return plugin.in_force.recorder.scheduler

    def step(self) -> int:
        from g4debug import plugin

        assert plugin.in_force is not None, "every tracer is armed here"
        return plugin.in_force.recorder.step - self.first_step

    def coming(self) -> int:
        """The same, and the next step while that is being prepared."""
        from g4debug import plugin

        assert plugin.in_force is not None, "every tracer is armed here"
        return plugin.in_force.recorder.event_step - self.first_step

    def note_told(self) -> None:
        from g4debug import plugin

        assert plugin.in_force is not None, "every tracer is armed here"
        known = {(check, kind) for check, kind, _ in self.told}
        for check, kind in plugin.in_force.recorder.status.findings:
            if (check, kind) not in known:
                self.told.append((check, kind, self.coming()))

    # --- in the place of SGLang's functions ------------------------------------------------------

    def install(self) -> None:
        put_in(lambda: self.strike)
        self._replace("scheduler.recv_requests", self.around_receive)
        self._replace("scheduler.run_event_loop", self.around_loop)

    def _replace(self, site: str, around: Callable[..., Any]) -> None:
        dotted = str(targets.path(site))
        owner = pkgutil.resolve_name(dotted.rpartition(".")[0])
        name = dotted.rpartition(".")[2]
        inner = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        wrapper.__name__, wrapper.__qualname__ = name, getattr(inner, "__qualname__", name)
        wrapper.__module__ = inner.__module__
        setattr(owner, name, wrapper)

    def around_receive(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.name:
            return self.receive()
        found = inner(*args, **kwargs)
        new = [r for given in found or () for r in requests_in(given)]
        if new and not (self.folder / GO).exists():
            self.recorded += [pickle.dumps(r) for r in new]
        if not found and (self.folder / GO).exists() and not (self.folder / DONE).exists():
            self.serve()
            if self.name:
                return self.receive()
        return found

    def around_loop(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except BaseException as e:
            if not self.name:
                raise
            self.end(e)

    # --- the parent ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Fork for each case, and wait for it. Returns in the forks, too: there ``name`` is set."""
        for name, seed in [("plain", None), ("again", None), *((str(s), s) for s in self.seeds)]:
            pid = os.fork()
            if not pid:
                self.begin(name, seed)
                return
            self._wait(pid, name)
        (self.folder / DONE).touch()

    def _wait(self, pid: int, name: str) -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            time.sleep(0.02)
        else:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        target = self.folder / f"{name}.json"
        if not target.is_file():
            died = os.waitstatus_to_exitcode(status)
            why = "it stood still" if died == -signal.SIGKILL else f"it died, status {died}"
            fired = self.folder / f"{name}.fired"
            what = json.loads(fired.read_text()) if fired.is_file() else None
            target.write_text(json.dumps({"error": why, "fired": what}))

    # --- a fork ----------------------------------------------------------------------------------

    def begin(self, name: str, seed: int | None) -> None:
        log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        self.name = name
        scheduler = self.scheduler
        for holder in (scheduler, getattr(scheduler, "ipc_channels", None)):
            for channel in ("send_to_detokenizer", "send_to_tokenizer"):
                sender = getattr(holder, channel, None)
                if sender is not None:  # its socket is the parent's
                    type(sender).send_output = lambda *args, **kwargs: None
        self.first_step = self.step()
        self.script = [pickle.loads(data) for data in self.recorded]
        case = draw(seed if seed is not None else 0, self.mtp)
        if seed is None:
            case = dataclasses.replace(case, step=1 << 30)  # never
        self.strike = Strike(case, scheduler, self.step, self.coming)
        # At once: a corruption may end the process without a word.
        fired = self.folder / f"{name}.fired"

        def note(what: dict[str, Any]) -> None:
            fired.write_text(json.dumps(what))

        self.strike.on_fire = note

    def receive(self) -> list[Any]:
        """The requests of this round. Ends the fork when all are served."""
        self.round += 1
        self.note_told()
        scheduler = self.scheduler
        if self.script and (self.round - 1) % EVERY == 0:
            return [self.script.pop(0)]
        self.idle = self.idle + 1 if not self.script and scheduler.is_fully_idle() else 0
        if self.idle > IDLE:
            self.end(None)
        if self.round > ROUNDS:
            self.end(RuntimeError(f"no end after {ROUNDS} rounds of the event loop"))
        return []

    def end(self, error: BaseException | None) -> NoReturn:
        """Write the result of this case, and end the process."""
        from g4debug import plugin

        assert plugin.in_force is not None and self.strike is not None  # noqa: PT018
        found: dict[str, Any] = {
            "fired": self.strike.fired,
            "steps": self.step(),
            "rounds": self.round,
        }
        self.note_told()
        while error is not None and not isinstance(error, TrapError) and error.__context__:
            if isinstance(error.__context__, TrapError):
                error = error.__context__
                break
            error = error.__context__
        if isinstance(error, TrapError):
            finding = error.finding
            found["finding"] = {
                "check": finding.check,
                "kind": finding.kind,
                # A finding may name an earlier step, which it belongs to: this is when it was told.
                "step": max(finding.location.step - self.first_step, self.coming()),
                "headline": finding.headline,
                "cause": finding.cause,
                "dump": str(error.path or ""),
            }
        elif error is not None:
            found["error"] = f"{type(error).__name__}: {error}"[:500]
        status = plugin.in_force.recorder.status
        found["findings"] = self.told
        found["failed"] = self.strike.failed
        found["disarmed"] = []
        for part in status.records():
            if part.off:
                found["disarmed"].append(f"{part.name} is off: {part.off}")
            else:
                found["disarmed"] += [f"{part.name}: {x.what}: {x.why}" for x in part.limits]
        found["tokens"] = {
            rid: [int(t) for t in r.output_ids] for rid, r in self.strike.requests.items()
        }
        (self.folder / f"{self.name}.json").write_text(json.dumps(found))
        sys.stderr.flush()
        os._exit(0)


def requests_in(given: Any) -> list[Any]:
    """The requests in a message of the tokenizer's; one message may bring several."""
    if type(given).__name__ == "TokenizedGenerateReqInput":
        return [given]
    if type(given).__name__ == "BatchTokenizedGenerateReqInput":
        return list(given.batch)
    return []


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """In place of SGLang's function of this name: the same, and it forks when it is told to."""
    from sglang.srt.managers.scheduler import run_scheduler_process as real

    order = json.loads(os.environ[VARIABLE])
    Forks(Path(order["folder"]), order["seeds"], order["mtp"]).install()
    real(*args, **kwargs)
