"""Tree building and greedy verification against brute-force walks over explicit paths."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.cpu import draft_tree, softcap, verify_greedy

pytestmark = pytest.mark.once("the code is ours alone")


@st.composite
def trees(draw):
    """Expand a tree as EAGLE does, and keep a closed set of `d - 1` candidates.

    Candidates are numbered as SGLang does: the root's children are 0..topk-1; step s >= 1 expands
    topk frontier candidates into topk children each, numbered topk + (s-1)*topk^2 + i*topk + j.
    `parents` is [-1 for the root] + the frontier of each step, so group g = number // topk.
    """
    topk = draw(st.integers(1, 3))
    depth = draw(st.integers(1, 4))
    paths = {i: (i,) for i in range(topk)}  # candidate number -> its path of child ranks
    frontier = list(range(topk))
    parents = [-1]
    for step in range(1, depth):
        parents += frontier
        created = []
        for i, parent in enumerate(frontier):
            for j in range(topk):
                number = topk + (step - 1) * topk * topk + i * topk + j
                paths[number] = (*paths[parent], j)
                created.append(number)
        frontier = sorted(draw(st.permutations(created))[:topk])
    kept: set[int] = set()
    by_path = {path: number for number, path in paths.items()}
    size = draw(st.integers(1, len(paths)))
    for number in sorted(paths, key=lambda n: (len(paths[n]), n)):
        if len(kept) < size and (len(paths[number]) == 1 or by_path[paths[number][:-1]] in kept):
            kept.add(number)
    return topk, depth, parents, sorted(kept), paths


def build(topk, depth, parents, selected, prefixes, mode):
    bs, d = len(prefixes), len(selected) + 1
    width = sum(prefixes) * d + bs * d * d if mode == 0 else bs * d * d
    mask = torch.full((width,), True)
    positions = torch.empty(bs * d, dtype=torch.long)
    retrieve = torch.full((3, bs, d), -1, dtype=torch.long)
    draft_tree.build_tree(
        torch.tensor([parents] * bs if depth > 1 else [[]] * bs, dtype=torch.long).view(bs, -1),
        torch.tensor([selected] * bs), torch.tensor(prefixes), mask, positions, *retrieve,
        topk, depth, d, mode,
    )  # fmt: skip
    return mask, positions, retrieve


@settings(max_examples=examples(60), deadline=None)
@given(tree=trees(), prefixes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_layout_equals_the_paths(tree, prefixes):
    topk, depth, parents, selected, paths = tree
    node_path = [(), *(paths[number] for number in selected)]
    d = len(node_path)
    full, positions, (index, child, sibling) = build(topk, depth, parents, selected, prefixes, 0)
    short, _, _ = build(topk, depth, parents, selected, prefixes, 1)
    start = 0
    for b, prefix in enumerate(prefixes):
        rows = full[start : start + d * (prefix + d)].view(d, prefix + d)
        start += d * (prefix + d)
        assert rows[:, :prefix].all()
        for t in range(d):
            assert positions[b * d + t] == prefix + len(node_path[t])
            assert index[b, t] == b * d + t
            for u in range(d):
                above = node_path[t][: len(node_path[u])] == node_path[u]
                assert rows[t, prefix + u] == above
                assert short.view(-1, d, d)[b, t, u] == above
            children = []
            node = int(child[b, t])
            while node != -1:
                children.append(node)
                node = int(sibling[b, node])
            assert children == [u for u in range(1, d) if node_path[u][:-1] == node_path[t]]
    assert start == full.numel()


def test_an_open_tree_is_refused():
    with pytest.raises(ValueError, match="closed tree"):
        build(2, 2, [-1, 0, 1], [1, 2], [3], 0)  # candidate 2 hangs below candidate 0


def test_bit_packing_is_refused():
    with pytest.raises(NotImplementedError, match="mask mode"):
        build(1, 2, [-1, 0], [0, 1], [3], 2)


@settings(max_examples=examples(80), deadline=None)
@given(tree=trees(), data=st.data(), bs=st.integers(1, 3))
def test_greedy_verification_equals_a_walk_over_paths(tree, data, bs):
    topk, depth, parents, selected, paths = tree
    node_path = [(), *(paths[number] for number in selected)]
    d = len(node_path)
    _, _, retrieve = build(topk, depth, parents, selected, [2] * bs, 1)
    token = st.integers(0, 2)  # few values, so that matches and duplicates happen
    candidates = torch.tensor(
        data.draw(st.lists(st.lists(token, min_size=d, max_size=d), min_size=bs, max_size=bs))
    )
    target = torch.tensor(
        data.draw(st.lists(st.lists(token, min_size=d, max_size=d), min_size=bs, max_size=bs))
    )
    predicts = torch.full((bs * d + 1,), -5, dtype=torch.int32)
    accept = torch.full((bs, depth + 1), -1, dtype=torch.int32)
    number = torch.zeros(bs, dtype=torch.int32)
    verify_greedy.verify_tree_greedy(predicts, accept, number, candidates, *retrieve, target)
    for b in range(bs):
        here, walked = 0, [0]
        while len(walked) <= depth:
            nexts = [
                u
                for u in range(1, d)
                if node_path[u][:-1] == node_path[here] and candidates[b, u] == target[b, here]
            ]
            if not nexts:
                break
            here = nexts[0]
            walked.append(here)
        want = [b * d + t for t in walked]
        assert accept[b].tolist() == want + [-1] * (depth + 1 - len(want))
        assert number[b] == len(walked) - 1
        written = {b * d + t: int(target[b, t]) for t in walked}
        for t in range(d):
            assert predicts[b * d + t] == written.get(b * d + t, -5)
    assert predicts[-1] == -5


@settings(max_examples=examples(20), deadline=None)
@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1), cap=st.floats(0.5, 60))
def test_softcap_equals_the_formula(values, cap):
    import math

    logits = torch.tensor(values, dtype=torch.float32)
    want = [cap * math.tanh(float(x) / cap) for x in logits]
    assert softcap.softcap_in_place(logits, cap) is logits
    torch.testing.assert_close(logits.double(), torch.tensor(want).double(), rtol=1e-5, atol=1e-4)


def test_softcap_keeps_strided_rows_and_refuses_a_bad_cap():
    base = torch.ones(2, 6)
    softcap.softcap_in_place(base[:, :3], 2.0)
    assert base[:, 3:].eq(1).all()
    with pytest.raises(ValueError, match="cap"):
        softcap.softcap_in_place(base, 0.0)
