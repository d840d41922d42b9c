"""The autopsy: what a CUDA core dump says of the crash, with the memory map of the dump."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from g4debug.autopsy import core as cores
from g4debug.autopsy import images, layouts, places, rows, story, sureness, votes
from g4debug.autopsy.core import Core, Grid, Warp
from g4debug.autopsy.votes import Pointer, Vote
from g4debug.findings.memory_map import GIVEN_BACK, KV, SEGMENT, MemoryMap, MemoryRange
from g4debug.findings.record import Autopsy, TrapRecord

APART = 3600  # seconds; a core and a dump of one crash are not that far apart
# The name that the flight recorder lets the driver give a core dump, and where a dump has it.
OURS = "g4debug-core-"
NAMED = re.compile(rf"{OURS}.*-(\d+)-\d+\.nvcudmp")
FILE = "CUDA_COREDUMP_FILE"
NAMES = 4  # buffers of a kernel that are named
NOT_FOLLOWED = (
    "only the kernel's parameters were looked at: a pointer in memory or in a descriptor is not "
    "followed"
)
NO_DUMP = "no dump was given; g4debug autopsy CORE DUMP reads the core with the dump's memory map"
NO_MAP = "the dump has no memory map"
WITHOUT = "which address faulted cannot be told without the memory map in the dump of the process"


def examine(path: Path, record: TrapRecord | None = None) -> Autopsy:
    """The autopsy of a core dump; with the dump of the same process, by its memory map.

    Raises CoreError if the file is no core dump, is damaged, or has an unknown layout.
    """
    return of_core(cores.read(path), path.name, record)


def of_core(core: Core, name: str, record: TrapRecord | None) -> Autopsy:
    memory, notes = _map(core, name, record)
    warps, exception, pc = _faulted(core)
    warp = warps[0] if warps else None
    grid = core.grids.get(warp.grid) if warp is not None else _only(core)
    place, entry = images.find(core.images(), pc, grid.entry if grid is not None else -1)
    if not core.architectures or core.architectures - images.ARCHITECTURES:
        place = dataclasses.replace(place, access=None)
        notes.append("this g4debug does not know the instructions of that device")
    known = Autopsy(
        core=name,
        verdict="",
        exception=layouts.exception(exception) if exception else "none is noted",
        kernel=entry.kernel or place.kernel,
        line=place.line,
        grid=() if grid is None else grid.size,
        block=() if warp is None else warp.block,
        device=core.device,
        driver=core.driver,
        time=core.time,
    )
    if place.why not in ("", images.NO_LINES) and not place.line:
        notes.append(f"the source line cannot be told: {place.why}")
    if exception == layouts.ASSERT:
        return dataclasses.replace(
            known,
            verdict="an assertion in the kernel failed; no address is in play",
            notes=tuple(notes),
        )
    if warp is None:
        notes.append("the warps that faulted had ended, so no register tells the address")
    among = votes.pointers(grid, memory)
    dtype = next((p.buffer.dtype for p in among if p.buffer is not None and p.is_kv), "")
    row_of = partial(rows.row_of, known.kernel, dtype=dtype)
    row = row_of(known.block)
    # The blocks of one row read the same pages. What another row read is another fault.
    mine = [w for w in warps if w.block == known.block or row_of(w.block) == row >= 0]
    others = [w for w in core.warps if warp is not None and w.grid == warp.grid and not w.faulted]
    known = _with_row(known, row, record, notes)
    if exception not in layouts.ILLEGAL_ADDRESS:
        voters = votes.Voters(core, mine) if exception in layouts.MISALIGNED else None
        return _of_no_page(known, exception, voters, place, memory, notes)
    found = votes.vote(votes.Voters(core, [*mine, *others]), place.access, among, memory)
    found = _as_given(found, known.request, record)
    notes += (
        sureness.of_vote(found, place)
        if memory is not None
        else sureness.of_registers(found, place)
    )
    blocks = {w.block for w in warps} - {w.block for w in mine}
    notes += sureness.of_others({block: row_of(block) for block in blocks})
    if memory is None:
        return dataclasses.replace(
            known, verdict=WITHOUT + _of_row(known), lanes=found.lanes, notes=tuple(notes)
        )
    base = found.base.buffer if found.base is not None else None
    if base is not None and base.is_kv:
        return _of_page(known, found, base, record, notes)
    if found.address < 0:
        return _gone(known, found, among, memory, notes)
    return _innocent(known, found, among, memory, notes)


def _map(core: Core, name: str, record: TrapRecord | None) -> tuple[MemoryMap | None, list[str]]:
    """The memory map of the dump, and what speaks against it: it may be another process's."""
    if record is None:
        return None, [NO_DUMP]
    if record.memory is None:
        return None, [NO_MAP]
    if record.memory.device == "cpu":
        return None, ["the dump is of a process on the CPU engine, so it is not of this core dump"]
    pid, named = record.finding.location.pid, NAMED.fullmatch(name)
    if named and pid > 0 and int(named[1]) != pid:
        return None, [f"the core is of process {named[1]}, the dump of {pid}: its map is not used"]
    if named and not _has_its_name(name, record):
        return None, ["the core is of another host or container than the dump: its map is not used"]
    try:
        apart = datetime.fromisoformat(core.time) - datetime.fromisoformat(record.created)
    except (ValueError, TypeError):
        return record.memory, []
    seconds = abs(apart.total_seconds())
    if seconds > APART:
        return record.memory, [
            f"the core and the dump are {seconds / 3600:.0f} h apart: one crash?"
        ]
    return record.memory, []


def _has_its_name(name: str, record: TrapRecord) -> bool:
    """False if the driver was told another name where the dump was made: see coredump.arm."""
    told = record.environment.get(FILE, "").rpartition("/")[2]
    if not told.startswith(OURS):
        return True  # it is not known, or the user's own name
    parts = {"%h": ".*", "%p": r"\d+", "%t": r"\d+"}
    pattern = "".join(parts.get(p) or re.escape(p) for p in re.split("(%[hpt])", told))
    return re.fullmatch(pattern, name) is not None


def _faulted(core: Core) -> tuple[list[Warp], int, int]:
    """The warps that faulted, the exception and the address of its instruction, -1 if not known.

    If a warp has ended meanwhile, only its multiprocessor says what happened.
    """
    warps = [w for w in core.warps if w.faulted]
    noted = next(iter(core.multiprocessors.values()), (0, -1))
    if not warps:
        return warps, *noted
    own = max(map(int, warps[0].lanes["exception"]), default=0)
    # A warp of another exception is another fault.
    same = [w for w in warps if w.grid == warps[0].grid and own in (0, *w.lanes["exception"])]
    return same, own or noted[0], warps[0].error_pc


def _only(core: Core) -> Grid | None:
    return next(iter(core.grids.values())) if len(core.grids) == 1 else None


def _with_row(known: Autopsy, row: int, record: TrapRecord | None, notes: list[str]) -> Autopsy:
    """With the row of the block that faulted, and its request, as far as they are known."""
    if row >= 0 and record is not None and rows.may_be_branches(record):
        notes.append(
            "the block may be of a branch of the draft's tree, so its request is not known"
        )
        return known
    request = rows.request_of(row, record.steps if record is not None else ())
    if row >= 0 and record is not None and not request:
        most = max((len(step.rids) for step in record.steps[-2:]), default=row + 1)
        notes.append(
            "the dump's last steps do not tell for sure whose row that is"
            if row < most
            else f"the last steps have at most {most} requests: the row may be padding of a CUDA "
            "graph"
        )
    return dataclasses.replace(known, row=row, request=request)


def _as_given(vote: Vote, request: str, record: TrapRecord | None) -> Vote:
    """Where only the distance tells the buffer: the one whose page the request was given."""
    if vote.sure or vote.base is None or not request or record is None:
        return vote
    events = (*record.events, *record.allocator)
    given = {page for e in events if e.request == request for page in e.pages}
    all_ = [p for p in (vote.base, *vote.rivals) if p.buffer is not None and p.is_kv]
    hits = [p for p in all_ if p.buffer is not None and p.buffer.page_at(vote.address)[0] in given]
    if len(hits) != 1:
        return vote
    rivals = tuple(p for p in all_ if p is not hits[0])
    return dataclasses.replace(vote, base=hits[0], rivals=rivals, given=True)


def _of_row(known: Autopsy, joint: str = ";") -> str:
    of = f"{joint} row {known.row} of the batch" if known.row >= 0 else ""
    return of + (f", request {known.request}" if known.request else "")


def _by(vote: Vote) -> str:
    """Who says what follows, if not all lanes do."""
    if vote.agree >= vote.lanes:
        return ""
    return f"by {vote.agree} of the {vote.lanes} lanes that faulted: "


def _of_no_page(
    known: Autopsy,
    exception: int,
    voters: votes.Voters | None,
    place: images.Place,
    memory: MemoryMap | None,
    notes: list[str],
) -> Autopsy:
    """The exception is not that an address is outside of all memory: no page is accused.

    voters: if it is about an address that is inside, but not aligned.
    """
    address = agree = lanes = -1
    if voters is None:
        what = f"no page is accused: {layouts.about(exception)}"
    elif memory is None:
        what = f"{WITHOUT}; it is one of mapped memory that is not aligned"
    elif (odd := votes.misaligned(voters, place.access, memory)) is None:
        what = "a mapped address that is not aligned, not known which: no register has it any more"
    else:
        address, alignment, agree, lanes = odd
        what = f"most likely address {address:#x}, which is no multiple of {2 * alignment}; it is "
        what += places.words(address, memory).removeprefix("not a KV page: ")
        notes.append(
            f"{agree} of the {lanes} lanes that faulted have such an address in the registers of "
            "the instruction; they may have been written over since"
        )
    return dataclasses.replace(
        known,
        verdict=f"{what}{_of_row(known)}",
        address=address,
        agree=agree,
        lanes=lanes,
        notes=tuple(notes),
    )


def _gone(
    known: Autopsy, vote: Vote, among: Sequence[Pointer], memory: MemoryMap, notes: list[str]
) -> Autopsy:
    """No register has the address any more: only the kernel, its buffers and the row are known."""
    reads, where = vote.reads.buffer if vote.reads is not None else None, ""
    given = _given(among, memory)
    kv = [r for r in given if r.what == KV]
    if reads is not None:
        what = (
            f"some page of {reads}: no register has the address any more, so it is not known which"
        )
    elif kv:
        what = f"not known: the kernel was given {_names(kv)}; no register has the address any more"
    elif given:
        what = f"most likely not a KV page: the kernel was given no KV buffer, but {_names(given)}"
        where = what
        notes.append(NOT_FOLLOWED)
    else:
        what = (
            "not known: no register has the address any more, and no parameter of the kernel "
            "points into memory that the map knows"
        )
    return dataclasses.replace(
        known,
        verdict=f"{what}{_of_row(known)}",
        lanes=vote.lanes,
        pool=reads.pool if reads is not None else "",
        layer=reads.layer if reads is not None else -1,
        part=reads.part if reads is not None else "",
        where=where,
        notes=tuple(notes),
    )


def _given(among: Sequence[Pointer], memory: MemoryMap) -> list[MemoryRange]:
    """What the kernel's pointers point into, each once, in the order of the addresses: KV if it is
    that, too, and a segment only if no more is known.
    """
    found = [
        sorted(memory.at(p.address), key=lambda r: (r.what != KV, r.what in (SEGMENT, GIVEN_BACK)))
        for p in among
    ]
    return list(dict.fromkeys(at[0] for at in found if at))


def _names(ranges: Sequence[MemoryRange]) -> str:
    """Names of buffers; those of which nobody knows more than the segment are counted."""
    names = list(dict.fromkeys(str(r) for r in ranges if r.what not in (SEGMENT, GIVEN_BACK)))
    more = len(names) - NAMES
    names = names[:NAMES] + ([f"{more} more"] if more > 0 else [])
    if any(r.what in (SEGMENT, GIVEN_BACK) for r in ranges):
        names.append("memory of PyTorch's that has no name in the map")
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _innocent(
    known: Autopsy,
    vote: Vote,
    among: Sequence[Pointer],
    memory: MemoryMap,
    notes: list[str],
) -> Autopsy:
    """No KV buffer of the kernel is near: what the address is in instead."""
    where = places.words(vote.address, memory).removeprefix("not a KV page: ")
    if vote.base is not None and vote.base.buffer is not None:
        where += f"; nearest among the kernel's buffers is {vote.base.buffer}"
    # Where the kernel reads KV, too, it may be a page that is far outside of its pool.
    reads = any(r.what == KV for p in among for r in memory.at(p.address))
    likely = "most likely " if reads or vote.few or not memory.segments else ""
    where = f"{likely}not a KV page: address {vote.address:#x} is {where}"
    return dataclasses.replace(
        known,
        verdict=f"{_by(vote)}{where}{_of_row(known)}",
        address=vote.address,
        lanes=vote.lanes,
        agree=vote.agree,
        where=where,
        notes=tuple(notes),
    )


def _of_page(
    known: Autopsy,
    vote: Vote,
    buffer: MemoryRange,
    record: TrapRecord | None,
    notes: list[str],
) -> Autopsy:
    page, token = buffer.page_at(vote.address)
    parts = [buffer.part, *(p.buffer.part for p in vote.same if p.buffer is not None)]
    both = dataclasses.replace(buffer, part=" or ".join(sorted(set(parts))))
    likely = "" if vote.sure and not vote.few else "most likely "
    why, fits = story.cause(buffer, page, token, record)
    if why and likely:
        why = f"most likely: {why}"
    elif why and vote.agree < vote.lanes:
        why = f"for {vote.agree} of the {vote.lanes} lanes: {why}"
    return dataclasses.replace(
        known,
        verdict=f"{_by(vote)}{likely}{places.page(both, page)}{_of_row(known, ',')}",
        address=vote.address,
        lanes=vote.lanes,
        agree=vote.agree,
        pool=buffer.pool,
        layer=buffer.layer,
        part=both.part,
        page=page,
        pages=buffer.pages,
        token=token,
        where="before" if page < 0 else "behind",
        cause=why,
        fits=fits,
        history=tuple(story.history(buffer, page, known.request, record)),
        notes=tuple(notes),
    )
