"""The stand-ins with which SGLang 0.5.14 and 0.5.15 verify requests that sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4debug.cpu import verify_greedy
from g4debug.cpu.verify_sampling import sample_tree, top_k_renorm_prob, top_p_renorm_prob

VOCAB = 6
# Node 0 with two children; the second one has a child. And a chain of three.
TREE = {"next_token": [1, -1, 3, -1], "next_sibling": [-1, 2, -1, -1]}
CHAIN = {"next_token": [1, 2, 3, -1], "next_sibling": [-1, -1, -1, -1]}


def outputs(batch: int = 1, nodes: int = 4, steps: int = 4) -> dict[str, torch.Tensor]:
    return {
        "predicts": torch.zeros(batch * nodes, dtype=torch.int32),
        "accept_index": torch.full((batch, steps), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(batch, dtype=torch.int32),
    }


def given_tree(shape: dict[str, list[int]], candidates: list[int]) -> dict[str, torch.Tensor]:
    return {
        "candidates": torch.tensor([candidates]),
        "retrive_index": torch.arange(4)[None],
        **{f"retrive_{name}": torch.tensor([nodes]) for name, nodes in shape.items()},
    }


def sampled(
    probs: torch.Tensor, coins: Any, last: float, tree: dict[str, torch.Tensor], **more: Any
) -> dict[str, torch.Tensor]:
    found = outputs(steps=more.pop("steps", 4))
    sample_tree(
        **found, **tree, target_probs=probs[None], draft_probs=torch.zeros_like(probs[None]),
        uniform_samples=torch.as_tensor(coins, dtype=torch.float32)[None],
        uniform_samples_for_final_sampling=torch.tensor([last]), **more,
    )  # fmt: skip
    return found


@given(
    shape=st.sampled_from([TREE, CHAIN]),
    candidates=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=4),
    wanted=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=4),
    coin=st.floats(0.001, 0.999),
    steps=st.integers(2, 4),
)
def test_where_one_token_is_certain_it_is_the_greedy_verify(shape, candidates, wanted, coin, steps):
    tree, greedy = given_tree(shape, candidates), outputs(steps=steps)
    verify_greedy.verify_tree_greedy_cpu(**greedy, **tree, target_predict=torch.tensor([wanted]))
    certain = torch.nn.functional.one_hot(torch.tensor(wanted), VOCAB).float()
    found = sampled(certain, [coin] * 4, coin, tree, steps=steps)
    assert all(torch.equal(found[name], greedy[name]) for name in greedy)


@pytest.mark.parametrize("shape", [TREE, CHAIN], ids=["tree", "chain"])
def test_the_answer_has_the_targets_probabilities(shape):
    """Whatever was drafted: over all coins, the next token is as likely as without a draft."""
    probs = torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2, 0.0]]).repeat(4, 1)
    tree, often = given_tree(shape, [0, 3, 1, 5]), torch.zeros(VOCAB)
    grid = [(n + 0.5) / 60 for n in range(60)]
    for first in grid:
        for last in grid:
            often[int(sampled(probs, [first] * 4, last, tree)["predicts"][0])] += 1
    assert (often / often.sum() - probs[0]).abs().max() < 0.02


def test_the_thresholds_accept_more():
    probs, tree = (
        torch.tensor([[0.3, 0.3, 0.4, 0, 0, 0.0]]).repeat(4, 1),
        given_tree(CHAIN, [9, 0, 0, 0]),
    )
    for more, accepted in (({}, 0), ({"threshold_single": 0.3}, 3), ({"threshold_acc": 0.5}, 3)):
        found = sampled(probs, [0.55] * 4, 0.1, tree, **more)
        assert found["accept_token_num"].tolist() == [accepted]
        assert found["accept_index"][0, : accepted + 1].tolist() == list(range(accepted + 1))
    assert int(sampled(probs, [0.55] * 4, 0.0, tree)["predicts"][0]) == 1  # 0 was refused


def test_unlikely_tokens_are_cut_off():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    by_k = top_k_renorm_prob(probs, torch.tensor([2, 1 << 30], dtype=torch.int32))
    assert torch.allclose(by_k, torch.tensor([[0, 4 / 7, 3 / 7, 0], [0.25] * 4]))
    by_p = top_p_renorm_prob(probs, torch.tensor([0.5, 1.0]))
    assert torch.allclose(by_p, torch.tensor([[0, 4 / 7, 3 / 7, 0], [0.25] * 4]))
    assert top_p_renorm_prob(probs, torch.tensor([0.0, 0.0])).count_nonzero(dim=-1).tolist() == [
        1,
        1,
    ]
