"""Gemma-4 E4B with trtllm_mha and FROZEN_KV_MTP: a crash, its diagnosis and its fix.

    python repro/e4b_trtllm_mtp.py [--device cpu|cuda] [--variant NAME] [--requests N] [--json]
                                   [--keep]

Real SGLang serves the same requests in four variants. A fault puts back a bug of upstream SGLang:
the draft hands page numbers of the full pool to sliding layers, whose SWA pool is smaller.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong
arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arguments import blocks_are_adjacent
from _run import ILLEGAL, Outcome
from _variants import (
    DEBUG,
    Repro,
    Variant,
    Verdict,
    accept_length,
    blamed,
    died_otherwise,
    dump_of,
    headline_first,
    main,
    no_dump,
    not_completed,
    not_named,
    same_outputs,
)
from _workload import DEVICES

FAULT = {"G4DEBUG_FAULTS": "seed=7;stale-swa-state=on"}
FIX_OFF = {"G4DEBUG_FIX_SWA_STATE_SWAP": "0"}
SWA_GOAL = 0.85


def on_gpu() -> bool:
    """True where the variants ran on a GPU: the CPU engine refuses such a machine."""
    import torch

    return torch.cuda.is_available()


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, not_completed(run))
    if run.swa_peak < SWA_GOAL:
        return Verdict(
            False,
            f"It completes, but the SWA pool gets only {run.swa_peak:.0%} full. This workload "
            f"should fill at least {SWA_GOAL:.0%} of it.",
        )
    return Verdict(
        True, f"It completes. The SWA pool gets {run.swa_peak:.0%} full. {accept_length(run)}"
    )


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed and on_gpu() and blocks_are_adjacent():
        return Verdict(
            True,
            "It completes, and nobody is told: this torch puts the KV pools side by side, so that "
            f"the wrong pages are a neighbour's memory. {accept_length(run)}",
        )
    if run.completed:
        return Verdict(False, "It completes: the bug had no effect.")
    if not run.illegal_access:
        return Verdict(False, died_otherwise(run, ILLEGAL))
    return Verdict(
        True, f"It dies of an illegal memory access. The traceback blames {blamed(run)}."
    )


def judge_diagnosed(run: Outcome, clean: Outcome | None) -> Verdict:
    record = dump_of(run)
    if record is None:
        return no_dump(run)
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
        return not_named(missing)
    return Verdict(
        True,
        f"g4debug stops it at step {where.step}. The finding names the place: {where.layer_kind} "
        f"layer {where.layer} of the draft, row {where.row} and column {where.column} of the page "
        "table.",
    )


REPRO = Repro(
    title="e4b_trtllm_mtp: Gemma-4 E4B's shape, trtllm_mha, FROZEN_KV_MTP",
    variants={
        "clean": Variant("SGLang as installed", {}, judge_clean),
        "broken": Variant(
            "the bug is put back, debugging is off",
            {**FAULT, **FIX_OFF},
            judge_broken,
            explain="traceback",
        ),
        "diagnosed": Variant(
            "the bug is put back, debugging is on",
            {**FAULT, **FIX_OFF, **DEBUG},
            judge_diagnosed,
            explain="finding",
        ),
        "fixed": Variant("the bug is put back, its fix swa-state-swap is on", FAULT, same_outputs),
    },
    devices=DEVICES,
    compares=("fixed",),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "as many as fill the SWA pool"))
