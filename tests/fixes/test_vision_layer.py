"""vision-layer in SGLang's real vision tower, tiny and float32, on and off.

On the CPU it runs only where it is forced on: its kernels, and the tower's attention, are then
Triton's interpreter's.
"""

from __future__ import annotations

import pytest
import real_layer
import torch
from g4debug.fixes import _vision_layer, vision_layer

from g4debug import targets
from g4debug.cpu.geometry import TINY

pytestmark = pytest.mark.skipif(
    targets.sglang_version() is not None and not targets.matches("<0.5.14"),
    reason="written for 0.5.12 and 0.5.13",
)
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
    from sglang.srt.server_args import get_global_server_args

    from g4debug.cpu.models import write

    target, _ = write(TINY, tmp_path_factory.mktemp("models") / "tiny")
    with real_layer.one_process(str(target)), torch.no_grad():
        get_global_server_args().mm_attention_backend = "triton_attn"
        yield


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched."""
    counted: dict[str, int] = {}
    for name in KERNELS:
        module = getattr(_vision_layer, name)
        real = getattr(module, name)

        def spy(*args, real=real, name=name, **kwargs):
            counted[name] = counted.get(name, 0) + 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    return counted


def tower(finite=False, **other):
    """Seeded, with sensible sizes; a scalar that is not 1. finite: with the bounds of a checkpoint,
    narrow enough to bite."""
    from sglang.srt.models.gemma4_vision import Gemma4VisionEncoder
    from transformers import Gemma4VisionConfig

    made = Gemma4VisionEncoder(Gemma4VisionConfig(**(VISION | other))).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in made.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(1 + 0.1 * noise if p.dim() == 1 else noise / p.shape[-1] ** 0.5)
    for layer in made.encoder.layers:
        layer.layer_scalar.fill_(0.75)
    if finite:
        for name, buffer in made.named_buffers():
            if name.endswith(("_min", "_max")):
                size = 0.3 + torch.rand((), generator=generator)
                buffer.fill_(-size if name.endswith("_min") else size)
    return made


def picture(width=4, height=4, padded=0, batch=1):
    """Pixels [batch, patches, PATCH] and positions [batch, patches, 2]."""
    n = width * height + padded
    pixels = torch.rand(batch, n, PATCH, generator=torch.Generator().manual_seed(n))
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    at = torch.full((n, 2), -1)
    at[: width * height] = torch.stack([x.reshape(-1), y.reshape(-1)], dim=-1)
    return pixels, at.expand(batch, -1, -1).clone()


def same(got, wanted):
    (pooled, valid), (right, right_valid) = got, wanted
    assert torch.equal(valid, right_valid)
    assert right.std() > 0.1
    # float32 on both sides; the sums are in another order. Values are of size 1 to 10.
    torch.testing.assert_close(pooled, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("finite", [False, True], ids=["no bounds", "finite bounds"])
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


@pytest.mark.parametrize("environment", [{}, {SWITCH: "0"}], ids=["nobody asked", "kill switch"])
def test_a_server_without_it_is_sglangs_own(process, arm, launches, environment):
    own = tower()(*picture())
    arm(**environment)
    made = tower()
    assert not vision_layer.used(made)
    for got, right in zip(made(*picture()), own, strict=True):
        assert torch.equal(got, right)
    assert not launches
