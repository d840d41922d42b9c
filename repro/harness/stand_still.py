"""The four variants of a script on a server that serves nobody, because a KV pool has no room.

*clean* has a pool with room, *broken* and *diagnosed* stand, and *fixed* serves with the pool of
*broken*. On the CPU engine only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from g4debug.settings import fix_switch
from harness.processes import Outcome
from harness.standing import PATIENCE
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


def serves_nobody(run: Outcome) -> str:
    """What a user sees. Raises Bad unless nobody is served while the scheduler goes on."""
    completed(run)
    found = run.result
    if found["unserved"] < len(found["tokens"]):
        raise Bad(f"It serves {len(found['tokens']) - found['unserved']} requests.")
    if not found["turns"]:
        raise Bad("Its scheduler does not answer any more: that is another bug.")
    return (
        f"It stands: none of {found['unserved']} requests is served within {PATIENCE:.0f} s, and "
        "its scheduler goes on as if nothing were wrong."
    )


def sentences(cause: str) -> str:
    """The lines of a finding's cause as one paragraph."""
    lines = [line.strip().rstrip(".") for line in cause.splitlines() if line.strip()]
    return " ".join(f"{line[0].upper()}{line[1:]}." for line in lines)


def repro(
    name: str,
    fix: str,
    serves: str,
    stands: Callable[[Outcome], str],
    pool: str = f"a SWA pool of {POOL}",
    room: str = "a SWA pool of 6528 tokens",
    **more: Any,
) -> Repro:
    """The script ``name``. fix: its id. stands: what a user sees; Bad if it does not stand.

    pool: which one is too small, of so many tokens, and room: what *clean* has in its place; both
    in words. more: of the ``Repro``.
    """
    off, kind = {fix_switch(fix): "0"}, pool.split()[1]

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
        if f"{kind} pool" not in finding.got or "deadlock" not in finding.cause:
            raise Bad(f"The finding does not say why: {finding.got} {finding.cause}")
        return f"{seen} g4debug tells it by itself, and why: {sentences(finding.cause)}"

    return Repro(
        name=name,
        serves=f"{serves}, {pool}",
        refuses=" or on a machine with a GPU",
        variants={
            "clean": Variant(f"{room}, the fix is off", off, judge_clean, "ROOMY"),
            "broken": Variant("the fix is off, debugging is off", off, judge_broken),
            "diagnosed": diagnosed(
                "the fix is off, debugging is on",
                # Else the tracers refuse releases on which they were never run.
                {
                    **off,
                    "G4DEBUG_HANG_SECONDS": str(HANG_SECONDS),
                    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
                },
                judge_diagnosed,
            ),
            "fixed": Variant(f"the fix {fix} is on", {}, same_outputs),
        },
        child="harness.standing",
        elsewhere=CPU_ONLY,
        **more,
    )
