"""The values that are handed on, and whether they arrive: the table, and checks on plain numbers.

The table of docs/tracers.md is made of the rows. To write it anew::

    UPDATE_SNAPSHOTS=1 pytest tests/tracers/spec_lifecycle/test_handed_on.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle.check_values import (
    RESULT,
    Rows,
    Verify,
    check_from_last,
    check_host,
    check_verify_input,
    check_verify_result,
)
from g4debug.tracers.spec_lifecycle.hidden_states import digest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tracers.md"
WIDTH = 4
VERIFY = Verify(WIDTH, WIDTH, chain=True)


def test_the_table_is_made_of_the_rows():
    text = PAGE.read_text()
    begin, end = re.search(r"<!-- handed on: .* -->\n", text), text.find("<!-- /handed on -->")
    assert begin
    assert end > 0
    written = text[: begin.end()] + "\n".join(h.markdown()) + "\n" + text[end:]
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        PAGE.write_text(written)
    assert PAGE.read_text() == written


def test_each_reading_has_a_key_of_its_own():
    readings = [x for x in vars(h).values() if isinstance(x, h.Reading)]
    keys = [r.key for r in (*readings, *h.TREE)]
    assert sorted(keys) == sorted({*keys, "stashed"} | set()) or keys.count("stashed") == 2
    assert all(r.name and r.end for r in readings)


@st.composite
def verifies(draw):
    """The values of a sound greedy verify: of each row, how many drafts are right."""
    correct = draw(st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=5))
    count = len(correct)
    token = iter(range(100, 100 + 99 * count))
    drafted, wanted, tokens, index = [], [], [], []
    for row, n in enumerate(correct):
        mine = [next(token) for _ in range(WIDTH)]
        wants = [mine[k + 1] if k < n else next(token) for k in range(WIDTH)]
        drafted += mine
        wanted += wants
        tokens += [w if k <= n else 0 for k, w in enumerate(wants)]
        index += [row * WIDTH + k if k <= n else -1 for k in range(WIDTH)]
    accepted = [n + 1 for n in correct]
    lens = draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
    bonus = [tokens[row * WIDTH + n] for row, n in enumerate(correct)]
    child = [k + 1 if k + 1 < WIDTH else -1 for _ in correct for k in range(WIDTH)]
    hidden = [1000 + i for i in range(count * WIDTH)]
    return {
        "bonus": drafted[::WIDTH], "lens": lens, "drafted": drafted, "tree tokens": drafted,
        "positions": [n + k for n in lens for k in range(WIDTH)],
        "tree index": list(range(count * WIDTH)), "tree child": child,
        "tree sibling": [-1] * (count * WIDTH), "fed": drafted,
        "fed positions": [n + k for n in lens for k in range(WIDTH)], "candidates": drafted,
        "wanted": wanted, "kernel tokens": tokens, "kernel index": index,
        "kernel correct": correct, "sample tokens": tokens, "sample lens": accepted,
        "sample index": index, "result tokens": tokens, "result lens": accepted,
        "result bonus": bonus, "left bonus": bonus, "stashed": bonus, "target hidden": hidden,
        "result hidden": hidden,
        "left hidden": [hidden[row * WIDTH + n] for row, n in enumerate(correct)],
        "host lens": accepted, "host tokens": tokens,
    }  # fmt: skip


def check(values, live=None, verify=VERIFY):
    count = len(values["lens"])
    rows = Rows([f"r{i}" for i in range(count)], range(count) if live is None else live)
    checks = (check_verify_input, check_verify_result, check_host)
    found = (c(rows, verify, values) for c in checks)
    return next((f for f in found if f is not None), None)


@given(verifies())
def test_a_sound_verify_is_silent(values):
    assert check(values) is None
    sampled = {k: v for k, v in values.items() if not k.startswith(("kernel", "wanted"))}
    assert check(sampled) is None
    for missing in values:
        if missing not in ("lens", "host lens", "host tokens"):
            assert check({k: v for k, v in values.items() if k != missing}) is None, missing


# What is not looked at: a token that was not accepted is nobody's.
ACCEPTED_ONLY = ("kernel tokens", "host tokens")
CHANGED = (
    "drafted", "positions", "tree index", "tree child", "tree sibling", "fed", "fed positions",
    "candidates", "kernel tokens", "kernel index", "kernel correct", "sample tokens",
    "sample lens", "sample index", "result tokens", "result lens", "result bonus", "left bonus",
    "stashed", "result hidden", "left hidden", "host lens", "host tokens",
)  # fmt: skip


@pytest.mark.parametrize("key", CHANGED)
@given(values=verifies(), data=st.data())
def test_whatever_is_changed_is_told_in_its_row(key, values, data):
    count = len(values["lens"])
    width = len(values[key]) // count
    row = data.draw(st.integers(0, count - 1))
    most = values["host lens"][row] if key in ACCEPTED_ONLY else width
    column = data.draw(st.integers(0, min(width, most) - 1))
    spoiled = list(values[key])
    spoiled[row * width + column] += 7
    found = check({**values, key: spoiled})
    assert found is not None
    assert found.row == row
    assert check({**values, key: spoiled}, [i for i in range(count) if i != row]) is None
    assert str(values[key][row * width + column]) not in found.got or not secret(key)


def secret(key):
    return any(r.key == key and r.thing for r in vars(h).values() if isinstance(r, h.Reading))


@given(values=verifies(), data=st.data())
def test_one_accepted_more_is_told_even_if_all_agree_on_it(values, data):
    rows = [i for i, n in enumerate(values["kernel correct"]) if n < WIDTH - 1]
    if not rows:
        return
    row = data.draw(st.sampled_from(rows))
    more = {k: list(v) for k, v in values.items() if not k.startswith(("kernel", "wanted"))}
    for key in ("sample lens", "result lens", "host lens"):
        more[key][row] += 1
    more["sample index"][row * WIDTH + more["sample lens"][row] - 1] = 1
    found = check(more)
    assert (found.kind, found.row) == (RESULT, row)


def test_several_paths_and_what_is_made_up_are_judged_by_less():
    values = {
        "lens": [5], "bonus": [9], "drafted": [9, 1, 2, 3], "positions": [5, 6, 6, 7],
        "sample lens": [2], "sample index": [0, 2, -1, -1], "result lens": [2],
        "sample tokens": [2, 0, 8, 0], "result tokens": [2, 8, 8, 0], "result bonus": [8],
    }  # fmt: skip
    tree = Verify(4, 4, chain=False)
    assert check(values, verify=tree) is None
    assert check({**values, "positions": [6, 6, 6, 7]}, verify=tree).what == "positions"
    assert check({**values, "sample lens": [3]}, verify=tree).kind == RESULT
    assert check({**values, "result bonus": [2]}, verify=tree).what == "bonus_tokens"
    made_up = Verify(4, 4, chain=True, simulated=True)
    values |= {"positions": [5, 6, 7, 8], "result tokens": [100] * 4, "sample tokens": [100] * 4}
    assert check({**values, "result bonus": [100]}, verify=made_up) is None


def test_what_the_last_step_left_is_compared_where_it_is_known():
    rows = Rows(["a", "b", "c"], (0, 2))
    left = [5, 6, None]
    assert check_from_last(rows, "seq-len", h.NEW_LENS, h.LENS, left, {"lens": [5, 9, 9]}) is None
    found = check_from_last(rows, "seq-len", h.NEW_LENS, h.LENS, left, {"lens": [6, 6, 9]})
    assert (found.row, found.off, found.whose) == (0, 1, "request b (row 1)")
    assert check_from_last(rows, "seq-len", h.NEW_LENS, h.LENS, left, {"lens": [6]}) is None
    assert check_from_last(rows, "seq-len", h.NEW_LENS, h.LENS, left, {}) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_digest_is_of_the_bits_of_one_row(dtype):
    hidden = torch.randn(6, 64).to(dtype)
    sums = digest(hidden)
    assert (sums.dtype, tuple(sums.shape)) == (torch.int64, (6,))
    assert len(set(sums.tolist())) == 6
    assert digest(hidden[[3, 1]]).tolist() == [sums[3], sums[1]]  # however many rows there are
    hidden[2, 5] += 1
    assert (digest(hidden) == sums).tolist() == [True, True, False, True, True, True]
    assert digest(hidden[:0]).tolist() == []
