"""The hidden states that Gemma-4 captures for a draft are overwritten by the next layer.

Each variant runs one real forward, and compares the captured states with copies that were made at
the moment of capture. On a CPU, a stand-in for the CUDA kernel writes the norm in place.

SGLang 0.5.23 does not have this bug. From there on only the variant "clean" runs, which has no fix.
"""

from __future__ import annotations

from typing import Any

from harness.processes import Outcome
from harness.variants import Repro, Variant, main
from harness.verdicts import completed, judge, only_if

from g4debug.fixes.residual_aliasing import FIX
from g4debug.hooking import targets

SWITCH = "G4DEBUG_FIX_RESIDUAL_ALIASING"
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}


@judge
def judge_broken(run: Outcome) -> str:
    completed(run)
    return only_if(run.result["wrong"] == run.result["captured"], what(run.result))


@judge
def judge_right(run: Outcome) -> str:
    completed(run)
    return only_if(not run.result["wrong"], what(run.result))


def what(found: dict[str, Any]) -> str:
    captured, wrong = found["captured"], found["wrong"]
    if not wrong:
        text = f"The states captured at all {len(captured)} layers are right."
    elif wrong == captured:
        text = f"The states captured at all {len(captured)} layers are wrong."
    else:
        text = (
            f"{len(wrong)} of the {len(captured)} captured states are wrong: those of the layers "
            f"{', '.join(map(str, wrong))}."
        )
    return f"{text} Their lowest cosine similarity to the right states is {found['cosine']:.3f}."


if targets.matches(FIX.needs):
    VARIANTS = {
        "broken": Variant("the fix residual-aliasing is off", OFF, judge_broken),
        "fixed": Variant("the fix residual-aliasing is on", ON, judge_right),
    }
else:
    title = f"SGLang {targets.sglang_version()}, which does not have this bug"
    VARIANTS = {"clean": Variant(title, OFF, judge_right)}
REPRO = Repro(
    name="residual_aliasing",
    serves="hidden states that Gemma-4 captures for a draft",
    workload="workloads.residual_aliasing",
    child="workloads.residual_aliasing",
    variants=VARIANTS,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, ""))
