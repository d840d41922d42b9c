"""Makes the finding about a process that dies or hangs: why and where. Reads no tensor."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING

from g4debug import discovery
from g4debug.dumps.heads import quoted
from g4debug.findings import kinds
from g4debug.findings.record import Finding, Location
from g4debug.settings import Settings, fix_switch

if TYPE_CHECKING:
    from g4debug.findings.launch_memory import Seat
    from g4debug.tracers.base import Context
    from g4debug.tracers.flight_recorder.assert_evidence import Asserted
    from g4debug.tracers.flight_recorder.progress import Hang
    from g4debug.tracers.flight_recorder.reasons import Reason
    from g4debug.tracers.flight_recorder.waits import Wait

    Told = tuple[Wait, float, Reason | None]  # who waits, for how many seconds, and why

CHECK = "flight-recorder"
KINDS = kinds.KINDS[CHECK]
WRAPPERS = (
    "g4debug/hooking/hooks.py",
    "g4debug/tracers/base.py",
    "g4debug/cpu/fault.py",
    "sglang/srt/plugins/",
)
SIGTERM = "g4debug.tracers.flight_recorder.sigterm"  # the module of our own signal handler
FRAMES = 12  # innermost frames that are kept
TEXT = 200  # characters that are kept of an exception's first line
BLOCKING = "CUDA_LAUNCH_BLOCKING=1 <your launch command> --disable-cuda-graph"
# PyTorch, the driver API, Triton, cuBLAS and NCCL each say it in other words. Running out of memory
# is not among them, because the CUDA context survives that.
CUDA = re.compile(
    r"CUDA error|CUDA driver error|Triton Error \[CUDA\]|\bcudaError[A-Z]\w+|\bCUDA_ERROR_\w+"
    r"|CUBLAS_STATUS_EXECUTION_FAILED|unhandled cuda error"
)
# An assertion failed in a kernel. PyTorch names "device-side assertions" below any CUDA error.
ASSERT = re.compile(r"device-side assert triggered|\bcudaErrorAssert\b|\bCUDA_ERROR_ASSERT\b")
# A driver that writes a core dump calls a failed assertion an "unspecified launch failure" (H100).
VAGUE = re.compile(
    r"CUBLAS_STATUS_EXECUTION_FAILED|unhandled cuda error"
    r"|unspecified launch failure|cudaErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED"
)
OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY|cudaErrorMemoryAllocation", re.I)


def all_tracers_armed(settings: Settings) -> bool:
    """True if ``SGLANG_TRTLLM_MHA_DEBUG=1`` would not arm any more tracers."""
    if not settings.trace:
        return bool(settings.debug) and not settings.watch
    others = set(discovery.names("tracer")) - set(settings.trace)
    return all(discovery.load("tracer", name).opt_in for name in others)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those that it was raised from, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_cuda(error: BaseException) -> bool:
    """True if the device failed, whatever the type of the exception is."""
    for e in chain(error):
        text = str(e)
        if CUDA.search(text) and not OUT_OF_MEMORY.search(text):
            return True
    return False


def is_vague(error: BaseException) -> bool:
    """True if the error says that the device failed, but does not name the cause."""
    texts = [text for e in chain(error) if CUDA.search(text := str(e))]
    return bool(texts) and all(VAGUE.search(text) for text in texts)


def is_assert(error: BaseException) -> bool:
    """True if the device failed because an assertion in a kernel did not hold."""
    return is_cuda(error) and any(ASSERT.search(str(e)) for e in chain(error))


def of_exception(
    error: BaseException,
    site: str,
    context: Context,
    complete: bool,
    innocence: Callable[[bool], list[str]],
    printed: Asserted | None = None,
) -> Finding:
    """The finding about an exception.

    complete: all tracers are armed already. innocence: tells which checks passed before
    a CUDA error (True) or another exception (False), and which were not made. It is asked only if
    no tracer found anything. printed: the evidence about the assertion that failed in a kernel, if
    one did.
    """
    cuda = is_cuda(error)
    frames = _frames(traceback.walk_tb(error.__traceback__))
    got = f"{type(error).__name__} in {_innermost(frames)}"
    if cuda:
        got += (
            ". This is only where it surfaced: the next call that waits for the device reports a "
            "CUDA error, but the kernel that failed was launched earlier"
        )
    if printed is not None:
        got += f"\n{printed.words()}"
    record = KINDS["exception"]
    if cuda:
        record = KINDS["cuda-error" if printed is None else "device-assert"]
    again = BLOCKING if cuda else ""
    what = _name_and_line(error) if printed is None else printed.headline()
    cause = [earlier(context), printed.cause() if printed is not None else ""]
    if not cause[0]:
        cause += [line for line in innocence(cuda) if line != NOT_KNOWN]
    return record.finding(
        site=site,
        headline=f"g4debug: {CHECK} in {_phase(site, context)}: {what}",
        location=_location(context),
        expected="a scheduler that keeps running",
        got=got,
        history=tuple(frames[-FRAMES:]),
        cause="\n".join(filter(None, cause)) or NOT_KNOWN,
        next_command=again if complete else record.command,
    )


def of_hang(hang: Hang, why_now: str, context: Context, complete: bool) -> Finding:
    """The finding about a hang. ``why_now``: why it is dumped now (SIGTERM, SGLang's watchdog)."""
    frames, record = main_thread(), KINDS["hang"]
    limit = context.settings.hang_seconds
    place = _innermost(frames)
    return record.finding(
        site="scheduler.run_event_loop",
        headline=f"g4debug: {CHECK}: the scheduler hangs: {hang.what}",
        location=_location(context),
        expected=f"progress within {limit} s (G4DEBUG_HANG_SECONDS)",
        got=f"no progress for {hang.seconds:.0f} s; the main thread is in {place} ({why_now})",
        history=tuple(frames[-FRAMES:]),
        cause=earlier(context) or NOT_KNOWN,
        next_command="" if complete else record.command,
    )


def of_busy(hang: Hang, doing: str, why_now: str, context: Context) -> Finding:
    """The finding about a loop that stands because of work that takes minutes: it accuses nobody.

    doing: that work, in words. why_now: as of :func:`of_hang`.
    """
    frames, record = main_thread(), KINDS["busy"]
    what = hang.what.replace("has been stuck for", "has made no round for")  # nobody is stuck
    return record.finding(
        site="scheduler.run_event_loop",
        headline=f"g4debug: {CHECK}: no hang is known: {what}; it was {doing}",
        location=_location(context),
        expected="nothing: such work takes minutes on a healthy server, too",
        got=f"the main thread is in {_innermost(frames)} ({why_now})",
        history=tuple(frames[-FRAMES:]),
        cause=earlier(context) or f"it was {doing}",
    )


def of_standing(hang: Hang, reasons: Sequence[Told], context: Context) -> Finding:
    """The finding about a loop that turns and serves nobody. reasons: of those that wait."""
    limit = context.settings.hang_seconds
    return KINDS["hang"].finding(
        site="scheduler.run_event_loop",
        headline=f"g4debug: {CHECK}: the scheduler hangs: {hang.what}",
        location=replace(_location(context), request=reasons[0][0].rid),
        expected=f"progress within {limit} s (G4DEBUG_HANG_SECONDS)",
        got="\n".join([f"no step for {hang.seconds:.0f} s", *_waiting(reasons)]),
        owner=next(("; ".join(r.holders) for _, _, r in reasons if r and r.holders), ""),
        cause=_why(reasons, context),
        next_command=_watch(),
    )


def of_starved(steps: int, seconds: float, reasons: Sequence[Told], context: Context) -> Finding:
    """The finding about requests that make no progress while others do, the worst first."""
    record, limit = KINDS["starved"], context.settings.starved_steps
    who = f"request {reasons[0][0].name}"
    if len(reasons) > 1:
        who += f" and {len(reasons) - 1} more"
    return record.finding(
        site="scheduler.run_event_loop",
        headline=(
            f"g4debug: {CHECK}: {who} made no progress for {steps} steps ({seconds:.0f} s), while "
            "others did"
        ),
        location=replace(_location(context), request=reasons[0][0].rid),
        expected=(
            "a pool that has room for it once all others have ended"
            if reasons[0][2] is not None and reasons[0][2].never
            else f"progress within {limit} steps (G4DEBUG_STARVED_STEPS), or within 10 minutes "
            "where others overtake it"
        ),
        got="\n".join(_waiting(reasons)),
        owner=next(("; ".join(r.holders) for _, _, r in reasons if r and r.holders), ""),
        cause=_why(reasons, context),
        next_command=_watch(),
    )


def _watch() -> str:
    return f"g4debug doctor --pid {os.getpid()}"


def _waiting(reasons: Sequence[Told]) -> Iterator[str]:
    for wait, seconds, reason in reasons:
        if reason is None:
            break
        begun = f", {wait.done} tokens computed" if wait.done else ""
        yield f"request {wait.name} {wait.place.value} for {seconds:.0f} s{begun}: {reason.line}"
    unnamed = sum(reason is None for _, _, reason in reasons)
    if unnamed:
        yield f"{unnamed} more requests wait"


def _why(reasons: Sequence[Told], context: Context) -> str:
    """The verdict on the first request of which there is one."""
    for wait, _, reason in reasons:
        if reason is not None and reason.verdict:
            more = [line for line in (reason.like, _fix_that_is_off(reason.fix, context)) if line]
            return "\n".join((f"request {wait.name}: {reason.verdict}", *more))
    if reasons[0][0].overtaken:
        return (
            "requests that came later are served before it; the order of the queue is the schedule "
            "policy's, and that of priorities where they are on"
        )
    return earlier(context) or NOT_KNOWN


def _fix_that_is_off(name: str, context: Context) -> str:
    """That a fix is off which this SGLang needs for such a request, and how to turn it on."""
    asked, mode = context.settings.switches.get(name), context.settings.fixes
    if not name or asked or (asked is None and mode != "none"):
        return ""
    if not discovery.load("fix", name).is_for_this_release:
        return ""
    return f"the fix {name} is for such a request, and is off: {fix_switch(name)}=1 turns it on"


def of_other_rank(first: Seat, error: BaseException | None, context: Context) -> Finding:
    """The finding of a rank that found nothing, when another one has stopped.

    error: the exception that this rank died of afterwards; None if it still runs.
    """
    if error is None:
        frames = main_thread()
        got = f"this rank found nothing; its main thread was in {_innermost(frames)}"
    else:
        frames = _frames(traceback.walk_tb(error.__traceback__))
        got = (
            f"this rank found nothing, and then died of {_name_and_line(error)} in "
            f"{_innermost(frames)}, because the other one was gone"
        )
    stop, record = first.stop, KINDS["other-rank"]
    what = stop.headline.removeprefix("g4debug: ")
    others = context.trap.others
    mine = others.memory.seat(others.memory.mine).dp if others.memory else -1
    # A server goes on without one of its data-parallel replicas.
    did = "stopped the server" if mine in (-1, first.dp) else "ended"
    dump = f"\nits dump: {quoted(stop.dump)}" if stop.dump else "\nit has left no dump"
    return record.finding(
        site="scheduler.run_event_loop",
        headline=f"g4debug: {CHECK}: rank {first.name} {did}: {what}",
        location=_location(context),
        expected="ranks that go on together",
        got=got,
        history=tuple(frames[-FRAMES:]),
        cause=f"the finding of rank {first.name} (pid {first.pid}){dump}",
        next_command=f"g4debug show {quoted(stop.dump)}" if stop.dump else record.command,
    )


def of_asking(context: Context) -> Finding:
    """The finding for a dump that somebody asked for: for its tape, or to follow a request."""
    record = KINDS["asked"]
    return record.finding(
        site="scheduler.run_event_loop",
        headline=f"g4debug: {CHECK} in {_phase('', context)}: the tape was asked for",
        location=_location(context),
        expected="nothing: this is no finding",
        got="somebody asked, by doctor's --tape or --request",
        cause=earlier(context) or "nothing is wrong, as far as the tracers tell",
    )


def main_thread() -> list[str]:
    """The main thread's frames, outermost first, without our own signal handler."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    stack = list(traceback.walk_stack(frame))[::-1] if frame is not None else []
    return _frames(itertools.takewhile(lambda at: _module(at[0]) != SIGTERM, stack))


def _name_and_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    line = lines[0].strip()[:TEXT] if lines else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _phase(site: str, context: Context) -> str:
    step = context.recorder.current
    if step is None:
        return "start-up" if site == "scheduler.init" else "the event loop, before its first step"
    n = len(step.rids)
    return f"step {step.step} ({step.forward_mode}, {n} request{'s' * (n != 1)})"


def _location(context: Context) -> Location:
    recorder = context.recorder
    step = recorder.current
    return Location(
        process="scheduler",
        step=recorder.step or -1,
        forward_mode=step.forward_mode if step else "",
        request=step.rids[0] if step and len(step.rids) == 1 else "",
    )


NOT_KNOWN = "not known: no tracer reported anything before"


def earlier(context: Context) -> str:
    """The first suspect: a finding that was reported before, in log or contain mode.

    Or one that was not reported, because the tracer had missed something.
    """
    reported = context.trap.reported
    if not reported:
        doubted = list(context.trap.doubted.values())
        if doubted:
            return f"a finding was not reported, so nothing is sure: {doubted[0]}"
        return ""
    several = len(reported) > 1
    which = f"the first of {len(reported)} earlier findings" if several else "this finding"
    return f"{which} did not stop the server ({context.settings.mode} mode): {reported[0]}"


def _frames(stack: Iterable[tuple[FrameType, int]]) -> list[str]:
    """The place of each frame, outermost first.

    Leaves out the wrappers of hooked calls, and the CPU engine's pretended device.
    """
    places = (_place(_module(f), f.f_code.co_filename, n, f.f_code.co_name) for f, n in stack)
    return [p for p in places if not p.startswith(WRAPPERS)]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _innermost(frames: list[str]) -> str:
    """The innermost frame, and the function of SGLang that it was called from."""
    if not frames:
        return "an unknown place"
    sglang = next((f for f in reversed(frames) if f.startswith("sglang/")), "")
    if not sglang or sglang == frames[-1]:
        return frames[-1]
    return f"{frames[-1]}, called by {sglang}"


def _place(module: str, file: str, line: int, function: str) -> str:
    """For example ``sglang/srt/managers/scheduler.py:3183 process_batch_result``, no full path.

    The module's name tells which part of the path is inside the package. The names of the folders
    above it mean nothing: a package may be installed below a folder that is called like another.
    """
    inside = module.replace(".", "/")
    for place in (f"{inside}.py", f"{inside}/__init__.py"):
        if "." in module and file.endswith(f"/{place}"):
            break
    else:
        place = "/".join(PurePath(file).parts[-2:])
    return f"{place}:{line} {function}"
