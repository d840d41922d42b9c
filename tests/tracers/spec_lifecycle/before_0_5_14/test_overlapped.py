"""What spec-lifecycle keeps of 0.5.12's v2: claims in advance, the ring of rows, bounds, cuts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.tracers.spec_lifecycle.before_0_5_14.overlapped import Claims, Gate, Ring
from g4debug.tracers.spec_lifecycle.check import check_bound
from g4debug.tracers.spec_lifecycle.token_commit import Committing


class Request:
    """The fields of a Req that are followed."""

    def __init__(self, rid, committed=10, tokens=1):
        self.rid, self.kv_committed_len, self.output_ids = rid, committed, [7] * tokens
        self.finished_reason, self.is_retracted, self.grammar = None, False, None
        self.spec_verify_ct = 0

    def finished(self):
        return self.finished_reason is not None


def test_what_is_claimed_in_advance_is_not_committed():
    claims, a, b = Claims(), Request("a"), Request("b", 20)
    for _ in range(2):  # the step that runs, and the next one
        claims.prepared([a, b])
        a.kv_committed_len += 1
        b.kv_committed_len += 1
    assert claims.books([a, b]) == [10, 20]
    claims.processed([a, b])
    a.kv_committed_len += 3 - 1  # three tokens were accepted
    b.kv_committed_len += 1 - 1
    assert claims.books([a, b]) == [13, 21]
    claims.forget([a])
    assert claims.books([a]) == [14]


def test_a_row_of_the_ring_is_read_by_the_request_that_it_was_stored_for():
    ring, a, b, new = Ring(), Request("a"), Request("b"), Request("new")
    ring.stored(5, [a, b], step=3)
    assert ring.rows([b, a]) == [6, 5]
    assert ring.check([b, a]) is None
    ring.stored(6, [new], step=4)
    violation = ring.check([a, b])
    assert (violation.kind, violation.row) == ("future-row", 1)
    assert violation.got == "written for request new in step 4"
    ring.lost([a])
    assert ring.check([a]).got == "never written"


def test_lengths_may_be_below_their_bound_but_not_above():
    assert check_bound("seq_lens", [8, 9], [8, 3]) is None
    violation = check_bound("seq_lens", [8, 9], [8, 11])
    assert (violation.kind, violation.row, violation.off) == ("seq-len", 1, 2)


@pytest.mark.parametrize(
    ("ends", "cuts", "kind"),
    [(True, True, None), (False, True, "accept-length"), (True, False, "accept-length")],
)
def test_fewer_tokens_are_given_only_to_a_request_that_ends(ends, cuts, kind):
    a = Request("a")
    committing = Committing(cuts=cuts)
    assert committing.begin([a]) is None
    a.kv_committed_len += 2
    a.spec_verify_ct += 1
    found = committing.check([a], [4], [[1, 2]])
    a.output_ids += [1, 2]
    if ends:
        a.finished_reason = "stop"
    found = found or committing.check_sent([a])
    assert (found.kind if found else None) == kind


@pytest.mark.parametrize(
    ("session", "finished_len", "kind"),
    [(object(), 3, None), (None, 3, "bookkeeping"), (object(), 2, "bookkeeping")],
)
def test_a_turn_of_a_session_is_left_with_the_tokens_up_to_its_end(session, finished_len, kind):
    """SGLang's ``_trim_overshoot``: a verify may go on behind the last token that was asked for."""
    a = Request("a")
    committing = Committing()
    committing.begin([a])
    a.kv_committed_len += 4
    a.spec_verify_ct += 1
    assert committing.check([a], [4], [[1, 2, 3, 4]]) is None
    a.output_ids += [1, 2]  # of four, to three in all
    a.finished_reason, a.session, a.finished_len = "length", session, finished_len
    found = committing.check_sent([a])
    assert (found.kind if found else None) == kind


def test_none_are_given_to_nobody():
    a = Request("a")
    committing = Committing(cuts=True)
    committing.begin([a])
    assert committing.check([a], [4], [[]]).kind == "accept-length"


def test_a_gate_that_is_shut_calls_nothing():
    hooks, called = {}, []
    context = SimpleNamespace(
        before=lambda site, hook, optional: hooks.update({f"before {site}": hook}),
        after=lambda site, hook, optional: hooks.update({f"after {site}": hook}),
        status="the context's",
    )
    gate = Gate(context)
    assert gate.status == "the context's"
    gate.before("x", called.append)
    gate.after("x", lambda result, number: called.append(number) or "other")
    gate.open = False
    hooks["before x"](1)
    assert hooks["after x"]("same", 2) == "same"
    assert called == []
    gate.open = True
    hooks["before x"](1)
    assert hooks["after x"]("same", 2) == "other"
    assert called == [1, 2]
