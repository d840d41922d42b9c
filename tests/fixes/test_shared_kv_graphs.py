"""shared-kv-graphs: SGLang's own capture of a prefill's graphs, with a real model's layers."""

from __future__ import annotations

import importlib
import logging

import pytest
from real_model import served

from g4debug.fixes import shared_kv_graphs
from g4debug.fixes.shared_kv_graphs import FIX, SAYS, SETUP, still_broken

pytestmark = pytest.mark.written_for(FIX.id)
BREAKABLE = {"cuda_graph_backend_prefill": "breakable", "disable_overlap_schedule": True}


@pytest.fixture(scope="module")
def made(_sglang_imported):
    """A model with KV-shared layers; its graphs of a prefill are asked for, but not captured."""
    from g4debug.cpu.models import tiny_models

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("real_model._make_pools", lambda runner: None)
        with served(tiny_models()[0], **BREAKABLE) as model:
            for step in ("alloc_memory_pool", "init_attention_backends"):
                getattr(model.runner, step)()
            yield model.runner


def capture(runner, fixed: bool, eager: object):
    original = importlib.import_module(SETUP).capture_prefill_graph
    given = {"model_runner": runner, "eager_runner": eager}
    if fixed:
        return shared_kv_graphs.around_capture(original, **given)
    return original(**given)


def test_sglang_dies_of_it(made):
    assert still_broken()
    with pytest.raises(ValueError, match=SAYS):
        capture(made, fixed=False, eager=object())


def test_with_the_fix_prefills_are_eager_and_the_log_says_so(made, caplog):
    eager = object()
    with caplog.at_level(logging.WARNING, "g4debug"):
        found = capture(made, fixed=True, eager=eager)
    assert found.runner is eager
    assert (found.memory_phase, found.memory_usage_gb, found.capture_time) == ("prefill", 0, 0)
    assert "prefills run without CUDA graphs" in caplog.text


def test_a_draft_gets_no_runner(made, monkeypatch):
    monkeypatch.setattr(made, "is_draft_worker", True)
    found = shared_kv_graphs._eager(model_runner=made, eager_runner=object())
    assert (found.runner, found.memory_phase) == (None, "draft_prefill")


def test_another_error_is_raised_on():
    def original(**given):
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        shared_kv_graphs.around_capture(original, model_runner=None, eager_runner=None)


def test_what_sglang_returns_is_passed_on():
    assert shared_kv_graphs.around_capture(lambda **given: "runner") == "runner"
