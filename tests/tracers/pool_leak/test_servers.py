"""On which servers pool-leak counts all that there is, and what it says on the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.pool_leak.tracer import PoolLeakTracer
from g4debug.tracers.pool_leak.watch import IdleCounts


@pytest.mark.parametrize("kind", [PoolLeakTracer, IdleCounts])
@pytest.mark.parametrize("linear", [False, True])
def test_the_states_of_linear_layers_are_not_counted_and_that_is_said(kind, linear, tmp_path):
    context = Context.alone("pool-leak", Settings(debug_dir=tmp_path), ledger=True)
    rows = SimpleNamespace(**({"mamba_pool": object()} if linear else {}))
    scheduler = SimpleNamespace(
        tree_cache=type("UnifiedRadixCache", (), {})(),
        req_to_token_pool=rows,
        server_args=SimpleNamespace(speculative_eagle_topk=1),
    )
    kind(context).after_scheduler_init(None, scheduler)
    limits = [limit.what for limit in context.status.record().limits]
    assert limits == (["not the states of linear layers"] if linear else [])
    assert not context.status.is_off
