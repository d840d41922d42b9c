"""Measures whether debugging may be left on: off beside `watch` beside `=1`, against their goals.

    python benchmarks/leave_it_on.py --out FOLDER [--seconds 540] [--device cuda|cpu]
        [--model E4B-32k] [--variants off,off-again,watch,armed] [--seed 1] [--first-round 0]
        [--quick]
    python benchmarks/leave_it_on.py --judge FOLDER [--csv FILE]

All servers are up at once on one device and take short turns, in an order that is drawn anew for
each round (measuring/together.py); before them one that is compared with none has started,
compiled, and gone. The load is that of tracer_overhead.py: shared prefixes, the prefix cache on and
evicting, CUDA graphs, overlap scheduling and FROZEN_KV_MTP where the release has them; 1, 8 and 64
requests at a time. Rows are written to FOLDER/requests.csv as they come, so that a run that is cut
off is not lost, and no round begins that would not end within --seconds. Several calls with other
--first-round go into folders of their own, and `tracer_overhead.py --merge` puts them into one.

A figure *holds* if its whole 95 % interval lies at or below the goal; it *fails* if the whole
interval lies above; else the rounds do not tell, which is no proof. The goals: `watch` 0.5 % and
`=1` 2 %, on a step, a token, the first token (median and 99th percentile) and the throughput, at
1, 8 and 64 requests. What of these was not measured does not hold. Nor does a figure of fewer than
12 rounds, or one whose whole interval lies below 0, because debugging makes nothing faster. And
none holds where two servers with debugging off differ: the interval of `debugging off, another
server` (or of the second copy of a base) must have 0 in it and be narrower than the goal. It has no
goal of its own. The verdicts go to FOLDER/verdict.csv.

At the end each server says whether it judged: one whose tape has ended, one of which a tracer was
limited or off, and one with a finding, was not what people would leave on. So nothing holds then,
or if FOLDER/servers.csv does not say it.

Without MTP: --variants no-mtp,armed-no-mtp,watch-no-mtp. Beside SGLang's own checks: add kv-canary
(which does not run with MTP), page-invariants, strict.

The exit code is 0 if all figures hold, 3 if some do not or were not measured, and 1 if a server
died.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tracer_overhead
from measuring import models, options, overhead, results, tracers
from measuring.overhead import Figure

GOALS = {"watch": 0.005, "armed": 0.02, "watch-no-mtp": 0.005, "armed-no-mtp": 0.02}
LEAST_ROUNDS = 12  # an interval of fewer is made of too few differences
BATCHES = (1, 8, 64)
VARIED = ("off", "off-again", "watch", "armed")
DOES_NOT_HOLD = 3
COLUMNS = (
    "batch", "variant", "metric", "value", "low", "high", "rounds", "goal", "verdict",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One figure of a variant beside its goal. goal: 0.02 for 2 %; None if it has none."""

    batch: int
    variant: str
    metric: str
    figure: Figure | None  # None: not measured
    goal: float | None
    twin: Figure | None = None  # the same of two servers that are alike
    alike: str = "two servers alike differ"

    @property
    def word(self) -> str:
        if self.goal is None:
            return ""
        if self.figure is None:
            return "not measured"
        if self.figure.rounds < 2:
            return "one round: no interval"
        if self.figure.low > self.goal:
            return "FAILS"
        if self.figure.high < 0:
            return "faster than without"
        if self.figure.high > self.goal:
            return "not told"
        if self.figure.rounds < LEAST_ROUNDS:
            return "too few rounds"
        twin = self.twin
        if twin is None or not twin.low <= 0 <= twin.high or twin.high - twin.low >= self.goal:
            return self.alike
        return "holds"


def judge(rows: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    """The verdicts by batch and variant: on what has a goal, and on what else was measured.

    Of the goals those count whose base was measured; if none was, those of the first base.
    """
    present = {str(r["variant"]) for r in rows}
    bases = {tracer_overhead.COMPARED[variant][0] for variant in GOALS} & present or {"off"}
    for batch in sorted({*BATCHES, *(int(r["batch"]) for r in rows)}):
        for variant, (base, _) in tracer_overhead.COMPARED.items():
            goal = GOALS.get(variant) if base in bases and batch in BATCHES else None
            found = overhead.compare(rows, batch, base, variant)
            alike = twin(rows, batch, base) if goal is not None else {}
            for metric in overhead.METRICS:
                if metric in found or goal is not None:
                    of = found.get(metric)
                    yield Verdict(batch, variant, metric, of, goal, alike.get(metric))


def twin(rows: Sequence[Mapping[str, Any]], batch: int, base: str) -> dict[str, Figure]:
    """How far two servers of a base differ; empty if there was one."""
    again = overhead.compare(rows, batch, base, f"{base}-again")
    alike = tracer_overhead.twins(rows, base)
    return again or overhead.compare(alike, batch, base, tracer_overhead.AGAIN)


def unproven(servers: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Why these servers were not what people would leave on."""
    if not servers:
        yield "servers.csv does not say whether any server judged"
    for row in servers:
        if row["variant"] not in GOALS:
            continue
        name = f"{row['variant']} {row.get('copy', '')}".strip()
        lacks, findings = row.get("lacks"), row.get("findings")
        if lacks is None or not findings:
            yield f"{name}: it is not known whether it judged"
        elif lacks or findings != "0":
            yield f"{name}: {findings} findings; lacks {lacks or 'nothing'}"
        if not int(row.get("tape_steps") or 0) > 0:
            yield f"{name}: its tape had ended, or it is not known"


def table(
    verdicts: Sequence[Verdict], called: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Lines of Markdown: one for each variant and batch. called: other names of variants."""
    lines = [
        f"| batch | what | goal | rounds | {' | '.join(overhead.METRICS)} |",
        "|---|---|---|---" + "|---" * len(overhead.METRICS) + "|",
    ]
    rows: dict[tuple[int, str], dict[str, Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.batch, verdict.variant), {})[verdict.metric] = verdict
    for (batch, variant), mine in rows.items():
        cells = []
        for metric in overhead.METRICS:
            it = mine.get(metric)
            cells.append("" if it is None else f"{it.figure or ''} {it.word}".strip())
        first = next(iter(mine.values()))
        rounds = max((it.figure.rounds for it in mine.values() if it.figure), default=0)
        goal = "" if first.goal is None else f"{first.goal:.1%}"
        what = called.get(variant) or tracer_overhead.COMPARED[variant][1]
        told = f"| {batch} | {what} | {goal} | {rounds} |"
        lines.append(f"{told} {' | '.join(cells)} |")
    return lines


def write(verdicts: Sequence[Verdict], path: Path) -> None:
    """The verdicts as CSV: batch, variant, metric, value, low, high, rounds, goal, verdict."""
    with path.open("w", newline="") as sink:
        out = csv.writer(sink)
        out.writerow(COLUMNS)
        for it in verdicts:
            of = it.figure
            numbers: list[str | int] = ["", "", "", 0]
            if of is not None:
                numbers = [*(f"{x:.5f}" for x in (of.value, of.low, of.high)), of.rounds]
            goal = "" if it.goal is None else it.goal
            out.writerow([it.batch, it.variant, it.metric, *numbers, goal, it.word])


def concluded(folder: Path, to: Path | None = None) -> int:
    """Print the table of a folder's requests.csv, and write its verdicts. The exit code."""
    path = folder / "requests.csv"
    if not path.is_file():
        print(f"{path}: there is no such file; no round was measured", file=sys.stderr)
        return 1
    return told(list(judge(results.read(path)[1])), folder, to)


def told(
    found: Sequence[Verdict],
    folder: Path,
    to: Path | None = None,
    called: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Print these verdicts, and write them into ``folder`` or into the file ``to``. The exit code:
    0 if all that have a goal hold, and the servers of FOLDER/servers.csv judged. called: see table.
    """
    print("\n".join(table(found, called)))
    write(found, to or folder / "verdict.csv")
    held = [it for it in found if it.goal is not None]
    good = sum(it.word == "holds" for it in held)
    print(f"\n{good} of {len(held)} figures hold")
    doubts = list(unproven(results.read(folder / "servers.csv")[1]))
    for doubt in doubts:
        print(f"nothing is shown by it: {doubt}")
    return 0 if held and good == len(held) and not doubts else DOES_NOT_HOLD


def parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """The options of a benchmark that is judged against the goals. quick: what --quick does."""
    made = options.parser(doc, "cuda", out="the folder for the CSV files")
    made.add_argument("--seconds", type=int, default=540, help="begin no round after these")
    made.add_argument("--seed", type=int, default=1, help="of the orders and the requests")
    made.add_argument("--rounds", type=int, default=1000, help="at most so many")
    made.add_argument("--model", choices=models.NAMES, default="E4B-32k", help="on a GPU")
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--judge", type=Path, metavar="FOLDER", help="measure nothing")
    made.add_argument("--csv", type=Path, help="with --judge: where the verdicts go")
    return made


def run(
    made: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Path], int],
    judged: Callable[[Path, Path | None], int],
    **fixed: Any,
) -> int:
    """Measure and judge, or with --judge only judge. The exit code. fixed: what is no option here.

    measure: of the options and of a folder for what need not be kept; returns 0 if all went well.
    judged: of the folder of the CSV files, and of the file for the verdicts if it is another one.
    """
    args = made.parse_args()
    if args.judge:
        return judged(args.judge, args.csv)
    if not args.out:
        made.error("--out is needed: the folder for the CSV files")
    args.out.mkdir(parents=True, exist_ok=True)
    args = argparse.Namespace(**vars(args), **fixed)
    with tempfile.TemporaryDirectory(prefix="g4debug-judged-") as folder:
        died = measure(args, Path(folder))
    code = judged(args.out, None)
    return 1 if died else code


def main() -> int:
    made = parser(__doc__, "few requests, to try the script")
    made.add_argument("--first-round", type=int, default=0)
    made.add_argument(
        "--variants", type=tracers.variant_names, default=VARIED, help=f"({','.join(VARIED)})"
    )
    measure = tracer_overhead.measure_together
    return run(made, measure, concluded, together=1, contexts=(), tp=1)


if __name__ == "__main__":
    raise SystemExit(main())
