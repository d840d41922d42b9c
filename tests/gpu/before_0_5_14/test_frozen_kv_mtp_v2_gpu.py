"""frozen-kv-mtp-v2 on a GPU, CUDA graphs on: v1's answers and accept length, tracers silent.

Which bits a GPU computes may depend on the batch, and with overlap scheduling other requests are in
it. So only requests that run alone must have equal answers. v1 itself tells how many of the others
may differ: from its own answers when the requests come in the opposite order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.written_for("frozen-kv-mtp-v2"),
]
DRIVER = Path(__file__).with_name("serve_frozen_v2.py")
TRACERS = "flight-recorder,page-table,pool-leak,spec-lifecycle,kv-allocator,kv-integrity,kv-writes"


def serve(folder: Path, name: str, **environ: str) -> tuple[dict[str, Any], str, list[Path]]:
    """What a server of its own answered, its log, and the dumps that it left."""
    dumps, result = folder / f"{name}-dumps", folder / f"{name}.json"
    run = subprocess.run(
        [sys.executable, str(DRIVER), str(result)],
        env={**os.environ, "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(dumps), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=420,
        check=False,
    )
    (folder / f"{name}.log").write_text(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    return json.loads(result.read_text()), run.stdout, sorted(dumps.glob("*.pt"))


@pytest.fixture(scope="module")
def v1(tmp_path_factory):
    return serve(tmp_path_factory.mktemp("v1"), "v1")[0]


def differing(a: dict[str, Any], b: dict[str, Any]) -> int:
    """How many requests have not the same tokens in both."""
    return sum(x != y for x, y in zip(a["tokens"], b["tokens"], strict=True))


@pytest.mark.parametrize("tracers", ["", TRACERS], ids=["unarmed", "armed"])
def test_the_answers_of_v1(tmp_path, v1, tracers):
    armed = {"G4DEBUG_TRACE": tracers, "G4DEBUG_LEAK_STEPS": "16"} if tracers else {}
    found, log, dumps = serve(tmp_path, "v2", SGLANG_FROZEN_KV_MTP_V2="1", **armed)
    said = [line for line in log.splitlines() if "g4debug" in line]
    assert found["overlap"], said
    assert not v1["overlap"]
    assert "Capture Frozen-KV MTP draft cuda graph end" in log
    assert not dumps, log[-4000:]
    assert found["alone"]["tokens"] == v1["alone"]["tokens"]
    assert found["alone"]["verifies"] == v1["alone"]["verifies"]
    others, by_order = differing(found["many"], v1["many"]), differing(v1["turned"], v1["many"])
    # v2's batches differ from v1's in more than their order, so it is a bound, not an equality.
    assert others <= 2 * by_order + 5, (others, by_order)
    for part in ("alone", "many"):
        got, wanted = found[part]["accept_length"], v1[part]["accept_length"]
        assert got == pytest.approx(wanted, abs=0.01 if part == "alone" else 0.05), part
