"""vision-layer on a GPU: its kernels compiled, against float64; and SGLang's real tower.

Widths of E2B's and E4B's tower (768, 12 heads of 64) and of 26B-A4B's and 31B's (1152, 16 of 72).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from norm_cases import DTYPES, EPS, draw
from vision_cases import BOUNDS, INF, bounds, check_gelu, check_norm_add, check_qkv

from g4debug.fixes.paths.kernels import _rows, clipped_gelu_mul, clipped_norm_add, vision_qkv
from g4debug.fixes.paths.kernels._rows import Cut, Tile
from g4debug.fixes.paths.kernels.clipped_norm_add import Next

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# heads, kv_heads, head_dim; with tensor parallelism 2, too
HEADS = ((12, 12, 64), (16, 16, 72), (6, 6, 64), (8, 8, 72), (3, 1, 16))
TILES = [None, Tile(1, 1), Tile(4, 4), Tile(2, 8, True)]
TOWERS = {
    "E2B": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
            "num_key_value_heads": 12, "head_dim": 64},
    "26B-A4B": {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
                "num_key_value_heads": 16, "head_dim": 72},
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qkv(dtype, heads, name):
    for tokens in (1, 37, 2520):
        check_qkv((tokens, *heads), dtype, name, "cuda")
    check_qkv((37, *heads), dtype, name, "cuda", apart=True)


@pytest.mark.parametrize("how", [Cut(1), Cut(4), Cut(8, pdl=True)], ids=str)
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_qkv_of_every_cut(heads, how):
    check_qkv((300, *heads), torch.bfloat16, "finite", "cuda", how)


@pytest.mark.parametrize("how", TILES, ids=str)
@pytest.mark.parametrize("columns", [100, 3072, 4304])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_mul(dtype, columns, how):
    for name in BOUNDS:
        check_gelu(37, columns, dtype, name, "cuda", how)
    check_gelu(1, columns, dtype, "finite", "cuda", how)
    check_gelu(2520, columns, dtype, "finite", "cuda", how, apart=8)


@pytest.mark.parametrize("how", TILES, ids=str)
@pytest.mark.parametrize("columns", [100, 768, 1152])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_add(dtype, columns, how):
    for name in BOUNDS:
        check_norm_add(37, columns, dtype, name, "cuda", how)
    check_norm_add(1, columns, dtype, "finite", "cuda", how)
    check_norm_add(2520, columns, dtype, "finite", "cuda", how, apart=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_clips_as_torch_does(dtype):
    """NaN, infinities, and bounds of float32 that dtype has to round."""
    free, low, high = (bounds(*b, "cuda") for b in ((-INF, INF), (-0.3, 0.3), (0.1, 0.7)))
    values = [float("nan"), INF, -INF, 0.3, 0.30001, -0.29999, 5.0, -5.0]
    ones = torch.full((1, 8), 3.0, device="cuda", dtype=dtype)
    up = torch.tensor([values], device="cuda").to(dtype)
    got = clipped_gelu_mul.clipped_gelu_mul(torch.cat([ones, up], dim=1), low, free, free)
    gate = torch.nn.functional.gelu(torch.clamp(ones, *low).double(), approximate="tanh")
    right, unit = gate * up.double(), max(2 * torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(got.double(), right, rtol=unit, atol=0, equal_nan=True)
    for out in (low, high):
        got = clipped_gelu_mul.clipped_gelu_mul(torch.cat([ones, up], dim=1), free, free, out)
        plain = clipped_gelu_mul.clipped_gelu_mul(torch.cat([ones, up], dim=1), free, free, free)
        torch.testing.assert_close(got, torch.clamp(plain, *out), rtol=0, atol=0, equal_nan=True)


def chain(x: torch.Tensor) -> list[torch.Tensor]:
    """Each kernel reads what the one right before it wrote. x: [4**n, 64], a quarter each round."""
    w = draw("w", 64, dtype=x.dtype, device="cuda").abs() + 0.5
    given = bounds(-4.0, 3.0, "cuda")
    angle = draw("a", len(x), 16, dtype=x.dtype, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    kept: list[torch.Tensor] = []
    while True:
        rows = len(x)
        heads = vision_qkv.vision_qkv(
            x, 2, 1, cos[:rows], sin[:rows], w[:16], w[16:32], EPS, given, given, given
        )
        q, after = heads.q.flatten(1), Next(w[:32], EPS, given)
        hidden, x = clipped_norm_add.clipped_norm_add(q, given, w[32:], q, EPS, w[:1], after)
        y = clipped_gelu_mul.clipped_gelu_mul(x, given, given, given)
        kept += [*heads, hidden, x, y]
        if rows < 4:
            return kept
        x = y.view(-1, 64)


def test_a_chain_that_is_launched_ahead_reads_what_came_before(monkeypatch):
    x = draw("x", 4**6, 64, dtype=torch.float32, device="cuda")
    ahead = [chain(x) for _ in range(50)]
    monkeypatch.setattr(_rows, "_takes_pdl", lambda index: False)
    right = chain(x)
    assert all(t.isfinite().all() for t in right)
    for found in ahead:
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def launch_each(x: torch.Tensor) -> list[torch.Tensor]:
    """Without inputs that are copied from the host."""
    one = x.new_ones(())
    given, w = (-one, one), x[0]
    heads = vision_qkv.vision_qkv(
        x, 6, 3, x[:, :64], x[:, 64:128], w[:64], w[64:128], EPS, given, given, given
    )
    gelu = clipped_gelu_mul.clipped_gelu_mul(x, given, given, given)
    both = clipped_norm_add.clipped_norm_add(x, given, w, x, EPS, one, Next(w, EPS, given))
    return [*heads, gelu, *both]


def test_captured_in_a_cuda_graph_and_replayed_on_other_values():
    x = draw("x", 9, 768, dtype=torch.bfloat16, device="cuda")
    launch_each(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = launch_each(x)
    x.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(kept, launch_each(x), strict=True))


class Attention(torch.nn.Module):
    """Stands in for a vision attention backend, which have no float32: softmax as it is written."""

    def forward(self, q, k, v, bsz, seq_len, **kwargs):
        q, k, v = (t.unflatten(0, (bsz, seq_len)).transpose(1, 2) for t in (q, k, v))
        found = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return found.transpose(1, 2).flatten(0, 1)


@pytest.fixture
def attention() -> None:
    """SGLang's choice for the tower; a test may name another one."""


@pytest.fixture
def tower(tmp_path, attention):
    """Makes a seeded Gemma4VisionEncoder of four layers with bounds that bite, and attention's
    logits of size 1, as in a trained tower (benchmarks/vision_rounding.py)."""
    pytest.importorskip("sglang")
    import real_layer
    import real_tower

    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.models import write

    def make(size: str, dtype: torch.dtype = torch.bfloat16):
        made = real_tower.tower({"num_hidden_layers": 4, **TOWERS[size]}, 1.0)
        real_tower.logits_of_size(made, 1.0)
        made.to("cuda", torch.bfloat16)
        if dtype == torch.float32:
            made.to(dtype)
            for layer in made.encoder.layers:
                layer.self_attn.qkv_backend = Attention()
            for module in made.modules():
                if hasattr(module, "forward_native"):  # SGLang's CUDA norms refuse float32
                    module.forward = module.forward_native
        return made

    target, _ = write(TINY, tmp_path / "tiny")
    process = real_layer.one_process(str(target), "cuda", mm_attention_backend=attention)
    with process, torch.no_grad():
        yield make


def ours(made, pixels, at):
    """The whole forward, with this path's wrappers around SGLang's own."""
    from g4debug.fixes.paths.vision_layer import fix as vision_layer

    def nobody(*args, **kwargs):
        raise AssertionError("SGLang's own was called")

    padding = (at == -1).all(dim=-1)
    embedder, encoder = made.patch_embedder, made.encoder
    vision_layer.after_init(None, made)
    assert vision_layer.used(made)
    hidden = embedder._patch_projection(pixels)
    hidden = hidden + vision_layer.around_positions(nobody, embedder, at, padding)
    hidden = vision_layer.around_encoder(nobody, encoder, hidden, ~padding, at)
    return made.pooler(hidden, at, padding, output_length=pixels.shape[1] // 9)


@pytest.mark.parametrize("attention", [None, "triton_attn"], ids=["default", "triton_attn"])
@pytest.mark.parametrize("size", TOWERS)
def test_it_is_as_near_to_float32_as_sglangs_tower(tower, size, attention):
    """bfloat16, two pictures of 48 x 48 patches and padding."""
    import real_tower

    if attention is None and importlib.util.find_spec("sgl_kernel.flash_ops") is None:
        pytest.skip("SGLang's default on this GPU is FlashAttention-3, which is not installed")
    at = real_tower.positions(48, 48, 2520 - 48 * 48).expand(2, -1, -1).cuda()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 2520, 768, generator=generator).to("cuda", torch.bfloat16)
    right, valid = tower(size, torch.float32)(pixels.float(), at)
    made = tower(size)
    own, own_valid = made(pixels, at)
    got, got_valid = ours(made, pixels, at)
    assert torch.equal(valid, own_valid)
    assert torch.equal(valid, got_valid)
    right = right[valid]
    theirs, mine = ((t[valid].float() - right).norm() / right.norm() for t in (own, got))
    print(f"{size}, {attention}: from float32: SGLang {theirs:.2e}, ours {mine:.2e}")
    assert right.std() > 0.1
    assert 0 < mine < 1.1 * theirs
    assert mine < 2**-4


def test_positions_are_looked_up_bit_for_bit(tower):
    from g4debug.fixes.paths.vision_layer.layer import position_embeddings

    embedder = tower("E2B").patch_embedder
    at = torch.randint(0, embedder.position_embedding_size, (2, 500, 2), device="cuda")
    at[0, 400:] = -1
    padding = (at == -1).all(dim=-1)
    own = embedder._position_embeddings(at, padding)
    assert torch.equal(position_embeddings(embedder.position_embedding_table, at, padding), own)


BEYOND = """
import torch
from g4debug.fixes.paths.vision_layer.layer import position_embeddings
at = torch.full((1, 4, 2), 64, device="cuda")
none = torch.zeros(1, 4, dtype=torch.bool, device="cuda")
print(position_embeddings(torch.ones(2, 64, 32, device="cuda"), at, none).sum().item())
"""


def test_a_position_beyond_the_table_is_a_device_assertion():
    done = subprocess.run([sys.executable, "-c", BEYOND], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr
