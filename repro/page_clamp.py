"""Why clamping the page table (seed PR #5) is no fix: the server survives, but the draft guesses
worse, and nothing is reported.

    python repro/page_clamp.py [--device cpu|cuda] [--variant NAME] [--requests N] [--json] [--keep]

The bug is that of e4b_trtllm_mtp.py. TRIAGE.md, 'Why the clamp is not a fix', tells more. There is
no variant with debugging on, because debugging and the clamp together are refused at start. For
the diagnosis of the bug run e4b_trtllm_mtp.py --variant diagnosed.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong
arguments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _run import Outcome
from _variants import Repro, Variant, Verdict, main, not_comparable, same_outputs
from _workload import DEVICES
from e4b_trtllm_mtp import FAULT, FIX_OFF, judge_broken, judge_clean

CLAMP = {"G4DEBUG_FIX_PAGE_CLAMP": "1"}
FIRED = "g4debug fault (seed=7) stale-swa-state #1"
_TOLD = re.compile(r"^\s+(?:no )?dump: ", re.M)  # a finding's lines, in every mode
# The same tokens are accepted, or clearly fewer: between the two is room for rounding on a GPU.
FEWER = 0.1


def lost(run: Outcome, clean: Outcome) -> str:
    """What is worse than in the clean run; empty if nothing is."""
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    wrong = sum(a != b for a, b in pairs)
    accepted, before = (r.result["accept_length"] for r in (run, clean))
    found = [f"{wrong} of {len(pairs)} outputs are wrong"] if wrong else []
    if accepted < before - FEWER:
        found.append(f"the mean accept length is {accepted:.2f} instead of {before:.2f}")
    return " and ".join(found)


def proves_nothing(run: Outcome, clean: Outcome | None) -> str:
    """Why this run proves nothing; empty if it can be compared with the clean one."""
    if run.completed and FIRED not in run.text:
        return "It completes, but the fault did not fire, so this proves nothing."
    return not_comparable(run, clean)


def judge_clamped(run: Outcome, clean: Outcome | None) -> Verdict:
    """Good if it survives, nothing is reported, and something is worse than in the clean run."""
    why_not = proves_nothing(run, clean)
    if why_not or clean is None:
        return Verdict(False, why_not)
    if _TOLD.search(run.text):
        return Verdict(
            False, "It survives, but a finding is in its log. The clamp should be silent."
        )
    worse = lost(run, clean)
    if not worse:
        return Verdict(False, "It survives, and nothing is worse than in the clean run.")
    return Verdict(True, f"It survives and reports nothing, but {worse}.")


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    why_not = proves_nothing(run, clean)
    if why_not or clean is None:
        return Verdict(False, why_not)
    worse = lost(run, clean)
    return Verdict(False, f"It completes, but {worse}.") if worse else same_outputs(run, clean)


REPRO = Repro(
    title="page_clamp: Gemma-4 E4B's shape, trtllm_mha, FROZEN_KV_MTP",
    variants={
        "clean": Variant("SGLang as installed", {}, judge_clean),
        "broken": Variant(
            "the bug is put back, no fix, no clamp",
            {**FAULT, **FIX_OFF},
            judge_broken,
            explain="traceback",
        ),
        "clamped": Variant(
            "the bug is put back, no fix, the clamp page-clamp is on",
            {**FAULT, **FIX_OFF, **CLAMP},
            judge_clamped,
        ),
        "fixed": Variant("the bug is put back, its fix swa-state-swap is on", FAULT, judge_fixed),
    },
    devices=DEVICES,
    compares=("clamped", "fixed"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "as many as fill the SWA pool"))
