"""Measures yoco-fast-prefill: 30 requests of 7000 tokens in and 10 out, with the path on and off.

    python benchmarks/yoco.py --model E2B|E4B [--rounds 5] [--out FILE.csv]
    python benchmarks/yoco.py --model E2B --sweep [--out FILE.csv]

The servers run on one GPU and take turns in changing order. They have triton attention, no radix
cache, CUDA graphs for decode, and the geometry of the published model with seeded weights.

The weights are random, so the best tokens of a prompt are close to each other. So even with the
path off the first token depends on what else is in the chunk. How often that happens is measured,
too.

off is SGLANG_GEMMA4_YOCO=0, and on is =1. With limit no row of a prefill enters the KV-shared
layers. Its answers are wrong, and no such path can be faster, because all other layers remain.

--sweep is about piecewise CUDA graphs, with one prompt of 32 to 8192 tokens at a time and 1 token
out. It compares the graphs with the path off, the path without graphs, and neither. It says from
how many spared rows on the path is the faster one (G4DEBUG_YOCO_EAGER_ROWS).
"""

from __future__ import annotations

import json
import statistics
import tempfile
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


def variants(sweep: bool, base: dict[str, Any]) -> dict[str, Variant]:
    def variant(environment: dict[str, str], engine: dict[str, Any], plugin: str) -> Variant:
        return Variant(environment, base | engine, plugin=plugin, answers="prefill")

    if sweep:
        return {
            "graphs": variant(OFF, {}, "seeded_weights"),
            "off": variant(OFF, EAGER, "seeded_weights"),
            "on": variant(ON, EAGER, "seeded_weights"),
        }
    return {
        "off": variant(OFF, EAGER, "seeded_weights"),
        "on": variant(ON, EAGER, "seeded_weights"),
        "limit": variant(ON, EAGER, "no_cross_decoder"),
    }


def measure(
    name: str, device: str, sweep: bool, rounds: int, count: int, length: int, folder: Path
) -> tuple[list[dict[str, Any]], str]:
    """The rows of the CSV, one for each round, prompt length and variant, and the device."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config(name)))
    base = arguments(model, device, 16_384 if sweep else count * (length + 64))
    lengths = [n for n in LENGTHS if n <= length or device == "cuda"] if sweep else [length]
    batch, tokens = (1, 1) if sweep else (count, 10)
    rows: list[dict[str, Any]] = []
    with all_up(variants(sweep, base), device, folder) as (servers, hello):
        for n in lengths:
            for server in servers.values():  # warm: JIT, allocator
                server.put([[n] * min(batch, 2), tokens, 1, True])
            at = {"model": name, "requests": batch, "input": n, "output": tokens}
            for number, order in in_turns(servers, rounds):
                made = {}
                for key in order:
                    answer = servers[key].put([[n] * batch, tokens, 100 + number, True])
                    made[key] = answer["tokens"]
                    seconds = round(answer["seconds"], 5)
                    rows.append({**at, "round": number, "variant": key, "seconds": seconds})
                rows[-1]["first_tokens_equal"] = equal(made["off"], made["on"])
            if not sweep:  # `made` is of the last round
                alone = servers["off"].put([[n] * batch, tokens, 100 + number, False])["tokens"]
                rows[-1]["first_tokens_equal_off_alone"] = equal(made["off"], alone)
        check(servers)
        return rows, hello["off"]["device"]


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
        same = [r["first_tokens_equal"] for r in at if "first_tokens_equal" in r]
        print(f"first token the same on and off: {sum(same)} of {len(same) * at[0]['requests']}")
        for r in at:
            if (alone := r.get("first_tokens_equal_off_alone")) is not None:
                print(f"and off, in chunks with others and alone: {alone} of {r['requests']}")


def main() -> None:
    parser = options.parser(__doc__, "cuda", rounds=5)
    parser.add_argument("--model", choices=("E2B", "E4B", "tiny"), default="E2B")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--input", type=int, default=7000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="g4debug-yoco-") as folder:
        rows, device = measure(
            args.model, args.device, args.sweep, args.rounds, args.requests, args.input,
            Path(folder),
        )  # fmt: skip
    what = "yoco_sweep" if args.sweep else "yoco"
    results.write(f"{what}_{args.model}", rows, device, args.out)
    summarise(rows)


if __name__ == "__main__":
    main()
