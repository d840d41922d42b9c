"""The three ways that mm_encoder.py compares: how to switch, check, profile and summarise them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring.results import by_round, spread

WAYS = ("alone", "together", "fused")


class Ways:
    """Switches a model between the three ways, and checks that it goes the right one."""

    def __init__(self, model: Any) -> None:
        from g4debug.fixes.paths.vision_layer import fix as vision_layer

        self.model, self.tower = model, model.vision_tower
        if not vision_layer.used(self.tower):
            raise SystemExit("vision-layer is not active; its line in the log says why")
        batched = type(model).get_image_feature
        self.features = {"alone": batched.__wrapped__, "together": batched, "fused": batched}

    def take(self, way: str) -> None:
        from g4debug.fixes.paths.vision_layer import fix as vision_layer

        type(self.model).get_image_feature = self.features[way]
        vision_layer.use(self.tower, way == "fused")

    def passes(self, items: list[Any], fused: bool) -> int:
        """How many calls of the tower pictures of one size need within the budget."""
        from g4debug.fixes.paths.mm_batched_encoder import batches as mm_batches
        from g4debug.fixes.paths.mm_batched_encoder import fix as mm_batched_encoder

        element = self.model.language_model.dtype().itemsize
        config = self.model.config.vision_config
        cost = mm_batches.bytes_of_patches(config, element, fused)(items[0].feature.shape[1])
        each = max(1, mm_batched_encoder.budget(self.tower.device) // cost)
        return -(-len(items) // each)

    def check(
        self, way: str, name: str, items: list[Any], encode: Callable[[list[Any]], Any]
    ) -> None:
        """Raise RuntimeError if encoding the items makes other calls than this way should.

        ``encode`` is the model's own function, or a whole prefill with these pictures, and
        ``name`` is what the error calls it.
        """
        from g4debug.fixes.paths.kernels import vision_qkv

        calls = {"tower": 0, "sglang's layer": 0, "kernel": 0}

        def count(name: str) -> None:
            calls[name] += 1

        real = vision_qkv.vision_qkv

        def launch(*args: Any, **kwargs: Any) -> Any:
            count("kernel")
            return real(*args, **kwargs)

        vision_qkv.vision_qkv = launch
        layers = self.tower.encoder.layers
        fused, each = way == "fused", len(layers)
        towers = len(items) if way == "alone" else self.passes(items, fused)
        hooks = [self.tower.register_forward_hook(lambda *_: count("tower"))]
        hooks += [n.register_forward_hook(lambda *_: count("sglang's layer")) for n in layers]
        try:
            self.take(way)
            encode(items)
        finally:
            vision_qkv.vision_qkv = real
            for hook in hooks:
                hook.remove()
        expected = {
            "tower": towers,
            "sglang's layer": 0 if fused else towers * each,
            "kernel": towers * each if fused else 0,
        }
        if calls != expected:
            raise RuntimeError(f"{way}, {name}: got calls {calls}, expected {expected}")


def profile(ways: Ways, items: list[Any], cuda: bool, out: Path) -> None:
    """Write one table of torch.profiler for each way."""
    import torch
    from torch.profiler import ProfilerActivity

    tables = []
    for way in WAYS:
        ways.take(way)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with torch.profiler.profile(activities=kinds) as found:
            ways.model.get_image_feature(items)
            if cuda:
                torch.cuda.synchronize()
        by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=70)
        tables.append(f"{way}\n{table}\n")
    out.write_text("\n".join(tables))
    print(f"wrote {out.name}")


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print medians, paired speed-ups and errors. SystemExit if a pass took too much memory."""
    budget = rows[0]["budget_bytes"]
    timed = ("encoder_s", "end_to_end_s")
    print("tower     way       encoder ms   end to end ms   peak MiB   rel. error   same token")
    peaks = {}
    for way in WAYS:
        mine = [r for r in rows if r["way"] == way]
        ms = [f"{statistics.median(r[n] for r in mine) * 1000:.2f}" for n in timed]
        peaks[way] = max(r["peak_bytes"] for r in mine)
        error = max(float(r["relative_error"]) for r in mine)
        same = f"{sum(r['same_token'] for r in mine)} of {len(mine)}"
        print(
            f"{mine[0]['tower']:8s}  {way:8s}  {ms[0]:>10s}   {ms[1]:>13s}   "
            f"{peaks[way] / 2**20:8.0f}   {error:10.1e}   {same:>10s}"
        )
    for name in timed:
        rounds = by_round(rows, "way", name)
        for way in WAYS[1:]:
            what = f"{way} over alone, {name.removesuffix('_s').replace('_', ' ')}"
            print(f"speed-up, {what}: {spread([r['alone'] / r[way] for r in rounds])}")
    for row in rows:
        if not row["same_token"]:
            print(
                f"round {row['round']}, {row['way']}: another first token; a logit is up to "
                f"{row['logits_apart']} from alone's, whose two best are {row['margin']} apart"
            )
    print(f"budget {budget / 2**20:.0f} MiB")
    over = [way for way in WAYS[1:] if peaks[way] > budget]
    if over:
        raise SystemExit(f"the encoder took more than the budget: {', '.join(over)}")
