"""The line at start that says which backend runs in which phase, and whether it is guarded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.backends import phases

pytestmark = pytest.mark.usefixtures("sglang")
TARGET, DRAFT = SimpleNamespace(), SimpleNamespace()
SCHEDULER = SimpleNamespace(
    tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=TARGET)),
    draft_worker=SimpleNamespace(draft_attn_backend=SimpleNamespace(attn_backends=[DRAFT])),
)
NAMES = {id(TARGET): "triton", id(DRAFT): "triton"}


@pytest.mark.parametrize(
    ("names", "in_part", "said"),
    [
        (NAMES, (), "draft on triton; all guarded"),
        (NAMES, {id(DRAFT)}, "draft on triton; guarded in part, see the limits in the log and"),
        ({id(TARGET): "triton"}, (), "draft on SimpleNamespace; NOT guarded: draft"),
        ({id(DRAFT): "x"}, {id(DRAFT)}, "NOT guarded: prefill, decode, verify; guarded in part"),
    ],
)
def test_the_line_claims_no_more_than_is_judged(names, in_part, said):
    assert said in phases.line(phases.of(SCHEDULER, names, in_part))
