"""Gemma-4 E4B + trtllm_mha + FROZEN_KV_MTP: clean, broken, diagnosed, fixed, on real SGLang.

    python repro/e4b_trtllm_mtp.py [--device cpu|cuda] [--arm NAME] [--requests N] [--json] [--keep]

Exit code 0 only if every arm did as it should, 1 if one did not, 2 for wrong arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arms import (
    DEBUG,
    Arm,
    Repro,
    Verdict,
    blamed,
    dump_of,
    headline_first,
    main,
    same_outputs,
)
from _run import Outcome
from _workload import DEVICES

FAULT = {"G4DEBUG_FAULTS": "seed=7;stale-swa-state=on"}
FIX_OFF = {"G4DEBUG_FIX_SWA_STATE_SWAP": "0"}
SWA_GOAL = 0.85


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    if run.swa_peak < SWA_GOAL:
        return Verdict(False, f"SWA pool peaked at {run.swa_peak:.0%}, wanted {SWA_GOAL:.0%}")
    return Verdict(
        True,
        f"completes; SWA pool peaks at {run.swa_peak:.0%}, "
        f"accept length {run.result['accept_length']:.2f}",
    )


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed:
        return Verdict(False, "completed: the fault did not bite")
    if not run.illegal_access:
        return Verdict(False, f"died of something else (status {run.status}); log: {run.log}")
    return Verdict(True, f"dies: illegal memory access, reported in {blamed(run)}")


def judge_diagnosed(run: Outcome, clean: Outcome | None) -> Verdict:
    record = dump_of(run)
    if record is None:
        return Verdict(False, f"no dump (status {run.status}); log: {run.log}")
    finding, where = record.finding, record.finding.location
    wanted = {
        "a sliding layer": where.layer_kind == "sliding",
        "the draft": where.runner == "draft",
        "a full-pool page": "full-pool page" in finding.headline,
        # The first wrong page stops it; on a GPU that is often one inside the SWA pool.
        "a full-pool page in the SWA table": finding.kind == "full-index-in-swa-table",
        "the request": bool(where.request) and where.request in finding.headline,
        "the headline before SGLang's own words": headline_first(run, finding.headline),
    }
    missing = [name for name, found in wanted.items() if not found]
    if missing:
        return Verdict(False, f"the finding does not name {', '.join(missing)}")
    return Verdict(
        True,
        f"stops at step {where.step}: {where.layer_kind} layer {where.layer}, "
        f"row {where.row}, column {where.column}",
    )


REPRO = Repro(
    title="e4b_trtllm_mtp: Gemma-4 E4B shape, trtllm_mha, FROZEN_KV_MTP",
    arms={
        "clean": Arm("SGLang as installed", {}, judge_clean),
        "broken": Arm(
            "the bug, debug off", {**FAULT, **FIX_OFF}, judge_broken, explain="traceback"
        ),
        "diagnosed": Arm(
            "the bug, debug on", {**FAULT, **FIX_OFF, **DEBUG}, judge_diagnosed, explain="finding"
        ),
        "fixed": Arm("the bug, fix swa-state-swap on", FAULT, same_outputs),
    },
    devices=DEVICES,
    compares=("fixed",),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "what fills the SWA pool"))
