"""The entry point that SGLang calls in its server and scheduler processes.

``register`` reads the settings, installs fixes, then faults, then tracers, and checks at the end
that all hooks are in place. If a plugin raises an exception, SGLang only logs it and serves on.
So if something that the user asked for cannot be done, ``register`` raises ``SystemExit``, which
ends the process.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from g4debug import __version__, discovery
from g4debug.dumps import launch
from g4debug.faults.grammar import GrammarError, Plan, parse
from g4debug.findings import names
from g4debug.hooking import roles
from g4debug.settings import WATCH, Settings, SettingsError

if TYPE_CHECKING:
    from g4debug.findings.peer_ranks import PeerRanks
    from g4debug.findings.status_publisher import StatusPublisher
    from g4debug.findings.steps import Recorder
    from g4debug.hooking.hooks import Hooks
    from g4debug.ledger.ledger import Ledger
    from g4debug.tracers.base import Tracer
    from g4debug.tracers.hook_watch import HookWatch
    from g4debug.trapping.trap import Trap

logger = logging.getLogger("g4debug")
NOT_RUN = "it was never run on this release of SGLang"


@dataclass(frozen=True)
class InForce:
    """All that ``register`` switched on in this process. ``g4debug doctor`` reads it."""

    hooks: Hooks
    fixes: dict[str, str]  # id -> "state: why"
    recorder: Recorder
    ledger: Ledger | None  # None: no armed tracer needs it
    watch: HookWatch | None  # looks at our hooks while the server runs; None: no tracer is armed
    installed: bool  # False: nothing was asked for or needed, so there is no hook in SGLang
    not_run: tuple[str, ...] = ()  # armed tracers that were never run on this SGLang
    teller: StatusPublisher | None = None  # shows the status to others; None: no tracer is armed
    others: PeerRanks | None = None  # the other ranks of this launch; None: no tracer is armed
    role: roles.Role = field(default_factory=roles.Role)  # what this process is in SGLang

    @property
    def tracers(self) -> dict[str, str]:
        """Name of each armed tracer -> its state now, in words."""
        return {t.name: t.state for t in self.recorder.status.records() if t.mode}


in_force: InForce | None = None


def register() -> None:
    """The entry point ``sglang.srt.plugins``.

    Raises SystemExit if something that the user asked for cannot be done.
    """
    names.clean_log()
    ours = ("G4DEBUG_", "SGLANG_TRTLLM_MHA_DEBUG")
    with _armed_or_ended(any(name.startswith(ours) for name in os.environ)):
        settings = Settings.from_environ()
        plan = parse(settings.faults)
    with _armed_or_ended(settings.asked or settings.cpu):
        _register(settings, plan)


@contextmanager
def _armed_or_ended(asked: bool) -> Iterator[None]:
    """Raise SystemExit for what a user got wrong, and where debugging was asked for, for a bug of
    g4debug (a fix that cannot be loaded, for example)."""
    try:
        yield
    except GrammarError as e:
        raise SystemExit(f"g4debug: G4DEBUG_FAULTS: {e}") from e
    except SettingsError as e:
        raise SystemExit(f"g4debug: {e}") from e
    except Exception as e:
        if asked:
            logger.exception("g4debug: could not be armed")
            raise SystemExit(f"g4debug: could not be armed: {type(e).__name__}: {e}") from e
        raise  # the user did not ask for debugging, so SGLang logs this and serves on


def _register(settings: Settings, plan: Plan) -> None:
    if "flight-recorder" in settings.tracers:
        from g4debug.tracers.flight_recorder import coredump

        # Before anything asks CUDA: the driver reads these variables when a process begins with it.
        coredump.arm(os.environ, settings.core, settings.debug_dir)
    if settings.cpu:
        from g4debug import cpu

        cpu.activate()
    from g4debug.faults import base as faults
    from g4debug.faults import fitting
    from g4debug.findings.steps import Recorder
    from g4debug.fixes import base as fixes
    from g4debug.hooking.hooks import Hooks, also
    from g4debug.trapping.describe import Describer
    from g4debug.trapping.trap import Trap

    tracers = chosen(settings)
    not_run: tuple[str, ...] = ()
    if tracers:
        cpu_engine = on_cpu(settings)
        gpu = "" if cpu_engine else kind_of_gpu()
        not_run = refuse_if_not_run(settings, tracers, cpu_engine, gpu)
        if settings.watch and not_run and not settings.takes_the_risk:
            settings = replace(settings, mode="log")  # what was never run changes nothing
    hooks = Hooks()
    part = roles.Role()
    recorder = Recorder(settings.steps)
    describer = Describer(recorder)
    trap = Trap(settings, describer, recorder.status)

    fix_states = fixes.apply_all(
        hooks,
        settings.switches,
        faults.recreated_bugs(plan),
        settings.forced_by,
        settings.fixes,
    )
    injections = faults.install_all(plan, hooks)
    fitting.install(injections, hooks)
    for install in also:
        install(hooks)
    if settings.tracers:
        describer.launch = launch.begin(part.name == roles.SERVER)
    ledger, watch = _arm(settings, hooks, recorder, trap, tracers, not_run, part)

    describer.fixes = {s.fix.id: str(s) for s in fix_states}
    describer.schedules = [injection.schedule for injection in injections]
    if ledger is not None:
        describer.allocator_events = ledger.last_events
    if watch is not None:
        from g4debug.hooking import plugins

        watch.fixes = describer.fixes
        watch.plugins = plugins.installed(os.environ)
        describer.plugins = {p.name: str(p) for p in watch.plugins}
        describer.look = watch.look_for_dump
    for state in fix_states:
        if state.state == "target-missing":
            logger.warning("g4debug: fix %s cannot be applied: %s", state.fix.id, state.why)
    global in_force
    in_force = InForce(
        hooks, describer.fixes, recorder, ledger, watch, bool(hooks.sites), not_run, role=part
    )
    line = start_up_line(settings, hooks, in_force, fixes.summary(fix_states, settings.fixes))
    if not hooks.sites:
        if settings.fixes == "none":  # who asked for nothing is told that this is what there is
            _say(line)
        return
    if settings.tracers:
        told = _tell(settings, hooks, recorder, trap, part)
        in_force = replace(in_force, teller=told, others=trap.others)
    hooks.install()
    _after_apply(hooks, settings, line, watch, not_run if only_reports(settings, tracers) else ())


def chosen(settings: Settings) -> list[Tracer]:
    """The tracers that the settings arm. An opt-in tracer is armed only if it is named, and so is a
    young one where it was not run."""
    if settings.watch:
        return [discovery.load_watch(name) for name in settings.tracers]
    loaded = [discovery.load("tracer", name) for name in settings.tracers]
    if settings.trace:
        return loaded
    return [tracer for tracer in loaded if not (tracer.opt_in or _is_too_young(settings, tracer))]


def _is_too_young(settings: Settings, tracer: Tracer) -> bool:
    from g4debug.hooking import targets

    if not tracer.young:
        return False
    cpu_engine = on_cpu(settings)
    return bool(targets.not_run((tracer.id,), cpu_engine, "" if cpu_engine else kind_of_gpu()))


def on_cpu(settings: Settings) -> bool:
    """True if SGLang runs without a GPU here."""
    import torch

    return settings.cpu or not torch.cuda.is_available()


def kind_of_gpu() -> str:
    """The kind of this machine's GPUs, such as sm90 or ROCm; '' if there is none, or it cannot be
    asked. SGLang's main process asks the same of torch when it reads its arguments.
    """
    import torch

    if torch.version.hip:
        return "ROCm"
    try:
        return "sm{}{}".format(*torch.cuda.get_device_capability())
    except (RuntimeError, AssertionError):  # no GPU, or a torch without CUDA
        return ""


def only_reports(settings: Settings, tracers: Sequence[Tracer]) -> bool:
    """True if no finding does more than be reported: in log mode, or because nothing is judged."""
    return settings.mode == "log" or not any(tracer.judges for tracer in tracers)


def refuse_if_not_run(
    settings: Settings, tracers: Sequence[Tracer], cpu_engine: bool, gpu: str = ""
) -> tuple[str, ...]:
    """The names of the tracers that were not run on the installed SGLang.

    gpu: the kind of the GPUs, as of :func:`targets.not_run`.

    Raises SettingsError if there are such, and their findings would do more than be reported. A
    false finding would stop a healthy server, which is worse than the bugs that are looked for.
    With ``watch`` nothing is refused: it only reports there.
    """
    from g4debug.hooking import targets

    not_run = targets.not_run((tracer.id for tracer in tracers), cpu_engine, gpu)
    harmless = only_reports(settings, tracers) or settings.not_run_on_this_release or settings.watch
    if not not_run or harmless:
        return not_run
    release = targets.sglang_version() or "of an unknown version"
    where = "on the CPU engine" if cpu_engine else "on a GPU"
    if not cpu_engine and gpu and gpu not in targets.GPUS_RUN:
        where += f" of this kind ({gpu}; run: {', '.join(targets.GPUS_RUN)})"
    text = (
        f"SGLang {release} was never run with {', '.join(not_run)} "
        f"{where}, so a finding could be false, and "
        f"G4DEBUG_MODE={settings.mode} could harm a healthy server. Start it with "
        "G4DEBUG_MODE=log, which only reports findings; or with G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1, "
        "which takes that risk"
    )
    was_run = [tracer.id for tracer in tracers if tracer.id not in not_run]
    if was_run:
        text += f"; or arm only the tracers that were run: G4DEBUG_TRACE={','.join(was_run)}"
    raise SettingsError(text)


def _arm(
    settings: Settings,
    hooks: Hooks,
    recorder: Recorder,
    trap: Trap,
    tracers: Sequence[Tracer],
    not_run: Sequence[str],
    part: roles.Role,
) -> tuple[Ledger | None, HookWatch | None]:
    """Install the step recorder, then the ledger if one is needed, then the tracers.

    Returns the ledger, None if no tracer needs one, and what looks at our hooks later.
    """
    if not settings.tracers:
        return None, None
    from g4debug.findings.status import STEPS
    from g4debug.hooking.hooks import HookError
    from g4debug.tracers.base import Context
    from g4debug.tracers.flight_recorder import rank_incident, scheduler_watch
    from g4debug.tracers.gate import Gate
    from g4debug.tracers.hook_watch import HookWatch
    from g4debug.tracers.silence import Silence

    steps = Context(STEPS, hooks, settings, recorder, trap)

    def count_step(*args: Any, **kwargs: Any) -> None:
        recorder.count()

    def record_step(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        recorder.record(batch)

    def prepare_step(*args: Any, **kwargs: Any) -> None:
        recorder.prepare_step()

    def attach(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        part.schedules()
        recorder.attach(scheduler)

    # The last that is put at a site runs first, so a step is counted, then recorded.
    steps.before("scheduler.run_batch", record_step)
    steps.before("scheduler.run_batch", count_step)
    # SGLang allocates for a step before the step begins.
    steps.before("batch.prepare_for_extend", prepare_step)
    steps.before("batch.prepare_for_decode", prepare_step)
    # Before, so that the dump of a crash at start has the arguments and the ranks.
    steps.before("scheduler.init", attach)
    ledger = None
    if any(t.ledger for t in tracers):
        from g4debug.ledger.hooks import LedgerHooks
        from g4debug.ledger.ledger import Ledger

        ledger = Ledger(recorder)
        LedgerHooks(ledger).install(hooks)
    for tracer in tracers:
        context = Context(tracer.id, hooks, settings, recorder, trap, ledger)
        context.status.mode = settings.mode
        if tracer.ledger and ledger is not None:
            context.status.depends_on(ledger.status, tracer.without_ledger)
        if tracer.id in not_run:  # the start-up line says it
            context.status.limit("it may be wrong", NOT_RUN, quiet=True)
        try:
            tracer.install(context)
        except HookError as e:
            if tracer.id not in not_run or not only_reports(settings, tracers):
                raise
            hooks.drop(tracer.id)
            context.off(str(e))
    watch = HookWatch(hooks, recorder, ledger, tracers)
    watch.install(steps)
    Silence(recorder, tracers).install(steps)
    rank_incident.install(steps, part)
    if any(t.id == "flight-recorder" for t in tracers):
        scheduler_watch.SchedulerWatch(steps, part).install()
    Gate(steps, tracers, on_cpu(settings)).install()
    return ledger, watch


def _tell(
    settings: Settings, hooks: Hooks, recorder: Recorder, trap: Trap, part: roles.Role
) -> StatusPublisher:
    """Let ``g4debug doctor --pid`` and SGLang's ``/metrics`` have the status of this process."""
    from g4debug.findings.status_file import StatusFileError
    from g4debug.findings.status_publisher import StatusPublisher
    from g4debug.tracers.base import Context

    context = Context("status", hooks, settings, recorder, trap)
    about = {
        "version": __version__,
        "role": part.name,
        "mode": settings.mode,
        "dumps": str(settings.debug_dir),
        "faults": settings.faults,
        "arms": WATCH if settings.watch else "",
    }
    recorder.status.watch = settings.watch
    teller = StatusPublisher(recorder.status, about)

    def attach(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        teller.about["role"] = part.name
        teller.attach(scheduler)
        return result

    def launched(result: Any, *args: Any, **kwargs: Any) -> Any:
        if teller.about["pid"] != os.getpid():  # a fork shares the file with its parent
            teller.close()
            teller.about["pid"] = os.getpid()
            teller.open()
        teller.about["role"] = part.name
        return result

    def beat(*args: Any, **kwargs: Any) -> None:
        teller.beat()

    try:
        teller.open()
    except StatusFileError as e:
        context.limit("g4debug doctor --pid cannot ask this process", str(e))
    context.after("server_args.check", launched)
    context.after("scheduler.init", attach)
    context.before("scheduler.recv_requests", beat)
    return teller


def role() -> str:
    """The role of this process in SGLang: server or scheduler.

    From 0.5.23 on also detokenizer and data_parallel_controller.
    """
    return in_force.role.name if in_force is not None else roles.by_stack()


def _after_apply(
    hooks: Hooks,
    settings: Settings,
    line: str,
    watch: HookWatch | None,
    not_run: Sequence[str],
) -> None:
    """Check that our hooks really run, as soon as SGLang has applied the hooks of all plugins.

    If they do, ``line`` is printed to stderr, because SGLang sets up its logging only after the
    plugins have run.

    not_run: tracers that were never run on this SGLang, if findings are only reported. They work as
    far as they can, and say what they do not see. Everything else that is missing stops the start.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from g4debug.findings.status import LEDGER, STEPS

    apply_hooks = HookRegistry.apply_hooks

    def apply_and_audit() -> None:
        HookRegistry.apply_hooks = apply_hooks
        apply_hooks()
        missing = hooks.missing()
        if missing and watch is not None and (not_run or settings.mode == "log"):
            partly = [s for s in missing if set(s.owners) <= {*not_run, LEDGER, STEPS}]
            watch.never(partly)
            missing = tuple(s for s in missing if s not in partly)
        if not missing:
            _say(line)
            if watch is not None:
                watch.look()  # who wraps our hooks is told now
            return
        text = "; ".join(f"{s.site} ({s.state}: {s.detail or s.path})" for s in missing)
        message = f"g4debug: not armed: {text}; run: g4debug doctor"
        # A fix that nobody asked for must not stop the server, whatever else is asked for.
        unforced = (
            {fix for fix in in_force.fixes if not settings.switches.get(fix)} if in_force else set()
        )
        if settings.asked and any(set(s.owners) - unforced for s in missing):
            raise SystemExit(message)
        logger.warning("%s", message)

    HookRegistry.apply_hooks = apply_and_audit


def _say(line: str) -> None:
    """Print to stderr. If its disk is full, or nobody reads it any more, the server starts anyway:
    SGLang's own logging takes that in the same way."""
    with suppress(OSError, ValueError):  # ValueError: it is closed
        print(line, file=sys.stderr, flush=True)


def start_up_line(settings: Settings, hooks: Hooks, state: InForce, fixed: str) -> str:
    """The start-up line: the armed tracers, SGLang's release, the fixes, the injected faults, and
    the dumps' folder. SGLang itself never says its release, and ``g4debug triage`` needs it.

    fixed: what ``g4debug.fixes.base.summary`` says.
    """
    from g4debug.hooking import targets

    armed = ", ".join(state.tracers) or "none"
    mode = f"{WATCH}, {settings.mode}" if settings.watch else settings.mode
    new = f"never run on this SGLang or GPU: {', '.join(state.not_run)}; " if state.not_run else ""
    return (
        f"g4debug {__version__} [{state.role.name}] armed: {armed} ({mode}); {new}"
        f"SGLang {targets.sglang_version() or 'of an unknown release'}; "
        f"fixes: {fixed}; "
        f"faults: {settings.faults or 'none'}; {len(hooks.sites)} sites hooked; "
        f"dumps: {settings.debug_dir}"
    )
