"""Handles a finding by mode: raise, contain or log; and limits the number of dumps.

A finding is never lost. If its dump cannot be written, the finding is still logged, and raised in
``raise`` mode, and it says why there is no dump.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from g4debug.dumps import calling, errors, heads, writing
from g4debug.findings import names
from g4debug.findings.launch_memory import Stop
from g4debug.findings.peer_ranks import PeerRanks
from g4debug.findings.record import Evidence, Finding, Table, TrapRecord
from g4debug.findings.status import Status
from g4debug.findings.tape_record import shortened
from g4debug.settings import Settings

MOST_LINES = 50  # of a text in the log; the dump has all of it
REMEMBERED = 20  # earlier findings that the flight recorder may refer to
logger = logging.getLogger("g4debug")


class TrapError(RuntimeError):
    """A tracer made a finding. ``str()`` of it starts with the headline.

    path: the dump. If there is none, path is None and ``problem`` says why.
    """

    def __init__(self, finding: Finding, path: Path | None, problem: str = "") -> None:
        self.finding = finding
        self.path = path
        self.problem = problem
        super().__init__("\n".join(lines(finding, path, problem)))


def lines(finding: Finding, path: Path | None, problem: str) -> list[str]:
    """The lines of the log and of the exception: headline, expected, got, dump, next command."""
    out = [
        headline(finding),
        f"  expected: {_said(finding, finding.expected)}",
        f"  got:      {_said(finding, finding.got)}",
    ]
    if finding.cause:
        out.append(f"  likely:   {_said(finding, finding.cause)}")
    if path is not None:
        out += [
            f"  dump:     {heads.quoted(path)}",
            f"  next:     {calling.program()} show {heads.quoted(path)}",
        ]
    else:
        out.append(f"  no dump:  {problem}")
    return out


def headline(finding: Finding) -> str:
    """The headline as it is logged: the client may have chosen the id of the request in it."""
    return names.line(_named(finding, finding.headline))


def _said(finding: Finding, text: str) -> str:
    """A text of one or more lines, below each other behind their label."""
    told = _named(finding, text).split("\n")
    more = ["… (cut)"] if len(told) > MOST_LINES else []
    return "\n            ".join([*map(names.line, told[:MOST_LINES]), *more])


def _named(finding: Finding, text: str) -> str:
    rid = finding.location.request
    return text.replace(rid, names.name(rid)) if rid else text


class Trap:
    """Reports the findings of all tracers of a process, which share one budget of dumps.

    ``describe`` makes the TrapRecord of a finding and its evidence. Only findings that are dumped
    need it. If it fails, the finding is reported without a dump.
    """

    def __init__(
        self,
        settings: Settings,
        describe: Callable[[Finding, Evidence], TrapRecord],
        status: Status | None = None,
    ) -> None:
        self.settings = settings
        self.describe = describe
        self.status = status  # counts the findings; None where nobody asks for them
        # Says why a finding must not be believed, '' if nothing speaks against it.
        self.doubt: Callable[[Finding], str] = lambda finding: ""
        self.left: Callable[[Path], None] = lambda path: None  # gets the dump of this process's end
        self.others = PeerRanks()  # the other ranks: a finding that stops this one is told to them
        self.doubted: dict[str, str] = {}  # kind -> its first finding, and why it was not believed
        self.reporters: list[Callable[[], None]] = []  # called when findings may only be reported
        self.written = 0
        self.reported: list[str] = []  # headline and dump of the first findings
        self._seen: Counter[tuple[object, ...]] = Counter()  # how often, by kind of finding

    def report(self, finding: Finding, evidence: Evidence | None = None) -> None:
        """Log and dump a finding; raise TrapError in ``raise`` mode.

        In the other modes a finding of the same kind is dumped once, and logged the 1st, 10th,
        100th … time, so that the findings do not flood the log of a server that goes on.

        A finding that must not be believed is only logged, once for each kind.
        """
        self._report(finding, evidence, self.settings.mode == "raise")

    def report_only(self) -> None:
        """From now on a finding may do no more than be reported: nothing is corrected any more.

        For a process that does not raise, of which it turns out what it runs was never run.
        """
        for reporter in self.reporters:
            reporter()

    def tell(self, finding: Finding, each: bool = False) -> None:
        """Log and dump a finding that stops no server, whatever the mode is.

        each: every one, and not only the first of its kind; these take half of the dumps at most.
        """
        self._report(finding, None, raising=False, each=each)

    def _report(
        self, finding: Finding, evidence: Evidence | None, raising: bool, each: bool = False
    ) -> None:
        if self._doubts(finding):
            return
        self._count(finding)
        where = finding.location
        key = (finding.check, finding.kind, where.runner, where.layer_kind, where.forward_mode)
        self._seen[key] += 1
        count = self._seen[key]
        if not raising and not each and count > 1:
            if str(count).strip("0") == "1":
                logger.error("%s (seen %d times)", headline(finding), count)
            return
        self.others.ending |= raising
        budget = self.settings.max_dumps
        if count > 1 and not raising:
            budget = (budget + 1) // 2  # the rest is for findings that were not seen before
        path, problem = self._dump(finding, evidence or Evidence(), budget)
        if len(self.reported) < REMEMBERED:
            self.reported.append(f"{finding.headline} ({path or problem})")
        logger.error("\n".join(lines(finding, path, problem)))
        if raising:
            if path is not None:
                self.left(path)
            self.stop(finding, path)
            raise TrapError(finding, path, problem)

    def _doubts(self, finding: Finding) -> bool:
        why = self.doubt(finding)
        kind = f"{finding.check}: {finding.kind}"
        if why and kind not in self.doubted:
            self.doubted[kind] = f"{finding.headline} ({why})"
            logger.warning("g4debug: this is not reported, because %s: %s", why, headline(finding))
        return bool(why)

    def report_end(self, finding: Finding, evidence: Evidence | None = None) -> Path | None:
        """Dump and log a finding about a process that ends anyway. Raises nothing in any mode.

        It may use one dump beyond the budget (unless the budget is 0), so that earlier findings do
        not cost the last evidence. The dump is written before anything is logged, because logging
        may block in a process that hangs.
        """
        self._count(finding)
        budget = self.settings.max_dumps
        path, problem = self._dump(finding, evidence or Evidence(), budget + 1 if budget else 0)
        if path is not None:
            self.left(path)
        logger.error("\n".join(lines(finding, path, problem)))
        return path

    def note_end(self, finding: Finding) -> Path | None:
        """Dump something about a process that may end, and warn of it: it accuses nobody.

        So it is not counted, and no alert comes of it. Else as :meth:`report_end`.
        """
        budget = self.settings.max_dumps
        path, problem = self._dump(finding, Evidence(), budget + 1 if budget else 0)
        if path is not None:
            self.left(path)
        logger.warning("\n".join(lines(finding, path, problem)))
        return path

    def keep(self, finding: Finding) -> Callable[[], tuple[Path | None, str]]:
        """Copy what a dump that was asked for has. It is beside the budget.

        Returns the rest of the work: it encodes and writes the dump, and returns its path, or why
        there is none. That takes some tenths of a second and waits for a disk, so that a server's
        event loop leaves it to another thread.
        """
        try:
            record = self.describe(finding, Evidence())
        except Exception as e:
            problem = _not_made(e)
            return lambda: (None, problem)
        return partial(self._write, record, self.written + 1)

    def stop(self, finding: Finding, path: Path | None) -> None:
        """Tell the other ranks that this process ends, and wait a moment for their dumps."""
        if not self.others.seated:
            return  # a process alone has nobody to tell
        said = Stop(finding.check, finding.kind, finding.headline, str(path or ""))
        try:
            self.others.stop(said)
        except Exception:  # the finding must not be lost
            logger.exception("g4debug: the other ranks could not be told. Please report this.")

    def _count(self, finding: Finding) -> None:
        if self.status is not None:
            self.status.found(finding.check, finding.kind)

    def _dump(self, finding: Finding, evidence: Evidence, budget: int) -> tuple[Path | None, str]:
        """Write the dump. Returns its path, or None and why there is no dump."""
        if self.written >= budget:
            return (
                None,
                f"G4DEBUG_MAX_DUMPS={self.settings.max_dumps} allows no more dumps"
                + (
                    " of a finding that was told before" if budget < self.settings.max_dumps else ""
                ),
            )
        try:
            record = self.describe(finding, evidence)
        except Exception as e:
            # A broken process can fail to be described in any way. The finding must not be lost.
            return None, _not_made(e)
        path, problem = self._write(record, self.written + 1)
        self.written += path is not None
        return path, problem

    def _write(self, record: TrapRecord, number: int) -> tuple[Path | None, str]:
        """Write a dump of this record. Returns its path, or None and why there is none."""
        try:
            whole, data = fitted(record, self.settings.max_dump_mb)
            return writing.write_dump(whole, data, self.settings.debug_dir, number), ""
        except Exception as e:
            return None, _not_made(e)


def _not_made(error: Exception) -> str:
    """Why there is no dump. What is no reason of our own is logged whole."""
    if isinstance(error, errors.DumpError):
        return str(error)
    logger.error("g4debug: the dump could not be made", exc_info=error)
    return f"{type(error).__name__}: {error}"


def fitted(record: TrapRecord, max_mb: int) -> tuple[TrapRecord, bytes]:
    """The record that is written, and the dump's bytes: at most so many MiB.

    If these are more, or the values more than a dump may have, the tape is shortened, and then
    table and histories are cut step by step. Raises DumpError if that is not enough.
    """
    room = limit = max_mb << 20
    for rows, columns, steps in (
        (0, 0, 0), (0, 0, 0), (64, 1024, 64), (16, 256, 16), (4, 64, 4)
    ):  # fmt: skip
        if steps:
            record = _cut(record, rows, columns, steps)
        try:
            data = writing.encode(record)
        except errors.TooLargeError as e:
            problem = str(e)
            continue
        if len(data) <= limit:
            return record, data
        if record.tape is not None:
            room = limit - (len(data) - record.tape.size)
            record = dataclasses.replace(record, tape=shortened(record.tape, room))
        problem = (
            f"the dump would have {len(data)} bytes, which is more than "
            f"G4DEBUG_MAX_DUMP_MB={max_mb} allows"
        )
    raise errors.DumpError(problem)


def _cut(record: TrapRecord, rows: int, columns: int, steps: int) -> TrapRecord:
    """At most so many rows and columns of the table, and so many entries of each history."""
    return dataclasses.replace(
        record,
        table=None if record.table is None else cut_out(record.table, rows, columns),
        steps=record.steps[-steps:],
        events=record.events[-steps:],
        transitions=record.transitions[-steps:],
        holdings=record.holdings[:steps],
        allocator=record.allocator[-steps:],
        requests=record.requests[-steps:],
        requests_lost=record.requests_lost + len(record.requests[:-steps]),
        held=(),  # a part of it would say that nobody holds the rest
    )


def cut_out(table: Table, rows: int, columns: int) -> Table:
    """At most ``rows`` x ``columns`` cells of a table, around its first bad cell."""
    bad_row, bad_column = (int(x) for x in table.bad[0, :2]) if len(table.bad) else (0, 0)
    have_rows, have_columns = table.values.shape
    r = max(0, min(bad_row - table.row0 - rows // 2, have_rows - rows))
    c = max(0, min(bad_column - table.column0 - columns // 2, have_columns - columns))
    here = slice(r, r + rows)
    return dataclasses.replace(
        table,
        values=table.values[here, c : c + columns],
        seq_lens=table.seq_lens[here],
        first_live=table.first_live[here],
        bad=table.bad[: rows * 4],
        row0=table.row0 + r,
        column0=table.column0 + c,
        rids=table.rids[here],
    )
