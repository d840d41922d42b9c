"""Measures yoco-fast-prefill: 30 requests of 7000 tokens in and 10 out, with the path on and off.

    python benchmarks/yoco.py --model E2B|E4B [--seconds 600] [--also PYTHON] [--out FILE.csv]
    python benchmarks/yoco.py --model E2B --sweep [--out FILE.csv]

It runs on the SGLang of this Python, and then on that of each Python after --also. Each release has
its own CSV, with its name in it.

The servers run on one GPU and take turns in changing order. They have triton attention, no radix
cache, and the geometry of the published model with seeded weights. All else is SGLang's default,
also whether a prefill has CUDA graphs (from 0.5.21 on it has none: fix shared-kv-graphs). --only
names the servers: with E4B three do not fit into 80 GB.

The weights are random, so the best tokens of a prompt are close to each other. So even with the
path off the first token depends on what else is in the chunk. How often that happens is measured,
too.

off is SGLang as it is (SGLANG_GEMMA4_YOCO=0), and on is the same with the path (=1). With limit no
row of a prefill enters the KV-shared layers. Its answers are wrong, and no such path can be faster,
because all other layers remain.

--sweep is about CUDA graphs of a prefill, with one prompt of 32 to 8192 tokens at a time and 1
token out. It compares the graphs with the path off, the path without graphs, and neither. It says
from how many spared rows on the path is the faster one (G4DEBUG_YOCO_EAGER_ROWS).

--traces lets SGLang's profiler look at each server before the first round, while it answers four
prompts, and puts FOLDER/<variant>.trace.json.gz there.

The rows are written as they come. After --seconds, the start of the servers included, it ends with
those that there are; each release has that long.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import options, results
from measuring.servers import Server, Variant, all_up, in_turns

OFF, ON = {"SGLANG_GEMMA4_YOCO": "0"}, {"SGLANG_GEMMA4_YOCO": "1"}
EAGER = {"disable_piecewise_cuda_graph": True}
LENGTHS = (32, 128, 512, 1024, 2048, 4096, 8192)


def config(name: str) -> dict[str, Any]:
    """A config.json with the published sizes. E2B's KV-shared layers have an MLP twice as wide."""
    from g4debug.cpu.geometry import E2B, E4B_256, TINY

    geometry = {"E2B": E2B, "E4B": replace(E4B_256, head_dim=512), "tiny": TINY}[name]
    wide = {"use_double_wide_mlp": name == "E2B", "tie_word_embeddings": True}
    return geometry.target_config() | wide


def arguments(model: Path, device: str, tokens: int) -> dict[str, Any]:
    common = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "disable_radix_cache": True,
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "info",
        "max_total_tokens": tokens,
    }
    if device == "cpu":
        from g4debug.cpu.server import BASE

        return {**BASE, **common}
    return common | {
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "context_length": 16_384,
        "chunked_prefill_size": 8192,
        "max_running_requests": 32,
        "cuda_graph_max_bs": 32,
        "mem_fraction_static": 0.85,
    }


def variants(sweep: bool, base: dict[str, Any], only: list[str]) -> dict[str, Variant]:
    def variant(environment: dict[str, str], engine: dict[str, Any], plugin: str) -> Variant:
        return Variant(environment, base | engine, plugin=plugin, answers="prefill")

    if sweep:
        return {
            "graphs": variant(OFF, {}, "seeded_weights"),
            "off": variant(OFF, EAGER, "seeded_weights"),
            "on": variant(ON, EAGER, "seeded_weights"),
        }
    made = {
        "off": variant(OFF, {}, "seeded_weights"),
        "on": variant(ON, {}, "seeded_weights"),
        "limit": variant(ON, {}, "no_cross_decoder"),
    }
    return {name: made[name] for name in only}


class TimeIsUpError(Exception):
    pass


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """After so many seconds, leave what is inside; it may be in the middle of a request."""

    def ring(*args: Any) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    except TimeIsUpError:
        print(f"{seconds} s are over: it ends with the rounds that there are", flush=True)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(args: Any, folder: Path) -> list[dict[str, Any]]:
    """The rows of the CSV, one for each whole round, prompt length and variant."""
    name, device, sweep, length = args.model, args.device, args.sweep, args.input
    count = args.requests
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config(name)))
    base = arguments(model, device, 16_384 if sweep else count * (length + 64))
    lengths = [n for n in LENGTHS if n <= length or device == "cuda"] if sweep else [length]
    batch, tokens = (1, 1) if sweep else (count, 10)
    rows: list[dict[str, Any]] = []
    chosen = variants(sweep, base, args.only)
    with at_most(args.seconds), all_up(chosen, device, folder) as (servers, hello):
        about = hello["off"]
        what = "yoco_sweep" if sweep else "yoco"
        out = args.out or results.default(f"{what}_{name}", about["device"])
        growing = results.Growing(out)
        for n in lengths:
            for server in servers.values():  # warm: JIT, allocator
                server.put([[n] * min(batch, 2), tokens, 1, True])
            if args.traces and not sweep:
                for server in servers.values():
                    to = args.traces / f"{server.name}.trace.json.gz"
                    server.trace([[n] * min(batch, 4), 2, 7, True], to)
            at = {"model": name, "requests": batch, "input": n, "output": tokens}
            for number, order in in_turns(servers, args.rounds):
                made, new = {}, []
                for key in order:
                    answer = servers[key].put([[n] * batch, tokens, 100 + number, True])
                    made[key] = answer["tokens"]
                    seconds = round(answer["seconds"], 5)
                    new.append({**at, "round": number, "variant": key, "seconds": seconds})
                same = equal(made["off"], made["on"])
                for row in new:
                    row |= {"first_tokens_equal": "", "first_tokens_equal_off_alone": ""}
                new[-1]["first_tokens_equal"] = same
                if not sweep and number == 0:
                    whole = [[n] * batch, tokens, 100, False]
                    alone = servers["off"].put(whole)["tokens"]
                    new[-1]["first_tokens_equal_off_alone"] = equal(made["off"], alone)
                check(servers)
                growing.add(new, about["device"])
                rows += new
    return rows


def equal(a: list[list[int]], b: list[list[int]]) -> int:
    """How many answers have the same first token."""
    return sum(x[0] == y[0] for x, y in zip(a, b, strict=True))


def check(servers: dict[str, Server]) -> None:
    """Check that the path ran where it should, and only there."""
    for key, server in servers.items():
        server.log.flush()
        ran = "yoco-fast-prefill: on" in Path(server.log.name).read_text(errors="replace")
        if ran != (key in ("on", "limit")):
            raise SystemExit(f"{key}: the path {'ran' if ran else 'did not run'}; log: see above")


def summarise(rows: list[dict[str, Any]]) -> None:
    names = sorted({r["variant"] for r in rows}, key=("graphs", "off", "on", "limit").index)
    print("model  input  variant   median s   speed-up over", names[0], "(range)")
    for n in dict.fromkeys(r["input"] for r in rows):
        at = [r for r in rows if r["input"] == n]
        times = results.by_round(at, "variant", "seconds")
        for name in names:
            ratios = [t[names[0]] / t[name] for t in times]
            print(
                f"{at[0]['model']:5s}  {n:5d}  {name:8s}  "
                f"{statistics.median(t[name] for t in times):8.4f}   {results.spread(ratios)}"
            )
        if "limit" in names:
            share = statistics.median(t["limit"] / t["off"] for t in times)
            reached = statistics.median(t["limit"] / t["on"] for t in times)
            print(
                f"limit: {share:.1%} of the time off is left; on is at {reached:.1%} of the limit"
            )
        same = [r["first_tokens_equal"] for r in at if r["first_tokens_equal"] != ""]
        print(f"first token the same on and off: {sum(same)} of {len(same) * at[0]['requests']}")
        for r in at:
            if (alone := r["first_tokens_equal_off_alone"]) != "":
                print(f"and off, in chunks with others and alone: {alone} of {r['requests']}")


def main() -> None:
    parser = options.parser(__doc__, "cuda", rounds=5)
    parser.add_argument("--model", choices=("E2B", "E4B", "tiny"), default="E2B")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--input", type=int, default=7000)
    parser.add_argument("--seconds", type=int, default=1800, help="that a release may take")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=["off", "on", "limit"],
        help="the servers, off and on among them (default: off,on,limit)",
    )  # fmt: skip
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--also", action="append", default=[], metavar="PYTHON",
        help="then measure with this Python of another SGLang, too",
    )  # fmt: skip
    args = parser.parse_args()
    if not {"off", "on"} <= set(args.only) <= {"off", "on", "limit"}:
        parser.error(f"--only: got {args.only}, expected off,on or off,on,limit")
    if args.also and args.out:
        parser.error("--out names one file, and with --also there is one for each release")
    with tempfile.TemporaryDirectory(prefix="g4debug-yoco-") as folder:
        rows = measure(args, Path(folder))
    if rows:
        summarise(rows)
    given = [x for i, x in enumerate(sys.argv) if "--also" not in (x, sys.argv[i - 1])]
    given = [x for x in given if not x.startswith("--also=")]
    ended = [subprocess.run([python, *given], check=False).returncode for python in args.also]
    if not rows or any(ended):
        raise SystemExit("not every release was measured; see above")


if __name__ == "__main__":
    main()
