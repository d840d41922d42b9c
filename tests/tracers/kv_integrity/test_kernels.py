"""The kernels of kv-integrity, run by Triton's interpreter, beside the operations in torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.tracers.kv_integrity import kernels
from g4debug.tracers.kv_integrity.kernels import NOT_FINITE, STAMPED_WORD, Launcher
from g4debug.tracers.kv_integrity.kv_pages import STAMP, WORDS, KvPages

pytestmark = [
    pytest.mark.once("Triton is the same with all releases, and the kernels are ours"),
    # An int64 sum that wraps is meant to.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
PAGES = 4


def test_the_interpreter_really_runs_the_kernels():
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(kernels._digest_kernel, InterpretedFunction)


def test_the_stamp_is_that_of_kv_pages():
    words = torch.full((WORDS,), STAMP, dtype=torch.int16)
    assert words.view(torch.int64).item() == STAMPED_WORD


def both(dtype, size, heads, dim, layers):
    """The same random pool twice: with the torch operations, and with the kernels."""
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    made = [torch.randn(PAGES * size, heads, dim).to(dtype) for _ in range(2 * layers)]
    found = []
    for _ in range(2):
        buffers = [b.clone().view(stored) for b in made]
        pool = SimpleNamespace(k_buffer=buffers[::2], v_buffer=buffers[1::2], dtype=dtype)
        found.append(KvPages(pool, PAGES, size))
    found[1].kernels = Launcher(found[1].buffers, PAGES, size)
    return found


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_the_same_answers_as_in_torch(data):
    dtype = data.draw(st.sampled_from(list(NOT_FINITE)))
    size = data.draw(st.sampled_from([1, 4, 16]))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    heads, dim = data.draw(st.sampled_from([(1, 8), (2, 24), (3, 264)]))
    pair = both(dtype, size, heads, dim, layers=data.draw(st.integers(1, 2)))
    some = st.lists(st.integers(0, PAGES - 1), unique=True, max_size=PAGES)
    sealed, freed, again, looked = (
        torch.tensor(data.draw(some), dtype=torch.int64) for _ in "1234"
    )
    harm = [
        (buffer, row, word, value)
        for buffer, row, word, value in data.draw(
            st.lists(
                st.tuples(
                    st.integers(0, len(pair[0].buffers) - 1),
                    st.integers(0, PAGES * size - 1),
                    st.integers(0, heads * dim * dtype.itemsize // 2 - 1),
                    st.sampled_from([0, 1, -1, 0x7FFF, STAMP]),
                ),
                max_size=4,
            )
        )
    ]
    answers = []
    for kv in pair:
        kv.seal(sealed)
        kv.stamp(freed)
        kv.unstamp(again)
        for buffer, row, word, value in harm:
            kv._rows[buffer].view(PAGES * size, -1)[row, word] = value
        codes = [kv.written(looked), kv.changed(looked), kv.not_finite(looked)]
        answers.append([*codes, kv.digests, *(b.view(torch.uint8) for b in kv.buffers)])
    assert all(map(torch.equal, *answers))


def test_the_last_place_of_a_page_that_needs_several_blocks():
    """More places than a program reads at a time, and the last of them is the bad one."""
    size, layers = 128, 5
    slow, fast = both(torch.bfloat16, size, 1, 8, layers)
    assert 2 * layers * size > kernels.PLACES
    for kv in (slow, fast):
        kv.buffers[-1][2 * size - 1] = float("inf")
    found = [kv.not_finite(torch.tensor([0, 1, 2])).tolist() for kv in (slow, fast)]
    assert found[0] == found[1] == [[0, 2 * layers * size, 0], [0, 1, 0]]
