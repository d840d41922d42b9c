"""The table of fixes: snapshots, and hostile text."""

from __future__ import annotations

import pytest
from test_report_snapshots import AsciiStream, compare, fits, text

from g4debug.reporters import fixes

ROWS = [
    fixes.Row(
        id="swa-state-swap",
        title="SWA state of the draft's attention backend follows the swapped KV pool",
        state="not-needed",
        why="the installed SGLang does not have this bug",
        switches=["G4DEBUG_FIX_SWA_STATE_SWAP"],
        seed="PR #6",
        upstream="sglang #26966 (2026-06-02), generalised by #27491",
        purpose="correctness",
    ),
    fixes.Row(
        id="mm-piecewise-graph",
        title="piecewise CUDA graphs for multimodal models",
        state="off",
        why="off by default; G4DEBUG_FIX_MM_PIECEWISE_GRAPH=1 turns it on",
        switches=[
            "G4DEBUG_FIX_MM_PIECEWISE_GRAPH",
            "SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM",
        ],
        seed="PR #16",
        upstream="none",
        purpose="experiment",
    ),
    fixes.Row(
        "some-fix", "t", "target-missing", "has no \x1b[31m x", ["G4DEBUG_FIX_S"], "s", "u", ""
    ),
]
HEAD = [
    "SGLang 0.5.12.post1",
    "G4DEBUG_FIXES=needed (the default): fixes that this SGLang needs; no paths",
]


@pytest.mark.parametrize("width", [80, 120])
def test_fixes(width: int) -> None:
    got = text(lambda c: fixes.render(ROWS, HEAD, c), width)
    fits(got, width)
    for row in ROWS:  # to be copied from the terminal
        assert all(switch in got for switch in row.switches)
    compare(f"fixes-{width}.txt", got)


def test_fixes_on_a_terminal_without_unicode() -> None:
    got = text(lambda c: fixes.render(ROWS, HEAD, c), 80, AsciiStream())
    assert got.isascii()
