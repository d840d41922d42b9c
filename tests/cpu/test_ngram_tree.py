"""NGRAM's trees from their masks, against plain walks over the nodes."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.cpu import ngram_tree

pytestmark = pytest.mark.once("the code is ours alone")

MOST = 6


@st.composite
def trees(draw):
    """The parent of each node; -1 of the first node, and of a node that pads the tree."""
    width = draw(st.integers(1, MOST))
    return [draw(st.integers(-1, node - 1)) for node in range(width)]


def ancestors(parent: list[int], node: int) -> list[int]:
    found = []
    while parent[node] >= 0:
        node = parent[node]
        found.append(node)
    return found


@settings(max_examples=examples(100), deadline=None)
@given(first=trees(), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_each_node_is_found_where_it_is_in_the_tree(first, count, seed):
    width = len(first)
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 50, (count,), generator=generator)
    mask = torch.zeros(count, width, width, dtype=torch.bool)
    for node in range(width):
        mask[:, node, [node, *ancestors(first, node)]] = True
    positions = torch.full((count * width,), -7)
    index, child, sibling = torch.full((3, count, width), -7)
    ngram_tree.reconstruct(mask.view(-1), lens, positions, index, child, sibling, count, width)
    for b in range(count):
        for node in range(width):
            children = [k for k in range(width) if first[k] == node]
            others = [k for k in range(node + 1, width) if first[k] == first[node] >= 0]
            assert positions[b * width + node] == lens[b] + len(ancestors(first, node))
            assert index[b, node] == b * width + node
            assert child[b, node] == min(children, default=-1)
            assert sibling[b, node] == min(others, default=-1)


def test_a_mask_of_another_size_is_refused():
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match="got 8 cells, expected 1 x 3 x 3"):
        ngram_tree.reconstruct(torch.zeros(8), *[nothing] * 5, 1, 3)
