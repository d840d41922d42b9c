"""Measures mm-batched-encoder and vision-layer: 6 images of 480 x 480 in a request, in three ways.

    python benchmarks/mm_encoder.py --tower E2B|26B-A4B [--rounds 20] [--out FILE.csv]
        [--profile FILE.txt]

It runs SGLang's own Scheduler and Gemma4ForConditionalGeneration in one process, with seeded
weights of the published sizes (the towers are 768 wide with 16 layers, and 1152 wide with 27
layers). The ways take turns:

alone: SGLang's loop over images, and its layers. together: mm-batched-encoder with SGLang's layers.
fused: mm-batched-encoder and vision-layer. Before the first round it is checked that each way runs
the layers that it says, and calls the tower as often as it says, in the encoder and in a prefill.

encoder is the time of get_image_feature for the 6 images. end to end is the time of the whole
prefill of a prompt of 1670 tokens with them: from the scheduler's queue, in which the request
waits alone, to its first token, which has to be the same in the three ways (same token). The
scheduler has SGLang's defaults, but for these: no CUDA graphs, so that all three ways run each
layer's operations one by one; no overlap, because there is nothing beside one request; no prefix
cache and an embedding cache of size 0, so that each prefill encodes its pictures; text attention on
triton; pools of 16384 tokens. All prefills have the same pages. Pictures are not decoded or cut
into patches here, because the tokenizer process does that, in the same way for all. peak is how
many bytes of device memory the encoder allocates.

The relative error compares the embeddings with those of alone. In the CSV, logits_apart is how far
a logit of the first token is at most from alone's, and margin how far alone's two best are from
each other. A margin of more than twice logits_apart leaves no other token. The weights are random,
so margins can be small: another token than alone's is to be read with both.
--profile writes a table for each way with the 30 most costly kernels of the encoder (on a CPU:
operators).

The results of 0.5.12.post1 are older: end to end is of a ModelRunner there, up to the logits.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import in_process, mm_ways, options, results
from measuring.mm_ways import WAYS, Ways

IMAGES, PROMPT = 6, 1670
SIDE, PATCHES = 48, 2520  # a picture has 48 x 48 of at most 2520 patches; the rest is padding
TOWERS = {
    "E2B": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16,
            "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64},
    "26B-A4B": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip
TOKENS = {"image_token_id": 5, "video_token_id": 6, "audio_token_id": 7}


def config(tower: str) -> dict[str, Any]:
    """The config.json of the multimodal model, in which ``head_dim`` is the sliding layers'."""
    from decode_paths import geometries
    from workloads import multimodal

    from g4debug.cpu.geometry import E2B, TINY

    text = {"E2B": E2B, "tiny": TINY}[tower].target_config() if tower != "26B-A4B" else None
    vision = {"model_type": "gemma4_vision", **TOWERS[tower]}
    return multimodal.config(text or geometries()["26B-A4B"], vision, **TOKENS)


def arguments(model: Path, device: str, attention: str | None) -> dict[str, Any]:
    """SGLang's, by their names in 0.5.12.post1; a whole engine starts with them, too."""
    given: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": 16_384,
        "grammar_backend": "none",
        "random_seed": 0,
    }
    if device == "cpu":
        from g4debug.cpu.server import BASE

        return {**BASE, **given, "mm_attention_backend": "triton_attn"}
    given |= {"dtype": "bfloat16", "attention_backend": "triton"}
    return given | {"mm_attention_backend": attention}


def scheduler(model: Path, device: str, attention: str | None) -> Any:
    """A Scheduler with seeded weights, with g4debug's hooks in place as in a server."""
    from harness.arguments import as_named_here
    from served import seeded_weights
    from sglang.srt.plugins import load_plugins

    from g4debug.settings import fix_switch

    for fix in ("mm-batched-encoder", "vision-layer"):
        os.environ[fix_switch(fix)] = "1"
    os.environ["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    seeded_weights.register()
    load_plugins()
    return in_process.scheduler(as_named_here(arguments(model, device, attention)))


def pictures(count: int, side: int, patches: int, device: Any, seed: int) -> list[Any]:
    """MultimodalDataItems as the processor makes them. Each has a hash of its own."""
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    at = torch.full((patches, 2), -1)
    at[: side * side] = torch.stack([x.reshape(-1), y.reshape(-1)], dim=-1)
    items = []
    for i in range(count):
        pixels = torch.rand(1, patches, 768, generator=generator)
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels.to(device))
        item.set("image_position_ids", at[None].to(device))
        item.hash = 1 + seed * 1000 + i
        item.set_pad_value()
        items.append(item)
    return items


def prompt(items: list[Any], side: int, length: int) -> list[int]:
    """A prompt of so many tokens that begins with the pictures. The items get their places."""
    ids, soft = [2], (side // 3) ** 2
    for item in items:
        item.offsets = [(len(ids), len(ids) + soft - 1)]
        ids += [TOKENS["image_token_id"]] * soft
    return ids + [10] * (length - len(ids))


def measure(
    tower: str, device: str, rounds: int, folder: Path, attention: str | None, table: Path | None
) -> tuple[list[dict[str, Any]], str]:
    import torch
    from served.start import device_name

    from g4debug.fixes.paths.mm_batched_encoder import fix as mm_batched_encoder

    (folder / "config.json").write_text(json.dumps(config(tower)))
    # On a CPU, where kernels are interpreted, few and small ones.
    sizes = (IMAGES, SIDE, PATCHES, PROMPT) if device == "cuda" else (2, 6, 45, 60)
    count, side, patches, length = sizes
    prefill = in_process.Prefill(scheduler(folder, device, attention))
    runner = prefill.scheduler.tp_worker.model_runner
    model = runner.model
    for layer in model.vision_tower.encoder.layers:
        # Attention's logits get the size 1: if they are large, a rounding changes the answer.
        layer.self_attn.q_norm.weight.data.fill_(layer.self_attn.head_dim**-0.5)
    ways, cuda = Ways(model), device == "cuda"
    budget = mm_batched_encoder.budget(torch.device(runner.device))

    def seen(seed: int) -> list[Any]:
        return pictures(count, side, patches, runner.device, seed)

    def asked(items: list[Any]) -> Any:
        return in_process.request(prompt(items, side, length), items, TOKENS["image_token_id"])

    def through(items: list[Any]) -> None:
        prefill.ask(asked(items))
        prefill.run()
        prefill.end()

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    rows: list[dict[str, Any]] = []
    slots: list[int] = []
    with torch.no_grad():
        for way in WAYS:
            ways.check(way, "encoder", seen(0), lambda items: model.get_image_feature(items))
            ways.check(way, "prefill", seen(0), through)
            slots = slots or prefill.slots
        for number in range(-2, rounds):  # the first two warm up
            outputs, timed = {}, {}
            for way in WAYS if number % 2 else WAYS[::-1]:
                ways.take(way)
                items = seen(100 + number)
                wait()
                before = torch.cuda.memory_allocated() if cuda else 0
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                begin = time.perf_counter()
                found = model.get_image_feature(items)
                wait()
                encoder = time.perf_counter() - begin
                peak = torch.cuda.max_memory_allocated() - before if cuda else 0
                prefill.ask(asked(items))
                wait()
                begin = time.perf_counter()
                logits = prefill.run()
                wait()
                whole = time.perf_counter() - begin
                outputs[way] = found.float(), logits[0].float().clone(), prefill.end()
                if prefill.slots != slots:
                    raise RuntimeError(f"{way}, round {number}: the prefill has other pages")
                timed[way] = {
                    "tower": tower,
                    "round": number,
                    "way": way,
                    "encoder_s": round(encoder, 6),
                    "end_to_end_s": round(whole, 6),
                    "peak_bytes": peak,
                    "budget_bytes": budget,
                }
            right, best, token = outputs["alone"]
            first, second = best.topk(2).values.tolist()
            for way, row in timed.items():
                error = float((outputs[way][0] - right).norm() / right.norm())
                row |= {
                    "relative_error": f"{error:.2e}",
                    "same_token": outputs[way][2] == token,
                    "logits_apart": f"{float((outputs[way][1] - best).abs().max()):.2e}",
                    "margin": f"{first - second:.2e}",
                }
            rows += timed.values() if number >= 0 else []
        if table:
            mm_ways.profile(ways, seen(1), cuda, table)
    ways.take("fused")
    return rows, device_name()


def main() -> None:
    parser = options.parser(__doc__, "cuda", rounds=20)
    parser.add_argument("--tower", choices=tuple(TOWERS), default="E2B")
    parser.add_argument("--mm-attention-backend", help="default: SGLang's own (fa3 on sm90)")
    parser.add_argument("--profile", type=Path, help="write torch.profiler's tables there")
    args = parser.parse_args()
    if args.device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    with tempfile.TemporaryDirectory(prefix="g4debug-mm-") as folder:
        rows, device = measure(
            args.tower, args.device, args.rounds, Path(folder), args.mm_attention_backend,
            args.profile,
        )  # fmt: skip
    results.write(f"mm_encoder_{args.tower}", rows, device, args.out)
    mm_ways.summarise(rows)


if __name__ == "__main__":
    main()
