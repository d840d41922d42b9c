"""Measures ``g4debug list`` on many dumps.

    python benchmarks/list_speed.py [--dumps 10000] [--old] [--folder DIR]

Writes that many dumps into a temporary folder, each of its own process and time, and runs
``g4debug list`` on it three times, with a warm file cache. ``--old`` writes them without a head, as
a g4debug before schema 3 did. Prints CSV: kind, dumps, seconds of wall time, seconds of processor
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

RUNS = 3


def without_head(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as old:
        for name in archive.namelist():
            if not name.endswith("/head.json"):
                old.writestr(name, archive.read(name))
    return out.getvalue()


def write(folder: Path, count: int, old: bool) -> None:
    from sample_trap import sample_record

    from g4debug.dumps import writing

    record, begin = sample_record(), datetime(2026, 6, 1, tzinfo=UTC)
    for number in range(count):
        at = begin + timedelta(seconds=40 * number)
        where = dataclasses.replace(record.finding.location, pid=number, host=f"node{number % 8}")
        finding = dataclasses.replace(record.finding, location=where)
        this = dataclasses.replace(
            record,
            finding=finding,
            created=at.isoformat(timespec="milliseconds"),
            launch=f"auto-{number // 8:012x}",
        )
        data = writing.encode(this)
        name = f"g4debug-page-table-{at:%Y%m%dT%H%M%SZ}-{number}-1.pt"
        (folder / name).write_bytes(without_head(data) if old else data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dumps", type=int, default=10_000)
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--folder", type=Path, help="a folder of dumps that is there already")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if args.folder is None:
            write(folder, args.dumps, args.old)
        count = sum(name.endswith(".pt") for name in os.listdir(folder))
        print("kind,dumps,wall_s,cpu_s")
        for _ in range(RUNS):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "g4debug", "list", str(folder)],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            wall = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            kind = "old" if args.old else "with head"
            print(f"{kind},{count},{wall:.2f},{cpu:.2f}", flush=True)


if __name__ == "__main__":
    main()
