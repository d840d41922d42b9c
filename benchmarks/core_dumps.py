"""Measures what CUDA core dumps cost while nothing faults, and how long one takes.

    python benchmarks/core_dumps.py [--rounds 6] [--seconds 300] [--out FILE.csv]

The driver is told by the environment, before CUDA begins, so on and off are processes of their own.
Each round starts three, in an order of its own: core dumps on (as the flight recorder arms
them), off, and off once more. What the two that are off differ by is how far the other figure can
be trusted. A process decodes with 24 layers of the shapes of Gemma-4 E4B: products of bfloat16
weights, and SGLang's Triton attention over 1,000 tokens a row. It does so in a replayed CUDA graph
and eagerly, with 1, 8 and 64 rows, and reads a number back after each step, as a scheduler does.

Then a process whose tensors fill 90 % of the GPU's memory reads an address that is not mapped: the
size of its core dump, the seconds until its exception, and those of the autopsy.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from measuring import options, results

from g4debug.tracers.flight_recorder import coredump

BATCHES = (1, 8, 64)
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM = 24, 2560, 10240, 8, 2, 256
TOKENS, STEPS, SPLITS = 1000, 60, 8
PATIENCE = 30  # seconds for the exception of a bad address
VARIANTS = ("on", "off", "off again")
HERE = Path(__file__)


def environment(on: bool, folder: Path) -> dict[str, str]:
    given = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_COREDUMP")}
    given.pop(coredump.ENABLE, None)
    given["PYTHONPATH"] = f"{HERE.resolve().parents[1]}:{given.get('PYTHONPATH', '')}"
    if on:
        coredump.arm(given, "keep", folder)
        if not coredump.is_ours(given):
            why = coredump.why_not(folder) or "not known"
            raise SystemExit(f"core dumps cannot be armed: {why}")
    return given


def child(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE), "--child", *arguments]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )


def attention() -> Callable[..., Any]:
    """SGLang's decode kernel for Triton. 0.5.23 has it elsewhere."""
    for place in ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(f"{place}.decode_attention")
            return module.decode_attention_fwd  # type: ignore[no-any-return]
    raise SystemExit("core_dumps: this SGLang has no decode_attention_fwd at a place known here")


def step(batch: int) -> Callable[[], Any]:
    """A decode step of ``batch`` rows. It returns a tensor of one element."""
    import torch

    decode_attention_fwd = attention()

    def new(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(shape, device="cuda", dtype=dtype) * 0.02

    up, down = new(HIDDEN, 2 * INTERMEDIATE), new(INTERMEDIATE, HIDDEN)
    to_q, to_out = new(HIDDEN, HEADS * DIM), new(HEADS * DIM, HIDDEN)
    k, v = (new(batch * TOKENS, KV_HEADS, DIM) for _ in "kv")
    hidden = new(batch, HIDDEN)
    indptr = torch.arange(0, batch * TOKENS + 1, TOKENS, dtype=torch.int32, device="cuda")
    indices = torch.randperm(batch * TOKENS, device="cuda")
    splits = torch.full((batch,), SPLITS, dtype=torch.int32, device="cuda")
    out = new(batch, HEADS, DIM)
    logits = new(batch, HEADS, SPLITS, DIM, dtype=torch.float32)
    lse = new(batch, HEADS, SPLITS, dtype=torch.float32)

    def run() -> Any:
        x = hidden
        for _ in range(LAYERS):
            q = (x @ to_q).view(batch, HEADS, DIM)
            decode_attention_fwd(
                q, k, v, out, indptr, indices, logits, lse, splits, SPLITS, 0.06, 1.0, 1.0
            )
            x = x + out.view(batch, -1) @ to_out
            gate, value = (x @ up).chunk(2, dim=-1)
            x = x + (torch.nn.functional.gelu(gate) * value) @ down
            x = x / x.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype)
        return x.sum()

    return run


def measured() -> Iterator[dict[str, Any]]:
    """Median milliseconds of a step, for each batch, eagerly and in a replayed graph."""
    import torch

    for batch in BATCHES:
        run = step(batch)
        for _ in range(3):
            run().item()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()

        def replay(graph: Any = graph, result: Any = result) -> Any:
            graph.replay()
            return result

        for way, call in (("graph", replay), ("eager", run)):
            times = []
            for number in range(STEPS + 10):
                begin = time.perf_counter()
                call().item()
                if number >= 10:
                    times.append(1e3 * (time.perf_counter() - begin))
            yield {"batch": batch, "way": way, "ms": round(statistics.median(times), 5)}


@triton.jit
def read_far(out, address):
    tl.store(out, tl.load(out + address))


def crash() -> dict[str, Any]:
    """Fill 90 % of the memory, and read what is not mapped. The seconds until the exception."""
    import torch

    out = torch.zeros(1, device="cuda", dtype=torch.int32)
    read_far[(1,)](out, 0)
    free, total = torch.cuda.mem_get_info()
    size = free - total // 10
    kept = [torch.ones(256 << 20, dtype=torch.uint8, device="cuda") for _ in range(size >> 28)]
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    begin, said = time.time(), "no exception"
    try:
        read_far[(1,)](out, 1 << 42)
        while time.time() < begin + PATIENCE:  # the first calls behind it may still succeed
            torch.cuda.synchronize()
            out.item()
    except Exception as e:
        said = " ".join(repr(e).split())[:200]
    return {
        "exception": said,
        "memory_used": round(1 - free / total, 4),
        "tensors": len(kept),
        "exception_s": round(time.time() - begin, 2),
    }


def filled(folder: Path) -> dict[str, Any]:
    """What :func:`crash` said, the core dump's bytes, and the seconds of its autopsy."""
    ran = child("crash", env=environment(True, folder))
    try:
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"the crash said nothing: {ran.stderr[-2000:]}") from None
    (core,) = folder.glob("*.nvcudmp")
    begin = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-m", "g4debug", "autopsy", str(core)],
        env=environment(False, folder), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    print(told.stdout[:1500] or told.stderr[-1500:])
    found |= {"core_bytes": core.stat().st_size, "autopsy_s": round(time.monotonic() - begin, 2)}
    return found


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """For each batch and way: the rounds' ratios to "off", their median and their range."""
    lines = ["| batch | way | ms, off | core dumps on | off again |", "|---|---|---|---|---|"]
    for batch in BATCHES:
        for way in ("graph", "eager"):
            mine: dict[str, list[float]] = {v: [] for v in VARIANTS}
            for row in rows:
                if (row["batch"], row["way"]) == (batch, way):
                    mine[row["variant"]].append(row["ms"])
            cells = [f"{statistics.median(mine['off']):.3f}"]
            for variant in ("on", "off again"):
                percent = sorted(
                    100 * (a / b - 1) for a, b in zip(mine[variant], mine["off"], strict=False)
                )
                middle = statistics.median(percent)
                cells.append(f"{middle:+.2f} % ({percent[0]:+.2f} .. {percent[-1]:+.2f})")
            lines.append(f"| {batch} | {way} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        if sys.argv[2] == "crash":
            print(json.dumps(crash()), flush=True)
            os._exit(0)  # the context is dead, and its destructors would abort
        print(json.dumps(list(measured())))
        return 0
    parser = options.parser(__doc__, rounds=6)
    parser.add_argument("--seconds", type=int, default=300, help="start no round after these")
    args = parser.parse_args()
    import torch

    device = torch.cuda.get_device_name()
    file = results.Growing(args.out or results.default("core_dumps", device))
    end, rows = time.monotonic() + args.seconds, []
    for number in range(-1, args.rounds):
        if number > 0 and time.monotonic() > end:
            break
        order = list(VARIANTS)
        random.Random(number).shuffle(order)
        for variant in order:
            with tempfile.TemporaryDirectory() as folder:
                ran = child("steps", env=environment(variant == "on", Path(folder)))
            if ran.returncode:
                raise SystemExit(f"{variant}: {ran.stderr[-3000:]}")
            new = [
                {"round": number, "variant": variant, **row}
                for row in json.loads(ran.stdout.splitlines()[-1])
            ]
            if number >= 0:  # the first round compiles
                file.add(new, device)
                rows += new
            else:
                break
    print("\n".join(compared(rows)))
    with tempfile.TemporaryDirectory() as folder:
        found = filled(Path(folder))
    file.path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
