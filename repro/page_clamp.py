"""Why clamping the page table (seed PR #5) is no fix: the server survives, but the draft guesses
worse, and nothing is reported.

The bug is the same as in e4b_trtllm_mtp.py. TRIAGE.md, 'Why the clamp is not a fix', tells more.
There is no variant with debugging on, because debugging and the clamp together are refused at
start. For the diagnosis of the bug run e4b_trtllm_mtp.py --variant diagnosed.
"""

from __future__ import annotations

import re

from e4b_trtllm_mtp import FAULT, PUT_BACK, judge_broken, judge_clean
from harness.processes import Outcome
from harness.variants import Repro, Variant, broken, main
from harness.verdicts import Bad, alike, compared, equal_outputs

CLAMP = {"G4DEBUG_FIX_PAGE_CLAMP": "1"}
FIRED = "g4debug fault (seed=7) stale-swa-state #1"
_TOLD = re.compile(r"^\s+(?:no )?dump: ", re.M)  # a finding's lines, in every mode
# The same tokens are accepted, or clearly fewer: between the two is room for rounding on a GPU.
FEWER = 0.1


def lost(run: Outcome, clean: Outcome) -> str:
    """The losses against the clean run; empty if there are none."""
    same, of = alike(run, clean)
    accepted, before = (r.result["accept_length"] for r in (run, clean))
    found = [f"{of - same} of {of} outputs are wrong"] if same < of else []
    if accepted < before - FEWER:
        found.append(f"the mean accept length is {accepted:.2f} instead of {before:.2f}")
    return " and ".join(found)


def hit(run: Outcome) -> None:
    """Raises Bad if this run proves nothing."""
    if FIRED not in run.text:
        raise Bad("It completes, but the fault did not fire, so this proves nothing.")


@compared
def judge_clamped(run: Outcome, clean: Outcome) -> str:
    """Good if it survives, nothing is reported, and something is worse than in the clean run."""
    hit(run)
    if _TOLD.search(run.text):
        raise Bad("It survives, but a finding is in its log. The clamp should be silent.")
    worse = lost(run, clean)
    if not worse:
        raise Bad("It survives, and nothing is worse than in the clean run.")
    return f"It survives and reports nothing, but {worse}."


@compared
def judge_fixed(run: Outcome, clean: Outcome) -> str:
    hit(run)
    if worse := lost(run, clean):
        raise Bad(f"It completes, but {worse}.")
    return equal_outputs(run, clean)


REPRO = Repro(
    name="page_clamp",
    serves="Gemma-4 E4B's shape, trtllm_mha, FROZEN_KV_MTP",
    workload="workloads.e4b_trtllm_mtp",
    variants={
        "clean": Variant("SGLang as installed", {}, judge_clean),
        "broken": broken("the bug is put back, no fix, no clamp", PUT_BACK, judge_broken),
        "clamped": Variant(
            "the bug is put back, no fix, the clamp page-clamp is on",
            {**PUT_BACK, **CLAMP},
            judge_clamped,
        ),
        "fixed": Variant("the bug is put back, its fix swa-state-swap is on", FAULT, judge_fixed),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "as many as fill the SWA pool"))
