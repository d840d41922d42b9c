"""A property of tape and feeder: whatever a real scheduler decides, it decides again.

Servers and their traffic are drawn by hypothesis, and each is recorded and replayed on the CPU
engine. ``make fuzz`` does the same with more features, and with tracers that are looked at.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from real_engine import ENGINE, drive
from warm_replay import warm_replays

from g4debug import cli
from g4debug.dumps import reading
from g4debug.hooking import targets

pytestmark = [*ENGINE, pytest.mark.long("twenty engines, and their replays")]
DRIVER = str(Path(__file__).with_name("drive_recorded.py"))
# 0.5.23 dies with a draft and without overlap scheduling (upstream #40155), before 0.5.14 a draft
# switches it off by itself.
OVERLAP_IS_OPTIONAL = targets.matches(">=0.5.14,<0.5.21")


@st.composite
def orders(draw: st.DrawFn) -> dict[str, Any]:
    """What drive_recorded.py takes: a server, and its traffic."""
    mtp, page = draw(st.booleans()), draw(st.sampled_from((16, 32, 64)))
    first = draw(st.sampled_from((None, None, "high", "low")))
    # SGLang takes no other policies with priorities, and a tape carries lpm with small pages.
    others = () if first else ("dfs-weight",) if page == 64 else ("dfs-weight", "lpm")
    engine: dict[str, Any] = {
        "page_size": page,
        "max_total_tokens": draw(st.sampled_from((1536, 3072, 6144))),
        "max_running_requests": draw(st.integers(1, 6)),
        "chunked_prefill_size": draw(st.sampled_from((128, 512, -1))),
        "schedule_policy": draw(st.sampled_from(("fcfs", "lof", *others))),
        "disable_radix_cache": draw(st.sampled_from((False, False, True))),
    }
    if first:
        engine["enable_priority_scheduling"] = True
        engine["schedule_low_priority_values_first"] = first == "low"
        engine["disable_priority_preemption"] = draw(st.booleans())
    if not mtp:
        engine["enable_mixed_chunk"] = draw(st.booleans()) and engine["chunked_prefill_size"] > 0
    if not mtp or OVERLAP_IS_OPTIONAL:
        engine["disable_overlap_schedule"] = draw(st.booleans())
    return {
        "seed": draw(st.integers(0, 9999)),
        "requests": draw(st.integers(3, 12)),
        "together": draw(st.integers(1, 6)),
        "mtp": mtp,
        "engine": engine,
        "priorities": [None, -1, 0, 30] if first else [],
        "long": draw(st.integers(0, 3)),
        "flush": draw(st.sampled_from((0, 0, 5))),
    }


@settings(
    max_examples=examples(20),
    phases=[Phase.generate],  # with an engine for each, a counterexample is told as it was drawn
    suppress_health_check=[HealthCheck.too_slow],
)
@given(orders())
def test_schedules_are_the_same_again(
    tmp_path_factory: pytest.TempPathFactory, order: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("schedule")
    target = folder / "tape.pt"
    run = drive(
        folder, DRIVER, json.dumps({**order, "tape": str(target)}), SGLANG_TRTLLM_MHA_DEBUG="1"
    )
    assert target.exists(), run.log[-3000:]
    on = reading.read(target).tape
    assert on is not None
    assert on.limits == ()
    told = io.StringIO()
    command = ["replay", str(target), "--pages-only", "--keep", str(folder / "kept"), "--json"]
    with contextlib.redirect_stdout(told), warm_replays():
        code = cli.main(command)
    result = json.loads(told.getvalue())
    assert code == result["code"] == 0, result
    assert result["text"].startswith("nothing was found, there or here: "), result
    assert result["equal"] == result["steps"] == on.steps > 3, result
    assert result["pages_compared"] >= 1, result
