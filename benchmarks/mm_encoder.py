"""Measures mm-batched-encoder and vision-layer: 6 images of 480 x 480 in a request, in three ways.

    python benchmarks/mm_encoder.py --tower E2B|26B-A4B [--rounds 20] [--out FILE.csv]
        [--profile FILE.txt]

It runs SGLang's own ModelRunner and Gemma4ForConditionalGeneration in one process, with seeded
weights of the published sizes (the towers are 768 wide with 16 layers, and 1152 wide with 27
layers). The ways take turns:

alone: SGLang's loop over images, and its layers. together: mm-batched-encoder with SGLang's layers.
fused: mm-batched-encoder and vision-layer. Before the first round it is checked that each way runs
the layers that it says, and calls the tower as often as it says.

encoder is the time of get_image_feature for the 6 images. end to end is the time of the whole
prefill of a prompt of 1670 tokens with them, up to the logits; it is measured up to 0.5.13, whose
scheduler still makes a batch that a ModelRunner takes. Pictures are not decoded or cut into
patches here, because the tokenizer process does that, in the same way for all. peak is how many
bytes of device memory the encoder allocates. The relative
error compares the embeddings with those of alone. --profile writes a table for each way with
the 30 most costly kernels of the encoder (on a CPU: operators).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
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


def runner(model: Path, device: str, attention: str | None) -> Any:
    """A ModelRunner of the model, with g4debug's hooks in place as in a server."""
    from harness.arguments import as_named_here
    from served import seeded_weights
    from sglang.srt.plugins import load_plugins

    from g4debug.settings import fix_switch

    for fix in ("mm-batched-encoder", "vision-layer"):
        os.environ[fix_switch(fix)] = "1"
    seeded_weights.register()
    load_plugins()
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
        "max_total_tokens": 16_384,
        "grammar_backend": "none",
        "random_seed": 0,
    }
    if device == "cpu":
        from g4debug.cpu.server import BASE

        arguments = {**BASE, **arguments, "mm_attention_backend": "triton_attn"}
    else:
        arguments |= {"dtype": "bfloat16", "attention_backend": "triton"}
        arguments |= {"mm_attention_backend": attention}
    made = in_process.model_runner(as_named_here(arguments), device)
    for layer in made.model.vision_tower.encoder.layers:
        # Attention's logits get the size 1: if they are large, a rounding changes the answer.
        layer.self_attn.q_norm.weight.data.fill_(layer.self_attn.head_dim**-0.5)
    return made


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


class Prefill:
    """Prefills a prompt with pictures again and again, in the same pages and with other hashes."""

    def __init__(self, runner: Any, side: int, patches: int, length: int) -> None:
        self.runner, self.side, self.patches, self.length = runner, side, patches, length
        self.soft = (side // 3) ** 2

    def batch(self, items: list[Any]) -> Any:
        import torch
        from sglang.srt.managers.schedule_batch import MultimodalInputs, Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = self.runner
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        ids: list[int] = [2]
        for item in items:
            item.offsets = [(len(ids), len(ids) + self.soft - 1)]
            ids += [item.pad_value] * self.soft
        ids += [10] * (self.length - len(ids))
        request = Req("r", "", ids, SamplingParams(temperature=0, max_new_tokens=1))
        request.multimodal_inputs = MultimodalInputs(mm_items=items)
        request.multimodal_inputs.im_token_id = TOKENS["image_token_id"]
        request.prefix_indices = torch.empty(0, dtype=torch.int64)
        request.fill_ids = ids
        request.logprob_start_len = -1
        request.set_extend_input_len(len(ids))
        tree = SimpleNamespace(
            page_size=runner.server_args.page_size, device=runner.device,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            is_chunk_cache=lambda: True, is_tree_cache=lambda: False,
            supports_swa=lambda: False, supports_mamba=lambda: False, evict=lambda *a: None,
        )  # fmt: skip
        batch = ScheduleBatch.init_new(
            reqs=[request], req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator, tree_cache=tree,
            model_config=runner.model_config, enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )  # fmt: skip
        batch.prepare_for_extend()
        return batch.get_model_worker_batch()

    def run(self, items: list[Any]) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        batch = self.batch(items)
        forward_batch = ForwardBatch.init_new(batch, self.runner)
        return self.runner.forward(forward_batch).logits_output.next_token_logits


def measure(
    tower: str, device: str, rounds: int, folder: Path, attention: str | None, table: Path | None
) -> tuple[list[dict[str, Any]], str]:
    import torch
    from served.start import device_name
    from sglang.srt.managers.mm_utils import init_mm_embedding_cache
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from g4debug.fixes.paths.mm_batched_encoder import fix as mm_batched_encoder

    (folder / "config.json").write_text(json.dumps(config(tower)))
    made = runner(folder, device, attention)
    init_mm_embedding_cache(0)
    side, patches, length = (SIDE, PATCHES, PROMPT) if device == "cuda" else (6, 45, 60)
    whole_model = hasattr(ScheduleBatch, "get_model_worker_batch")
    prefill = Prefill(made, side, patches, length) if whole_model else None
    model = made.model
    ways, cuda = Ways(model), device == "cuda"
    budget = mm_batched_encoder.budget(torch.device(made.device))

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for way in WAYS:
            ways.check(way, pictures(IMAGES, side, patches, made.device, 0))
        for number in range(-2, rounds):  # the first two warm up
            outputs, timed = {}, {}
            for way in WAYS if number % 2 else WAYS[::-1]:
                ways.take(way)
                seed = 100 + number  # the embedding cache has size 0
                items = pictures(IMAGES, side, patches, made.device, seed)
                wait()
                before = torch.cuda.memory_allocated() if cuda else 0
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                begin = time.perf_counter()
                found = model.get_image_feature(items)
                wait()
                encoder = time.perf_counter() - begin
                peak = torch.cuda.max_memory_allocated() - before if cuda else 0
                begin = time.perf_counter()
                logits = None if prefill is None else prefill.run(items)
                wait()
                whole = time.perf_counter() - begin
                outputs[way] = found.float(), None if logits is None else logits.argmax(-1)
                timed[way] = {
                    "tower": tower,
                    "round": number,
                    "way": way,
                    "encoder_s": round(encoder, 6),
                    "end_to_end_s": round(whole, 6) if prefill is not None else "",
                    "peak_bytes": peak,
                    "budget_bytes": budget,
                }
            right, token = outputs["alone"]
            for way, row in timed.items():
                error = float((outputs[way][0] - right).norm() / right.norm())
                row |= {
                    "relative_error": f"{error:.2e}",
                    "same_token": "" if token is None else torch.equal(outputs[way][1], token),
                }
            rows += timed.values() if number >= 0 else []
        if table:
            mm_ways.profile(ways, pictures(IMAGES, side, patches, made.device, 1), cuda, table)
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
