"""A cause that only the v1 worker has is told from the others of its kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.tracers.spec_lifecycle.before_0_5_14.log import Left, cause
from g4debug.tracers.spec_lifecycle.check import check_counts, check_state
from g4debug.tracers.spec_lifecycle.hand_over import HandOver


def why(violation, left=None, site="batch.merge"):
    batch = SimpleNamespace(forward_mode=None)
    return cause(violation, HandOver(site, "here", batch, ("a", "b")), left)


LEFT = check_state("verify-input", "FrozenKVMTPVerifyInput", ("draft-input",))
DROPPED = check_state("idle", "NoneType", ("draft-input",))


def counted(got):
    return check_counts("bookkeeping", "kv_committed_len", [10, 20], got)


TOLD = {
    "finished in the verify of step 5": why(LEFT, Left(5, 2, 0)),
    "although 1 of 2 requests go on": why(LEFT, Left(5, 2, 1)),
    "not known: no forward": why(LEFT),
    "lost between two steps": why(DROPPED),
    "lost inside the worker's step": why(DROPPED, site="worker.verify"),
    "was advanced more than once": why(counted([13, 20])),
    "was advanced too little": why(counted([7, 20])),
}


@pytest.mark.parametrize("words", TOLD)
def test_a_cause_is_told_from_the_others(words):
    assert [told for told in TOLD if told in TOLD[words]] == [words]


def test_what_sglang_does_next_is_what_v1_does():
    assert why(DROPPED).endswith("SGLang's next line would be an assertion in draft")
