"""What ``g4debug replay`` prints: snapshots, and hostile text."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from test_report_snapshots import compare, fits, text

from g4debug.findings.status import Limit, TracerStatus
from g4debug.reporters import replay
from g4debug.reporters.replay import Kept, Replayed, Scripted, Shrunk
from g4debug.reporters.running import Process

RESULT = Replayed(
    code=0,
    text="reproduced: g4debug: kv-allocator in step 282: swa pages 2, 3 and 11 are freed twice",
    more=(
        "282 of 282 steps are equal: the scheduler decided the same in each.",
        "It depends on nothing that a GPU computes.",
    ),
    notes=("attention_backend=fa3 is trtllm_mha here",),
    release="0.5.12.post1",
    requests=148,
    steps=282,
    equal=282,
    pages_compared=10,
    begins="start",
    seconds=21.7,
    tried=(("fix locked-prefix on", "it does not come"), ("SGLang 0.5.23", "it does not come")),
    shrunk=Shrunk(
        before=148,
        tried=31,
        seconds=24.2,
        whole=True,
        file="small.pt",
        kept=(
            Kept(7, "when all before it have ended", 448, 4, 4, "length"),
            Kept(9, "round 13", 448, 37, -1, "running"),
        ),
    ),
    script=Scripted("script.py", "SGLang's own error: AttributeError: no attribute 'merge_batch'"),
)


@pytest.mark.parametrize("width", [80, 120])
def test_a_result(width: int) -> None:
    got = text(lambda c: replay.render(RESULT, c), width)
    fits(got, width)
    compare(f"replay-{width}.txt", got)


def test_a_result_without_a_replay() -> None:
    result = Replayed(2, "cannot be replayed, because the dump has no tape")
    got = text(lambda c: replay.render(result, c), 80)
    assert got == "cannot be replayed, because the dump has no tape\n"


def test_what_is_left_of_a_search_without_time() -> None:
    shrunk = dataclasses.replace(RESULT.shrunk, whole=False)
    got = text(lambda c: replay.render(dataclasses.replace(RESULT, shrunk=shrunk), c), 120)
    assert "there was no time to try all" in got
    none = Shrunk(148, 1, 3.0, True, "", ())
    got = text(lambda c: replay.render(dataclasses.replace(RESULT, shrunk=none), c), 120)
    assert "did not come a second time" in got


def test_why_there_is_no_script() -> None:
    why = Scripted("", "the bug is a fault that g4debug injected, and plain SGLang has none")
    got = text(lambda c: replay.render(dataclasses.replace(RESULT, script=why), c), 120)
    assert f"no script was written: {why.text}" in got


def test_text_that_would_steer_a_terminal_is_shown() -> None:
    got = text(lambda c: replay.render(Replayed(2, "a\x1b[31mb", ("c\x1bd",)), c), 80)
    assert "\x1b" not in got


def test_what_a_tape_cannot_carry_is_no_worry_of_doctors() -> None:
    limited = TracerStatus("tape", limits=(Limit("it cannot carry this", "LoRA adapters", 9),))
    process = Process(1, has_status=True, tracers=(limited,))
    assert process.worries == []
    assert "LoRA" in limited.state


def test_json() -> None:
    out = io.StringIO()
    replay.render_json(RESULT, out)
    found = json.loads(out.getvalue())
    assert found["shrunk"]["kept"][0]["prompt"] == 448
    assert found["equal"] == found["steps"] == 282
