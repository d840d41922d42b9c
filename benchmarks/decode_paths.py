"""Measures the decode time per output token with all performance paths on, and off.

    python benchmarks/decode_paths.py --model E4B|26B-A4B [--rounds 7] [--engine JSON] [--out CSV]

Two servers run on one GPU with the same arguments and the same seeded weights, with CUDA graphs and
without speculative decoding. They take turns in changing order. There are 500 tokens in and 200
out, in batches of 1, 8 and 64; the time for one token is subtracted from that for 200. "off" sets
the switch of each path to 0. Fixes are on in both. If no path is active in the decode of "on",
there is nothing to compare, and it ends with an error: so it is for 26B-A4B on 0.5.23. head_dim of
the full layers is 256 instead of the models' 512, because sm90's decode kernel takes only that.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from measuring import options, results
from measuring.servers import Variant, all_up, in_turns

BATCHES = (1, 8, 64)
TOKENS = 200


def geometries() -> dict[str, dict[str, Any]]:
    """The config.json of each model. All numbers but head_dim are the published ones."""
    from g4debug.cpu.geometry import E4B_256

    e4b = E4B_256.target_config() | {"tie_word_embeddings": True}
    period = ["sliding_attention"] * 5 + ["full_attention"]
    moe = e4b | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "layer_types": period * 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "swa_num_key_value_heads": 8,
        "sliding_window": 1024,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }
    return {"E4B": e4b, "26B-A4B": moe}


def paths() -> list[str]:
    """The performance paths that were written for this SGLang."""
    from g4debug import discovery

    names = discovery.names("fix")
    found = {n: discovery.load("fix", n) for n in names}
    return [n for n, path in found.items() if path.eligible and path.is_for_this_release]


def switched(on: bool) -> dict[str, str]:
    """The variables that switch all of these paths on, or off."""
    from g4debug.settings import fix_switch

    return {fix_switch(path): str(int(on)) for path in paths()}


def active(log: str) -> list[str]:
    """The paths that a server's log says are active in the layers of a decode.

    Raises SystemExit if there are none: then the server is the same as the one without paths.
    """
    found = sorted(set(re.findall(r"g4debug: ([a-z0-9-]+): active\b", log)))
    if not found:
        said = [line[-200:] for line in log.splitlines() if ": not used: " in line]
        raise SystemExit(
            "no performance path is active in the decode of the server with paths, so it is the "
            "same as the one without. " + ("Its log says:\n" + "\n".join(said) if said else "")
        )
    return found


def engine(model: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    from harness.workload import without_mtp

    return {
        "model_path": str(model),
        "load_format": "dummy",
        **without_mtp(),
        # Both pools hold 64 requests. Two servers of 26B-A4B just fit on a H200.
        "max_total_tokens": 64 * 768,
        "swa_full_tokens_ratio": 1.0,
        "mem_fraction_static": 0.92,
        "disable_overlap_schedule": False,
        "decode_log_interval": 40,
        "log_level": "info",
        **overrides,
    }


def measure(name: str, rounds: int, overrides: dict[str, Any], folder: Path) -> Any:
    """The rows of the CSV, the device's name, and the paths that are active on the one server."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(geometries()[name]))
    arguments, plugin = engine(model, overrides), "seeded_weights"
    variants = {
        "off": Variant(switched(False), arguments, plugin=plugin),
        "on": Variant(switched(True), arguments, plugin=plugin),
    }
    rows = []
    with all_up(variants, "cuda", folder) as (servers, hello):
        for batch in BATCHES:
            for server in servers.values():  # warm: JIT, graphs of this batch size
                server.ask(batch, 40)
            log = Path(servers["on"].log.name).read_text(errors="replace")
            names = active(log)
            for number, order in in_turns(servers, rounds):
                for key in order:
                    ms, _ = servers[key].ms_per_token(batch, TOKENS)
                    at = {"model": name, "round": number, "batch": batch, "paths": key}
                    rows.append(at | {"ms_per_token": round(ms, 4)})
        return rows, hello["on"]["device"], names


def summarise(rows: list[dict[str, Any]]) -> None:
    print("model     batch   off ms/token   on ms/token   on / off (range)")
    for batch in dict.fromkeys(r["batch"] for r in rows):
        mine = [r for r in rows if r["batch"] == batch]
        rounds = results.by_round(mine, "paths", "ms_per_token")
        off, on = (statistics.median(r[k] for r in rounds) for k in ("off", "on"))
        ratios = [r["on"] / r["off"] for r in rounds]
        print(
            f"{mine[0]['model']:9s} {batch:4d}   {off:12.3f}   {on:11.3f}   "
            f"{results.spread(ratios)}"
        )


def main() -> None:
    parser = options.parser(__doc__, rounds=7)
    parser.add_argument("--model", choices=("E4B", "26B-A4B"), default="E4B")
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of sgl.Engine")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this measures a server's decode and needs a CUDA device")
    with tempfile.TemporaryDirectory(prefix="g4debug-decode-") as folder:
        rows, device, names = measure(args.model, args.rounds, args.engine, Path(folder))
    stem = f"decode_paths_{args.model}"
    results.write(stem, rows, device, args.out, paths=paths(), active=names, engine=args.engine)
    print(f"active in decode: {', '.join(names)}")
    summarise(rows)


if __name__ == "__main__":
    main()
