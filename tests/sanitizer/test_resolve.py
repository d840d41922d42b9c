"""How a kernel resolves tokens, in Triton's interpreter, against the same in torch.

That what they find is right is counted by the tests of the checks, tests/tracers/page_table and
tests/tracers/kv_writes; on a GPU by tests/gpu.
"""

from __future__ import annotations

import random

import pytest
import torch
import triton.language as tl
from effort import examples
from guard_cases import launched, truthful
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug import launching
from g4debug.sanitizer import device_library
from g4debug.sanitizer import resolve as resolving
from g4debug.sanitizer.reference_state import Truth, arguments
from g4debug.sanitizer.resolve import Resolved, resolve, resolve_tokens

pytestmark = [
    pytest.mark.once("what it tests is the same code on every release"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernels are compiled here: tests/gpu runs them"
    ),
]
TOKENS = 128
NAMES = tuple(Resolved.__dataclass_fields__)


@launching.kernel(tensors=8, numbers=7)
def _resolve_kernel(
    out, positions, req_to_token, req_pool_indices, book, owners, protected, step,
    page_size, requests, words, apart, known, padding, stride,
    HAS_SHADOW: tl.constexpr, HAS_OWNERS: tl.constexpr, HAS_STEP: tl.constexpr, SWA: tl.constexpr,
    BY_PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TOKENS)
    position = tl.load(positions + lane)
    request = tl.load(req_pool_indices + row).to(tl.int64)
    theirs = (request > 0) & (request < requests)
    cell = position * apart
    within = position * 0
    if BY_PAGE:
        cell = position // page_size
        within = position % page_size
    begins = position // page_size * page_size
    judged, place, page, own_place, own_page, freed, foreign, cached = resolve(
        req_to_token, book, owners, protected, request, theirs, cell, within, position, begins,
        lane < TOKENS - 3, words, known, stride, page_size, HAS_SHADOW, HAS_OWNERS, SWA,
    )  # fmt: skip
    to = out + row * 8 * TOKENS + lane
    tl.store(to, judged.to(tl.int64))
    tl.store(to + TOKENS, place)
    tl.store(to + 2 * TOKENS, page)
    tl.store(to + 3 * TOKENS, own_place)
    tl.store(to + 4 * TOKENS, own_page)
    tl.store(to + 5 * TOKENS, freed.to(tl.int64))
    tl.store(to + 6 * TOKENS, foreign.to(tl.int64))
    tl.store(to + 7 * TOKENS, cached.to(tl.int64))


def agrees(truth: Truth, page_size: int, rng: random.Random) -> set[str]:
    """The names of all that was found."""
    rows, words = len(truth.req_pool_indices), truth.req_to_token.shape[1]
    last = words * (page_size if truth.apart == 1 else 1) + 5
    position = torch.tensor([rng.randrange(last) for _ in range(TOKENS)])
    by_page = truth.apart == 1 and page_size > 1
    out = torch.zeros(rows, 8, TOKENS, dtype=torch.int64)
    sent = arguments(truth, truth.req_to_token, 1)
    launching.Launcher(_resolve_kernel)(
        (rows, 1, 1),
        (out, position, *sent.tensors),
        (page_size, *sent.numbers, sent.stride),
        (*sent.flags, by_page, TOKENS),
    )
    inside = torch.arange(TOKENS) < TOKENS - 3
    row = torch.arange(rows)[:, None]
    cell, within = (position // page_size, position % page_size) if by_page else (position, 0)
    found = resolve_tokens(truth, row, cell, within, position, inside, page_size)
    for number, name in enumerate(NAMES):
        want, got = getattr(found, name).to(torch.int64), out[:, number]
        # What lies in the layer's own pool is said only where it is known.
        known = found.judged if name.startswith("own_") else torch.ones_like(found.judged)
        assert torch.equal(want[known], got[known]), name
    return {name for name in NAMES if bool((getattr(found, name) > 0).any())}


def drawn(seed: int) -> set[str]:
    rng = random.Random(seed)
    case = truthful(rng, rng.randint(1, 4), rng.randint(1, 6))
    truth = case.truth
    if rng.random() < 0.5 and (not truth.swa or truth.shadow is not None):
        truth = launched(case).truth
    return agrees(truth, case.page_size, rng)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32))
def test_kernel_and_torch_find_the_same(seed):
    drawn(seed)


def test_the_random_cases_have_everything_in_them():
    assert set().union(*(drawn(seed) for seed in range(60))) == set(NAMES)


def test_the_library_reads_no_global_constants():
    """Triton compares each of them at every launch, which was a quarter of the host's time."""
    names = [(m, n) for m in (device_library, resolving) for n in vars(m)]
    jitted = [f for m, n in names if hasattr(f := getattr(m, n), "fn")]
    assert len(jitted) >= 6
    for function in (f.fn for f in jitted):
        used = [function.__globals__.get(n) for n in function.__code__.co_names]
        assert not any(isinstance(x, tl.constexpr | int | float) for x in used), function
