"""What arming g4debug costs: decode time per output token, debug off against armed.

    python benchmarks/tracer_overhead.py [--device cuda|cpu] [--rounds 7] [--out FILE.csv]

Both servers run at the same time on one device, each in a process of its own, and take
turns (off, armed, armed, off, …), so that drift hits both alike. Time per output token is
(time of N tokens - time of 1 token) / (N - 1) per call, both calls in the same turn; the
ratio is the median over the rounds of armed / off. CUDA graphs on, FROZEN_KV_MTP on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "repro"))

VARIANTS = {
    "off": {},
    "armed": {"SGLANG_TRTLLM_MHA_DEBUG": "1"},
}
BATCHES = {"cuda": (1, 8, 64), "cpu": (1, 2)}
SIZES = {"cuda": (500, 400), "cpu": (100, 12)}


def engine_arguments(device: str) -> dict[str, Any]:
    from _workload import DEVICES

    arguments = dict(DEVICES[device](None).engine)
    arguments |= {"log_level": "error", "disable_radix_cache": True}
    arguments.pop("swa_full_tokens_ratio", None)
    if device == "cuda":
        arguments |= {
            "max_running_requests": 64,
            "cuda_graph_max_bs": 64,
            "max_total_tokens": 64 * 1600,
            "chunked_prefill_size": 8192,
            "mem_fraction_static": 0.35,  # two servers share the device
        }
    return arguments


def serve(device: str) -> None:
    """One server: reads [batch, tokens] from stdin, answers with seconds, one line each."""
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    import random

    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the server prints must not mix with the answers
    engine = sglang.Engine(**engine_arguments(device))
    hello = {"hooks": len(HookRegistry._hooks), "device": device_name()}
    print(json.dumps(hello), file=answers, flush=True)
    length = SIZES[device][0]
    rng = random.Random(0)
    prompts = [[2, *(rng.randrange(4, 500) for _ in range(length - 1))] for _ in range(64)]
    for line in sys.stdin:
        batch, tokens = json.loads(line)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        outputs = engine.generate(input_ids=prompts[:batch], sampling_params=sampling)
        seconds = time.perf_counter() - begin
        accepted = [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]
        answer = {"seconds": seconds, "accept_length": sum(accepted) / len(accepted)}
        print(json.dumps(answer), file=answers, flush=True)
    engine.shutdown()


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class Server:
    """A variant's process. ``ask`` blocks until it answered."""

    def __init__(self, variant: str, device: str) -> None:
        self.variant = variant
        environment = {**os.environ, **VARIANTS[variant]}
        if device == "cpu":
            from g4debug import cpu

            environment = cpu.environment(environment)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--device", device],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.variant} server died; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, batch: int, tokens: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps([batch, tokens]), file=self.process.stdin, flush=True)
        return self.read()

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


def measure(device: str, rounds: int) -> tuple[list[dict[str, Any]], str]:
    """Rows of the CSV, one per round, batch and variant; and what they were measured on."""
    servers = {name: Server(name, device) for name in VARIANTS}
    rows = []
    try:
        hello = {name: server.read() for name, server in servers.items()}
        hooks = {name: h["hooks"] for name, h in hello.items()}
        if hooks["off"] != 0:
            raise SystemExit(f"debug off, yet {hooks['off']} hooks are registered")
        tokens = SIZES[device][1]
        for batch in BATCHES[device]:
            for server in servers.values():  # warm: JIT, graphs of this batch size
                server.ask(batch, tokens)
            for number in range(rounds):
                order = list(VARIANTS) if number % 2 == 0 else list(VARIANTS)[::-1]
                for name in order:
                    first = servers[name].ask(batch, 1)["seconds"]
                    whole = servers[name].ask(batch, tokens)
                    rows.append(
                        {
                            "round": number,
                            "batch": batch,
                            "variant": name,
                            "hooks": hooks[name],
                            "ms_per_token": (whole["seconds"] - first) / (tokens - 1) * 1000,
                            "accept_length": round(whole["accept_length"], 3),
                        }
                    )
    finally:
        for server in servers.values():
            server.stop()
    return rows, hello["off"]["device"]


def summarise(rows: list[dict[str, Any]]) -> None:
    print("batch  off ms/tok  armed ms/tok  overhead  (range over rounds)   accept length")
    for batch in dict.fromkeys(r["batch"] for r in rows):
        mine = {
            name: [r for r in rows if r["batch"] == batch and r["variant"] == name]
            for name in VARIANTS
        }
        times = {n: statistics.median(r["ms_per_token"] for r in rs) for n, rs in mine.items()}
        ratios = [
            a["ms_per_token"] / o["ms_per_token"] - 1
            for o, a in zip(mine["off"], mine["armed"], strict=True)
        ]
        accept = {n: rs[0]["accept_length"] for n, rs in mine.items()}
        print(
            f"{batch:5d}  {times['off']:10.3f}  {times['armed']:12.3f}  "
            f"{statistics.median(ratios):+8.2%}  ({min(ratios):+.2%} .. {max(ratios):+.2%})   "
            f"{accept['off']:.2f} / {accept['armed']:.2f}"
        )
    hooks = {r["variant"]: r["hooks"] for r in rows}
    print(f"hooks registered: off {hooks['off']}, armed {hooks['armed']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "tracer_overhead.csv")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.device)
    from g4debug.describe import versions

    rows, device = measure(args.device, args.rounds)
    with args.out.open("w", newline="") as f:
        header = {**versions(), "device": device}
        f.write(f"# {json.dumps(header)}\n")
        writer = csv.DictWriter(f, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    summarise(rows)


if __name__ == "__main__":
    main()
