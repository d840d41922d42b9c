"""The kernels of the performance paths compiled and on a GPU, against float64 and torch's own."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from norm_cases import DTYPES, EPS, close, draw, gelu, normed
from router_cases import SHAPES, SPECIAL, check, logits, scale

from g4debug.fixes.paths.kernels import fused_router, gelu_mul, rmsnorm_add, triple_rmsnorm
from g4debug.fixes.paths.kernels._rows import Cut, Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TILES = [None, Tile(1, 1), Tile(4, 4), Tile(16, 4), Tile(8, 1), Tile(1, 1, True)]
CUTS = [
    None,
    Cut(4),
    Cut(8),
    Cut(4, per_sm=4, stages=2),
    Cut(8, per_sm=2, stages=3),
    Cut(4, pdl=True),
]
MODEL_WIDTHS = (64, 1536, 2560, 2816)


def routed(x, s, top_k, how=None):
    weights, ids = fused_router.fused_router(x.cuda(), s.cuda(), top_k, how)
    return weights.cpu(), ids.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_router_every_shape_and_dtype(shape, dtype):
    x, s = logits(shape, dtype), scale(shape[1], dtype)
    check(x, s, *routed(x, s, shape[2]))


@pytest.mark.parametrize("how", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_every_tile(dtype, how):
    for x in (logits((77, 128, 8), dtype), logits((77, 128, 8), dtype, ties=True)):
        check(x, scale(128), *routed(x, scale(128), 8, how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_router_ties_and_what_is_no_number(name, dtype):
    x = torch.tensor([SPECIAL[name]]).to(dtype)
    for top_k in (1, 4, 12):
        check(x, scale(12), *routed(x, scale(12), top_k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["as drawn", "many ties"])
def test_router_takes_the_experts_that_torch_takes(dtype, ties):
    """torch.topk promises nothing about ties; what it does on CUDA is to take the lowest ids."""
    x = logits((4096, 128, 8), dtype, ties).cuda()
    _, ids = fused_router.fused_router(x, scale(128).cuda(), 8)
    theirs = torch.topk(x, 8, dim=-1).indices
    assert torch.equal(ids.long().sort(-1).values, theirs.sort(-1).values)
    assert torch.equal(x.gather(1, ids.long()), x.gather(1, theirs))  # and in the same order


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_takes_the_set_that_torch_takes(name, dtype):
    x = torch.tensor([SPECIAL[name]]).to("cuda", dtype)
    for top_k in (1, 4, 8):
        _, ids = fused_router.fused_router(x, scale(12).cuda(), top_k)
        theirs = torch.topk(x, top_k, dim=-1).indices
        assert ids.long().sort(-1).values.tolist() == theirs.sort(-1).values.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_weights_are_torchs_within_its_roundings(dtype):
    x, s = logits((512, 128, 8), dtype).cuda(), scale(128, dtype).cuda()
    weights, ids = fused_router.fused_router(x, s, 8)
    values, their_ids = torch.topk(x, 8, dim=-1)
    theirs = (values.softmax(-1) * s[their_ids]).float()
    # By expert: torch.topk promises no order among equal logits, whose scales differ.
    ours, right = (
        torch.zeros_like(x, dtype=torch.float32).scatter_(1, i.long(), w)
        for i, w in ((ids, weights), (their_ids, theirs))
    )
    # SGLang rounds the softmax and the product to the logits' dtype: two halves of a unit each.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, right, rtol=max(1.1 * unit, 1e-5), atol=1e-7)


@pytest.mark.parametrize("how", CUTS, ids=str)
@pytest.mark.parametrize("width", MODEL_WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype, width, how):
    for rows in (1, 37, 1500):
        x, r = (draw(n, rows, width, dtype=dtype, device="cuda") for n in "xr")
        w = [draw(n, width, dtype=dtype, device="cuda") for n in "xdre"]
        s = draw("s", 1, dtype=dtype, device="cuda")
        right = normed(x, w[0], EPS) + r.double()
        close(rmsnorm_add.rmsnorm_add(x, w[0], r, EPS, how=how), right)
        close(rmsnorm_add.rmsnorm_add(x, w[0], r, EPS, s, how), right * s.double())
        out = triple_rmsnorm.triple_rmsnorm(x, r, *w, EPS, EPS, how)
        close(out.residual, right)
        for got, weight in zip(out[1:], w[1:], strict=True):
            close(got, normed(out.residual, weight, EPS))


@pytest.mark.parametrize("how", [None, Tile(1, 2), Tile(8, 4), Tile(1, 1, True)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_mul(dtype, how):
    for rows in (1, 37, 1500):
        gate = draw("g", rows, 256, dtype=dtype, device="cuda") * 2
        x = draw("p", rows, 5, 256, dtype=dtype, device="cuda")[:, 3]
        close(gelu_mul.gelu_mul(gate, x, how), gelu(gate) * x.double())


def test_captured_in_a_cuda_graph_and_replayed_on_other_values():
    x, s = logits((9, 128, 8), torch.bfloat16).cuda(), scale(128).cuda()
    r = draw("r", 9, 1536, dtype=torch.bfloat16, device="cuda")
    w = draw("w", 1536, dtype=torch.bfloat16, device="cuda")

    def work():
        return (
            *fused_router.fused_router(x, s, 8),
            rmsnorm_add.rmsnorm_add(r, w, r, EPS),
            gelu_mul.gelu_mul(r, r),
            *triple_rmsnorm.triple_rmsnorm(r, r, w, w, w, w, EPS, EPS),
        )

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    x.copy_(x.flip(1))
    r.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(kept, work(), strict=True))


def test_a_chain_that_is_launched_ahead_reads_what_came_before():
    """Each kernel of the chain reads what the one before it wrote, a thousand times over."""
    w = draw("w", 1536, dtype=torch.float32, device="cuda").abs() + 0.5
    start = draw("x", 64, 1536, dtype=torch.float32, device="cuda")

    def chain(pdl):
        x = start.clone()
        for _ in range(250):
            x = rmsnorm_add.rmsnorm_add(x, w, start, EPS, how=Cut(4, pdl=pdl))
            four = triple_rmsnorm.triple_rmsnorm(x, start, w, w, w, w, EPS, EPS, Cut(4, pdl=pdl))
            x = gelu_mul.gelu_mul(four.dense, four.experts, Tile(1, 4, pdl))
        return fused_router.fused_router(x[:, :128], w[:128], 8, Tile(1, 1, pdl))

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = chain(True)
    graph.replay()
    for got, also, right in zip(kept, chain(True), chain(False), strict=True):
        assert torch.equal(got, right)
        assert torch.equal(also, right)


def test_the_ops_that_a_compiled_model_calls():
    x, s = logits((9, 128, 8), torch.bfloat16).cuda(), scale(128).cuda()
    r = draw("r", 9, 1536, dtype=torch.bfloat16, device="cuda")
    w = draw("w", 1536, dtype=torch.bfloat16, device="cuda")

    def work(x, s, r, w):
        return (
            *fused_router.fused_router_op(x, s, 8),
            rmsnorm_add.rmsnorm_add_op(r, w, r, EPS, w[:1]),
            gelu_mul.gelu_mul_op(r, r),
            *triple_rmsnorm.triple_rmsnorm_op(r, r, w, w, w, w, EPS, EPS),
        )

    compiled = torch.compile(work, fullgraph=True)
    assert all(
        torch.equal(a, b) for a, b in zip(compiled(x, s, r, w), work(x, s, r, w), strict=True)
    )


@pytest.mark.parametrize(
    "op",
    [
        (fused_router.fused_router_op, lambda r: (r[:, :128].contiguous(), r[0, :128], 8)),
        (rmsnorm_add.rmsnorm_add_op, lambda r: (r, r[0], r, EPS, r[0, :1])),
        (gelu_mul.gelu_mul_op, lambda r: (r, r)),
        (triple_rmsnorm.triple_rmsnorm_op, lambda r: (r, r, r[0], r[0], r[0], r[0], EPS, EPS)),
    ],
    ids=["router", "rmsnorm_add", "gelu_mul", "triple"],
)
def test_the_ops_declare_what_they_do(op):
    """Shapes, dtypes and aliases of the real op against its fake."""
    function, arguments = op
    r = draw("r", 9, 1536, dtype=torch.bfloat16, device="cuda")
    torch.library.opcheck(function, arguments(r), test_utils=("test_schema", "test_faketensor"))


def first(returned: Any) -> torch.Tensor:
    found: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return found


@pytest.mark.parametrize("name", ["ple-tail", "triple-rmsnorm"])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_sglangs_real_layer(tmp_path, monkeypatch, name, rows):
    """bfloat16, width 1536: SGLang's forward and ours on the same weights and inputs."""
    pytest.importorskip("sglang")
    import real_layer

    from g4debug.cpu.geometry import TINY, TINY_MOE
    from g4debug.cpu.models import write
    from g4debug.fixes.paths import ple_tail, triple_rmsnorm
    from g4debug.hooking import targets

    path = {"ple-tail": ple_tail, "triple-rmsnorm": triple_rmsnorm}[name]
    if not path.FIX.is_for_this_release:
        pytest.skip(f"{name} is for SGLang {path.FIX.needs}")
    small = TINY if path is ple_tail else TINY_MOE
    geometry = replace(small, hidden=1536, ple=256 if path is ple_tail else 0)

    class Experts(torch.nn.Module):
        """Stands in for the experts, which need a server's set-up."""

        def forward(self, x, logits):
            return x * logits.sigmoid().mean(-1, keepdim=True)

    def given():
        made = real_layer.inputs(geometry, rows)
        made["positions"] = made["positions"].cuda()
        for key in ("hidden_states", "per_layer_input"):
            if made[key] is not None:
                made[key] = made[key].to("cuda", torch.bfloat16)
        return made

    def nobody(*args, **kwargs):
        raise AssertionError("SGLang's own forward was called")

    target, _ = write(TINY, tmp_path / "tiny")
    with real_layer.one_process(str(target), "cuda"), torch.no_grad():
        layer = real_layer.layer(geometry).to("cuda", torch.bfloat16)
        rotary = layer.self_attn.rotary_emb
        rotary.cos_sin_cache = rotary.cos_sin_cache.float()  # a server's is float32, too
        if path is triple_rmsnorm:
            layer.moe = Experts()
        # From 0.5.21 on a layer returns a tensor, before that two things.
        own = first(layer(**given()))
        path.after_init(None, layer)
        if path is ple_tail and targets.layer_tail_is_apart():
            tail = functools.partial(ple_tail.around_next_stream, nobody, layer)
            monkeypatch.setattr(layer, "_next_stream", tail)
            ours = first(layer(**given()))
        else:
            ours = first(path.around_forward(nobody, layer, **given()))
    error = (ours.float() - own.float()).square().mean().sqrt() / own.float().square().mean().sqrt()
    print(f"{name}, {rows} rows: relative error against SGLang's layer {error:.2e}")
    assert error < 2**-6  # both round to bfloat16 at several places, but not at the same
