"""What requests that end were given, against SGLang's own Req as it ends them in every way."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace

import pytest
import releases

from g4debug.hooking import targets
from g4debug.tracers.spec_lifecycle.token_commit import Committing

pytestmark = [
    pytest.mark.usefixtures("sglang"),
    pytest.mark.skipif(
        targets.path("result.resolve") is None and targets.path("result.resolve_overlap") is None,
        reason="no v2 worker is followed in this release",
    ),
]
VOCABULARY, END = 100, 2
GIVEN = [31, 32, 33, 34]  # by the verify in which a request ends


class Words:
    """A tokenizer of which each token is a letter."""

    eos_token_id, additional_stop_token_ids = END, None

    def decode(self, tokens):
        return "".join(chr(64 + t) for t in tokens)

    def encode(self, text, add_special_tokens=False):
        return [ord(c) - 64 for c in text]


def request(**sampling):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = SamplingParams(**{"max_new_tokens": 50, "temperature": 0, **sampling})
    made.normalize(Words())
    found = Req(
        "r", "", releases.token_ids([5, 6]), made, vocab_size=VOCABULARY, eos_token_ids={END}
    )
    found.tokenizer = Words()
    found.output_ids.extend([7, 8])
    releases.kv_of(found).kv_committed_len = 3
    return found


def abort(request):
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request.to_finish = FINISH_ABORT("the client has left", HTTPStatus.BAD_REQUEST)


def grammar(request):
    request.grammar = SimpleNamespace(is_terminated=lambda: True, finished=False)


def nothing(request):
    """It goes on."""


# name -> sampling parameters, what is done to the request before, its tokens
ENDS = {
    "goes on": ({}, nothing, GIVEN),
    "length": ({"max_new_tokens": 6}, nothing, GIVEN),
    "length inside a verify": ({"max_new_tokens": 4}, nothing, GIVEN),
    "end token": ({}, nothing, [31, END, 33, 34]),
    "stop token": ({"stop_token_ids": [32]}, nothing, GIVEN),
    "stop string": ({"stop": ["`a"]}, nothing, GIVEN),
    "stop regex": ({"stop_regex": ["a"]}, nothing, GIVEN),
    "abort": ({}, abort, GIVEN),
    "grammar": ({}, grammar, GIVEN),
    "no word": ({}, nothing, [31, VOCABULARY + 5, 33, VOCABULARY + 6]),
    "negative": ({}, nothing, [31, -1, 33, 34]),
}


def end_if_it_must(request, tokens):
    """SGLang's own decision, which 0.5.13 gave another name."""
    end = getattr(request, "update_finish_state", None) or request.check_finished
    end(tokens)


def run(sampling, before, tokens, after=nothing):
    """A verify's result is processed, and its tokens are about to leave."""
    r, committing = request(**sampling), Committing()
    assert committing.begin([r]) is None
    releases.kv_of(r).kv_committed_len += len(tokens)
    r.spec_verify_ct += 1
    assert committing.check([r], [len(tokens)], [list(tokens)]) is None
    before(r)
    r.output_ids.extend(tokens)
    end_if_it_must(r, len(tokens))
    after(r)
    return committing.check_sent([r]), r


@pytest.mark.parametrize("end", ENDS)
def test_no_way_to_end_is_told(end):
    found, r = run(*ENDS[end])
    assert found is None
    assert r.finished() == (end != "goes on"), "the request was to end so"


def test_sglang_replaces_what_is_no_word():
    """Else the case above would show nothing."""
    _, r = run(*ENDS["no word"])
    assert list(r.output_ids[2:]) == [31, END, 33, VOCABULARY + 6]


@pytest.mark.parametrize("column", [0, 2, 3])
@pytest.mark.parametrize("end", ENDS)
def test_another_token_is_told_in_each_of_them(end, column):
    tokens = ENDS[end][2]

    def change(r):
        r.output_ids[2 + column] += 7

    found, _ = run(*ENDS[end], change)
    if end == "no word" and column == 3:
        return  # it might have been SGLang
    assert (found.kind, found.row, found.column) == ("sampled-token", 0, column)
    assert len(tokens) == 4


@pytest.mark.parametrize(("at", "kind"), [(None, None), (2, "sampled-token")])
def test_a_turn_of_a_session_is_judged_as_far_as_it_was_kept(at, kind):
    """SGLang's ``StreamingSession._trim_overshoot`` leaves the tokens up to its end."""

    def turn(r):
        r.session = object()
        assert r.finished_len == 4
        r.output_ids = r.output_ids[: r.finished_len]
        if at is not None:
            r.output_ids[at] += 1

    found, _ = run(*ENDS["length inside a verify"], turn)
    assert (found.kind if found else None) == kind


def test_a_request_that_was_to_return_a_mask_may_be_given_nothing():
    r, committing = request(), Committing()
    committing.begin([r])
    releases.kv_of(r).kv_committed_len += 4
    r.spec_verify_ct += 1
    assert committing.check([r], [4], [GIVEN]) is None
    abort(r)
    r.return_sampling_mask, r.finished_reason = True, r.to_finish
    assert committing.check_sent([r]) is None


def test_one_that_was_retracted_meanwhile_is_not_judged():
    def retract(r):
        r.is_retracted = True
        r.output_ids = r.output_ids[:0]

    assert run(*ENDS["goes on"], retract)[0] is None


def test_the_row_is_that_of_the_request_that_ended():
    a, b, committing = request(), request(max_new_tokens=4), Committing()
    committing.begin([a, b])
    for r in (a, b):
        releases.kv_of(r).kv_committed_len += 4
        r.spec_verify_ct += 1
    assert committing.check([a, b], [4, 4], [GIVEN, GIVEN]) is None
    for r in (a, b):
        r.output_ids.extend(GIVEN)
        end_if_it_must(r, 4)
    b.output_ids[3] = 50
    found = committing.check_sent([a, b])
    assert (found.kind, found.row, found.column) == ("sampled-token", 1, 1)
    assert not a.finished()
    assert b.finished()
