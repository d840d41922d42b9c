"""What a step allocated is entered while the forward runs, without waiting for the forward."""

from __future__ import annotations

import pytest
import torch

from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_it_is_entered_before_the_forward_has_ended():
    ledger, entered = Ledger(Recorder(4)), []
    ledger.transport.gathers = True
    for first in (0, 1000):
        torch.cuda.synchronize()
        tokens = torch.arange(first, first + 64, device="cuda")
        ledger.post(tokens, lambda found: entered.append(found.tolist()))
        ledger.post(tokens * 2, lambda found: entered.append(found.tolist()))
        assert not entered
        ledger.transport.before_forward()
        # Some 2 s. The first round makes streams and compiles, which takes long on some machines.
        torch.cuda._sleep(4_000_000_000)
        forward = torch.cuda.Event()
        forward.record()
        ledger.transport.meanwhile()
        assert not first or not forward.query(), "the forward was over too soon to show anything"
        expected = list(range(first, first + 64))
        assert entered == [expected, [2 * t for t in expected]]
        entered.clear()
    torch.cuda.synchronize()
    assert len(ledger.transport._spare) == 2  # the two events are used again
