"""SGLang's arguments as the installed release has them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
sys.path.insert(0, str(Path(__file__).parents[2] / "repro"))


def test_mtp_has_overlap_where_the_v1_worker_is_gone(sglang):
    """A GPU's server of 0.5.23 dies at the first request if this is wrong (upstream #40155)."""
    from harness.arguments import mtp_has_overlap

    v1 = importlib.util.find_spec("sglang.srt.speculative.frozen_kv_mtp_worker")
    assert mtp_has_overlap() == (v1 is None)
