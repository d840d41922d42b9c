"""The line at start that says which backend runs in which phase, and whether it is guarded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.backends import adapter, phases
from g4debug.backends.base import PHASES

pytestmark = pytest.mark.usefixtures("sglang")
TARGET, DRAFT = SimpleNamespace(), SimpleNamespace()
SCHEDULER = SimpleNamespace(
    tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=TARGET)),
    draft_worker=SimpleNamespace(draft_attn_backend=SimpleNamespace(attn_backends=[DRAFT])),
)
TRITON = adapter("triton")
BOTH = {id(TARGET): TRITON, id(DRAFT): TRITON}


@pytest.mark.parametrize(
    ("adapters", "in_part", "said"),
    [
        (BOTH, {}, "draft on triton; all guarded"),
        (BOTH, {id(DRAFT): PHASES}, "triton; guarded in part, see the limits in the log and"),
        (BOTH, {id(TARGET): {"verify"}}, "limits in the log and the status: verify"),
        ({id(TARGET): TRITON}, {}, "draft on SimpleNamespace; NOT guarded: draft"),
        (
            {id(DRAFT): TRITON},
            {id(DRAFT): {"draft"}},
            "NOT guarded: prefill, decode, verify; guarded in part",
        ),
    ],
)
def test_the_line_claims_no_more_than_is_judged(adapters, in_part, said):
    assert said in phases.line(phases.of(SCHEDULER, adapters, in_part))


def test_a_phase_that_the_adapter_does_not_judge_is_not_guarded(monkeypatch):
    monkeypatch.setattr(TRITON, "phases", ("prefill", "decode"))
    line = phases.line(phases.of(SCHEDULER, BOTH))
    assert line.endswith("draft on triton; NOT guarded: verify, draft")


@pytest.mark.parametrize(
    ("adapters", "blind"),
    [
        (BOTH, set()),
        ({id(TARGET): TRITON}, set()),  # the verify is guarded, so a decode has something to judge
        ({}, {"EXTEND", "MIXED", "SPLIT_PREFILL", "DECODE", "TARGET_VERIFY"}),
        ({id(DRAFT): TRITON}, {"EXTEND", "MIXED", "SPLIT_PREFILL"}),
    ],
)
def test_the_modes_in_which_nothing_is_guarded(adapters, blind):
    assert phases.blind_modes(phases.of(SCHEDULER, adapters)) == blind


def test_of_layers_of_two_kinds_those_with_attention_count():
    """As in HybridLinearAttnBackend, maybe in a half of HybridAttnBackend."""
    both = SimpleNamespace(full_attn_backend=TARGET, linear_attn_backend=SimpleNamespace())
    assert phases.selected(both, None) is TARGET
    assert phases.selected(SimpleNamespace(_select_backend=lambda mode: both), None) is TARGET


@pytest.mark.parametrize(
    ("args", "backends"),
    [
        ({}, {}),
        ({"attention_backend": "trtllm_mha"}, {"prefill": "trtllm_mha", "decode": "trtllm_mha"}),
        (
            {
                "attention_backend": None,
                "prefill_attention_backend": "triton",
                "decode_attention_backend": "trtllm_mha",
                "speculative_algorithm": "FROZEN_KV_MTP",
                "speculative_attention_mode": "prefill",
            },
            {
                "prefill": "triton",
                "decode": "trtllm_mha",
                "verify": "triton",
                "draft": "trtllm_mha",
            },
        ),
    ],
)
def test_the_backend_of_each_phase(args, backends):
    assert phases.asked(SimpleNamespace(**args)) == backends
    assert phases.asked(None) == {}
