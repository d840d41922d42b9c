"""The kernels of a verify's attention, in Triton's interpreter, against float64, key by key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_cases import Case, error, tensors

from g4debug.fixes.paths.kernels import verify_attention as va
from g4debug.fixes.paths.kernels.verify_attention import Cut, ineligible, verify_attention

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernel is compiled here: tests/gpu runs it"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
MIXED = (0, 1, 63, 64, 65, 200)  # around the end of a block
CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3}  # the interpreter has no product of bfloat16


def wrong(case: Case, how: Cut | None = None, seed: int = 0) -> float:
    arguments = tensors(case, seed=seed)
    verify_attention(**arguments, how=how)
    assert torch.isfinite(arguments["out"]).all()
    return error(case, arguments)


def test_the_interpreter_really_runs_the_kernels():
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(va._verify_part_kernel, InterpretedFunction)
    assert isinstance(va._verify_whole_kernel, InterpretedFunction)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("programs", [1, 48, 10_000], ids=["one part", "four", "as many as may be"])
def test_rows_of_every_length(dtype, programs):
    case = Case(MIXED, dtype=dtype)
    how = Cut(16, 4, 1, programs, 32)
    assert how.parts(len(MIXED) * 2, -1) == {1: 1, 48: 4, 10_000: 32}[programs]
    assert wrong(case, how) < CLOSE[dtype]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("window", [0, 1, 5, 63, 64, 300])
def test_a_window_hides_what_is_too_far_back(window, masked):
    case = Case(MIXED, window=window, masked=masked)
    assert wrong(case, Cut(16, 4, 1, 48, 4)) < 1e-6


def test_tokens_before_the_window_have_cells_in_the_mask():
    case = Case((40, 64, 3), window=64, skipped=29, tree=True)
    assert wrong(case, Cut(16, 4, 1, 48, 4)) < 1e-6


def test_a_tree_sees_what_its_mask_says():
    assert wrong(Case(MIXED, tree=True)) < 1e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"), [(8, 1, 4), (6, 2, 5), (4, 4, 1), (8, 1, 8), (12, 4, 7)]
)
def test_heads_and_queries(heads, kv_heads, queries):
    case = Case(MIXED, heads=heads, kv_heads=kv_heads, queries=queries)
    assert wrong(case, Cut(32, 4, 1, 40, 8)) < 1e-6


@pytest.mark.parametrize(("d", "dv"), [(256, 256), (80, 48), (512, 512)])
def test_sizes_of_heads(d, dv):
    assert wrong(Case((5, 130), d=d, dv=dv)) < 1e-6


def test_nothing_is_read_but_the_row_s_own_tokens():
    """What is not listed, and what is behind the lists, is not a number."""
    case = Case(MIXED)
    arguments = tensors(case)
    others = torch.ones(arguments["k_buffer"].shape[0], dtype=torch.bool)
    others[arguments["kv_indices"]] = False
    arguments["k_buffer"][others] = arguments["v_buffer"][others] = float("nan")
    behind = torch.full((64,), 10**9)
    arguments["kv_indices"] = torch.cat([arguments["kv_indices"], behind])
    verify_attention(**arguments, how=Cut(16, 4, 1, 48, 8))
    assert error(case, arguments) < 1e-6


def test_a_view_of_larger_tensors_as_sglang_hands_them_over():
    case = Case(MIXED)
    arguments = tensors(case)
    for name in ("q", "k_new", "v_new"):
        wide = torch.full((arguments[name].shape[0], 50, 80), float("nan"))
        view = wide[:, 3 : 3 + arguments[name].shape[1], 5 : 5 + arguments[name].shape[2]]
        view.copy_(arguments[name])
        arguments[name] = view
    verify_attention(**arguments)
    assert error(case, arguments) < 1e-6


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from([(4, 1), (4, 2), (6, 3)]),
    st.sampled_from([-1, 0, 7, 40]),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from([Cut(16, 4, 1, 1, 1), Cut(16, 4, 1, 64, 8), Cut(32, 4, 1, 999, 4)]),
    st.integers(0, 2**31),
)
def test_drawn_verifies(prefixes, queries, heads, window, tree, skipped, how, seed):
    case = Case(
        tuple(prefixes),
        queries=queries,
        heads=heads[0],
        kv_heads=heads[1],
        d=16,
        dv=16,
        window=window,
        tree=tree,
        skipped=skipped if window >= 0 else 0,
    )
    assert wrong(case, how, seed) < 1e-5


def test_what_the_kernels_do_not_compute():
    def why(case: Case, queries: int | None = None, **others: torch.Tensor) -> str:
        t = tensors(case) | others
        return ineligible(
            t["q"], t["k_new"], t["k_buffer"], t["v_buffer"], len(case.prefixes),
            queries or case.queries,
        )  # fmt: skip

    case = Case((5, 6))
    assert why(case) == ""
    assert why(case, 3) == "its rows have different numbers of queries"
    assert "more than 64" in why(replace(case, queries=17))
    assert "another dtype" in why(case, k_buffer=tensors(case)["k_buffer"].half())
    assert "one vector" in why(case, k_buffer=torch.zeros(9, 4, 2, 64))
    assert "other sizes" in why(case, k_buffer=torch.zeros(9, 2, 65))
