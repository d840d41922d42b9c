"""To whom the time of a sampled stack belongs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measuring.stacks import share

SGLANG, G4DEBUG = "/site/sglang/", "/repo/g4debug/"
LOOP = "event_loop_normal (/site/sglang/srt/managers/scheduler.py:10)"
HOOK = "around (/repo/g4debug/hooking/hooks.py:261)"
RUN = "run_batch (/site/sglang/srt/managers/scheduler.py:20)"


@pytest.mark.parametrize(
    ("frames", "ours"),
    [
        ([LOOP, RUN], ""),
        ([LOOP, HOOK], "hooking/hooks.py around"),
        ([LOOP, HOOK, RUN], ""),  # SGLang, called by a hook
        ([LOOP, HOOK, RUN, "empty (/site/torch/x.py:1)"], ""),
        ([LOOP, HOOK, "check (/repo/g4debug/tracers/a.py:3)"], "tracers/a.py check"),
        ([LOOP, HOOK, RUN, "look (/repo/g4debug/ledger/b.py:3)"], "ledger/b.py look"),
        ([LOOP, HOOK, RUN, "look (/repo/g4debug/ledger/b.py:3)", "run (/site/triton/jit.py:9)"],
         "ledger/b.py look"),
        ([LOOP, HOOK, "forward (/repo/g4debug/fixes/paths/c.py:3)"], ""),
        ([LOOP, HOOK, "attend (/repo/g4debug/cpu/attention.py:3)", "mm (/site/torch/x.py:1)"], ""),
    ],
)  # fmt: skip
def test_a_sample_is_ours_or_not(frames, ours):
    found = share([";".join(frames) + " 3"], SGLANG, G4DEBUG)
    assert (found.samples, found.ours) == (3, 3 if ours else 0)
    assert dict(found.by) == ({ours: 3} if ours else {})


def test_the_share_is_of_the_event_loop_alone():
    lines = [f"{LOOP};{RUN} 90", f"{LOOP};{HOOK} 10", "start (/site/sglang/x.py:1) 500", ""]
    assert share(lines, SGLANG, G4DEBUG).of_all == 0.1


def test_nothing_seen_is_no_share_of_nothing():
    with pytest.raises(ValueError, match="no sample"):
        _ = share([], SGLANG, G4DEBUG).of_all
