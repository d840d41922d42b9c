"""The canary of prefix-cache bites, and says so if the tracer does not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from g4debug.tracers.base import CanaryError
from g4debug.tracers.prefix_cache import canary
from g4debug.tracers.prefix_cache.tracer import PrefixCacheTracer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")


def test_the_canary_bites(sglang, tmp_path, monkeypatch):
    assert "exchanged" in canary.fire(tmp_path, torch.device("cpu"))
    monkeypatch.setattr(PrefixCacheTracer, "after_match", lambda *args: None)
    with pytest.raises(CanaryError, match="not found"):
        canary.fire(tmp_path, torch.device("cpu"))
