"""Which sampled tokens are followed, that they reach the host, and what is counted of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.copies import Copies
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.tracers.spec_lifecycle.sampled_tokens import SampledTokens


class Result:
    """Something that can be referred to weakly."""

    def __init__(self, tokens):
        self.next_token_ids = tokens


class Step:
    """A prefill of one request, on a server that has a draft or none."""

    def __init__(self, folder, draft: bool, overlap: bool = False) -> None:
        self.context = Context.alone("spec-lifecycle", Settings(debug=True, debug_dir=folder))
        self.tracer = SampledTokens(self.context, SpecLog(self.context))
        self.tracer.judging = True
        self.scheduler = SimpleNamespace(enable_overlap=overlap)
        self.request = Request()
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(
                is_decode=lambda: False, is_extend=lambda: True, is_mixed=lambda: False
            ),
            reqs=[self.request],
            spec_algorithm=SimpleNamespace(is_none=lambda: not draft),
        )

    def run(self, samples: bool = True) -> None:
        tokens, tracer = torch.tensor([7]), self.tracer
        result = Result(tokens if samples else None)
        tracer.before_run_batch(self.scheduler, self.batch)
        if samples:
            tracer.after_sampler(tokens)
        tracer.after_forward(result, None)
        tracer.after_run_batch(result, self.scheduler, self.batch)
        tracer.before_process(self.scheduler, self.batch, result)
        self.request.output_ids.append(7)
        tracer.before_stream_output(None, self.batch.reqs)
        tracer.after_process(None)

    @property
    def counted(self) -> dict[str, int]:
        return {c.what: c.count for c in self.context.status.record().checked}


class Request:
    def __init__(self) -> None:
        self.rid, self.output_ids, self.finished_reason = "a", [], None
        self.req_pool_idx, self.kv_committed_len, self.is_retracted = 1, 5, False


def test_a_token_that_passed_by_is_counted_and_one_that_nobody_saw_is_not(tmp_path):
    step = Step(tmp_path, draft=False)
    step.run(samples=False)
    assert step.counted == {}
    step.run()
    assert step.counted == {"sampled tokens": 1}


@pytest.mark.parametrize(
    ("draft", "overlap", "closed"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_where_nothing_is_stashed_the_tokens_are_sent_to_the_host_all_the_same(
    draft, overlap, closed, tmp_path, monkeypatch
):
    """On a GPU a copy is begun, and is sent only when it is closed."""
    seen = []
    monkeypatch.setattr(Copies, "close", lambda self: seen.append(self))
    Step(tmp_path, draft, overlap).run()
    assert len(seen) == closed


def test_a_batch_with_a_beam_search_is_not_followed_and_that_is_said(tmp_path):
    step = Step(tmp_path, draft=False)
    step.run()
    assert step.context.status.record().sound
    step.request.beam_group = object()
    step.run()
    (limit,) = step.context.status.record().limits
    assert limit.what.startswith("of a batch with a beam search no sampled tokens")
    assert step.counted == {"sampled tokens": 1}
