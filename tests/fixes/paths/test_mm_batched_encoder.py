"""mm-batched-encoder on a real Gemma4ForConditionalGeneration with a tiny vision tower.

The tower's attention is SGLang's Triton kernel, in Triton's interpreter.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import arguments
import pytest
import real_layer
import torch

from g4debug.cpu.geometry import TINY
from g4debug.fixes.paths.mm_batched_encoder import batches as mm_batches
from g4debug.fixes.paths.mm_batched_encoder import fix as mm_batched_encoder
from g4debug.fixes.paths.mm_batched_encoder.batches import Entry

PATCH = 3 * 4**2  # numbers in a patch
pytestmark = pytest.mark.written_for("mm-batched-encoder")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 64,
    "pooling_kernel_size": 2,
}


@pytest.fixture(scope="module")
def model(_sglang_imported, tmp_path_factory):
    from sglang.srt.models.gemma4_mm import Gemma4ForConditionalGeneration
    from transformers import Gemma4Config, Gemma4VisionConfig

    from g4debug.cpu.models import tiny_models

    with real_layer.one_process(str(tiny_models()[0]), mm_attention_backend="triton_attn"):
        config = Gemma4Config(
            text_config=real_layer.config(TINY, pad_token_id=0),
            vision_config=Gemma4VisionConfig(**VISION),
            audio_config=None,
        )
        made = Gemma4ForConditionalGeneration(config).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for p in [*made.vision_tower.parameters(), *made.embed_vision.parameters()]:
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.1 * noise if p.dim() == 1 else noise / p.shape[-1] ** 0.5)
        yield made


@pytest.fixture
def calls(model, arm, monkeypatch, caplog):
    """Armed; the batch sizes of the tower's calls, and the tokens of the embedder's."""
    seen = SimpleNamespace(tower=[], embedder=[])

    def spy(module, into, size):
        real = module.forward

        def forward(*args, **kwargs):
            into.append(size(*args, **kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, "forward", forward)

    spy(model.vision_tower, seen.tower, lambda pixels, positions: len(pixels))
    spy(model.embed_vision, seen.embedder, lambda inputs_embeds: inputs_embeds.shape[1])
    monkeypatch.setattr(mm_batched_encoder.base, "_said", set())
    caplog.set_level(logging.INFO, "g4debug")
    arm(G4DEBUG_FIX_MM_BATCHED_ENCODER="1")
    return seen


def grid(width, height, seed, frames=None, padded=0):
    """Pixels and positions of a picture of width x height patches, some of them padding."""
    generator = torch.Generator().manual_seed(seed)
    n = width * height + padded
    pixels = torch.rand(*([frames] if frames else []), n, PATCH, generator=generator)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    at = torch.stack([x.reshape(-1), y.reshape(-1)], dim=-1)
    at = torch.cat([at, torch.full((padded, 2), -1)])
    return pixels, at.expand(frames, -1, -1).clone() if frames else at


def item(kind, feature, positions):
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    made = MultimodalDataItem(modality=Modality[kind.upper()], feature=feature)
    made.set(f"{kind}_position_ids", positions)
    return made


def image(*args, **kwargs):
    return item("image", *grid(*args, **kwargs))


def alone(model, kind, items):
    """SGLang's own loop."""
    original = getattr(type(model), f"get_{kind}_feature").__wrapped__
    with torch.no_grad():
        return original(model, items)


def batched(model, kind, items):
    with torch.no_grad():
        return getattr(model, f"get_{kind}_feature")(items)


def same(got, wanted):
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_images_of_one_size_are_one_call(model, calls):
    items = [image(4, 4, seed) for seed in range(5)]
    got = batched(model, "image", items)
    assert calls.tower == [5]
    assert calls.embedder == [20]
    wanted = alone(model, "image", items)
    assert calls.tower[1:] == [1] * 5
    same(got, wanted)
    assert wanted.std() > 0.1


def test_mixed_resolutions_keep_their_order(model, calls):
    """By patch count, not by shape: 4 x 4 and 8 x 2 go together."""
    sizes = [(4, 4), (6, 4), (8, 2), (2, 2), (6, 4), (4, 4)]
    items = [image(*size, seed) for seed, size in enumerate(sizes)]
    got = batched(model, "image", items)
    assert sorted(calls.tower) == [1, 2, 3]
    assert len(calls.embedder) == 1
    same(got, alone(model, "image", items))


def test_it_says_once_that_it_is_on(model, calls, caplog):
    batched(model, "image", [image(4, 4, 1)])  # alone: SGLang's way
    assert not mm_batched_encoder.base._said
    for count in (3, 2):
        batched(model, "image", [image(4, 4, seed) for seed in range(count)] + [image(6, 4, 9)])
    batched(model, "video", [item("video", *grid(4, 4, 1, frames=3))])
    (said,) = [r for r in caplog.records if mm_batched_encoder.ID in r.getMessage()]
    assert said.levelno == logging.INFO
    assert "on: 4 images in 2 passes of the vision tower" in said.getMessage()


def test_padding_patches_give_no_tokens(model, calls):
    items = [image(4, 4, 1, padded=8), image(6, 4, 2), image(2, 6, 3, padded=12)]
    got = batched(model, "image", items)
    assert calls.tower == [3]
    same(got, alone(model, "image", items))
    assert len(got) == 4 + 6 + 3


def test_an_item_of_several_images_and_a_batch_dimension(model, calls):
    (a, at), (b, bt) = grid(4, 4, 1), grid(4, 4, 2)
    items = [
        item("image", [a, b[None]], [at, bt[None]]),
        item("image", torch.stack([b, a]), torch.stack([bt, at])),
    ]
    got = batched(model, "image", items)
    assert calls.tower == [4]
    same(got, alone(model, "image", items))


def test_embeddings_pass_through_in_their_place(model, calls):
    ready = torch.randn(3, TINY.hidden)
    items = [image(4, 4, 1), item("image", ready, None), image(4, 4, 2)]
    got = batched(model, "image", items)
    assert calls.tower == [2]
    assert torch.equal(got[4:7], ready)
    same(got, alone(model, "image", items))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_nothing_gives_nothing(model, calls, kind):
    got = batched(model, kind, [])
    assert got.shape == (0, TINY.hidden)
    assert not calls.tower
    assert not calls.embedder


def test_only_embeddings(model, calls):
    ready = torch.randn(3, TINY.hidden)
    assert torch.equal(batched(model, "image", [item("image", ready, None)] * 2)[3:], ready)
    assert not calls.tower


def test_one_image_goes_sglangs_way(model, calls):
    items = [image(4, 4, 1)]
    assert torch.equal(batched(model, "image", items), alone(model, "image", items))
    assert calls.tower == [1, 1]


def test_frames_of_videos(model, calls):
    first, second = grid(4, 4, 1, frames=3), grid(6, 4, 2, frames=2)
    items = [
        item("video", *first),
        item("video", second[0][None], second[1][None]),  # [videos, frames, patches, ...]
        item("video", *grid(4, 4, 3, frames=1)),
    ]
    got = batched(model, "video", items)
    assert sorted(calls.tower) == [2, 4]
    assert len(calls.embedder) == 1
    same(got, alone(model, "video", items))


def test_the_budget_splits_a_video_too(model, calls, monkeypatch):
    cost = mm_batches.bytes_of_patches(model.config.vision_config, 4)
    monkeypatch.setattr(mm_batched_encoder, "budget", lambda device: 2 * cost(16) + 1)
    items = [item("video", *grid(4, 4, 1, frames=5))]
    got = batched(model, "video", items)
    assert calls.tower == [2, 2, 1]
    assert calls.embedder == [20]
    same(got, alone(model, "video", items))


def test_a_tower_on_vision_layer_takes_less(model, calls, monkeypatch):
    """Neither one-hot nor masks: more images fit into the budget."""
    config = model.config.vision_config
    sglangs, ours = (mm_batches.bytes_of_patches(config, 4, fused)(16) for fused in (False, True))
    assert ours < sglangs
    items = [image(4, 4, seed) for seed in range(5)]
    wanted = alone(model, "image", items)
    calls.tower.clear()
    for part in (model.vision_tower.encoder, model.vision_tower.patch_embedder):
        monkeypatch.setattr(part, "g4debug_vision_layer", True, raising=False)
    monkeypatch.setattr(mm_batched_encoder, "budget", lambda device: 2 * ours + 1)
    same(batched(model, "image", items), wanted)
    assert calls.tower == [2, 2, 1]


def test_an_image_larger_than_the_budget_goes_alone(model, calls, monkeypatch):
    monkeypatch.setattr(mm_batched_encoder, "budget", lambda device: 1)
    items = [image(4, 4, seed) for seed in range(3)]
    got = batched(model, "image", items)
    assert calls.tower == [1, 1, 1]
    same(got, alone(model, "image", items))


def test_passes_hold_one_patch_count_and_the_budget():
    entries = [Entry(torch.empty(n, 3), torch.empty(n, 2)) for n in (4, 9, 4, 4, 9, 100)]
    found = mm_batches.passes(entries, lambda patches: patches, 8)
    assert found == [[0, 2], [3], [1], [4], [5]]
    assert mm_batches.passes([], lambda patches: patches, 8) == []


def test_missing_positions_are_sglangs_error(model, calls):
    items = [image(4, 4, 1), item("image", grid(4, 4, 2)[0], None)]
    with pytest.raises(ValueError, match="no matching image_position_ids"):
        batched(model, "image", items)


def test_out_of_memory_goes_image_by_image(model, calls, monkeypatch, caplog):
    items = [image(4, 4, seed) for seed in range(3)]
    wanted = alone(model, "image", items)

    def fail(*args):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(mm_batches, "encode", fail)
    for _ in range(2):
        assert torch.equal(batched(model, "image", items), wanted)
    assert caplog.text.count("G4DEBUG_MM_ENCODER_PERCENT") == 1
    assert ": on: " not in caplog.text


def test_sdpa_takes_one_image_at_a_time(model, calls, monkeypatch):
    class VisionSdpaAttention:
        pass

    attention = model.vision_tower.encoder.layers[0].self_attn
    monkeypatch.setitem(attention._modules, "qkv_backend", None)
    monkeypatch.setattr(attention, "qkv_backend", None)
    monkeypatch.setitem(vars(attention), "qkv_backend", VisionSdpaAttention())
    assert "sdpa" in mm_batched_encoder.limit(model)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("enable_deterministic_inference", True), ("rl_on_policy_target", "fsdp")],
)
def test_servers_whose_numbers_must_not_depend_on_the_batch(
    model, calls, monkeypatch, caplog, argument, value
):
    items = [image(4, 4, seed) for seed in range(3)]
    arguments.put(monkeypatch, argument, value)
    assert torch.equal(batched(model, "image", items), alone(model, "image", items))
    assert calls.tower == [1] * 6
    assert f"not used: --{argument.replace('_', '-')}" in caplog.text


def test_the_budget_is_a_share_of_the_device(sglang, monkeypatch):
    monkeypatch.setattr(mm_batches, "device_memory", lambda device: 1000)
    assert mm_batched_encoder.budget(torch.device("cpu")) == 50
    monkeypatch.setenv("G4DEBUG_MM_ENCODER_PERCENT", "20")
    assert mm_batched_encoder.budget(torch.device("cpu")) == 200
    monkeypatch.undo()
    assert mm_batches.device_memory(torch.device("cpu")) > 2**28
