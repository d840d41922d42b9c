"""Driven by test_mm_ranks.py: one of two ranks that share a real vision tower, with gloo.

    drive_tp_mm.py RANK PORT BUDGET_KB FAILS

It prints what get_image_feature gives, with the path and by SGLang's own loop, as hexadecimal
sums, and how many images each call of the tower had. FAILS=1: the second layer of this rank's
tower runs out of memory once, in the middle of a pass.
"""

import json
import sys

import torch


def main(rank, port, budget_kb, fails):
    import real_layer
    import releases
    from sglang.srt import server_args as module
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.plugins import load_plugins
    from test_mm_batched_encoder import VISION, image
    from transformers import Gemma4Config

    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.models import tiny_models
    from g4debug.fixes.paths.mm_batched_encoder import batches

    load_plugins()
    from sglang.srt.models.gemma4_mm import Gemma4ForConditionalGeneration

    args = module.ServerArgs(
        model_path=str(tiny_models()[0]), device="cpu", skip_tokenizer_init=True,
        attention_backend="triton", mm_attention_backend="triton_attn", tp_size=2,
    )  # fmt: skip
    releases.publish(args, rank)
    parallel_state.init_distributed_environment(
        world_size=2, rank=rank, local_rank=rank, backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )  # fmt: skip
    groups = parallel_state.initialize_model_parallel  # 0.5.23 reads its size from the arguments
    groups(**releases.accepted(groups, tensor_model_parallel_size=2))
    config = ModelConfig.from_server_args(args)
    initialize_dp_attention(args, **releases.accepted(initialize_dp_attention, model_config=config))
    text = real_layer.config(TINY, pad_token_id=0)
    config = Gemma4Config(text_config=text, vision_config=dict(VISION), audio_config=None)
    model = Gemma4ForConditionalGeneration(config).eval().requires_grad_(False)
    for name, p in [*model.vision_tower.named_parameters(), *model.embed_vision.named_parameters()]:
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
        p.copy_(1 + 0.1 * noise if p.dim() == 1 else noise / p.shape[-1] ** 0.5)

    # Devices of two sizes, as far as the budget goes.
    batches.device_memory = lambda device: (budget_kb << 10) * 20  # of which 5 % are the budget
    calls = []
    real = model.vision_tower.forward

    def forward(pixels, positions):
        calls.append(len(pixels))
        return real(pixels, positions)

    model.vision_tower.forward = forward
    if fails:
        layer = model.vision_tower.encoder.layers[1]

        def out_of_memory(*args, **kwargs):
            handle.remove()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        handle = layer.register_forward_pre_hook(out_of_memory)
    items = [image(4, 4, seed) for seed in range(5)]
    own = type(model).get_image_feature.__wrapped__
    with torch.no_grad():
        found = model.get_image_feature(items)
        together = list(calls)
        calls.clear()
        wanted = own(model, items)
    answer = {
        "rank": rank, "together": together, "alone": list(calls),
        "difference": float((found - wanted).abs().max()), "size": float(wanted.std()),
    }  # fmt: skip
    print("RESULT", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
