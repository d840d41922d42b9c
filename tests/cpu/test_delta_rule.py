"""The gated delta rule against its formula in float64, and against SGLang's kernels.

Those run in Triton's interpreter. test_toys_engine.py has transformers' answers.
"""

from __future__ import annotations

import pytest
import torch

from g4debug.cpu import fault, gated_norm
from g4debug.cpu.delta_rule import (
    CHUNK,
    chunk_gated_delta_rule,
    fused_gdn_gating,
    fused_sigmoid_gating_delta_rule_update,
)

KEY_HEADS, HEADS, K, V, SLOTS = 2, 4, 16, 32, 6
LAST = pytest.mark.once("the toys are served on the newest release only")


@pytest.fixture(autouse=True)
def _mended():
    torch.manual_seed(0)
    yield
    fault.clear()


@pytest.fixture
def gates():
    """A_log and dt_bias of a layer."""
    return torch.randn(HEADS) - 1, torch.randn(HEADS)


def states() -> torch.Tensor:
    return torch.randn(SLOTS, HEADS, V, K)


def tokens(n: int) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(1, n, KEY_HEADS, K),
        "k": torch.randn(1, n, KEY_HEADS, K) * 3,
        "v": torch.randn(1, n, HEADS, V),
        "a": torch.randn(n, HEADS) * 2,
        "b": torch.randn(n, HEADS) * 2,
    }


def part(x: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    return {n: t[:, begin:end] if t.dim() == 4 else t[begin:end] for n, t in x.items()}


def together(*rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: torch.cat([row[n] for row in rows], int(rows[0][n].dim() == 4)) for n in rows[0]}


def plain(x, gates, state):
    """The formula, token by token and head by head, of one sequence: outputs, states before each
    token, and the last state."""
    a_log, bias = (t.double() for t in gates)
    state, out, before = state.double().clone(), torch.zeros(len(x["a"]), HEADS, V).double(), []
    for t in range(len(out)):
        before.append(state.clone())
        for h in range(HEADS):
            group = h * KEY_HEADS // HEADS
            q, k = (x[n][0, t, group].double() for n in "qk")
            q, k = (y / (y @ y + 1e-6).sqrt() for y in (q, k))
            g = -a_log[h].exp() * (1 + (x["a"][t, h].double() + bias[h]).exp()).log()
            beta = 1 / (1 + (-x["b"][t, h].double()).exp())
            state[h] *= g.exp()
            state[h] += beta * torch.outer(x["v"][0, t, h].double() - state[h] @ k, k)
            out[t, h] = state[h] @ q / K**0.5
    return out, before, state


def prefill(x, gates, pool, lengths, slots, **more):
    g, beta = fused_gdn_gating(gates[0], x["a"], x["b"], gates[1])
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return chunk_gated_delta_rule(
        q=x["q"], k=x["k"], v=x["v"], g=g, beta=beta, initial_state=pool,
        initial_state_indices=torch.tensor(slots), cu_seqlens=starts, head_first=False,
        use_qk_l2norm_in_kernel=True, **more,
    )  # fmt: skip


def decode(x, gates, pool, slots, update=fused_sigmoid_gating_delta_rule_update, **more):
    return update(
        A_log=gates[0], dt_bias=gates[1], **x, initial_state_source=pool,
        initial_state_indices=torch.tensor(slots),
        cu_seqlens=torch.arange(len(slots) + 1, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0, softplus_threshold=20.0, **more,
    )  # fmt: skip


def test_chunks_and_decodes_are_the_whole_sequence(gates):
    """Two requests, one of which begins with a single token, on what their slots have."""
    whole, pool = [tokens(9), tokens(6)], states()
    others = pool[[0, 1, 3]].clone()
    wanted = [plain(x, gates, pool[slot]) for x, slot in zip(whole, (4, 2), strict=True)]
    first, _, _ = prefill(
        together(part(whole[0], 0, 5), part(whole[1], 0, 1)), gates, pool, (5, 1), (4, 2)
    )
    second, _, _ = prefill(
        together(part(whole[0], 5, 7), part(whole[1], 1, 4)), gates, pool, (2, 3), (4, 2)
    )
    found = [[first[0, :5], second[0, :2]], [first[0, 5:], second[0, 2:]]]
    for step in range(2):
        x = together(part(whole[0], 7 + step, 8 + step), part(whole[1], 4 + step, 5 + step))
        for row, out in zip(found, decode(x, gates, pool, (4, 2))[0], strict=True):
            row.append(out[None])
    for row, slot, (out, _, last) in zip(found, (4, 2), wanted, strict=True):
        torch.testing.assert_close(torch.cat(row).double(), out, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(pool[slot].double(), last, atol=2e-5, rtol=1e-4)
    assert torch.equal(pool[[0, 1, 3]], others)


def test_the_states_with_which_chunks_begin_are_told(gates):
    """For each request in its turn, also for one that ends where a chunk does, and for padding."""
    lengths, slots = (CHUNK + 3, 2, 1, 2 * CHUNK), (0, -1, 5, 3)
    rows, pool = [tokens(n) for n in lengths], states()
    wanted = []
    for x, slot in zip(rows, slots, strict=True):
        before = plain(x, gates, pool[slot])[1]
        wanted += [torch.zeros(HEADS, V, K).double()] if slot < 0 else before[::CHUNK]
    _, last, begun = prefill(together(*rows), gates, pool, lengths, slots)
    assert last is None
    assert begun.shape == (1, 2 + 1 + 1 + 2, HEADS, V, K)
    torch.testing.assert_close(begun[0].double(), torch.stack(wanted), atol=2e-5, rtol=1e-4)


@LAST
@pytest.mark.usefixtures("sglang")
def test_a_decode_and_its_gates_are_sglangs_kernels(gates):
    from sglang.kernels.ops.attention.linear import fused_gdn_gating as theirs
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as kernels

    x, pool = tokens(3), states()
    for mine, own in zip(
        fused_gdn_gating(gates[0], x["a"], x["b"], gates[1]),
        theirs.fused_gdn_gating(gates[0], x["a"], x["b"], gates[1]),
        strict=True,
    ):
        torch.testing.assert_close(mine, own)
    their_pool, update = pool.clone(), kernels.fused_sigmoid_gating_delta_rule_update
    out = decode(x, gates, pool, (4, 0, 2))
    torch.testing.assert_close(out, decode(x, gates, their_pool, (4, 0, 2), update))
    torch.testing.assert_close(pool, their_pool)


def test_padding_is_zeros_and_changes_nothing(gates):
    pool = states()
    before = pool.clone()
    assert not prefill(tokens(4), gates, pool, (4,), (-1,))[0].any()
    assert not decode(tokens(1), gates, pool, (-1,)).any()
    assert torch.equal(pool, before)
    # Tokens behind those of the last request are padding, too.
    assert not prefill(tokens(4), gates, pool, (2,), (1,))[0][:, 2:].any()
    assert fault.pending() is None


@pytest.mark.parametrize("slot", [SLOTS, -2])
def test_a_slot_that_is_not_there_is_a_device_fault(gates, slot):
    out = decode(tokens(2), gates, states(), (slot, 1))
    broken = fault.pending()
    fault.clear()  # else this test cannot read a tensor either
    assert str(broken).startswith(
        f"chunk_gated_delta_rule: row 0, column 0: slot {slot} is outside 0 <= slot < {SLOTS}"
    )
    assert not out[0, 0].any()
    assert out[0, 1].any()


@pytest.mark.parametrize("more", [{"inplace_update": True}, {"scale": 1.0}])
def test_what_qwen3_next_does_not_use_is_refused(gates, more):
    pool = states()
    with pytest.raises(NotImplementedError, match=r"the CPU engine's chunk_gated_delta_rule: got"):
        prefill(tokens(2), gates, pool, (2,), (0,), **more)
    with pytest.raises(NotImplementedError, match=r"fused_sigmoid_gating_delta_rule_update: got"):
        decode(tokens(1), gates, pool, (0,), disable_state_update=True)
    with pytest.raises(NotImplementedError, match=r"expected one token of each of the 1 requests"):
        fused_sigmoid_gating_delta_rule_update(
            A_log=gates[0], dt_bias=gates[1], **tokens(2), initial_state_source=pool,
            initial_state_indices=torch.tensor([0]), cu_seqlens=torch.tensor([0, 2]),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"k": torch.zeros(1, 3, KEY_HEADS, V)}, r"got k with the shape"),
        ({"v": torch.zeros(1, 2, HEADS, V)}, r"got v with the shape|expected \(1, 3, 4\)"),
        ({"v": torch.zeros(1, 3, 3, V)}, r"got g with the shape|got the states with|multiple of"),
        ({"q": torch.zeros(1, 3, KEY_HEADS, K).half()}, r"expected \[1, tokens, heads, dim\]"),
        ({"a": torch.zeros(3, HEADS - 1)}, r"got a with the shape \(3, 3\), expected \(3, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(gates, wrong, words):
    with pytest.raises(ValueError, match=words):
        prefill({**tokens(3), **wrong}, gates, states(), (3,), (0,))


def test_a_pool_that_is_the_other_way_round_is_refused(gates):
    with pytest.raises(ValueError, match=r"got the states with the shape \(6, 4, 16, 32\)"):
        prefill(tokens(3), gates, states().transpose(2, 3), (3,), (0,))


@pytest.mark.parametrize("lengths", [(4,), (5, -1), (1, 1)])
def test_requests_that_do_not_fit_the_tokens_are_refused(gates, lengths):
    with pytest.raises(ValueError, match=r"got cu_seqlens=\[0, .* expected 2 numbers that rise"):
        prefill(tokens(3), gates, states(), lengths, (0,))


@LAST
@pytest.mark.usefixtures("sglang")
def test_the_gated_norm_is_its_formula():
    x, g, weight = torch.randn(7, V), torch.randn(7, V), torch.randn(V)
    for activation in ("silu", "swish"):
        out = gated_norm.rms_norm_gated(x, g, weight, None, activation, eps=1e-5)
        y, z = x.double(), g.double()
        wanted = weight.double() * y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        wanted = wanted * z / (1 + (-z).exp())
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"rms_norm_gated: got activation='sigmoid'"):
        gated_norm.rms_norm_gated(x, g, weight, None, "sigmoid")
    with pytest.raises(ValueError, match=r"expected two equal ones"):
        gated_norm.rms_norm_gated(x, g[:3], weight, None)
