"""The four variants of a script on a server that serves nobody, because the SWA pool has no room.

*clean* has a pool with room, *broken* and *diagnosed* stand, and *fixed* serves with the pool of
*broken*. On the CPU engine only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from g4debug.settings import fix_switch
from harness.processes import Outcome
from harness.variants import CPU_ONLY, Repro, Variant, diagnosed
from harness.verdicts import Bad, completed, judge, only_if, same_outputs, told
from harness.workload import Make, each

HANG_SECONDS = 10
POOL = 768  # tokens of the SWA pool
ENGINE: Mapping[str, Any] = {
    "mtp": False,
    "max_running_requests": None,  # 0.5.23 makes the SWA pool larger if it is given
    "max_total_tokens": 8192,
    "swa_full_tokens_ratio": 0.1,
}


def with_room(devices: Mapping[str, Make]) -> dict[str, Make]:
    """The workloads of *clean*, which a script has by the name ``ROOMY``."""
    return each(devices, swa_full_tokens_ratio=0.8)


def repro(name: str, fix: str, serves: str, stands: Callable[[Outcome], str]) -> Repro:
    """The script ``name``. fix: its id. stands: what a user sees; Bad if it does not stand."""
    off = {fix_switch(fix): "0"}

    @judge
    def judge_clean(run: Outcome) -> str:
        completed(run)
        return only_if(
            not run.result["unserved"], f"It serves all {len(run.result['tokens'])} requests."
        )

    @judge
    def judge_broken(run: Outcome) -> str:
        return stands(run)

    @judge
    def judge_diagnosed(run: Outcome) -> str:
        seen = stands(run)
        finding = told(run).finding
        if finding.kind != "hang":
            raise Bad(f"It tells another finding: {finding.headline}.")
        if "SWA" not in finding.got or "deadlock" not in finding.cause:
            raise Bad(f"The finding does not say why: {finding.got} {finding.cause}")
        return f"{seen} g4debug tells it by itself, and why: {finding.cause}"

    return Repro(
        name=name,
        serves=f"{serves}, a SWA pool of {POOL}",
        refuses=" or on a machine with a GPU",
        variants={
            "clean": Variant(
                "a SWA pool of 6528 tokens, the fix is off", off, judge_clean, "ROOMY"
            ),
            "broken": Variant("the fix is off, debugging is off", off, judge_broken),
            "diagnosed": diagnosed(
                "the fix is off, debugging is on",
                {**off, "G4DEBUG_HANG_SECONDS": str(HANG_SECONDS)},
                judge_diagnosed,
            ),
            "fixed": Variant(f"the fix {fix} is on", {}, same_outputs),
        },
        child="harness.standing",
        elsewhere=CPU_ONLY,
    )
