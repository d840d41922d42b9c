"""A model with KV-shared layers under the default piecewise CUDA graphs (seed PR #16).

    python repro/kv_shared_piecewise.py [--device cuda] [--arm NAME] [--requests N] [--json]

No fault is injected: SGLang 0.5.12.post1 as installed dies at start. Needs CUDA graphs. Exit code 0
only if every arm did as it should, 1 if one did not, 2 for wrong arguments or without a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arms import Arm, Repro, Verdict, blamed, main, same_outputs
from _kv_shared import DEVICES
from _run import UP, Outcome

ERROR = "TypeError: 'NoneType' object is not subscriptable"
CAPTURED = "Capture piecewise CUDA graph end"
OFF = {"G4DEBUG_FIX_OPTIONAL_KV": "0"}
DEFAULT, EAGER = "_kv_shared", "_kv_shared:EAGER"


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    if CAPTURED in run.text:
        return Verdict(False, "captured piecewise CUDA graphs although they are switched off")
    different = len({tuple(tokens) for tokens in run.result["tokens"]})
    return Verdict(True, f"completes; {different} different outputs")


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if UP in run.text:
        return Verdict(False, "the engine came up: the bug is not there")
    if ERROR not in run.text:
        return Verdict(False, f"died of something else (status {run.status}); log: {run.log}")
    return Verdict(True, f"dies at start: {ERROR}, in {blamed(run)}")


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed and CAPTURED not in run.text:
        return Verdict(False, "completes, but captured no piecewise CUDA graphs")
    return same_outputs(run, clean)


REPRO = Repro(
    title="kv_shared_piecewise: Gemma-4 E2B shape, default arguments",
    arms={
        "clean": Arm("piecewise CUDA graphs off, fix off", OFF, judge_clean, EAGER),
        "broken": Arm("default arguments, fix off", OFF, judge_broken, DEFAULT, "traceback"),
        "fixed": Arm("default arguments, fix optional-kv on", {}, judge_fixed, DEFAULT),
    },
    devices=DEVICES,
    compares=("fixed",),
    elsewhere="kv_shared_piecewise needs CUDA graphs, so a GPU. What can be shown without one, "
    "SGLang's own custom op called without K and V (crash, then the eager numbers):\n"
    "    python -m pytest tests/fixes/test_optional_kv.py",
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "8"))
