"""Runs every fault against every tracer on real SGLang, and shows what a user sees without them.

Each fault runs twice on the CPU engine. The run without tracers shows what a user would have seen.
The other run has every tracer in ``log`` mode, which changes nothing in SGLang, so that each tracer
can find the fault on its own. All fixes are off: this is SGLang as released.

With --watch each runs a third time, on a server with ``SGLANG_TRTLLM_MHA_DEBUG=watch``.

The exit code is 0 if every fault is caught by each tracer that it names, nothing is found where
nothing is wrong, and a run without faults gives the same tokens with and without tracers. It is 1
if not, and 2 for wrong arguments.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from harness import render
from harness.options import Parser, left_out, logs, page, results_of
from harness.processes import script
from rich.console import Console
from suites.matrix.drill import (
    Clean,
    Drill,
    Row,
    drills,
    kept,
    name_of,
    row_of,
    run_clean,
    run_drill,
)
from suites.matrix.table import block, clean_block, markdown

from g4debug import discovery
from g4debug.cpu import toys
from g4debug.faults.base import Fault

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> int:
    parser = Parser(__doc__)
    parser.model()
    parser.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help="the attention backend, one of those on which the CPU engine serves the model "
        "(default: the model's first, and for each fault in lists of tokens triton)",
    )
    parser.add_argument(
        "--fault",
        action="append",
        metavar="NAME",
        help="run only this fault; may be given several times. No table is written then, unless "
        "--out is given",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="run each fault a third time, with SGLANG_TRTLLM_MHA_DEBUG=watch: one column more",
    )
    parser.number("--jobs", "how many faults run at the same time", 2)
    parser.out("where the table is written (default: docs/matrix-RELEASE.md, or -MODEL-BACKEND.md)")
    parser.results(
        "keep logs, dumps and results here. A fault that has a good result there is not run again"
    )
    args = parser.parse_args()
    names = discovery.names("fault")
    for name in args.fault or ():
        if name not in names:
            parser.error(f"there is no fault {name!r}; there are: {', '.join(names)}")
    faults: list[Fault] = [discovery.load("fault", n) for n in names]
    wanted = set(args.fault or names)
    console = Console(highlight=False)
    with logs("matrix", console, "Logs, dumps and results are in:", given=args.results) as left:
        toy, of = toys.load(args.model), name_of(args.model, args.backend)
        if args.backend and args.backend not in toy.backends:
            parser.error(
                f"the CPU engine serves {toy.id} on {', '.join(toy.backends)}, and not on "
                f"{args.backend!r}"
            )
        folder = results_of(left.folder, of)
        every = drills([f for f in faults if not f.absent], toy, args.backend)
        todo = [d for d in every if not d.without and d.fault.id in wanted]
        without = [d for d in every if d.without]
        mine = {str(d): d.without for d in without if d.fault.id in wanted}
        left_out(console, mine, of)
        not_run = [d for d in every if not d.without and d.fault.id not in wanted]
        # A fault is compared with a run on the same attention backend, with a draft or without.
        first = (args.backend, bool(toy.draft))
        servers = dict.fromkeys([first, *((d.on, d.mtp) for d in todo)])
        clean = {
            (b, mtp): kept(
                Clean, f"clean-{b}-{mtp}", folder, partial(run_clean, folder, b, mtp, args.model)
            )
            for b, mtp in servers
        }
        for one in clean.values():
            render.block(console, clean_block(one))
        rows: list[Row] = []

        def drilled(it: Drill) -> Row:
            on = clean[it.on, it.mtp]
            name = row_of(it.fault, it.chain, on).name
            return kept(
                Row, name, folder, partial(run_drill, it.fault, it.chain, on, folder, args.watch)
            )

        with ThreadPoolExecutor(args.jobs) as pool:
            for row in pool.map(drilled, todo):
                rows.append(row)
                render.block(console, block(row, f"fault {len(rows)} of {len(todo)}"))
        console.print()
        render.count(console, [*map(clean_block, clean.values()), *map(block, rows)], "runs")
        if args.out or not args.fault:
            out = args.out or page(DOCS, "matrix", of)
            out.parent.mkdir(exist_ok=True)
            done = list(clean.values())
            out.write_text(markdown(done, rows, args.model, without, not_run, args.backend))
            render.for_copying(console, "The table is written to:", str(out))
        left.good = all(r.good for r in rows) and all(c.good for c in clean.values())
    return left.status


if __name__ == "__main__":
    raise SystemExit(script(main))
