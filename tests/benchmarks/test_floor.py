"""The floor of a decode step counts the numbers that the checkpoints really have."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import floor

from g4debug.cpu.geometry import TINY
from g4debug.cpu.weights import Weights, assistant_tensors, target_tensors

pytestmark = pytest.mark.once("the code is ours alone")

SHAPES = (TINY, replace(TINY, pattern="ssfsssfssf", kv_shared=3, kv_heads=4, ple=0))
# Of these a pass reads a row for each token, or nothing, and not the whole.
ROWS = ("embed_tokens", "token_ordering", "norm", "layer_scalar")


def matrices(tensors, skipped=()):
    return sum(
        t.numel() for name, t in tensors if not any(part in name for part in (*ROWS, *skipped))
    )


@pytest.mark.parametrize("g", SHAPES)
def test_the_target_s_matrices_are_those_of_its_checkpoint(g):
    shared = [layer for layer in range(g.layers) if g.kv_owner(layer) != layer]
    idle = [f"layers.{layer}.self_attn.{x}_proj" for layer in shared for x in "kv"]
    assert floor.of_target(g) == matrices(target_tensors(Weights(g)), idle)


@pytest.mark.parametrize("g", SHAPES)
def test_the_draft_s_matrices_are_those_of_its_checkpoint(g):
    none = ("k_proj", "v_proj")
    assert floor.of_draft(g) == matrices(assistant_tensors(Weights(g)), none)


def test_kv_of_layers_that_share_it_is_read_once_and_attended_to_by_each():
    by_what = {(p.passed, p.what): p for p in floor.parts(TINY, 2, 1000, 4)}
    # Two sliding windows of 128 tokens would be read twice if each layer read its own.
    owners = [
        (d, n) for d, n in ((32, 128), (32, 128), (64, 1000), (32, 128), (32, 128), (64, 1000))
    ]
    read = 2 * sum(2 * 2 * dim * tokens for dim, tokens in owners)
    kv = by_what[floor.VERIFY, "KV"]
    assert kv.bytes == floor.BYTES * read
    # With 4 heads and 2 KV heads each number is in two products, each with an addition.
    shared = 2 * 2 * (32 * 128 + 64 * 1000)
    assert kv.flops == 2 * 4 * 4 * (read // 2 + shared)


def test_the_longer_of_reading_and_multiplying_is_the_time():
    slow = floor.Part(floor.VERIFY, "weights", 100, 10)
    assert floor.seconds([slow, slow], bandwidth=100, rate=1000) == 2
    assert floor.seconds([slow, slow], bandwidth=100, rate=1) == 20


def test_the_table_adds_the_passes():
    line = floor.table(TINY, [1], 100, 1e9, 1e12)[-1]
    cells = [cell.split()[0] for cell in line.split("|")[1:-1]]
    assert float(cells[-1]) == pytest.approx(float(cells[4]) + float(cells[6]), abs=0.011)
