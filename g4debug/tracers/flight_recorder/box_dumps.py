"""Makes a dump of the black box of a scheduler that has ended without one.

The server's main process does so when a scheduler is gone
(:mod:`g4debug.tracers.flight_recorder.scheduler_watch`), and when it starts, for those of earlier
launches; ``g4debug list`` and ``show`` do so for the folder that they look into. The box may hold
anything: its values are checked as those of a dump are (:mod:`g4debug.dumps.plain`), and the dump
is as bounded as any other.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from g4debug.dumps import writing
from g4debug.dumps.errors import DumpError
from g4debug.dumps.plain import from_plain, to_plain
from g4debug.findings import black_box, kinds, process_end
from g4debug.findings.black_box import BoxError, Content, Found
from g4debug.findings.process_end import End
from g4debug.findings.record import Finding, Location, Pool, Step, TrapRecord
from g4debug.tracers.flight_recorder.coverage import Death, innocence
from g4debug.trapping.trap import fitted

KINDS = kinds.KINDS["flight-recorder"]
MAX_MB = 16
# What a signal says of the process, beyond its name.
MEANS: Mapping[int, str] = {
    signal.SIGKILL: "It comes from outside of the process: from the kernel, which was out of "
    "memory, from a container's runtime, from whoever typed kill -9, or because the process that "
    "had started the scheduler died.",
    signal.SIGABRT: "A library called abort(): NCCL's watchdog does so, a failed assertion in C++, "
    "and the CUDA driver behind a core dump if it has no skip_abort. Its words are in the log.",
    signal.SIGALRM: "It had got SIGTERM, and no Python could run for half a minute: its main "
    "thread hung, and kept the GIL. Or other code has set an alarm.",
}
FAULT = (
    "Code outside of Python failed. If the log has 'Fatal Python error', it has the stacks there."
)
SENT = "Somebody sent this signal, or a limit of the system did: no fault in the code has it."
FAULTS = {
    signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS,
    signal.SIGTRAP, signal.SIGALRM,
}  # fmt: skip

UNKNOWN = End()


@dataclass(frozen=True)
class Maker:
    """Who makes the dump, and what that one knows. who: "the server's main process (pid 4711)".

    end: how the scheduler ended. ended_ns: when, in Unix time; 0: not known, some time after the
    last step. server: what is known of the server's main process, in words. oom_kills: as of
    :func:`process_end.oom_kills`, shortly before; without it, the box has an older one.
    """

    who: str
    end: End = UNKNOWN
    ended_ns: int = 0
    server: str = ""
    oom_kills: Mapping[str, int] = field(default_factory=dict)


def collect(folder: Path, who: str, beside: bool = True) -> list[tuple[Path, str]]:
    """Make dumps of the boxes with this dump folder whose schedulers, and servers, are dead.

    beside: also of those that lie in the folder itself.
    Returns the box and the reason of each of which no dump can be made.
    """
    older = "it is of an older g4debug, and was removed, because this one cannot read it"
    problems, kept = [(path, older) for path in black_box.remove_older()], 0
    for path in black_box.everywhere(folder if beside else None):
        with black_box.opened(path) as box:
            if box is None or not box.left_behind:
                continue
            if box.goes_to(folder):
                known = box.owner.server > 0
                gone = "the server's main process is gone, too" if known else ""
                try:
                    make(box, Maker(who, server=gone))
                    continue
                except (BoxError, DumpError) as e:
                    problems.append((path, str(e)))
            kept += 1
            if kept > black_box.MOST:
                box.remove()
    return problems


def make(box: Found, maker: Maker) -> tuple[Finding, Path] | None:
    """Make the dump of a box, and remove the box. None if there need not be one.

    Raises BoxError if the box cannot be understood, and DumpError if the dump cannot be written.
    """
    content = box.read()
    # Where nobody saw the end, the box says whether it was asked for: a terminal that is closed, or
    # a signal to the whole group, ends the server's first process, too.
    asked = maker.end.asked or (not maker.end.known and content.asked)
    if asked or content.dump:
        box.remove()
        return None
    record, data = fitted(record_of(content, maker), MAX_MB)
    path = writing.write_dump(record, data, box.folder, 1, dead=True)
    box.remove()
    return record.finding, path


def record_of(content: Content, maker: Maker) -> TrapRecord:
    """The dump's record. Raises BoxError if a value of the box is not what g4debug writes."""
    try:
        about = _object(content, "about")
        status = _object(content, "status")
        location = about.get("location", {})
        payload = {
            **about.get("dump", {}),
            "finding": vars(_blank(Location())) | {"location": location},
            "created": _created(content, maker),
            "tracers": status.get("tracers", []),
            "steps": content.steps,
            "allocator": content.events,
            "requests": content.notes,
            "requests_lost": content.lost,
            "launch": content.owner.launch,
        }
        record = from_plain(payload)
        at = replace(record.finding.location, process="scheduler", pid=content.owner.pid)
        found = _finding(content, maker, about, status, record, at)
        record = replace(record, finding=found, pools=_pools(record))
        to_plain(record)  # so that a wrong type is told here
        return record
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError) as e:
        raise BoxError(f"its content is damaged ({type(e).__name__}: {e})"[:300]) from e


def _created(content: Content, maker: Maker) -> str:
    """When the scheduler ended, as far as that is known: dumps are ordered by it."""
    last = content.steps[-1]["time_ns"] if content.steps else content.owner.born_ns
    at = datetime.fromtimestamp((maker.ended_ns or last) / 1e9, UTC)
    return at.isoformat(timespec="milliseconds")


def _object(content: Content, name: str) -> dict[str, Any]:
    found = json.loads(content.blobs.get(name, b"{}"))
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no JSON object")
    return found


def _blank(location: Location) -> Finding:
    return KINDS["gone"].finding(site="", headline="", location=location, expected="", got="")


def _finding(
    content: Content,
    maker: Maker,
    about: Mapping[str, Any],
    status: Mapping[str, Any],
    record: TrapRecord,
    at: Location,
) -> Finding:
    end, last = maker.end, record.steps[-1] if record.steps else None
    oom = _oom(maker.oom_kills or about.get("oom_kills", {}))
    kind, what = _kind(end, oom)
    phase, site = "start-up, or the event loop before its first step", "scheduler.init"
    got = [f"{end.words}; no step had begun"]
    if last is not None:
        site = "scheduler.run_event_loop"
        n = len(last.rids)
        phase = f"step {last.step} ({last.forward_mode}, {n} request{'s' * (n != 1)})"
        inside = content.returned < last.step
        phase = f"{'' if inside else 'the event loop, after '}{phase}"
        seconds = max(0.0, (maker.ended_ns - last.time_ns) / 1e9)
        when = f", {seconds:.1f} s before" if maker.ended_ns else ""
        did = "had not returned" if inside else "had returned"
        got = [f"{end.words}; step {last.step} began last{when}, and {did}"]
        at = replace(
            at,
            step=last.step,
            forward_mode=last.forward_mode,
            request=last.rids[0] if n == 1 else "",
        )
    got.append(
        f"this dump was made of the black box that the dead process left, by {maker.who}"
        + (f"; {maker.server}" if maker.server else "")
    )
    if content.cut:
        got.append(
            f"the box keeps {black_box.REQUESTS} requests of a step, and one had {content.cut}"
        )
    watched = maker.ended_ns > 0
    cause = [
        _cause(end, oom, watched),
        _earlier(status) or "\n".join(_innocence(about, status, record)),
    ]
    return KINDS[kind].finding(
        site=site,
        headline=f"g4debug: flight-recorder in {phase}: {what}",
        location=at,
        expected="a scheduler that keeps running",
        got="\n".join(got),
        cause="\n".join(filter(None, cause)),
    )


def _kind(end: End, oom: tuple[int, int]) -> tuple[str, str]:
    """The kind of finding, and the end of its headline."""
    if end.signal == signal.SIGKILL:
        if oom[0] > 0:
            return "oom-killed", "the scheduler was killed, as it seems by the OOM killer"
        return "killed", "the scheduler was killed (SIGKILL)"
    if end.signal in FAULTS:
        return "native-crash", f"the scheduler died of {end.words}, outside of Python"
    if end.signal:
        return "killed", f"the scheduler was killed by {end.words}"
    if end.known:
        return "gone", f"the scheduler ended with {end.words}, and no exception was seen"
    return "gone", "the scheduler is gone, and nobody saw how it ended"


def _oom(before: Any) -> tuple[int, int]:
    """How many processes the OOM killer has killed since the box was made, in this cgroup and on
    this host. 0 for both if that is not known.
    """
    now = process_end.oom_kills()
    known = before if isinstance(before, dict) else {}
    grown = {
        key: count - known[key] for key, count in now.items() if isinstance(known.get(key), int)
    }
    return sum(n for key, n in grown.items() if key != "host"), grown.get("host", 0)


def _cause(end: End, oom: tuple[int, int], watched: bool) -> str:
    """watched: the server's main process was there, and makes the dump."""
    here, host = oom
    if here > 0 and end.signal in (0, signal.SIGKILL):  # the OOM killer has no other one
        return (
            f"Since the scheduler began, the kernel's OOM killer has killed {here} "
            f"process{'es' * (here != 1)} of its cgroup: then the host memory that this container "
            "or service may use was full. Which process it was is in the kernel's log."
        )
    if end.signal == signal.SIGKILL and host > 0:
        return (
            f"{MEANS[signal.SIGKILL]} The OOM killer has killed {host} "
            f"process{'es' * (host != 1)} of this host since the scheduler began; which, is in the "
            "kernel's log."
        )
    if end.signal:
        return MEANS.get(end.signal, FAULT if end.signal in FAULTS else SENT)
    if end.known:
        return "It called exit() outside of the event loop, or a library did."
    if watched:
        return "Its exit status was taken by other code of the server before it could be read."
    return (
        "It was killed together with its server, or its container was stopped, or the machine "
        "had no memory: nobody was left to see it. A terminal that is closed may do it, too: the "
        "system kills a scheduler whose server has died, and it may have had no time to note that "
        "it was asked to end."
    )


def _pools(record: TrapRecord) -> tuple[Pool, ...]:
    """The pools, with what was in use when the last step began."""
    last = record.steps[-1] if record.steps else Step(0, "", (), ())
    used = {"full": last.full_used, "swa": last.swa_used}
    return tuple(replace(pool, used_tokens=used.get(pool.name, -1)) for pool in record.pools)


def _earlier(status: Mapping[str, Any]) -> str:
    found = status.get("earlier", "")
    return found if isinstance(found, str) else ""


def _innocence(
    about: Mapping[str, Any], status: Mapping[str, Any], record: TrapRecord
) -> list[str]:
    """What the tracers had checked, by their last note, which is at most a second old."""
    death = Death(
        step=record.steps[-1].step if record.steps else 0,
        finished=int(status.get("finished", 0)),
        replays=int(status.get("replays", 0)),
        cuda=False,
        backends={str(k): str(v) for k, v in dict(about.get("backends", {})).items()},
        seen=False,
    )
    return innocence(death, record.tracers)
