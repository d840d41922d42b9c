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
from g4debug.trapping.trap import TrapError


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
            seq_lens_cpu=None,
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

    def decode(self) -> None:
        """The same, as a decode."""
        mode = SimpleNamespace(
            is_decode=lambda: True, is_extend=lambda: False, is_mixed=lambda: False
        )
        self.batch.forward_mode = mode
        self.run()

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


@pytest.mark.parametrize("by", [-1, 1])
def test_a_token_that_is_added_or_lost_between_two_results_is_told(by, tmp_path):
    step = Step(tmp_path, draft=False)
    step.run()
    step.decode()
    output = step.request.output_ids
    step.request.output_ids = [*output, 7] if by > 0 else output[:-1]
    with pytest.raises(TrapError) as error:
        step.decode()
    finding = error.value.finding
    assert finding.kind == "bookkeeping"
    assert f"output_ids = {2 + by} ({by:+d})" in finding.headline


def test_what_a_step_adds_that_is_not_followed_is_left_alone(tmp_path):
    step = Step(tmp_path, draft=False)
    step.run()
    step.decode()
    step.tracer.before_process(step.scheduler, step.batch, Result(None))
    step.request.output_ids += [7, 7, 7]
    step.decode()
    step.decode()


def test_a_request_that_was_retracted_may_begin_its_output_anew(tmp_path):
    step = Step(tmp_path, draft=False)
    prefill = step.batch.forward_mode
    step.run()
    step.decode()
    step.request.output_ids = []
    step.batch.forward_mode = prefill
    step.run()
    step.decode()
