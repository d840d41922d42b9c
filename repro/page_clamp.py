"""The bug of e4b_trtllm_mtp under seed PR #5's clamp: the server survives, and guesses worse.

    python repro/page_clamp.py [--device cpu|cuda] [--arm NAME] [--requests N] [--json] [--keep]

Not a fix, and nobody is told (TRIAGE.md, 'Why the clamp is not a fix'). Who names the bug:
``e4b_trtllm_mtp.py --arm diagnosed``; with the clamp on, debugging is refused at start. Exit code
0 only if every arm did as it should, 1 if one did not, 2 for wrong arguments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arms import Arm, Repro, Verdict, main, not_comparable, same_outputs
from _run import Outcome
from _workload import DEVICES
from e4b_trtllm_mtp import FAULT, FIX_OFF, judge_broken, judge_clean

CLAMP = {"G4DEBUG_FIX_PAGE_CLAMP": "1"}
FIRED = "g4debug fault (seed=7) stale-swa-state #1"
_TOLD = re.compile(r"^\s+(?:no )?dump: ", re.M)  # a finding's lines, in every mode
# The same tokens are accepted, or clearly fewer: between the two is room for rounding on a GPU.
FEWER = 0.1


def lost(run: Outcome, clean: Outcome) -> str:
    """What got worse than in the clean run; empty: nothing."""
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    wrong = sum(a != b for a, b in pairs)
    accepted, before = (r.result["accept_length"] for r in (run, clean))
    found = [f"{wrong} of {len(pairs)} outputs are wrong"] if wrong else []
    if accepted < before - FEWER:
        found.append(f"accept length {accepted:.2f} instead of {before:.2f}")
    return ", ".join(found)


def proves_nothing(run: Outcome, clean: Outcome | None) -> str:
    """Why nothing can be said of this run; empty: it can."""
    if run.completed and FIRED not in run.text:
        return f"the fault did not fire; log: {run.log}"
    return not_comparable(run, clean)


def judge_clamped(run: Outcome, clean: Outcome | None) -> Verdict:
    """Survives, silently, and something is worse."""
    reason = proves_nothing(run, clean)
    if reason or clean is None:
        return Verdict(False, reason)
    if _TOLD.search(run.text):
        return Verdict(False, f"survives, but it is told; log: {run.log}")
    worse = lost(run, clean)
    if not worse:
        return Verdict(False, "survives, and nothing is worse than in the clean run")
    return Verdict(True, f"survives, nothing is reported, and it is worse: {worse}")


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    reason = proves_nothing(run, clean)
    if reason or clean is None:
        return Verdict(False, reason)
    worse = lost(run, clean)
    return Verdict(False, f"completes, but {worse}") if worse else same_outputs(run, clean)


REPRO = Repro(
    title="page_clamp: Gemma-4 E4B shape, trtllm_mha, FROZEN_KV_MTP, stale SWA state",
    arms={
        "clean": Arm("SGLang as installed", {}, judge_clean),
        "broken": Arm(
            "the bug, no fix, no clamp", {**FAULT, **FIX_OFF}, judge_broken, explain="traceback"
        ),
        "clamped": Arm(
            "the bug, no fix, page-clamp on", {**FAULT, **FIX_OFF, **CLAMP}, judge_clamped
        ),
        "fixed": Arm("the bug, fix swa-state-swap on", FAULT, judge_fixed),
    },
    devices=DEVICES,
    compares=("clamped", "fixed"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "what fills the SWA pool"))
