"""The inputs of a draft layer against SGLang's kernel for GPUs, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4debug.cpu import input_ids
from g4debug.hooking import targets

pytestmark = pytest.mark.skipif(
    targets.matches("<0.5.18"), reason="multi-layer EAGLE's kernel is elsewhere in older releases"
)
LENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def drawn(lens: list[int], seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lens)
    starts = counts.cumsum(0) - counts
    ids = torch.randint(0, 500, (sum(lens) + 2,), generator=generator)
    tokens = torch.randint(500, 600, (len(lens), 1), generator=generator)
    # The place of a token that counts: any of the request's own.
    offsets = torch.randint(0, 100, (len(lens),), generator=generator) % counts.clamp(min=1)
    return ids, starts, counts, tokens, starts + offsets


@given(lens=LENS, seed=st.integers(0, 999), behind=st.booleans())
def test_each_request_moves_one_place_and_gets_its_token(lens, seed, behind):
    ids, starts, counts, tokens, places = drawn(lens, seed)
    want = ids.tolist()
    for b, (start, count) in enumerate(zip(starts.tolist(), lens, strict=True)):
        if count:
            want[start : start + count - 1] = want[start + 1 : start + count]
            want[int(places[b]) if behind else start + count - 1] = int(tokens[b])
    assert input_ids.rotate(ids, starts, counts, tokens, places if behind else None) is None
    assert ids.tolist() == want


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_sglangs_kernel(sglang, seed, behind):
    from sglang.kernels.ops.speculative.multi_layer_eagle import rotate_input_ids_kernel

    ids, starts, counts, tokens, places = drawn([*[3, 0, 9, 1, 8][seed:], 5], seed)
    select, wanted = places if behind else None, ids.clone()
    block = 4096 if behind else 8  # as SGLang calls it
    rotate_input_ids_kernel[(len(counts),)](
        wanted, starts, counts, tokens, select, BLOCK_SIZE=block
    )
    input_ids.rotate(ids, starts, counts, tokens, select)
    assert torch.equal(ids, wanted)


def test_several_paths_are_refused():
    one = torch.tensor([0])
    with pytest.raises(NotImplementedError, match=r"got 2 tokens for 1 requests.*topk=1"):
        input_ids.rotate(torch.zeros(4), one, one + 4, torch.tensor([[7, 8]]))
