"""Measures how long a server of two ranks takes to end after a finding, on the CPU engine.

    python benchmarks/incident_end.py [--rounds 3] [--ranks 2] [--out FILE.csv]

One rank gets a bad page, finds it and stops; the others are inside a collective, or come to one.
The time is from the finding, as its dump says, until the last process of the server is gone. Two
arms take turns: ``g4debug`` is as it is delivered, ``sglang`` has SGLang's own dumps before a crash
asked for by its switches, which g4debug then leaves on. Up to 0.5.12.post1 SGLang has no such
dumps, so the arms are alike. Each row also counts the remains: dumps, processes, zombies, files
in /dev/shm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from measuring import results
from measuring.servers import in_turns

ARMS = {
    "g4debug": {},
    "sglang": {
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "1",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "1",
    },
}
LIMIT = 300.0  # seconds for one run
LOOK = 1.0  # seconds between two looks at /dev/shm
REAPED = 10.0  # seconds that the system may take to reap what it has inherited
SERVE = """
import sys
def main():
    import sglang
    from g4debug.cpu.server import engine_arguments
    engine = sglang.Engine(**engine_arguments(mtp=True, tp_size=int(sys.argv[1])))
    prompts = [[2, *range(4, 4 + n)] for n in (130, 40, 300, 90)]
    sampling = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params=sampling)
    engine.shutdown()
if __name__ == "__main__":
    main()
"""


def session(leader: int) -> tuple[int, int]:
    """How many processes of a session there are that run, and how many zombies."""
    import psutil

    running = zombies = 0
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                dead = process.status() == psutil.STATUS_ZOMBIE
                running, zombies = running + (not dead), zombies + dead
        except (psutil.Error, ProcessLookupError):
            continue
    return running, zombies


def mapped(leader: int) -> set[str]:
    """The names of the blocks in /dev/shm that a process and its children have mapped."""
    import psutil

    found: set[str] = set()
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(leader)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{one.pid}/maps").read_text()
                found |= set(re.findall(r" /dev/shm/(\S+)$", text, re.M))
    return found


def run(arm: str, ranks: int, folder: Path) -> dict[str, Any]:
    """One server, from its start to its end."""
    from g4debug.dumps import incidents

    script = folder / "serve.py"
    script.write_text(SERVE)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    environ = {
        **clean,
        **ARMS[arm],
        "SGLANG_TRTLLM_MHA_DEBUG": "1",
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"),
        "G4DEBUG_FAULTS": f"seed=1;page-oob=1*on@mode=target_verify@rank={ranks - 1}",
    }
    shared: set[str] = set()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "g4debug.cpu", str(script), str(ranks)],
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            begin = looked = time.monotonic()
            while process.poll() is None and time.monotonic() < begin + LIMIT:
                if time.monotonic() > looked + LOOK:
                    shared |= mapped(process.pid)
                    looked = time.monotonic()
                time.sleep(0.01)
            while session(process.pid)[0] and time.monotonic() < begin + LIMIT:
                time.sleep(0.01)
            gone = time.time()
            while session(process.pid)[1] and time.time() < gone + REAPED:
                time.sleep(0.1)
            running, zombies = session(process.pid)
        finally:
            if session(process.pid)[0]:
                os.killpg(process.pid, signal.SIGKILL)
    dumps = folder / "dumps"
    found = incidents.group(incidents.look_into(dumps)) if dumps.is_dir() else []
    if len(found) != 1:
        print((folder / "log").read_text(errors="replace")[-3000:])
        sys.exit(f"{arm}: got {len(found)} incidents, expected 1; the end of its log is above")
    first = found[0].first
    return {
        "arm": arm,
        "seconds": f"{gone - datetime.fromisoformat(first.time).timestamp():.2f}",
        "first": f"{first.head.check}: {first.head.kind}",
        "dumps": len(found[0].dumps),
        "processes_with_a_dump": found[0].processes,
        "processes_left": running,
        "zombies": zombies,
        "shm_left": len(shared & set(os.listdir("/dev/shm"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for number, order in in_turns(ARMS, args.rounds):
        for arm in order:
            with tempfile.TemporaryDirectory(prefix="g4debug-end-") as folder:
                row = {"round": number + 1, **run(arm, args.ranks, Path(folder))}
            print(row, flush=True)
            rows.append(row)
    results.write("incident_end", rows, "cpu", args.out, ranks=args.ranks)
    for arm in ARMS:
        seconds = [float(r["seconds"]) for r in rows if r["arm"] == arm]
        print(f"{arm:8} median {results.spread(seconds, '.2f')} s")


if __name__ == "__main__":
    main()
