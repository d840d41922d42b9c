"""Tells which checks passed before the scheduler died, and which were not made.

Where no tracer found anything, that is evidence, too: somebody who knows that the page tables were
right looks at the kernel, and not for weeks at the allocator. But it is evidence only as far as the
checks went. So this claims nothing that is not in the status of a tracer, and nothing about a step
that the device may not have finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from g4debug.backends import adapters
from g4debug.findings.status import TracerStatus
from g4debug.sanitizer.unsupported import BACKEND, PHASE

TABLES, ALLOCATOR, CENSUS = "page-table", "kv-allocator", "pool-leak"
GIVEN = "the hand-outs and frees of KV pages"  # what kv-allocator judges
POOL = "pages of the {} pool"  # what a census counts
LEDGER, STEPS = "ledger", "step-recorder"
# The subject at which nobody has looked if this tracer is not armed.
SUBJECTS: Mapping[str, str] = {
    TABLES: "page tables",
    ALLOCATOR: "who got and gave back which page",
    CENSUS: "lost pages",
    "spec-lifecycle": "the state between draft and verify",
    "kv-integrity": "what is in the KV pages",
    "kv-writes": "where KV is written",
    "prefix-cache": "what the prefix cache gets and gives",
}
GUARDED = tuple(adapter.name for adapter in adapters())
COUNTED = ("tables", "token lists")  # what it counts, and the same "captured in CUDA graphs"
Judged = Literal["right", "range", "nothing"]


@dataclass(frozen=True)
class Death:
    """The known facts about the end.

    step: the step that had begun last. finished: the last step that the device had certainly
    finished. replays: how many of the finished steps were CUDA-graph replays. cuda: the device
    failed. backends: phase -> attention backend, as the server was told. seen: the process itself
    tells it; else its black box does, and nothing was read after the end.
    """

    step: int
    finished: int
    replays: int
    cuda: bool
    backends: Mapping[str, str]
    seen: bool = True


def innocence(death: Death, tracers: Iterable[TracerStatus]) -> list[str]:
    """Whole sentences, the most important first. [] if no tracer that checks anything was armed."""
    armed = {t.name: t for t in tracers}
    if not any(name in armed for name in SUBJECTS):
        return []
    table, allocator = armed.get(TABLES), armed.get(ALLOCATOR)
    judged, guarded = _judged(death, table), _guarded(death, table)
    if judged == "right" and guarded == []:
        judged = "range"  # it is not known what runs on what, so which tables is not known, too
    pages = _sound(allocator, armed.get(LEDGER)) and _checked(allocator, "hand-outs") > 0
    lines = [_verdict(death, judged, pages, guarded, _until(death, table))]
    lines += _lost_pages(armed.get(CENSUS))
    found_right = [_counts(armed[name]) for name in SUBJECTS if name in armed]
    lines += _list("Checked, and nothing found", [text for text in found_right if text])
    if judged != "nothing" and table is not None:
        lines += _last_steps(death, table)
    lines += _list("Not looked at", _not_looked_at(death, armed))
    return lines


def _verdict(
    death: Death, judged: Judged, pages: bool, guarded: Sequence[str] | None, until: int
) -> str:
    """guarded: the backends with judged tables, None for all. until: see _until."""
    if death.finished < 1:
        return "Nothing is known to be innocent: the device had finished no step yet."
    step = death.finished if judged == "nothing" else until
    upto = f"up to step {step}"
    if death.replays:
        upto += f" ({death.replays} of them CUDA-graph replays)"
    where = "; look at the kernel" if death.cuda else "; look at HISTORY" if death.seen else ""
    only = ""
    if guarded is not None:
        only = f" of {' and '.join(guarded)}" if guarded else " that was checked"
    if judged == "right" and pages:
        return f"Page tables{only} and {GIVEN} are innocent {upto}{where}."
    if judged == "right":
        return (
            f"Page tables{only} are innocent {upto}; the KV allocators were not checked, or not "
            "always."
        )
    if judged == "range":
        return (
            f"No page table{only} named a page outside of its pool {upto}. Whether the pages were "
            "the right ones was not checked, or not always."
        )
    if pages:
        return (
            f"The KV allocators are innocent {upto}; page tables were not checked, or not always."
        )
    return "Neither page tables nor KV pages were checked, so either may be guilty."


def _lost_pages(census: TracerStatus | None) -> list[str]:
    """When each pool was last counted: only a count shows lost pages."""
    if census is None:
        return []  # it stands among what was not looked at
    begin, end = POOL.split("{}")
    counted = [
        f"the {c.what[len(begin) : -len(end)]} pool in step {c.step}"
        for c in census.checked
        if c.count and c.what.startswith(begin) and c.what.endswith(end)
    ]
    if not counted:
        return ["No pool was counted, so pages may be lost, or be free and in use at once."]
    pools = " and ".join(counted)
    found = sum(census.findings.values())
    then = "" if found else "; every page was somebody's then"
    return [f"Counted last: {pools}{then}. Pages that were lost after that were not looked for."]


def _guarded(death: Death, table: TracerStatus | None) -> list[str] | None:
    """The backends in use that page-table judges. None if it judges all of them."""
    used = set(death.backends.values())
    said = [limit.what for limit in table.limits] if table is not None else []
    judged = {name for name in GUARDED if BACKEND.format(name) not in said}
    if used <= judged and not any(_is_whole(what) for what in said):
        return None
    return [name for name in GUARDED if name in used & judged]


def _is_whole(limit: str) -> bool:
    """True if it says that page-table does not look at a whole backend or phase."""
    return any(limit.startswith(what.partition("{}")[0]) for what in (BACKEND, PHASE))


def _until(death: Death, table: TracerStatus | None) -> int:
    """The last finished step with checked tables.

    A captured table is checked in each replay, and counted at its capture. So with a guard in the
    graphs that is the last step that was finished.
    """
    if table is None or any(_captured(table, what) for what in COUNTED):
        return death.finished
    last = [c.step for c in table.checked if c.what in COUNTED and c.count]
    return min(death.finished, max(last, default=death.finished))


def _judged(death: Death, table: TracerStatus | None) -> Judged:
    """How far page-table can vouch for the page tables."""
    if table is None or table.off or table.dead:
        return "nothing"
    if not any(_checked(table, what) or _captured(table, what) for what in COUNTED):
        return "nothing"
    if death.replays and not any(_captured(table, what) for what in COUNTED):
        return "nothing"  # the graphs that were replayed have no guard
    if any(limit.what.startswith("its hook ") for limit in table.limits):
        return "nothing"  # one of its hooks failed, and it may be the one that checks
    return "range" if any(not _is_whole(limit.what) for limit in table.limits) else "right"


def _sound(*parts: TracerStatus | None) -> bool:
    return all(part is not None and part.sound for part in parts)


def _checked(part: TracerStatus | None, what: str) -> int:
    """How many things of this sort it has checked."""
    return sum(c.count for c in part.checked if c.what == what) if part is not None else 0


def _captured(part: TracerStatus | None, what: str) -> int:
    return _checked(part, f"{what} captured in CUDA graphs")


def _counts(part: TracerStatus) -> str:
    """For example ``page-table: 1,240 tables (the last in step 42)``. '' if it checked nothing."""
    counts = [f"{c.count:,} {c.what} (the last in step {c.step})" for c in part.checked if c.count]
    return f"{part.name}: {', '.join(counts)}" if counts else ""


def _last_steps(death: Death, table: TracerStatus) -> list[str]:
    """A warning about the steps that the device may not have finished."""
    first = death.finished + 1
    if death.step < first:
        return []
    which = f"Step {first}" if first == death.step else f"Steps {first} to {death.step}"
    if not death.seen:
        return [f"{which} may not have been finished, and what the guards saw there is lost."]
    known = (
        f"{which} may not have been finished. The guard runs in front of the kernel, and what it "
        "left in host memory was read after the error: it names no bad cell. Whether the guard had "
        "run by then is not known."
    )
    return [known]


def _not_looked_at(death: Death, armed: Mapping[str, TracerStatus]) -> list[str]:
    found = []
    for name, subject in SUBJECTS.items():
        part = armed.get(name)
        if part is None:
            found.append(f"{subject} ({name} is not armed)")
        elif part.off:
            since = f" since step {part.off_step}" if part.off_step > 0 else ""
            found.append(f"{subject}{since} ({name} is off: {part.off})")
        elif not any(c.count for c in part.checked):
            found.append(f"{subject} ({name} was armed, and had nothing to check)")
    for name in (*SUBJECTS, LEDGER, STEPS):
        part = armed.get(name)
        if part is not None and not part.off:
            found += [f"{name} is limited: {x.what} ({x.why})" for x in part.limits]
            found += [f"{name}'s hook does not run at {x}" for x in part.dead]
    unguarded: dict[str, list[str]] = {}
    for phase, backend in death.backends.items():
        if backend not in GUARDED:
            unguarded.setdefault(backend, []).append(phase)
    if TABLES in armed:
        found += [
            f"the page tables of {' and '.join(phases)} (attention backend {backend})"
            for backend, phases in unguarded.items()
        ]
    captured = any(_captured(armed.get(TABLES), what) for what in COUNTED)
    if TABLES in armed and death.replays and not captured:
        found.append(f"{death.replays:,} replays of CUDA graphs, in which there is no guard")
    if captured and death.replays:
        found.append("rows as short as padding in CUDA-graph replays (their ranges were checked)")
    return found


def _list(label: str, items: Sequence[str]) -> list[str]:
    return [f"{label}: {'; '.join(items)}."] if items else []
