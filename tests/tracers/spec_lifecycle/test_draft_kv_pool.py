"""The draft computes on the pool that it is shown: SGLang's own HybridAttnBackend, with and without
fix hybrid-pool-swap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import real_hybrid

from g4debug import plugin
from g4debug.hooking import targets
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.draft_kv_pool import ShownPool
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import Trap, TrapError

pytestmark = pytest.mark.skipif(
    targets.matches("<0.5.13"), reason="an attention backend has no pool of its own there"
)
DUMMY, TARGET, OTHER = (SimpleNamespace(size=n) for n in (64, 4096, 128))


@pytest.fixture
def hybrid_class(sglang, monkeypatch):
    return real_hybrid.unpatched(monkeypatch)


@pytest.fixture
def forward(arm, hybrid_class):
    """Runs the check as before a decode of a hybrid backend that was shown TARGET."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def run(fixed=True, shown=TARGET, algorithm="FROZEN_KV_MTP", inner=DUMMY, draft=True):
        arm(G4DEBUG_TRACE="spec-lifecycle", G4DEBUG_FIX_HYBRID_POOL_SWAP="0")
        hooks, recorder = plugin.in_force.hooks, plugin.in_force.recorder
        settings = Settings.from_environ()
        trap = Trap(settings, Describer(recorder))
        context = Context("spec-lifecycle", hooks, settings, recorder, trap)
        hybrid = real_hybrid.build(
            hybrid_class,
            DUMMY,
            *(real_hybrid.with_pool(inner) for _ in range(2)),
            fixed,
            is_draft_worker=draft,
            spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        )
        if shown is not None:
            hybrid.token_to_kv_pool = shown
        check = ShownPool(context, SpecLog(context))
        check.before_metadata(hybrid, SimpleNamespace(forward_mode=ForwardMode.DECODE))

    return run


def test_the_dummy_is_named(forward):
    with pytest.raises(TrapError) as raised:
        forward(fixed=False)
    finding = raised.value.finding
    assert (finding.check, finding.kind) == ("spec-lifecycle", "draft-pool")
    assert "the target's KV pool of 4096 tokens" in finding.headline
    assert "its own KV pool of 64 tokens" in finding.headline
    assert "hybrid_attn_backend.py" in finding.cause
    assert finding.location.runner == "draft"
    assert "G4DEBUG_FIX_HYBRID_POOL_SWAP=1" in finding.next_command


def test_a_third_pool_is_named_and_its_cause_is_not_known(forward):
    with pytest.raises(TrapError) as raised:
        forward(fixed=False, inner=OTHER)
    assert "another KV pool of 128 tokens" in raised.value.finding.headline
    assert "not known" in raised.value.finding.cause


@pytest.mark.parametrize(
    "given",
    [
        {},  # the fix hands the pool on
        {"fixed": False, "shown": None},  # outside of the view
        {"fixed": False, "algorithm": "EAGLE"},
        {"fixed": False, "draft": False},
        {"fixed": False, "inner": TARGET},
    ],
)
def test_what_is_right_or_not_judged(forward, given):
    forward(**given)
