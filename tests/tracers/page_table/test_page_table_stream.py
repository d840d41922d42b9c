"""What has left a server when `raise` stops it: the answers are streamed, under overlap scheduling.

The next batch is launched before a forward's tokens are sent, so a finding has to come between the
two. A wrong page must not become a token that a user gets.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from real_engine import ENGINE, drive, side_by_side

pytestmark = [*ENGINE, pytest.mark.once("when tokens are sent is one hook for every release")]
DRIVER = str(Path(__file__).with_name("drive_stream.py"))
STEP = 14
# Drawn so that a token of that very step comes out wrong: then it would be seen if it were sent.
FAULT = f"seed=2;page-alias=1*on@mode=target_verify@step={STEP}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")

    def run(name, **environ):
        return lambda: drive(folder / name, DRIVER, **environ)

    return side_by_side(
        clean=run("clean"),
        wrong=run("wrong", G4DEBUG_FAULTS=FAULT),
        armed=run("armed", G4DEBUG_FAULTS=FAULT, SGLANG_TRTLLM_MHA_DEBUG="1"),
    )


def parts(run):
    """Request -> its tokens as they left the server, one list for each part, each from the first
    token on."""
    found = {}
    for number, tokens in map(json.loads, re.findall(r"^PART (.*)$", run.log, re.MULTILINE)):
        before = found.setdefault(number, [[]])
        assert tokens[: len(before[-1])] == before[-1]  # it grows
        before.append(tokens)
    return found


def test_in_raise_mode_no_token_of_the_void_step_is_sent(runs):
    clean, wrong, armed = (parts(runs[name]) for name in ("clean", "wrong", "armed"))
    assert runs["clean"].status == runs["wrong"].status == 0
    assert runs["armed"].status != 0
    (record,) = [r for r in runs["armed"].dumps if r.finding.kind != "server-died"]
    assert record.finding.location.step == STEP
    assert armed.keys() == clean.keys() == wrong.keys()
    harmed = 0
    for number, found in armed.items():
        right, got = clean[number][-1], found[-1]
        assert got
        assert got == right[: len(got)]
        # Without tracers, the part that comes next is that of the step in which the fault struck.
        void = next(part for part in wrong[number] if len(part) > len(got))
        harmed += void != right[: len(void)]
    assert harmed == 1
