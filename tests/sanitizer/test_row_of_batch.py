"""What is known of a row of a batch: room that the step itself takes is not known before it."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import releases

from g4debug.findings.record import Step
from g4debug.sanitizer.page_report import row_of_batch


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
@pytest.mark.parametrize("draft", [False, True])
def test_a_verify_of_v1_takes_room_that_the_request_does_not_count_yet(sglang, draft):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    step = Step(7, "DECODE", ("a",), (299,), rows=(5,), committed=(299,), allocated=(299,))
    algorithm = SpeculativeAlgorithm.from_string("FROZEN_KV_MTP" if draft else None)
    recorder = SimpleNamespace(steps=[step], scheduler=SimpleNamespace(spec_algorithm=algorithm))
    row = row_of_batch(recorder, 7, 0, 5)
    said = row.wrong_length(303)
    if draft and releases.has_v1_worker():
        assert said == ""
    else:
        assert "room for 299 was allocated" in said
    assert "it has 299 with KV" in row.wrong_length(290)
