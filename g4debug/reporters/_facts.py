"""The report as data: its content, words and order.

The order is taken from KFENCE, the kernel's memory checker: headline, location, expected and got,
evidence, owner and history, environment, cause and fix, next command. A reporter only decides how
that looks. Every text of the finished report is clean: no character of it can steer a terminal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from g4debug.dumps.heads import quoted
from g4debug.findings.kinds import FORMER_CHECKS, KINDS, Contain
from g4debug.findings.record import Autopsy, Finding, Location, OtherHook, Plain, Pool, TrapRecord
from g4debug.findings.status import TracerStatus
from g4debug.reporters import _evidence
from g4debug.reporters._evidence import ROWS, Grid, TableView, percent, rounded, table_view, unit
from g4debug.reporters.text import cleaned, fit

HIDDEN = "set"  # in a dump, in place of a value that may not be shown
MAX_ITEMS = 40  # entries of one environment line

# How fixes say that nobody asked for them. The last one is in older dumps.
OFF_BY_DEFAULT = (
    "off by default", "a performance path", "it changes a default", "shipped off",
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A piece of text. tone: '', good, bad, warn, dim or strong."""

    text: str
    tone: str = ""


Item = tuple[Span, ...]  # shown with a space between them
Line = tuple[Item, ...]  # items that may share a line


@dataclass(frozen=True)
class Entry:
    """A label and its lines."""

    label: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class PoolUse:
    """How full a pool is. share: from 0 to 1, None if not known. tone: good, warn or bad."""

    name: str
    size: str
    share: float | None
    tone: str
    percent: str
    tokens: str


@dataclass(frozen=True)
class Pools:
    label: str
    pools: tuple[PoolUse, ...]


@dataclass(frozen=True)
class Map:
    """A page table around the cell that the finding is about."""

    label: str
    note: str
    view: TableView


@dataclass(frozen=True)
class History:
    label: str
    note: str
    grid: Grid


@dataclass(frozen=True)
class Next:
    """The next command to type, and what to know before."""

    label: str
    command: str
    note: str = ""


Block = Entry | Pools | Map | History | Next


def headline(record: TrapRecord) -> str:
    return fit(record.finding.headline or f"g4debug: {record.finding.check}")


def report(
    record: TrapRecord,
    *,
    source: str = "",
    most: int | None = 0,
    words: bool = False,
    rows: int | None = ROWS,
    number: Callable[[int], str] = rounded,
    before: Sequence[Entry] = (),
    after: Sequence[Entry] = (),
) -> list[list[Block]]:
    """The report's blocks in groups. A reporter leaves some space between the groups.

    source: the dump's path. most: how many rows of a history to keep, if that is more than are
    shown (None: all). words: give the history in words even where there is a timeline of it. rows,
    number: see ``table_view``. before, after: what stands above the location and above the cause,
    if there is more to tell than this record.
    """
    f = record.finding
    named = _reference(f)
    top: list[Block] = [
        *before,
        Entry("WHERE", tuple(where(f.location, _step_mode(record)))),
        Entry("CHECK", _text(f"{f.check}: {f.kind}, at {f.site or 'a site that is not known'}")),
    ]
    if record.faults:
        n = len(record.faults)
        drill = f"{n} injected fault{'s' * (n != 1)} fired in this process, so this may be a drill"
        top.append(Entry("NOTE", _text(drill, "warn")))
    groups: list[list[Block]] = [
        top,
        [Entry("EXPECTED", _text(f.expected, "good")), Entry("GOT", _text(f.got, "bad"))],
        [] if record.autopsy is None else autopsy(record.autopsy),
        _table(record, rows, number),
        _history("ASSERTS", "that CUDA printed", _evidence.asserts(record, most)),
        _history("LOOKUPS", "which one it may have been", _evidence.lookups(record, most)),
        _history("HOLDERS", "of the pages, worst first", _evidence.holdings(record, most)),
        [Entry("OWNER", _text(f.owner or "not known")), *_words(record, words)],
        _history("TIMELINE", "of the page, newest last", _evidence.events(record, most)),
        _history("SPEC INFO", "batch.spec_info, newest last", _evidence.transitions(record, most)),
        _history("LAST STEPS", "newest last", _evidence.steps(record, most)),
        _history("ALLOCATOR", "all pages, newest last", _evidence.allocator(record, most)),
        environment(record, source),
        list(after),
        [
            Entry("CAUSE", _text(f.cause or "not known", "strong" if f.cause else "dim")),
            Entry("FIX", _text(named or "none known", "strong" if named else "dim")),
            *_first_lines(named),
            _next(record, source),
        ],
    ]
    return cleaned([group for group in groups if group], fit)


def _reference(finding: Finding) -> str:
    """What the finding names, with the entry that its line leads to: as ``g4debug triage`` says it.

    Dumps of before name the entry of the kind even where the line names who freed the page.
    """
    check = FORMER_CHECKS.get(finding.check, finding.check)
    kind = KINDS.get(check, {}).get(finding.kind)
    if kind is None:
        return finding.reference
    return finding.reference.replace(kind.reference, kind.reference_for(finding.headline))


def _first_lines(reference: str) -> list[Block]:
    """The first lines of the entry that a finding names; none where this version has no such one.

    The content of a dump is anybody's: only its title is looked up.
    """
    from g4debug.triage.entry import by_title, entries

    found = re.search(r"TRIAGE\.md, '([^']{1,200})'", reference)
    number = by_title().get(found[1]) if found is not None else None
    if number is None:
        return []
    return [Entry("TRIAGE", _text(entries()[number].first_lines))]


def where(at: Location, step_mode: str = "") -> list[Line]:
    """The lines of the location. A number of -1 or an empty text means "not known".

    step_mode: the forward mode of the step, '' if not known. A forward of another mode may run in
    it: the draft decodes inside the step of a prefill.
    """
    layer = f"layer {at.layer}" + (f" ({at.layer_kind})" if at.layer_kind else "")
    mode = at.forward_mode
    if mode and step_mode and mode != step_mode:
        mode = f"{mode} inside a step of mode {step_mode}"
    places: dict[str, int | str] = {
        "host": at.host,
        "DP rank": at.dp_rank,
        "TP rank": at.rank,
        "PP rank": at.pp_rank,
    }
    known: tuple[tuple[tuple[int | str, str], ...], ...] = (
        (
            (at.layer, layer),
            (at.runner, f"{at.runner} model"),
            (at.forward_mode, mode),
            (_ran(at), "CUDA-graph replay" if at.replay else "eager"),
        ),
        (
            (at.row, f"row {at.row}"),
            (at.column, f"column {at.column}"),
            (at.request, f"request {at.request}"),
        ),
        ((at.step, f"step {at.step}"), (at.process, at.process), (at.pid, f"pid {at.pid}")),
        tuple((value, f"{name} {value}") for name, value in places.items()),
    )
    lines: list[Line] = []
    for parts in known:
        tone = "strong" if parts is known[0] else ""
        if line := tuple((Span(text, tone),) for value, text in parts if value not in (-1, "")):
            lines.append(line)
    missing = [name for name, value in places.items() if value in (-1, "")]
    rest: Item = (Span(f"not known: {', '.join(missing)}", "dim"),)
    if len(missing) == len(places):
        lines.append((rest,))
    elif missing:
        lines[-1] = (*lines[-1], rest)
    return lines


def _step_mode(record: TrapRecord) -> str:
    """The forward mode of the step that the finding was made in, '' if not known."""
    at = record.finding.location.step
    return next((s.forward_mode for s in reversed(record.steps) if s.step == at >= 0), "")


def _ran(at: Location) -> int:
    """-1 if no forward was watched: then nobody knows whether it was eager or a replay."""
    return 0 if at.replay or at.runner or at.layer >= 0 else -1


def autopsy(a: Autopsy) -> list[Block]:
    """What a CUDA core dump says: which page or what else, why, the kernel, and how sure it is."""
    lines: list[Line] = [((Span(a.verdict, "bad"),),)]
    if a.cause:
        lines.append(((Span(a.cause, "strong"),),))
    line = f"at {a.line}" if a.line else "(no source line)"
    kernel = f"{a.kernel} {line}" if a.kernel else "the kernel is not known"
    block = f"block {_triple(a.block)} of a grid of {_triple(a.grid)}" if a.block else ""
    # A verdict on no page names the address itself.
    at = f"address {a.address:#x}, token {a.token} of that page" if a.pages > 0 else ""
    for texts in ((kernel, block), (a.exception, at)):
        lines.append(tuple((Span(text),) for text in texts if text))
    blocks: list[Block] = [Entry("AUTOPSY", tuple(line for line in lines if line))]
    if a.history:
        some = a.history[:MAX_ITEMS]
        blocks.append(Entry("EVENTS", tuple(((Span(text),),) for text in some)))
    if a.notes:
        blocks.append(Entry("HOW SURE", tuple(((Span(text),),) for text in a.notes[:MAX_ITEMS])))
    made = ", ".join(filter(None, (a.device, a.driver and f"driver {a.driver}", a.time)))
    blocks.append(Entry("CORE", (((Span(a.core),), (Span(made, "dim"),)),)))
    return blocks


def _triple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers[:3]))})"


def environment(record: TrapRecord, source: str = "") -> list[Block]:
    dump = (record.created, quoted(source)) if source else (record.created,)
    entries: list[Entry | Pools] = [
        Entry("DUMP", (tuple((Span(text),) for text in dump),)),
        Entry("VERSIONS", _items(record.versions, " ")),
        Pools("POOLS", tuple(map(_use, record.pools[:MAX_ITEMS]))),
        Entry("GEOMETRY", _items(record.geometry, "=")),
        Entry("ARGUMENTS", _arguments(record.arguments)),
        Entry("FIXES", _fixes(record.fixes)),
        Entry("TRACERS", _tracers(record.tracers)),
        Entry("CHECKED", _checked(record.tracers)),
        Entry("PLUGINS", _plugins(record)),
        Entry("FAULTS", _faults(record.faults)),
        Entry("SETTINGS", _items(record.environment, "=")),
    ]
    return [e for e in entries if (e.pools if isinstance(e, Pools) else e.lines)]


def _use(pool: Pool) -> PoolUse:
    usage = pool.usage
    share = None if usage is None else max(0.0, min(usage, 1.0))
    tone = "bad" if (share or 0) >= 0.95 else "warn" if (share or 0) >= 0.8 else "good"
    return PoolUse(
        name=pool.name,
        size=f"{pool.pages} pages of {pool.page_size}",
        share=share,
        tone=tone,
        percent="" if share is None else percent(pool.used_tokens, pool.tokens),
        tokens=f"{pool.used_tokens} of {pool.tokens} tokens",
    )


def _table(record: TrapRecord, rows: int | None, number: Callable[[int], str]) -> list[Block]:
    if record.table is None:
        return []
    at, note = record.finding.location, "as the kernel would have got it"
    label = "PAGE TABLE" if unit(record.table) == "page" else "TOKEN LIST"
    view = table_view(record.table, at.row, at.column, record.pools, rows, number)
    return [Map(label, note, view)]


def _history(label: str, note: str, grid: Grid) -> list[Block]:
    if grid.front or grid.rest:
        return [History(label, note, grid)]
    return [Entry(label, _text(f"{grid.hidden} (--all)", "dim"))] if grid.hidden else []


def _words(record: TrapRecord, always: bool) -> list[Block]:
    """The history in words. It is left out where a page's timeline says the same, and more."""
    history = record.finding.history
    if history and (always or not record.events):
        return [Entry("HISTORY", tuple(((Span(h),),) for h in history))]
    if record.events or record.transitions or record.holdings:
        return []
    return [Entry("HISTORY", _text("not known", "dim"))]


def _faults(faults: Sequence[str]) -> tuple[Line, ...]:
    lines: tuple[Line, ...] = tuple(((Span(f),),) for f in faults[-MAX_ITEMS:])
    earlier = len(faults) - len(lines)
    if earlier:
        lines = _text(f"{earlier} earlier firings (--json)", "dim") + lines
    return lines or _none()


def _tracers(tracers: Sequence[TracerStatus]) -> tuple[Line, ...]:
    """The status of each tracer when the dump was written.

    A tracer that is limited or off has a line of its own: it is often the reason why there is no
    finding. ``--json`` also has the step in which each tracer's hooks were last looked at.
    """
    some = tracers[:MAX_ITEMS]
    sound = tuple((Span(t.name), Span(t.state, "good")) for t in some if t.sound)
    lines: list[Line] = [sound] if sound else []
    lines += [((Span(t.name), Span(t.state, "warn")),) for t in some if not t.sound]
    return tuple(lines) or _none()


def _checked(tracers: Sequence[TracerStatus]) -> tuple[Line, ...]:
    """The counts of each tracer: ``page-table 1200 tables, 40 steps (last in step 40)``."""
    items = []
    for tracer in tracers[:MAX_ITEMS]:
        if tracer.checked:
            counts = ", ".join(f"{c.count} {c.what}" for c in tracer.checked[:MAX_ITEMS])
            last = max(c.step for c in tracer.checked)
            items.append((Span(tracer.name), Span(f"{counts} (last in step {last})")))
    return (tuple(items),) if items else ()


def _fixes(values: Mapping[str, str]) -> tuple[Line, ...]:
    """One line for each state, with the fixes that are in it. ``--json`` also has the reasons.

    A fix that somebody switched off, or that could not be applied, has a line of its own with the
    reason.
    """
    groups: dict[str, list[str]] = {}
    alone: list[Line] = []
    for name, text in _some(values):
        state, _, why = text.partition(": ")
        if why.startswith(OFF_BY_DEFAULT) or state in ("applied", "not-needed"):
            groups.setdefault("off by default" if state == "off" else state, []).append(name)
        else:
            alone.append(((Span(name), Span(text, "warn")),))
    for state, (first, *more) in groups.items():
        tone = "good" if state == "applied" else "dim"
        alone.append(((Span(f"{state}:", tone), Span(first)), *((Span(name),) for name in more)))
    return tuple(alone) or _none()


def _plugins(record: TrapRecord) -> tuple[Line, ...]:
    """SGLang's plugins, and who else has a hook at a site of ours. Nothing if we are alone."""
    if not record.others and len(record.plugins) < 2:
        return ()
    lines: list[Line] = [
        tuple((Span(name), Span(text, "dim")) for name, text in _some(record.plugins))
    ]
    for other in record.others[:MAX_ITEMS]:
        tone = "dim" if other.side == "inside" else "warn"
        lines.append(((Span(f"{other.who} at {other.site}"), Span(_side(other), tone)),))
    return tuple(line for line in lines if line)


def _side(other: OtherHook) -> str:
    means = {
        "outside": "wraps our hook, so its changes are not checked",
        "inside": "is wrapped by our hook",
        "instead": "is there in place of our hook",
        "never": "never runs",
    }
    return f"{means.get(other.side, other.side)}: {other.function}"


def _items(values: Mapping[str, Plain], joint: str) -> tuple[Line, ...]:
    items = tuple((Span(f"{k}{joint}{v}"),) for k, v in _some(values))
    return (items,) if items else ()


def _arguments(values: Mapping[str, Plain]) -> tuple[Line, ...]:
    """The server's arguments that differ from the defaults; those without a value by name only."""
    shown = {k: v for k, v in values.items() if v != HIDDEN}
    hidden = [k for k, v in values.items() if v == HIDDEN]
    lines = _items(shown, "=")
    if hidden:
        names = ", ".join(hidden[:MAX_ITEMS])
        more = f" and {len(hidden) - MAX_ITEMS} more" if len(hidden) > MAX_ITEMS else ""
        lines += _text(f"set, values not in the dump: {names}{more}", "dim")
    return lines


def _some(values: Mapping[str, Plain]) -> list[tuple[str, str]]:
    items = [(k, str(v)) for k, v in itertools.islice(values.items(), MAX_ITEMS)]
    more = len(values) - len(items)
    return items + ([("and", f"{more} more (--json)")] if more else [])


CONTAIN = "G4DEBUG_MODE=contain"


def _next(record: TrapRecord, source: str) -> Next:
    """The next command. What a finding's own command leaves unsaid is said in front of it."""
    f = record.finding
    command = f.next_command or (
        f"g4debug show --json {quoted(source)}" if source else "g4debug list"
    )
    if record.faults:
        note = "A fault was injected (G4DEBUG_FAULTS). Unset it; if it was no drill, then run:"
        return Next("NEXT", f"unset G4DEBUG_FAULTS; {command}", note)
    if CONTAIN not in command:
        return Next("NEXT", command)
    kind = KINDS.get(FORMER_CHECKS.get(f.check, f.check), {}).get(f.kind)
    if kind is None or kind.contain is not Contain.MENDS:
        command = command.replace(f"{CONTAIN} ", "")
        note = f"Do not serve on with {CONTAIN}: it does not mend this kind (see FIX)."
        return Next("NEXT", command, note)
    note = (
        "This keeps serving: what is bad is replaced by what is right. Where the right page is "
        "gone or not known, answers are wrong (see FIX)."
    )
    return Next("NEXT", command, note)


def _text(text: str, tone: str = "") -> tuple[Line, ...]:
    """One text, which may have several lines (an exception's has)."""
    lines = text.split("\n")[:MAX_ITEMS]
    return tuple(((Span(line, tone),),) for line in lines)


def _none() -> tuple[Line, ...]:
    return _text("none", "dim")
