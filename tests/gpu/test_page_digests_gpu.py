"""On a GPU: a CUDA error while a digest of the tape is on its way does not abort the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_dead_context_leaves_no_digest_and_no_abort() -> None:
    script = Path(__file__).with_name("dump_with_a_digest.py")
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "before: 1 True" in ran.stdout, ran.stderr[-2000:]
    assert "error:" in ran.stdout, ran.stderr[-2000:]
    assert "after: None" in ran.stdout, ran.stderr[-2000:]
