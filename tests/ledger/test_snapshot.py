"""The kernel that takes indices down does what its reference does, whatever it is given."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.ledger import shadow as shadows
from g4debug.ledger import snapshot

pytestmark = pytest.mark.once("the code is ours alone")

PAGES, MAPPED = 9, 40
# Without a GPU the kernel runs in Triton's interpreter (tests/conftest.py).
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_the_kernel_does_what_the_reference_does(data):
    size = data.draw(st.sampled_from([1, 4]))
    # Broken allocators give what is no page: beyond the pool, negative, page 0.
    given_ = data.draw(st.lists(st.integers(-50, 60), min_size=1, max_size=12))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    stride = data.draw(st.sampled_from([1, 3]))
    whole = torch.full((len(given_) * stride,), 7, dtype=dtype)
    whole[::stride] = torch.tensor(given_, dtype=dtype)
    mapping = torch.arange(1000, 1000 + MAPPED) if data.draw(st.booleans()) else None
    marks, value = data.draw(st.booleans()), data.draw(st.sampled_from([-1, 0]))
    unless_free = data.draw(st.booleans())
    found = []
    for how, device in (("kernel", DEVICE), ("reference", "cpu")):
        shadow = shadows.new(PAGES, device)
        shadow[2:5] = torch.tensor([0, 3, 0])
        on = [None if t is None else t.to(device) for t in (whole, mapping)]
        out = torch.full((2 * len(given_) + 3,), -77, dtype=torch.int64, device=device)
        of = (on[1], shadows.Marks(shadow, size, value, unless_free) if marks else None)
        if how == "kernel":
            snapshot.launch(on[0][::stride], out, *of)
        else:
            snapshot.reference(on[0][::stride], out, *of)
        found.append((out.tolist(), shadow.tolist()))
    assert found[0] == found[1]
    out, shadow = found[0]
    assert out[: len(given_)] == given_
    assert out[2 * len(given_) :] == [-77] * 3
    assert shadow[PAGES] == 1
    if mapping is not None:
        near = [1000 + min(max(t, 0), MAPPED - 1) for t in given_]
        assert out[len(given_) : 2 * len(given_)] == near


def test_more_than_one_block():
    indices = torch.arange(2 * snapshot.BLOCK + 5, device=DEVICE)
    out = torch.empty_like(indices)
    snapshot.launch(indices, out, None, None)
    assert out.tolist() == indices.tolist()
