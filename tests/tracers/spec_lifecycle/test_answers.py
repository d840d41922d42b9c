"""A token that a request was given is the same when the request ends, or is retracted."""

from __future__ import annotations

import gc
from array import array
from types import SimpleNamespace

import pytest

from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.answers import Answers
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.trapping.trap import TrapError


class Request:
    def __init__(self, rid="a", kind=list):
        self.rid = rid
        self.output_ids = kind([5]) if kind is list else array("q", [5])


class Server:
    def __init__(self, folder):
        self.context = Context.alone("spec-lifecycle", Settings(debug=True, debug_dir=folder))
        self.judging = True
        self.tracer = Answers(self.context, SpecLog(self.context), lambda: self.judging)

    def result(self, *requests):
        self.tracer.after_process("out", None, SimpleNamespace(reqs=list(requests)), None)

    def release(self, request):
        self.tracer.before_release(request)


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


@pytest.mark.parametrize("kind", [list, array])
@pytest.mark.parametrize("at", [0, 3])
def test_a_token_that_became_another_one_is_told_at_the_end(server, kind, at):
    request, other = Request(kind=kind), Request("b", kind)
    for token in (6, 7, 8, 9):
        server.result(request, other)
        request.output_ids.append(token)
        other.output_ids.append(token)
    server.result(request, other)
    request.output_ids[at] = 99
    server.release(other)
    with pytest.raises(TrapError) as told:
        server.release(request)
    finding = told.value.finding
    assert finding.kind == "sampled-token"
    assert f"output_ids is another token at the request's end or retraction, token {at} of 5" in (
        finding.headline
    )
    assert "request a" in finding.headline
    assert finding.cause.startswith(
        "output_ids was changed between the end of the result's processing and the request's end"
    )


def test_an_answer_that_is_added_to_or_cut_is_another_checks(server):
    request = Request()
    server.result(request)
    request.output_ids += [6, 7]
    server.release(request)
    request.output_ids = array("q", [5, 6, 7])
    server.result(request)
    request.output_ids = request.output_ids[:1]  # a session's turn is cut at its end
    server.release(request)


def test_a_retracted_request_may_begin_anew(server):
    """SGLang does so with a request that came as embeddings."""
    request = Request()
    server.result(request)
    server.release(request)
    request.output_ids = [8]
    server.result(request)
    request.output_ids.append(9)
    server.result(request)
    server.release(request)
    server.release(request)  # nothing was given since


def test_nothing_is_said_where_nothing_is_judged(server):
    request = Request()
    server.result(request)
    request.output_ids[0] = 9
    server.judging = False
    server.release(request)
    beam = Request()
    server.judging, beam.beam_group = True, object()
    server.result(beam)
    beam.output_ids[0] = 9
    server.release(beam)


def test_a_request_that_is_gone_is_forgotten(server):
    """The next one may have its address."""
    request = Request()
    server.result(request)
    assert server.tracer._given
    del request
    gc.collect()
    assert not server.tracer._given
    assert not server.tracer._alive
