"""The short convolution against a plain loop; test_toys_engine.py has transformers' answers."""

from __future__ import annotations

import pytest
import torch

from g4debug.cpu import fault
from g4debug.cpu.short_conv import causal_conv1d_fn, causal_conv1d_update

CHANNELS, WIDTH, SLOTS = 6, 3, 5


@pytest.fixture(autouse=True)
def _mended():
    yield
    fault.clear()


@pytest.fixture
def weight():
    return torch.randn(CHANNELS, WIDTH)


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The formula, token by token, of one whole sequence ``[channels, tokens]``."""
    out = torch.zeros_like(x)
    for c in range(CHANNELS):
        for t in range(x.shape[1]):
            for j in range(WIDTH):
                if t - WIDTH + 1 + j >= 0:
                    out[c, t] += weight[c, j] * x[c, t - WIDTH + 1 + j]
    return out


def prefill(x, weight, states, lengths, slots, goes_on, **more):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return causal_conv1d_fn(
        x, weight, None, query_start_loc=starts, cache_indices=torch.tensor(slots),
        has_initial_state=torch.tensor(goes_on), conv_states=states,
        **{"activation": None, **more},
    )  # fmt: skip


def decode(x, weight, states, slots, activation=None):
    at = torch.tensor(slots)
    return causal_conv1d_update(x, states, weight, None, activation, conv_state_indices=at)


def test_chunks_and_decodes_are_the_whole_sequence(weight):
    """Two requests, one of which begins with a single token; their slots have an old request's."""
    whole = [torch.randn(CHANNELS, 9), torch.randn(CHANNELS, 6)]
    states = torch.randn(SLOTS, CHANNELS, WIDTH - 1)
    others = states[[0, 1, 3]].clone()
    first = prefill(
        torch.cat((whole[0][:, :5], whole[1][:, :1]), 1), weight, states, (5, 1), (4, 2), (0, 0)
    )
    second = prefill(
        torch.cat((whole[0][:, 5:7], whole[1][:, 1:4]), 1), weight, states, (2, 3), (4, 2), (1, 1)
    )
    found = [[first[:, :5], second[:, :2]], [first[:, 5:], second[:, 2:]]]
    for step in range(2):
        x = torch.stack([whole[0][:, 7 + step], whole[1][:, 4 + step]])
        for row, column in zip(found, decode(x, weight, states, (4, 2)), strict=True):
            row.append(column[:, None])
    for row, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(torch.cat(row, 1), plain(expected, weight))
    assert torch.equal(states[4], whole[0][:, -2:])
    assert torch.equal(states[[0, 1, 3]], others)


def test_an_activation_is_behind_the_filter_and_not_in_the_slot(weight):
    """As Qwen3-Next has it, which also tells how many tokens each request has."""
    x, states = torch.randn(CHANNELS, 5), torch.zeros(SLOTS, CHANNELS, WIDTH - 1)
    found = prefill(x[:, :4], weight, states, (4,), (1,), (0,), activation="silu", seq_lens_cpu=[4])
    last = decode(x[:, 4][None], weight, states, (1,), "silu")
    wanted = plain(x, weight)
    wanted = wanted / (1 + (-wanted).exp())
    torch.testing.assert_close(torch.cat((found, last.T), 1), wanted)
    assert torch.equal(states[1], x[:, -2:])
    with pytest.raises(ValueError, match=r"got seq_lens_cpu=\[3\], expected \[4\]"):
        prefill(x[:, :4], weight, states, (4,), (1,), (0,), seq_lens_cpu=[3])


def test_padding_is_zeros_and_changes_nothing(weight):
    states = torch.randn(SLOTS, CHANNELS, WIDTH - 1)
    before = states.clone()
    x = torch.randn(CHANNELS, 4)
    assert not prefill(x, weight, states, (4,), (-1,), (1,)).any()
    assert not decode(x.T[:1], weight, states, (-1,)).any()
    assert torch.equal(states, before)
    assert fault.pending() is None


@pytest.mark.parametrize("slot", [SLOTS, -2])
def test_a_slot_that_is_not_there_is_a_device_fault(weight, slot):
    states = torch.zeros(SLOTS, CHANNELS, WIDTH - 1)
    out = decode(torch.randn(2, CHANNELS), weight, states, (slot, 1))
    broken = fault.pending()
    fault.clear()  # else this test cannot read a tensor either
    assert str(broken).startswith(
        f"causal_conv1d_update: row 0, column 0: slot {slot} is outside 0 <= slot < {SLOTS}"
    )
    assert not out[0].any()
    assert out[1].any()


@pytest.mark.parametrize("more", [{"activation": "gelu"}, {"bias": torch.zeros(CHANNELS)}])
def test_what_no_toy_uses_is_refused(weight, more):
    states = torch.zeros(SLOTS, CHANNELS, WIDTH - 1)
    given = {"conv_state_indices": torch.tensor([0]), **more}
    with pytest.raises(NotImplementedError, match=r"the CPU engine's causal_conv1d_update: got"):
        causal_conv1d_update(torch.randn(1, CHANNELS), states, weight, **given)
    with pytest.raises(NotImplementedError, match=r"without query_start_loc"):
        causal_conv1d_fn(torch.randn(CHANNELS, 2), weight, conv_states=states)
