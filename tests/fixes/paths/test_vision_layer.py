"""vision-layer in SGLang's real vision tower, tiny and float32, on and off.

On the CPU it runs only where it is forced on: its kernels, and the tower's attention, are then
Triton's interpreter's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from types import SimpleNamespace

import arguments
import pytest
import real_layer
import real_tower
import torch

from g4debug.cpu.geometry import TINY
from g4debug.fixes.base import Fix
from g4debug.fixes.paths import base
from g4debug.fixes.paths.mm_batched_encoder import batches as mm_batches
from g4debug.fixes.paths.vision_layer import fix as vision_layer
from g4debug.fixes.paths.vision_layer import layer as vision_layers

pytestmark = [
    pytest.mark.written_for("vision-layer"),
    pytest.mark.once("what it tests is the same code on every release"),
]
SWITCH = "G4DEBUG_FIX_VISION_LAYER"
LAYERS, PATCH = 2, 3 * 4**2
VISION = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 64,
    "pooling_kernel_size": 2,
}
KERNELS = {"vision_qkv": 1, "clipped_gelu_mul": 1, "clipped_norm_add": 2}  # of each layer


@pytest.fixture(scope="module")
def process(_sglang_imported, tmp_path_factory):
    from g4debug.cpu.models import write

    target, _ = write(TINY, tmp_path_factory.mktemp("models") / "tiny")
    with (
        real_layer.one_process(str(target), mm_attention_backend="triton_attn"),
        torch.no_grad(),
    ):
        yield


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched."""
    modules = (getattr(vision_layers, name) for name in KERNELS)
    return real_layer.count_launches(monkeypatch, modules)


def tower(finite=False, **other):
    """Seeded; a scalar that is not 1. finite: with the bounds of a checkpoint, narrow enough to
    bite."""
    made = real_tower.tower(VISION | other, 0.3 if finite else None)
    for layer in made.encoder.layers:
        layer.layer_scalar.fill_(0.75)
    return made


def picture(width=4, height=4, padded=0, batch=1):
    """Pixels [batch, patches, PATCH] and positions [batch, patches, 2]."""
    n = width * height + padded
    pixels = torch.rand(batch, n, PATCH, generator=torch.Generator().manual_seed(n))
    return pixels, real_tower.positions(width, height, padded).expand(batch, -1, -1).clone()


def same(got, wanted):
    (pooled, valid), (right, right_valid) = got, wanted
    assert torch.equal(valid, right_valid)
    assert right.std() > 0.1
    # float32 on both sides; the sums are in another order, which one depends on the processor. So
    # how far a value may be off is measured by the largest one: near 0, large terms cancel.
    largest = float(right.abs().max())
    assert 1 < largest < 30
    torch.testing.assert_close(pooled, right, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize(
    "finite",
    [
        pytest.param(False, id="no bounds", marks=pytest.mark.long("a tower for each")),
        pytest.param(True, id="finite bounds"),
    ],
)
@pytest.mark.parametrize(
    "shape", [{}, {"padded": 4}, {"width": 6, "batch": 2}], ids=["plain", "padded", "batch"]
)
def test_the_tower_computes_the_same(process, arm, launches, finite, shape):
    own_tower = tower(finite)
    own = own_tower(*picture(**shape))
    assert not launches
    arm(**{SWITCH: "1"})
    same(tower(finite)(*picture(**shape)), own)
    assert launches == {name: LAYERS * n for name, n in KERNELS.items()}
    if finite:  # they bite
        free = tower()(*picture(**shape))[0]
        assert (free - own[0]).abs().max() > 0.1


def test_float16_is_as_near_to_float32_as_sglangs(process, arm):
    """Each rounds elsewhere, so that they differ from each other; the truth is float32."""
    pixels, at = picture(width=8, height=8)
    arm(**{SWITCH: "1"})
    own, ours, truth = tower(), tower(), tower()
    for made in (own, ours):
        made.to(torch.float16)
    for right, rounded in zip(truth.parameters(), own.parameters(), strict=True):
        right.copy_(rounded)
    for made, on in ((own, False), (ours, True), (truth, False)):
        vision_layer.use(made, on)
    wide = pixels.half()
    right = truth(wide.float(), at)[0]
    theirs, mine = (
        (made(wide, at)[0].float() - right).norm() / right.norm() for made in (own, ours)
    )
    print(f"from float32: SGLang {theirs:.2e}, ours {mine:.2e}")
    assert 0 < mine < 1.1 * theirs


def test_the_layers_of_sglang_are_not_called_and_its_gemms_are(process, arm, monkeypatch):
    arm(**{SWITCH: "1"})
    made, called = tower(), []
    for name, module in made.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    made(*picture())
    for number in range(LAYERS):
        layer = f"encoder.layers.{number}"
        assert layer not in called
        gemms = ("self_attn.qkv.qkv_proj", "self_attn.o_proj.linear", "mlp.gate_up.gate_up_proj",
                 "mlp.down_proj.linear")  # fmt: skip
        assert [called.count(f"{layer}.{g}") for g in gemms] == [1] * 4


def test_a_bound_that_is_changed_later_is_seen(process, arm):
    """A weight update writes into the buffers."""
    arm(**{SWITCH: "1"})
    made = [tower(), tower()]
    vision_layer.use(made[0], False)
    assert [vision_layer.used(t) for t in made] == [False, True]
    before = [t(*picture()) for t in made]
    for t in made:
        for name, buffer in t.named_buffers():
            if name.endswith(("_min", "_max")):
                buffer.copy_(torch.tensor(-0.4 if name.endswith("_min") else 0.5))
        t.encoder.layers[1].layer_scalar.fill_(0.5)
    after = [t(*picture()) for t in made]
    same(after[1], after[0])
    assert (after[1][0] - before[1][0]).abs().max() > 0.1


@pytest.mark.parametrize(
    "environment",
    [{}, {"G4DEBUG_FIXES": "all"}, {SWITCH: "0"}],
    ids=["nobody asked", "all, on a CPU", "kill switch"],
)
def test_a_server_without_it_is_sglangs_own(process, arm, launches, environment):
    own = tower()(*picture())
    arm(**environment)
    made = tower()
    assert not vision_layer.used(made)
    for got, right in zip(made(*picture()), own, strict=True):
        assert torch.equal(got, right)
    assert not launches


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("enable_deterministic_inference", True),
        ("rl_on_policy_target", "fsdp"),
        ("enable_torch_compile", True),
        ("debug_tensor_dump_output_folder", "somewhere"),
    ],
)
def test_servers_that_refuse(process, arm, launches, monkeypatch, caplog, argument, value):
    own = tower()(*picture())
    arm(**{SWITCH: "1"})
    monkeypatch.setattr(base, "_said", set())
    arguments.put(monkeypatch, argument, value)
    with caplog.at_level(logging.INFO, "g4debug"):
        made = tower()
    assert torch.equal(made(*picture())[0], own[0])
    assert not launches
    (text,) = caplog.messages
    assert text.startswith(f"g4debug: vision-layer: not used: --{argument.replace('_', '-')}")


def test_it_says_that_it_is_active(process, arm, monkeypatch, caplog):
    arm(**{SWITCH: "1"})
    monkeypatch.setattr(base, "_said", set())
    with caplog.at_level(logging.INFO, "g4debug"):
        tower()
    assert caplog.messages == ["g4debug: vision-layer: active (first: the vision tower)"]


def test_an_attention_that_reads_the_mask_is_sglangs(process, arm, launches, monkeypatch, caplog):
    """sdpa: padding patches are masked there, so that the numbers would be others."""
    from sglang.srt.models import gemma4_vision

    if hasattr(gemma4_vision, "get_mm"):  # from 0.5.23 on
        chosen = SimpleNamespace(mm_attention_backend="sdpa")
        monkeypatch.setattr(gemma4_vision, "get_mm", lambda: chosen)
    else:
        arguments.put(monkeypatch, "mm_attention_backend", "sdpa")
    own = tower()(*picture(padded=4))
    arm(**{SWITCH: "1"})
    monkeypatch.setattr(base, "_said", set())
    with caplog.at_level(logging.INFO, "g4debug"):
        made = tower()
    assert torch.equal(made(*picture(padded=4))[0], own[0])
    assert not launches
    assert "not used: VisionSdpaAttention may read a mask" in caplog.text


def test_the_mask_makes_no_difference_to_the_attention_that_is_taken(process, monkeypatch):
    """What this path relies on, seen in SGLang's own layers."""
    made = tower()
    own = made(*picture(padded=4))[0]
    layers, masks = made.encoder.layers, []
    for layer in layers:
        real = layer.self_attn.qkv_backend.forward

        def without(*args, real=real, attention_mask, **kwargs):
            masks.append(attention_mask)
            return real(*args, attention_mask=None, **kwargs)

        monkeypatch.setattr(layer.self_attn.qkv_backend, "forward", without)
    assert torch.equal(made(*picture(padded=4))[0], own)
    assert [m.shape for m in masks] == [(1, 1, 20, 20)] * LAYERS
    assert not any(m.all() for m in masks)


def test_no_mask_is_built(process, arm, monkeypatch):
    arm(**{SWITCH: "1"})
    made, seen = tower(), []
    attention = made.encoder.layers[0].self_attn.qkv_backend
    real = attention.forward

    def spy(**kwargs):
        seen.append({k: v for k, v in kwargs.items() if k not in "qkv"})
        assert all(kwargs[n].is_contiguous() for n in "qkv")
        return real(**kwargs)

    monkeypatch.setattr(attention, "forward", spy)
    made(*picture(batch=2))
    assert seen == [
        {"cu_seqlens": None, "bsz": 2, "seq_len": 16, "attention_mask": None, "softmax_scale": 1.0}
    ]


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("input_layernorm", "scale_shift", 1.0),
        ("post_attention_layernorm", "scale_shift", 1.0),
        ("pre_feedforward_layernorm", "scale_shift", 1.0),
        ("post_feedforward_layernorm", "scale_shift", 1.0),
        ("self_attn.q_norm", "scale_shift", 1.0),
        ("self_attn.k_norm", "eps", 1e-3),
        ("self_attn.v_norm", "with_scale", True),
        ("self_attn", "head_dim", 18),
    ],
)
def test_layers_that_are_not_its_own(process, name, attribute, value):
    made = tower()
    assert vision_layer.limit(made) == ""
    setattr(made.encoder.layers[1].get_submodule(name), attribute, value)
    assert vision_layer.limit(made).startswith("layer 1: ")
    assert "expected" in vision_layer.limit(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_are_looked_up_bit_for_bit(process, arm, dtype):
    """SGLang's one-hot matrix times the table, which is exact: each sum has one term."""
    arm(**{SWITCH: "1"})
    embedder = tower().patch_embedder.to(dtype)
    generator = torch.Generator().manual_seed(1)
    at = torch.randint(0, VISION["position_embedding_size"], (2, 50, 2), generator=generator)
    at[0, 40:] = -1
    at[1, 3] = torch.tensor([-1, 5])  # half a position: SGLang takes 0 for the other half
    padding = (at == -1).all(dim=-1)
    own = type(embedder)._position_embeddings.__wrapped__(embedder, at, padding)
    got = embedder._position_embeddings(at, padding)
    assert torch.equal(got, own)
    assert got.dtype == own.dtype == dtype
    assert not got[0, 40:].any()
    assert got[1, 3].any()


def test_a_position_beyond_the_table_is_an_error(process, arm):
    arm(**{SWITCH: "1"})
    embedder = tower().patch_embedder
    at = torch.full((1, 2, 2), VISION["position_embedding_size"])
    none = torch.zeros(1, 2, dtype=torch.bool)
    with pytest.raises(RuntimeError):
        type(embedder)._position_embeddings.__wrapped__(embedder, at, none)
    with pytest.raises(IndexError):
        embedder._position_embeddings(at, none)


@contextlib.contextmanager
def frozen_heap():
    """Garbage collection does not look through the existing objects again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("ours", [False, True], ids=["sglang", "vision-layer"])
@pytest.mark.parametrize(
    ("width", "batch"), [(4, 1), pytest.param(8, 3, marks=pytest.mark.long("a larger one"))]
)
def test_the_budget_of_a_pass_is_an_upper_bound(process, arm, monkeypatch, ours, width, batch):
    """What torch allocates and frees while the tower runs, against mm-batched-encoder's estimate.

    On a CPU; benchmarks/mm_encoder.py looks at it on a GPU, with the sizes of real towers.
    """
    from transformers import Gemma4VisionConfig

    arm(**{SWITCH: "1"})
    sizes = {"position_embedding_size": 1024}
    made = tower(**sizes)
    # Triton's interpreter leaves circles behind that hold a launch's arguments.
    attentions = [layer.self_attn.qkv_backend for layer in made.encoder.layers]
    kernels = [(getattr(vision_layers, name), name) for name in KERNELS]
    for owner, name in [*kernels, *((a, "forward") for a in attentions)]:
        real = getattr(owner, name)

        def launch(*args, real=real, **kwargs):
            found = real(*args, **kwargs)
            gc.collect()
            return found

        monkeypatch.setattr(owner, name, launch)
    vision_layer.use(made, ours)
    given = picture(width, batch=batch)
    with frozen_heap():
        made(*given)
    with frozen_heap(), torch.profiler.profile(profile_memory=True) as found:
        made(*given)
    events = found.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for _, size in steps:
        live += size
        peak = max(peak, live)
    config = Gemma4VisionConfig(**(VISION | sizes))
    cost = mm_batches.bytes_of_patches(config, 4, ours)
    assert 0 < peak <= batch * cost(4 * width)


def test_the_declaration(sglang):
    fix = vision_layer.FIX
    assert isinstance(fix, Fix)
    assert fix.still_broken()
    assert "CUDA" in fix.eligible
