"""Every fault against every tracer, on real SGLang, and what the user sees without them.

Each fault runs twice on the CPU engine: with no tracer, which shows what the user would have
seen, and with every tracer in ``log`` mode, which changes nothing that SGLang does and so
lets each tracer find the fault on its own. All fixes are off: this is SGLang as it is.
Exit code 0 only if every fault is caught by each tracer that it names, nothing is found where
nothing is wrong, and the tokens of a clean run are the same with and without the tracers.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _matrix import Row, run_clean, run_drill
from _matrix_table import markdown, render
from _run import script
from rich.console import Console

from g4debug import discovery
from g4debug.faults.base import Fault

OUT = Path(__file__).resolve().parent.parent / "docs" / "matrix.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="append", help="only this fault (repeatable)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--out", type=Path, help=f"where the table goes (default: {OUT.name})")
    parser.add_argument("--keep", action="store_true", help="keep logs and dumps")
    args = parser.parse_args()
    names = discovery.names("fault")
    for name in args.fault or ():
        if name not in names:
            parser.error(f"there is no fault {name!r}; there are: {', '.join(names)}")
    faults: list[Fault] = [discovery.load("fault", n) for n in (args.fault or names)]
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="g4debug-matrix-"))
    try:
        clean = run_clean(folder)
        console.print(f"no fault: {clean.seen}; with every tracer: {clean.verdict}")
        rows: list[Row] = []
        with ThreadPoolExecutor(args.jobs) as pool:
            drills = [(f, d) for f in faults for d in f.drills]
            for row in pool.map(lambda fd: run_drill(fd[0], fd[1], clean, folder), drills):
                rows.append(row)
                console.print(f"[{len(rows)}/{len(drills)}] {row.fault}={row.drill}: {row.verdict}")
        render(clean, rows, console)
        if args.out or not args.fault:
            out = args.out or OUT
            out.parent.mkdir(exist_ok=True)
            out.write_text(markdown(clean, rows))
            console.print(f"written: {out}", soft_wrap=True)
        bad = [r for r in rows if not r.good]
        if bad or not clean.good:
            console.print(f"{len(bad)} of {len(rows)} rows are not as they should be", style="red")
        if args.keep or bad:
            console.print(f"logs and dumps: {folder}", soft_wrap=True)
            args.keep = True
        return 1 if bad or not clean.good else 0
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(script(main))
