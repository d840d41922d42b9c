"""The copy as of launch: the kernel, run by Triton's interpreter, beside its torch reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.ledger import shadow as shadows
from g4debug.sanitizer import snapshot_copy
from g4debug.sanitizer.snapshot_copy import Copy, launch, reference

pytestmark = pytest.mark.once("Triton is the same with all releases, and the kernels are ours")


def test_the_interpreter_really_runs_the_kernel():
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(snapshot_copy._copy_kernel, InterpretedFunction)


def ledger_of(pages: int, rows: int, owners: bool, protected: bool) -> SimpleNamespace:
    shadow = torch.randint(-1, pages, (pages + 1,), dtype=torch.int32)
    if not owners:
        return SimpleNamespace(shadow=shadow, owners=None)
    known = SimpleNamespace(
        pages=torch.randint(0, 1 << 40, (pages + 1,)),
        protected=torch.randint(0, 1 << 40, (rows,)) if protected else None,
    )
    return SimpleNamespace(shadow=shadow, owners=known)


def state(copy: Copy) -> list[torch.Tensor]:
    kept = (copy.first_tokens, copy.step, copy.shadow, copy.owners, copy.protected)
    return [t for t in kept if t is not None]


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_the_same_copy_as_in_torch(data):
    torch.manual_seed(data.draw(st.integers(0, 9)))
    rows, tokens = data.draw(st.integers(2, 9)), data.draw(st.sampled_from([5, 64, 2500]))
    size, pages = data.draw(st.sampled_from([1, 4, 64])), data.draw(st.integers(1, 2200))
    source = torch.randint(0, pages * size, (rows, tokens), dtype=torch.int32)
    ledger = None
    if data.draw(st.booleans()):
        ledger = ledger_of(pages, rows, data.draw(st.booleans()), data.draw(st.booleans()))
    batch = data.draw(st.lists(st.integers(0, rows - 1), unique=True, min_size=1))
    index = torch.tensor(batch, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    copies = [Copy(source, size, ledger) for _ in range(2)]
    for copy, how in zip(copies, (reference, launch), strict=True):
        how(copy, index, 41, copy._pairs())
    first, second = map(state, copies)
    assert all(map(torch.equal, first, second))
    assert int(second[1]) == 41
    assert torch.equal(second[0][batch], source[batch, ::size])


@pytest.mark.parametrize("how", [launch, reference])
def test_what_the_ledger_has_no_more_is_void(how):
    ledger = ledger_of(20, 4, owners=True, protected=True)
    copy = Copy(torch.zeros(4, 64, dtype=torch.int32), 4, ledger)
    rows = torch.tensor([1, 2])
    how(copy, rows, 1, copy._pairs())
    assert torch.equal(copy.owners, ledger.owners.pages)
    ledger.owners = None
    how(copy, rows, 2, copy._pairs())
    assert not copy.owners.any()
    ledger.shadow = shadows.new(7, "cpu")  # of another pool
    how(copy, rows, 3, copy._pairs())
    assert int(copy.shadow[-1]) == 0
    assert int(copy.step) == 3


@pytest.mark.parametrize("how", [launch, reference])
@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_a_row_that_is_not_there_is_left_alone(how, wrong):
    source = torch.arange(4 * 8, dtype=torch.int32).view(4, 8)
    copy = Copy(source, 4, None)
    before = copy.first_tokens.clone()
    how(copy, torch.tensor([wrong, 2]), 7, [])
    before[2] = torch.tensor([16, 20])
    assert torch.equal(copy.first_tokens, before)
    assert int(copy.step) == 7
