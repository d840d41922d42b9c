"""Measures what arming takes: the time to load, the modules, and a scheduler's memory.

    python benchmarks/arming.py --out FILE.csv [--rounds 2] [--seconds 540]

On the CPU engine, for debugging off, SGLANG_TRTLLM_MHA_DEBUG=watch and =1, one after the other, in
an order that changes from round to round. Each is a process of its own that imports SGLang's
scheduler, then loads SGLang's plugins as a server does, and then starts an engine that serves a few
requests. Rows are written as they come; after --seconds none is begun.

load_s: seconds to load and apply the plugins, with SGLang imported before. modules: of g4debug that
are loaded then. sites: functions of SGLang that have a hook. plugins_mib: by how much the process
grew meanwhile. scheduler_mib: the scheduler's own memory (USS) after the requests, in MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from measuring import options, results

SWITCH = "SGLANG_TRTLLM_MHA_DEBUG"
WAYS = {"off": {}, "watch": {SWITCH: "watch"}, "1": {SWITCH: "1"}}
MARK = "MEASURED "
MIB = 1 << 20


def child() -> None:
    """Runs in a process with SGLang: prints what it measured."""
    import sglang
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner
    from sglang.srt.plugins import load_plugins

    from g4debug.cpu.server import engine_arguments

    me = psutil.Process()
    before, begin = me.memory_full_info().uss, time.perf_counter()
    load_plugins()
    took = time.perf_counter() - begin
    grown = me.memory_full_info().uss - before
    plugin = sys.modules.get("g4debug.plugin")
    state = None if plugin is None else plugin.in_force
    found = {
        "load_s": round(took, 2),
        "modules": sum(name.startswith("g4debug") for name in sys.modules),
        "ledger": sum(name.startswith("g4debug.ledger") for name in sys.modules),
        "sites": 0 if state is None else len(state.hooks.sites),
        "plugins_mib": round(grown / MIB, 1),
    }
    engine = sglang.Engine(**engine_arguments(log_level="warning"))
    prompts = [[2, *range(4, 4 + length)] for length in (40, 130, 250)]
    engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
    )
    schedulers = [p for p in me.children(recursive=True) if "scheduler" in " ".join(p.cmdline())]
    if schedulers:
        own = max(p.memory_full_info().uss for p in schedulers)
        found["scheduler_mib"] = round(own / MIB, 1)
    print(MARK + json.dumps(found), flush=True)
    engine.shutdown()


def measure(way: str, seconds: float) -> dict[str, object]:
    """The row of one process. Raises SystemExit with the end of its log if it fails."""
    ours = ("G4DEBUG_", "SGLANG_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | WAYS[way]
    command = [sys.executable, "-m", "g4debug.cpu", __file__, "--child"]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=seconds, check=False
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith(MARK)]
    if len(lines) != 1:
        raise SystemExit(f"{way}: it ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, object] = {"way": way, **json.loads(lines[0].removeprefix(MARK))}
    return found


def main() -> int:
    parser = options.parser(__doc__, "cpu", out="the CSV file")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=540, help="begin nothing after these")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return 0
    if not args.out:
        parser.error("--out is needed: the CSV file")
    written, end, longest = results.Growing(Path(args.out)), time.monotonic() + args.seconds, 0.0
    for number in range(args.rounds):
        ways = list(WAYS)
        for way in ways[number % 3 :] + ways[: number % 3]:
            if time.monotonic() + 1.1 * longest > end:
                return 0
            begin = time.monotonic()
            row = {"round": number, **measure(way, args.seconds)}
            longest = max(longest, time.monotonic() - begin)
            written.add([row], "cpu")
            print(", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
