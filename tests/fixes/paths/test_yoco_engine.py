"""yoco-fast-prefill on a real engine: on with every tracer armed, and off. The same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import releases
from real_engine import ENGINE, drive, side_by_side

DRIVER = Path(__file__).with_name("drive_yoco.py")
pytestmark = [
    *ENGINE,
    pytest.mark.written_for("yoco-fast-prefill"),
]


# On speculative decoding v2, FROZEN_KV_MTP runs with overlap scheduling only.
MTP = ["mtp"] if releases.has_v1_worker() else ["mtp", "overlap"]
MORE = pytest.mark.long("a minute each; the three others cover the most of it")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(MTP, id="mtp"),
        pytest.param([*MTP, "split"], id="mtp, prefill on triton"),
        pytest.param(["overlap"], id="overlap, no MTP"),
        pytest.param(["overlap", "mixed"], id="mixed chunks", marks=MORE),
        pytest.param(["triton"], id="triton alone, no overlap, no MTP", marks=MORE),
        pytest.param([*MTP, "tp"], id="mtp on two ranks", marks=MORE),
    ],
)
def test_the_same_answers_and_no_tracer_fires(tmp_path, arguments):
    def run(name, **environ):
        return drive(tmp_path / name, str(DRIVER), *arguments, **environ)

    runs = side_by_side(
        off=lambda: run("off", SGLANG_GEMMA4_YOCO="0"),
        on=lambda: run("on", SGLANG_GEMMA4_YOCO="1", SGLANG_TRTLLM_MHA_DEBUG="1"),
    )
    on, off = runs["on"], runs["off"]
    assert (on.status, off.status) == (0, 0), on.log[-3000:] + off.log[-3000:]
    assert "yoco-fast-prefill: on: layers 6 to 7 of 8" in on.log
    assert "yoco-fast-prefill: on" not in off.log
    assert not on.dumps
    got, wanted = on.results, off.results
    assert len(got) == len(wanted) == 4
    for a, b in zip(got, wanted, strict=True):
        assert a["tokens"] == b["tokens"], a["round"]
        assert a["cached"] == b["cached"]
        for mine, theirs in zip(a["logprobs"], b["logprobs"], strict=True):
            assert mine[1:] == pytest.approx(theirs[1:], abs=1e-4)
    assert max(got[2]["cached"]) == 192
    assert [len(x) for x in got[3]["logprobs"]] == [50, 0, 64]
