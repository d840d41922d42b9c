"""What has left a server when `raise` stops it: an answer is streamed, under overlap scheduling.

The next batch is launched before a forward's tokens are sent, so a finding has to come between the
two. A wrong page must not become a token that a user gets.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from drive_stream import PROMPT
from real_engine import ENGINE, WhenAsked, drive

pytestmark = [*ENGINE, pytest.mark.once("when tokens are sent is one hook for every release")]
DRIVER = str(Path(__file__).with_name("drive_stream.py"))
STEP = 14
# Drawn so that a token of that very step comes out wrong: then it would be seen if it were sent.
FAULT = f"seed=2;page-zero=1*on@mode=target_verify@step={STEP}"
PROPOSED = 3  # tokens of a draft; a verify answers with one more at most


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")

    def run(name, **environ):
        return lambda: drive(folder / name, DRIVER, **environ)

    return WhenAsked(
        clean=run("clean"),
        wrong=run("wrong", G4DEBUG_FAULTS=FAULT),
        armed=run("armed", G4DEBUG_FAULTS=FAULT, SGLANG_TRTLLM_MHA_DEBUG="1"),
    )


def sent(run):
    """The tokens that left the server. Each part has all of them from the first one on."""
    parts = [json.loads(part) for part in re.findall(r"^PART (.*)$", run.log, re.MULTILINE)]
    for before, after in pairwise(parts):
        assert after[: len(before)] == before
    return parts[-1]


def test_in_raise_mode_no_token_of_the_void_step_is_sent(runs):
    clean, wrong, armed = (sent(runs[name]) for name in ("clean", "wrong", "armed"))
    assert runs["clean"].status == runs["wrong"].status == 0
    assert runs["armed"].status != 0
    (record,) = [r for r in runs["armed"].dumps if r.finding.kind != "server-died"]
    assert record.finding.location.step == STEP
    # The table has KV of all tokens that are known, and of those that the draft proposes.
    known = int(record.table.seq_lens[0]) - PROMPT - PROPOSED
    # Without tracers, the step in which the fault strikes answers with a wrong token.
    first_wrong = next(i for i, (a, b) in enumerate(zip(wrong, clean, strict=True)) if a != b)
    assert known <= first_wrong < known + PROPOSED + 1
    assert 0 < len(armed) <= known
    assert armed == clean[: len(armed)]
