"""Samples how much of a scheduler's time the tracers take, under load.

    python benchmarks/host_share.py [--device cuda|cpu] --out FILE.csv [--py-spy PATH]
        [--variants armed,kv-integrity] [--rate 400]

The load is the same as in tracer_overhead.py. While it runs, py-spy looks at the scheduler's stack
some hundred times a second, and measuring/stacks.py tells whose time each sample is. Where servers
alike differ by more than the tracers cost, this still gives a figure. It is the host's time only,
and an upper bound of what it adds to a step: while the device still works on earlier launches, the
host's time costs nothing. py-spy is not among the requirements: python -m pip install py-spy.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import options, results, tracers
from measuring.fleet import Fleet, Gated
from measuring.stacks import Share, share

SHOWN = 5  # the costliest places that are printed for each batch size


def sglang_folder() -> str:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("SGLang is not installed here")
    return f"{next(iter(spec.submodule_search_locations))}/"


def phase(server: Gated, batch: int, count: int, args: argparse.Namespace, raw: Path) -> Share:
    """Sample the scheduler while it serves these requests, and not while it is idle."""
    pid = Path(f"{server.gate}.ready").read_text()
    command = [args.py_spy, "record", "--rate", str(args.rate), "--duration", "600", "--pid", pid,
               "--format", "raw", "--full-filenames", "--nonblocking", "-o", str(raw)]  # fmt: skip
    log = raw.with_suffix(".log")
    with ThreadPoolExecutor(1) as pool, log.open("wb") as sink:
        asked = pool.submit(server.put, {"serve": batch, "seed": 100 + batch, "count": count})
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        try:
            asked.result()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
    if not raw.is_file():
        raise SystemExit(f"py-spy wrote nothing:\n{log.read_text(errors='replace')[-2000:]}")
    return share(raw.read_text().splitlines(), sglang_folder())


def measure(args: argparse.Namespace, folder: Path) -> None:
    tracers.installed()
    shared = tracers.engine(args.device, ())
    variants = tracers.under_load(args.variants, shared)
    load = tracers.LOADS[args.device, args.quick]
    file = results.Growing(args.out)
    names = [(n, n) for n in args.variants]
    with Fleet(names, variants, args.device, folder, len(names)) as fleet:
        for server, (name, _) in zip(fleet, names, strict=False):
            device = server.start()["device"]
            fleet.quiet()
            tracers.fill(server, load)
            tracers.check(name, server.facts())
            for batch, count in load.phases:
                before = server.facts()["steps"]
                found = phase(server, batch, count, args, folder / f"{name}-{batch}.raw")
                steps = server.facts()["steps"] - before
                file.add([{"variant": name, "batch": batch, "steps": steps,
                           "samples": found.samples, "ours": found.ours}], device)  # fmt: skip
                print(f"{name}, batch {batch}: {found.of_all:.1%} of {found.samples} samples")
                for place, many in found.by.most_common(SHOWN):
                    print(f"    {many / found.samples:.1%} {place}", flush=True)


def main() -> int:
    parser = options.parser(__doc__, "cuda", out="")
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    parser.add_argument("--py-spy", default=shutil.which("py-spy"), help="default: from the PATH")
    parser.add_argument("--rate", type=int, default=400, help="samples in a second")
    parser.add_argument("--quick", action="store_true", help="few requests, to try the script")
    parser.add_argument(
        "--variants",
        type=tracers.variant_names,
        default=("armed", "kv-integrity"),
        help="of tracer_overhead.py, separated by commas",
    )
    args = parser.parse_args()
    if not args.py_spy:
        parser.error("py-spy was not found: python -m pip install py-spy")
    with tempfile.TemporaryDirectory(prefix="g4debug-host-") as folder:
        measure(args, Path(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
