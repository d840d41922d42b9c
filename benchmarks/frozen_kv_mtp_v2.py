"""Measures FROZEN_KV_MTP on speculative decoding v2 against v1's worker, side by side.

    python benchmarks/frozen_kv_mtp_v2.py [--device cuda|cpu] [--batches 1,8,64] [--tokens 300]
        [--rounds 5] [--variants v1,ours] [--accept N] [--out FILE]
        [--upstream-python PYTHON] [--timeline FOLDER]
    python benchmarks/frozen_kv_mtp_v2.py --table FILE...

One server for each variant: ``v1``, ``ours`` (``SGLANG_FROZEN_KV_MTP_V2=1``), ``ours-armed`` (the
same with the default tracers), ``v1-blocks`` and ``ours-blocks`` (with hopper-extend-blocks, too).
``upstream`` is SGLang's own v2, from 0.5.14 on: on such a release it is the only variant; beside
the others it runs in another environment, with the Python of --upstream-python. ``off`` and ``on``
are ``upstream`` with all performance paths of this release switched off, and on. All are up
together, on one device, and are asked in turns, in an order of its own for each round. E4B's
geometry (full layers' head_dim 256) with seeded weights, CUDA graphs, prefill on triton, decode on
trtllm_mha, pages of 64.

A round asks each server for one token of each prompt, and then for --tokens of them. A row is about
the difference, so it has no prefill in it: ``ms_per_token`` is the time per output token of one
request, ``ms_per_step`` is the same times the accept length. The first round is not written down.

--accept lets SGLang accept so many tokens in each verify, whatever was drafted
(SGLANG_SIMULATE_ACC_LEN): seeded weights are accepted less, or more, than a trained draft.
--timeline lets SGLang's profiler look at each server before the first round, and puts a trace for
each variant and batch into FOLDER; timeline.py draws them. --table prints the table of files that
were written before; the first file's first variant is what the others are compared with.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import models, options, results
from measuring.servers import Server, ServerDied, Variant

from g4debug.cpu.server import free_port

# SGLang itself switches overlap scheduling off where FROZEN_KV_MTP does not run with it.
OVERLAP = {"disable_overlap_schedule": False}
ON = {"SGLANG_FROZEN_KV_MTP_V2": "1"}
BLOCKS = {"G4DEBUG_FIX_HOPPER_EXTEND_BLOCKS": "1"}
VARIANTS = {
    "v1": Variant(engine=OVERLAP),
    "ours": Variant(ON, engine=OVERLAP),
    "ours-armed": Variant({**ON, "SGLANG_TRTLLM_MHA_DEBUG": "1"}, engine=OVERLAP),
    "v1-blocks": Variant(BLOCKS, engine=OVERLAP),
    "ours-blocks": Variant({**ON, **BLOCKS}, engine=OVERLAP),
    "upstream": Variant(engine=OVERLAP),
    "verify": Variant({"G4DEBUG_FIX_VERIFY_ATTENTION": "1"}, engine=OVERLAP),
}
PATHS = {"off": False, "on": True}  # the variants of the performance paths
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cuda": {**models.FOR_64, "max_total_tokens": 64 * 1000, "chunked_prefill_size": 8192,
             # Of the memory that is free at start; the pools are as large as the line above says.
             "mem_fraction_static": 0.9},
    "cpu": {"max_total_tokens": 4096},
}  # fmt: skip
PROFILED = {"cuda": 40, "cpu": 12}  # output tokens of a request that the profiler looks at


def known(name: str) -> Variant:
    """The variant of this name."""
    if name not in PATHS:
        return VARIANTS[name]
    from decode_paths import switched

    return Variant(switched(PATHS[name]), engine=OVERLAP)


def default_variants(upstream_python: str) -> list[str]:
    from g4debug.speculation import adapter

    if adapter("FROZEN_KV_MTP").overlap:
        return ["upstream"]
    return ["v1", "ours", *(["upstream"] if upstream_python else [])]


def ask(server: Server, batch: int, tokens: int) -> dict[str, Any]:
    """The row of one round; see the top of this file."""
    per_token, accepted = server.ms_per_token(batch, tokens)
    return {
        "ms_per_token": round(per_token, 4),
        "ms_per_step": round(per_token * accepted, 4),
        "accept_length": round(accepted, 4),
    }


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    shared = models.arguments("E4B", args.device, **ARGUMENTS[args.device])
    environment = {"SGLANG_SIMULATE_ACC_LEN": str(args.accept)} if args.accept else {}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        releases: dict[str, str] = {}
        for name in args.variants:
            given = known(name)
            engine = {**shared, **given.engine, "nccl_port": free_port()}
            variant = replace(
                given, environment={**environment, **given.environment}, engine=engine,
                python=args.upstream_python if name == "upstream" else "",
            )  # fmt: skip
            servers[name] = Server(name, variant, args.device, folder)
            stack.callback(servers[name].stop)
        # They start together. Each looks at how much memory is free, but how large its pools are
        # max_total_tokens says.
        for name, server in servers.items():
            hello = server.read()
            releases[name] = hello["sglang"]
            if hello["overlap"] == name.startswith("v1"):
                is_on = "on" if hello["overlap"] else "off"
                raise SystemExit(f"{name}: overlap scheduling is {is_on}:\n{server.tail()}")
            print(f"{name}: up", flush=True)
        device = hello["device"]
        out = args.out or results.default("frozen_kv_mtp_v2", device)
        growing = results.Growing(out, accept=args.accept or "")
        try:
            for number in range(args.rounds + 1):
                if number == 1 and args.timeline:
                    for server in servers.values():
                        for batch in args.batches:
                            to = args.timeline / f"{server.name}-{batch}.trace.json.gz"
                            server.trace([batch, PROFILED[args.device]], to)
                for batch in args.batches:
                    order = list(servers)
                    random.Random(f"{number} {batch}").shuffle(order)
                    for name in order:
                        row = {"round": number, "batch": batch, "variant": name}
                        row["sglang"] = releases[name]
                        row |= ask(servers[name], batch, args.tokens)
                        if number:
                            growing.add([row], device)
                            rows.append(row)
        finally:
            for name, server in servers.items():
                warned = [x for x in server.tail().splitlines() if "g4debug:" in x]
                print("\n".join(f"{name}: {x}" for x in warned[-4:]), file=sys.stderr)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: one line for each batch and variant. Medians over the rounds."""
    lines = [
        "| batch | variant | ms per token | of the first | ms per step | accept length | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in dict.fromkeys(r["batch"] for r in rows):
        base = None
        for variant in dict.fromkeys(r["variant"] for r in rows):
            mine = [r for r in rows if r["batch"] == batch and r["variant"] == variant]
            if not mine:
                continue
            per_token, per_step, accepted = (
                statistics.median(float(r[name]) for r in mine)
                for name in ("ms_per_token", "ms_per_step", "accept_length")
            )
            base = base or per_token
            lines.append(
                f"| {batch} | {variant} | {per_token:.2f} | {per_token / base:.2f} "
                f"| {per_step:.2f} | {accepted:.2f} | {len(mine)} |"
            )
    return lines


def main() -> int:
    parser = options.parser(__doc__, "cuda", rounds=5)
    parser.add_argument("--batches", type=lambda t: [int(x) for x in t.split(",")])
    parser.add_argument("--tokens", type=int, help="output tokens of each request")
    parser.add_argument("--variants", type=lambda t: t.split(","))
    parser.add_argument("--accept", type=float, default=0.0, metavar="N")
    parser.add_argument("--upstream-python", default="", metavar="PYTHON")
    parser.add_argument("--timeline", type=Path, metavar="FOLDER")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    if args.timeline and not args.rounds:
        parser.error("--timeline needs at least one round")
    if args.table:
        print("\n".join(table([row for path in args.table for row in results.read(path)[1]])))
        return 0
    args.variants = args.variants or default_variants(args.upstream_python)
    unknown = set(args.variants) - set(VARIANTS) - set(PATHS)
    if unknown:
        names = ", ".join([*VARIANTS, *PATHS])
        parser.error(f"unknown variants {sorted(unknown)}; known: {names}")
    args.batches = args.batches or ([1, 8, 64] if args.device == "cuda" else [1, 4])
    args.tokens = args.tokens or (300 if args.device == "cuda" else 24)
    with tempfile.TemporaryDirectory(prefix="g4debug-v2-") as folder:
        try:
            rows = measure(args, Path(folder))
        except ServerDied as e:
            print(e, file=sys.stderr)
            return 1
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
