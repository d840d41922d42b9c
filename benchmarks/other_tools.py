"""Measures what other tools cost, not tracers: the decode time per output token.

    python benchmarks/other_tools.py --group graphs|eager|sanitizer [--device cuda|cpu] [--rounds 7]
        [--out FILE.csv]

The servers of a group run on one device at the same time, each in a process of its own. They take
turns in changing order, so that a drift of the device is the same for all. The time per output
token is (time of N tokens - time of 1 token) / (N - 1), with both calls in the same turn. The
overhead of a variant is the median over the rounds of its time over that of the group's first
variant. FROZEN_KV_MTP is on. The groups are:

graphs, with CUDA graphs: nothing, and CUDA_LAUNCH_BLOCKING=1. eager, without CUDA graphs: nothing,
and the check of seed PR #3, which cannot be in a graph. sanitizer: eager, and compute-sanitizer.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measuring import options, results
from measuring.servers import Variant, all_up, in_turns

# The fixes that this SGLang needs are on in every variant, because only debugging is compared.
# Without them 0.5.12.post1 dies here of seed PR #22's crash, as requests of equal length end
# together.
EAGER = {"disable_cuda_graph": True}
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
GROUPS = {
    "graphs": {
        "off": Variant(),
        "launch-blocking": Variant({"CUDA_LAUNCH_BLOCKING": "1"}),
    },
    "eager": {
        "eager": Variant(engine=EAGER),
        "max-min check (seed PR #3)": Variant(engine=EAGER, plugin="max_min_check"),
    },
    "sanitizer": {
        "eager": Variant(engine=EAGER),
        "compute-sanitizer": Variant(
            engine=EAGER,
            wrapper=(SANITIZER, "--tool", "memcheck", "--target-processes", "all"),
        ),
    },
}
BATCHES = {"graphs": (1, 8, 64), "eager": (1, 8), "sanitizer": (1,)}
TOKENS = {"graphs": 200, "eager": 60, "sanitizer": 5}


def measure(
    group: str, device: str, rounds: int, batches: tuple[int, ...], folder: Path
) -> tuple[list[dict[str, Any]], str]:
    """The rows of the CSV, one for each round, batch and variant, and the device's name."""
    rows = []
    with all_up(GROUPS[group], device, folder) as (servers, hello):
        first = next(iter(servers))
        if hello[first]["hooks"]:
            raise SystemExit(
                f"debugging is off, yet tracers are at {hello[first]['hooks']} hook sites"
            )
        tokens = TOKENS[group] if device == "cuda" else 12
        for batch in batches:
            for server in servers.values():  # warm: JIT, graphs of this batch size
                server.ask(batch, min(tokens, 60))
            for number, order in in_turns(servers, rounds):
                for name in order:
                    ms, accept = servers[name].ms_per_token(batch, tokens)
                    at = {"group": group, "round": number, "batch": batch, "variant": name}
                    at |= {"hooks": hello[name]["hooks"], "ms_per_token": ms}
                    rows.append(at | {"accept_length": round(accept, 3)})
        return rows, hello[first]["device"]


def summarise(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(r["variant"] for r in rows))
    print("batch  variant                       ms/token   overhead  (range)      accept  hooks")
    for batch in dict.fromkeys(r["batch"] for r in rows):
        mine = {n: [r for r in rows if (r["batch"], r["variant"]) == (batch, n)] for n in names}
        base = {r["round"]: r["ms_per_token"] for r in mine[names[0]]}
        for name, found in mine.items():
            ratios = [r["ms_per_token"] / base[r["round"]] - 1 for r in found]
            median = statistics.median(r["ms_per_token"] for r in found)
            print(
                f"{batch:5d}  {name:28s}  {median:8.3f}  {statistics.median(ratios):+8.2%}  "
                f"({min(ratios):+.1%} .. {max(ratios):+.1%})  {found[0]['accept_length']:.2f}  "
                f"{found[0]['hooks']}"
            )


def main() -> None:
    parser = options.parser(__doc__, "cuda", rounds=7)
    parser.add_argument("--group", choices=tuple(GROUPS), default="graphs")
    args = parser.parse_args()
    batches = BATCHES[args.group] if args.device == "cuda" else (1, 2)
    with tempfile.TemporaryDirectory(prefix="g4debug-overhead-") as folder:
        rows, device = measure(args.group, args.device, args.rounds, batches, Path(folder))
    results.write(f"other_tools_{args.group}", rows, device, args.out)
    summarise(rows)


if __name__ == "__main__":
    main()
