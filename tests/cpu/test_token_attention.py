"""The stand-ins for Triton attention against SGLang's own kernels, in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from g4debug.cpu import fault, token_attention
from g4debug.hooking import targets

OPS = (
    "sglang.srt.layers.attention.triton_ops"
    if targets.matches("<0.5.18")
    else "sglang.kernels.ops.attention"
)
HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 64


@pytest.fixture(autouse=True)
def device():
    yield
    fault.clear()


def sglangs(name: str):
    """SGLang's own function, from a copy of its module: in SGLang's, the stand-in is in place."""
    spec = importlib.util.find_spec(f"{OPS}.{name.removesuffix('_fwd')}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert getattr(module, name) is not getattr(token_attention, name)
    return getattr(module, name)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lists(lengths: list[int], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_indptr and kv_indices of rows of these lengths, in a shuffled pool."""
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends, order[: sum(lengths)]


def sinks(heads: int, given: bool) -> torch.Tensor | None:
    return normal(heads, seed=9) * 3 if given else None


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("heads", [HEADS, KV_HEADS])
@pytest.mark.usefixtures("sglang")
def test_decode_is_sglangs_kernel(heads: int, cap: float, sunk: bool) -> None:
    lengths = [7, 1, 20]
    q, k, v = normal(3, heads, DIM), normal(SLOTS, KV_HEADS, DIM, seed=2), None
    v = normal(SLOTS, KV_HEADS, DIM, seed=3)
    indptr, indices = lists(lengths)
    splits = torch.full((3,), 4, dtype=torch.int32)
    mine, theirs = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    for o, kernel in (
        (mine, token_attention.decode_attention_fwd),
        (theirs, sglangs("decode_attention_fwd")),
    ):
        logits, lse = torch.zeros(3, heads, 4, DIM), torch.zeros(3, heads, 4)
        kernel(
            q, k, v, o, indptr, indices, logits, lse, splits, 4, 0.25, 1.0, 0.5, logit_cap=cap,
            sinks=sinks(heads, sunk),
        )  # fmt: skip
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [-1, 3, 6])
@pytest.mark.parametrize("masked", ["causal", "not causal", "mask", "whole mask"])
@pytest.mark.usefixtures("sglang")
def test_extend_is_sglangs_kernel(window: int, masked: str, sunk: bool) -> None:
    prefixes, new = [5, 0, 9], [3, 4, 1]
    tokens = sum(new)
    q = normal(tokens, HEADS, DIM)
    extended = [normal(tokens, KV_HEADS, DIM, seed=s) for s in (4, 5)]
    pool = [normal(SLOTS, KV_HEADS, DIM, seed=s) for s in (6, 7)]
    indptr, indices = lists(prefixes)
    begins = torch.tensor([0, 3, 7, 8], dtype=torch.int32)
    offsets = torch.tensor([2, 0, 1], dtype=torch.int32) if window > 0 else None
    given = offsets.tolist() if offsets is not None else [0, 0, 0]
    lines = [n * (o + p + n) for o, p, n in zip(given, prefixes, new, strict=True)]
    mask = starts = None
    if "mask" in masked:
        mask = torch.rand(sum(lines), generator=torch.Generator().manual_seed(8)) < 0.6
        at = 0
        for o, p, n, size in zip(given, prefixes, new, lines, strict=True):
            own = mask[at : at + size].view(n, -1)
            own[torch.arange(n), o + p + torch.arange(n)] = True  # each query sees itself
            at += size
        starts = torch.tensor([0, *lines], dtype=torch.int64).cumsum(0)
    mine, theirs = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    for o, kernel in (
        (mine, token_attention.extend_attention_fwd),
        (theirs, sglangs("extend_attention_fwd")),
    ):
        kernel(
            q, *extended, o, *pool, begins, indptr, indices, mask, masked != "not causal", starts,
            max(new), 1.0, 1.0, 0.25, sliding_window_size=window,
            skip_prefix_custom_mask=masked == "mask", window_kv_offsets=offsets,
            sinks=sinks(HEADS, sunk),
        )  # fmt: skip
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("sglang")
def test_decode_of_mla_is_sglangs_kernel() -> None:
    """One KV head for all, whose V is the beginning of its K. The kernel knows two such shapes."""
    dim, narrow = 288, 256
    q, k = normal(3, HEADS, dim), normal(SLOTS, 1, dim, seed=2)
    v = k[..., :narrow]
    indptr, indices = lists([7, 1, 20])
    splits = torch.full((3,), 4, dtype=torch.int32)
    found = []
    for kernel in (token_attention.decode_attention_fwd, sglangs("decode_attention_fwd")):
        o, lse = torch.full((3, HEADS, narrow), 7.0), torch.zeros(3, HEADS, 4)
        logits = torch.zeros(3, HEADS, 4, narrow)
        kernel(q, k, v, o, indptr, indices, logits, lse, splits, 4, 0.1, 1.0, 1.0, has_mla=True)
        found.append(o)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.usefixtures("sglang")
def test_prefill_of_mla_is_sglangs_kernel(prefix: int) -> None:
    """Without a prefix K and V are whole, though the pool's are compressed; else all are so."""
    heads, dim, narrow = (1, DIM, DIM // 2) if prefix else (HEADS, 2 * DIM, DIM)
    q, k = normal(4, HEADS, dim), normal(4, heads, dim, seed=2)
    v = k[..., :narrow].contiguous()
    pool = normal(SLOTS, 1, DIM, seed=6)
    indptr, indices = lists([prefix])
    begins = torch.tensor([0, 4], dtype=torch.int32)
    found = []
    for kernel in (token_attention.extend_attention_fwd, sglangs("extend_attention_fwd")):
        o = torch.full((4, HEADS, narrow), 7.0)
        kernel(
            q, k, v, o, pool, pool[..., : DIM // 2], begins, indptr, indices, None, True, None, 4,
            1.0, 1.0, 0.25,
        )  # fmt: skip
        found.append(o)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [-1, SLOTS, 10**9])
def test_an_index_outside_breaks_the_device(bad: int) -> None:
    q, k = normal(2, HEADS, DIM), normal(SLOTS, KV_HEADS, DIM, seed=2)
    indptr, indices = lists([4, 6])
    indices[7] = bad
    o = torch.full_like(q, 7.0)
    token_attention.decode_attention_fwd(
        q, k, k, o, indptr, indices, o, o, indptr, 1, 0.25, 1.0, 1.0
    )
    found = fault.pending()
    assert (found.row, found.column, found.page, found.unit) == (1, 3, bad, "token")
    assert "token" in str(found)
    fault.clear()
    assert not o[1].any()  # the other row is right
    assert o[0].any()


def test_a_list_that_ends_early_breaks_the_device() -> None:
    q, k = normal(1, HEADS, DIM), normal(SLOTS, KV_HEADS, DIM, seed=2)
    indptr, indices = lists([5])
    o = torch.zeros_like(q)
    token_attention.decode_attention_fwd(
        q, k, k, o, indptr, indices[:4], o, o, indptr, 1, 0.25, 1.0, 1.0
    )
    assert (fault.pending().row, fault.pending().column) == (0, 4)


def test_without_a_list_nothing_is_read():
    """What SGLang hands to a sliding layer of an EAGLE draft before 0.5.23: no entries, no list."""
    q, k = normal(1, HEADS, DIM), normal(SLOTS, KV_HEADS, DIM, seed=2)
    for ends, fails in (([0, 0], False), ([0, 3], True)):
        o, indptr = torch.full_like(q, 7.0), torch.tensor(ends)
        arguments = (q, k, k, o, indptr, None, o, o, indptr, 1, 0.25, 1.0, 1.0)
        if fails:
            with pytest.raises(TypeError, match="there is no list"):
                token_attention.decode_attention_fwd(*arguments)
        else:
            token_attention.decode_attention_fwd(*arguments)
            assert not o.any()
