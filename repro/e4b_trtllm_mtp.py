"""Gemma-4 E4B with trtllm_mha and FROZEN_KV_MTP: a crash, its diagnosis and its fix.

Real SGLang serves the same requests in four variants. A fault puts back a bug of upstream SGLang:
the draft hands page numbers of the full pool to sliding layers, but their SWA pool is smaller. On a
CPU the dump that this leaves is then replayed: the same scheduler decides again, from its tape.
"""

from __future__ import annotations

from harness import verdicts
from harness.arguments import blocks_are_adjacent
from harness.processes import ILLEGAL, Outcome
from harness.variants import Repro, Variant, broken, diagnosed, main

FAULT = {"G4DEBUG_FAULTS": "seed=7;stale-swa-state=on"}
PUT_BACK = {**FAULT, "G4DEBUG_FIX_SWA_STATE_SWAP": "0"}
SWA_GOAL = 0.85


def on_gpu() -> bool:
    """True where the variants ran on a GPU: the CPU engine refuses such a machine."""
    import torch

    return torch.cuda.is_available()


@verdicts.judge
def judge_clean(run: Outcome) -> str:
    verdicts.completed(run)
    if run.swa_peak < SWA_GOAL:
        raise verdicts.Bad(
            f"It completes, but the SWA pool gets only {run.swa_peak:.0%} full. This workload "
            f"should fill at least {SWA_GOAL:.0%} of it."
        )
    return f"It completes. The SWA pool gets {run.swa_peak:.0%} full. {verdicts.accept_length(run)}"


@verdicts.judge
def judge_broken(run: Outcome) -> str:
    if run.completed and on_gpu() and blocks_are_adjacent():
        return (
            "It completes, and nobody is told: this torch puts the KV pools side by side, so that "
            f"the wrong pages are a neighbour's memory. {verdicts.accept_length(run)}"
        )
    if run.completed:
        raise verdicts.Bad("It completes: the bug had no effect.")
    if not run.illegal_access:
        raise verdicts.Bad(verdicts.died_otherwise(run, ILLEGAL))
    return f"It dies of an illegal memory access. The traceback blames {verdicts.blamed(run)}."


@verdicts.judge
def judge_diagnosed(run: Outcome) -> str:
    finding = verdicts.told(run).finding
    where = finding.location
    wanted = {
        "a sliding layer": where.layer_kind == "sliding",
        "the draft": where.runner == "draft",
        "a full-pool page": "full-pool page" in finding.headline,
        # The first wrong page stops it; on a GPU that is often one inside the SWA pool.
        "a full-pool page in the SWA table": finding.kind == "full-index-in-swa-table",
        "the request": bool(where.request) and where.request in finding.headline,
    }
    verdicts.must_name(run, finding, wanted)
    return (
        f"g4debug stops it at step {where.step}. The finding names the place: {where.layer_kind} "
        f"layer {where.layer} of the draft, row {where.row} and column {where.column} of the page "
        "table."
    )


REPRO = Repro(
    name="e4b_trtllm_mtp",
    serves="Gemma-4 E4B's shape, trtllm_mha, FROZEN_KV_MTP",
    workload="workloads.e4b_trtllm_mtp",
    variants={
        "clean": Variant("SGLang as installed", {}, judge_clean),
        "broken": broken("the bug is put back, debugging is off", PUT_BACK, judge_broken),
        "diagnosed": diagnosed("the bug is put back, debugging is on", PUT_BACK, judge_diagnosed),
        "fixed": Variant(
            "the bug is put back, its fix swa-state-swap is on", FAULT, verdicts.same_outputs
        ),
        "replayed": Variant(
            "the dump of diagnosed, without the requests",
            {},
            verdicts.reproduced,
            replays="diagnosed",
        ),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "as many as fill the SWA pool"))
