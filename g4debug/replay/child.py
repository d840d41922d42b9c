"""The process of a replay: a scheduler of SGLang that is started once and forked for each job.

``python -m g4debug.replay.child ORDER ANSWERS``: ORDER is a file of JSON, see :class:`Order`. Each
line of stdin is a job; each line to the file descriptor ANSWERS is news of it. Both are JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from g4debug import cpu
from g4debug.replay import memory
from g4debug.replay.parent import end_with_parent

EVERY = 0.2  # seconds between two news of a job
TO_END = 30.0  # seconds that a fork has to end its step, if it was asked to end
MORE = 1.1  # times the memory that it may take meanwhile


@dataclass(frozen=True)
class Order:
    """dump: the dump with the tape. arguments, drafts: see ``Setting``. model: as JSON."""

    dump: str
    arguments: dict[str, Any]
    drafts: bool
    model: dict[str, Any]
    pages_only: bool


def main(argv: list[str]) -> None:
    order = Order(**json.loads(Path(argv[0]).read_text()))
    answers = os.fdopen(int(argv[1]), "w", buffering=1)
    # SGLang's scheduler sends SIGQUIT to its parent when it dies. That must not be the command.
    end_with_parent()
    pid = os.fork()
    if pid:
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        os._exit(min(1, os.waitpid(pid, 0)[1]))
    end_with_parent()
    Replayer(order, answers).run()


class Replayer:
    def __init__(self, order: Order, answers: Any) -> None:
        from g4debug.dumps import reading
        from g4debug.hooking import hooks
        from g4debug.replay import verdict
        from g4debug.replay.feeder import Feeder
        from g4debug.replay.setting import recording_of
        from g4debug.replay.tokens import FIRST_WORD, Tokens

        self.order, self.answers = order, answers
        self.most, self.up = memory.most(), False
        threading.Thread(target=self._watch_start, daemon=True).start()
        record = reading.read(Path(order.dump))
        self.hung = verdict.hung(record.finding)
        self.tape, self.recording = recording_of(record)
        tokens = Tokens(self.recording, order.model["vocab"] - FIRST_WORD)
        self.feeder = Feeder(self.recording, tokens)
        self.job: dict[str, Any] | None = None  # of this fork
        self.steps = mmap.mmap(-1, 8)  # a fork tells its parent how far it is
        self.scheduler: Any = None
        hooks.also.append(self._install)

    def _install(self, hooks: Any) -> None:
        from g4debug.hooking.hooks import Order as At
        from g4debug.replay.feeder import OWNER

        self.feeder.install(hooks)
        hooks.before("scheduler.run_batch", At.FAULT, OWNER, self._step)
        hooks.around("scheduler.run_event_loop", At.FAULT, OWNER, self._loop)

    def _watch_start(self) -> None:
        """End with a reason before the machine's memory is full. Later ``_wait`` looks."""
        while not self.up:
            if memory.taken(os.getpid()) > self.most:
                self._tell(failed=memory.too_much(self.most))
                os._exit(1)
            time.sleep(EVERY)

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self.steps[:] = self.feeder.steps.to_bytes(8, "little")
        if self.job is not None and os.path.exists(self.job["stop"]):
            self.feeder.until = 1  # a step that is over: it ends with this one

    def run(self) -> NoReturn:
        cpu.prepare()
        error: BaseException | None = None
        try:
            self._serve()
        except BaseException as e:
            error = e
            traceback.print_exc()
        if self.job is None:  # the scheduler did not come up
            self._tell(failed=f"{type(error).__name__}: {error}" if error else "it did not come up")
            os._exit(1)
        self._end(error)

    def _serve(self) -> None:
        from g4debug.cpu import page_kernels, pages_only
        from g4debug.replay.model import Model

        order = self.order
        importlib.import_module("sglang.srt.plugins").load_plugins()
        take_time()
        model = Model(**order.model)
        module = importlib.import_module("sglang.srt.server_args")
        made = model.serve(order.drafts, **{"log_level": "warning", **order.arguments})
        known = _fields(module.ServerArgs)
        self.without = sorted(made.keys() - known)  # another release's
        args = module.ServerArgs(**{name: made[name] for name in made.keys() & known})
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        scheduler = importlib.import_module("sglang.srt.managers.scheduler")
        page_kernels.install()
        if order.pages_only:
            pages_only.install()
        given = {
            "server_args": args,
            "port_args": module.PortArgs.init_new(args),
            "gpu_id": 0,
            "dp_rank": None,
            "pipe_writer": _Nobody(),
        }
        process = scheduler.run_scheduler_process
        self._keep_errors(scheduler.logger)
        process(
            **{
                name: given.get(name, 0)
                for name, p in inspect.signature(process).parameters.items()
                if name in given or p.default is p.empty
            }
        )

    def _keep_errors(self, logger: Any) -> None:
        """Keep the error of which a scheduler dies: SGLang only logs it, and goes on to its end."""
        self.error: BaseException | None = None
        real = logger.error

        def error(*args: Any, **kwargs: Any) -> None:
            self.error = sys.exception() or self.error
            real(*args, **kwargs)

        logger.error = error

    def _loop(self, call_next: Callable[..., Any], scheduler: Any, *args: Any, **kw: Any) -> Any:
        """In place of SGLang's event loop: a fork for each job, and in the forks that loop."""
        from g4debug.replay.feeder import mute

        mute(scheduler)
        self.scheduler, self.up = scheduler, True
        self._tell(ready=True, without=self.without)
        for line in sys.stdin:
            job = json.loads(line)
            self.steps[:] = bytes(8)
            pid = os.fork()
            if not pid:
                self._begin(job)
                return call_next(scheduler, *args, **kw)
            self._wait(pid, job)
        os._exit(0)

    def _wait(self, pid: int, job: dict[str, Any]) -> None:
        """Until a fork has ended. One that takes too long or too much is asked to end, if it was
        given all: then it is known what was equal up to there. It is killed if it does not."""
        end, asked, large = time.monotonic() + job["seconds"], False, ""
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            late, taken = time.monotonic() >= end, memory.taken(pid)
            if taken > self.most:
                large = memory.too_much(self.most)
            over = late or taken > MORE * self.most
            if (asked and over) or ((late or large) and job["workload"] is not None):
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                break
            if (late or large) and not asked:
                Path(job["stop"]).write_text(large or f"the {job['seconds']:.0f} s are up")
                end, asked = time.monotonic() + TO_END, True
            self._tell(steps=int.from_bytes(self.steps[:], "little"))
            time.sleep(EVERY)
        self._tell(done=job["result"], status=status, pid=pid, large=large)

    # --- a fork ----------------------------------------------------------------------------------

    def _begin(self, job: dict[str, Any]) -> None:
        end_with_parent()
        from g4debug.replay.workload import Workload
        from g4debug.tracers.flight_recorder import taping

        self.job = job
        log = os.open(f"{job['result']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job["workload"] is not None:
            self.feeder.give(Workload.of(job["workload"]))
            self.feeder.most_idle = min(self.feeder.most_idle, job["idle"])
        self.feeder.until = job["until"]
        if job["to_the_end"]:
            self.feeder.to_the_end()
        if taping.current is not None:
            whole = job["workload"] is None
            taping.current.go_on(self.recording.begins, self.tape.format, whole)
        self.feeder.begin(self.scheduler)
        if self.hung:
            self.feeder.hangs = self._hangs

    def _hangs(self) -> tuple[bool, bool]:
        """Whether the flight recorder has told of a hang, and whether there is work."""
        from g4debug import plugin
        from g4debug.replay import verdict

        state = plugin.in_force
        told = state is not None and bool(state.recorder.status.findings[verdict.HANG])
        return told, self._works()

    def _works(self) -> bool:
        """Whether there is work: a request runs, or waits for this scheduler."""
        from g4debug.tracers.flight_recorder import work

        return any(not item.place.outside for item in work.of(self.scheduler))

    def _end(self, error: BaseException | None) -> NoReturn:
        """Write the job's result, with this scheduler's tape, and end."""
        from g4debug import plugin
        from g4debug.findings.tape_record import data
        from g4debug.replay.feeder import Stuck, TapeEnd
        from g4debug.tracers.flight_recorder import taping

        assert self.job is not None
        error = error or self.error
        result = Path(self.job["result"])
        made = None if taping.current is None else taping.current.tape()
        found: dict[str, Any] = {
            "ended": "stuck" if isinstance(error, Stuck) else "tape",
            "steps": self.feeder.steps,
            "forced": self.feeder.forced,
            "lacking": self.feeder.lacking,
            "reached": self.feeder.reached,
            "idle": self.feeder.at_end,
        }
        if error is None or isinstance(error, TapeEnd):
            state = plugin.in_force
            snapshot = None if state is None else state.recorder.status.snapshot
            found["last"] = "" if snapshot is None else snapshot()()[0]
            found["works"] = self._works()
        else:
            found |= {"ended": "raised", "error": f"{type(error).__name__}: {error}"[:2000]}
        if made is not None:
            result.with_suffix(".tape").write_bytes(data(made))
            found |= {"scheduler": made.scheduler, "limits": made.limits}
        result.write_text(json.dumps(found))
        sys.stderr.flush()
        os._exit(0)

    def _tell(self, **news: Any) -> None:
        self.answers.write(json.dumps(news) + "\n")


def take_time() -> None:
    """From now on no request starves because of seconds: a server's took others than a replay's."""
    from g4debug.tracers.flight_recorder.standing import Standing

    Standing.long = math.inf


def _fields(cls: Any) -> set[str]:
    """The names of the server's arguments."""
    return {*(getattr(cls, "__struct_fields__", None) or cls.__dataclass_fields__)}


class _Nobody:
    """In place of the pipe to the process that starts a scheduler."""

    def send(self, info: object) -> None:
        """It is up."""


if __name__ == "__main__":
    main(sys.argv[1:])
