"""A Gemma-4 with KV-shared layers does not start with SGLang's default piecewise CUDA graphs (seed
PR #16).

    python repro/kv_shared_piecewise.py [--device cuda] [--variant NAME] [--requests N] [--json]
                                        [--keep]

No fault is injected: this is SGLang 0.5.12.post1 as released. The script needs a GPU, because there
are no CUDA graphs without one.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong
arguments, if there is no GPU or on SGLang 0.5.13 and later.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _kv_shared import DEVICES
from _run import UP, Outcome
from _variants import (
    Repro,
    Variant,
    Verdict,
    blamed,
    died_otherwise,
    main,
    not_completed,
    same_outputs,
)

ERROR = "TypeError: 'NoneType' object is not subscriptable"
CAPTURED = "Capture piecewise CUDA graph end"
OFF = {"G4DEBUG_FIX_OPTIONAL_KV": "0"}
DEFAULT, EAGER = "_kv_shared", "_kv_shared:EAGER"


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, not_completed(run))
    if CAPTURED in run.text:
        return Verdict(False, "It captured piecewise CUDA graphs although they are switched off.")
    different = len({tuple(tokens) for tokens in run.result["tokens"]})
    return Verdict(True, f"It completes, with {different} different outputs.")


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if UP in run.text:
        return Verdict(False, "The engine started: the bug is not there.")
    if ERROR not in run.text:
        return Verdict(False, died_otherwise(run, ERROR))
    return Verdict(True, f"It dies at start: {ERROR}, in {blamed(run)}.")


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed and CAPTURED not in run.text:
        return Verdict(False, "It completes, but it captured no piecewise CUDA graphs.")
    return same_outputs(run, clean)


REPRO = Repro(
    title="kv_shared_piecewise: Gemma-4 E2B's shape, default arguments",
    variants={
        "clean": Variant("piecewise CUDA graphs are off, the fix is off", OFF, judge_clean, EAGER),
        "broken": Variant(
            "default arguments, the fix is off", OFF, judge_broken, DEFAULT, "traceback"
        ),
        "fixed": Variant("default arguments, the fix optional-kv is on", {}, judge_fixed, DEFAULT),
    },
    devices=DEVICES,
    releases="<0.5.13",
    compares=("fixed",),
    elsewhere="kv_shared_piecewise needs CUDA graphs, and so a GPU. Without a GPU, this test calls "
    "SGLang's own custom op without K and V. It crashes without the fix, and gives the eager "
    "numbers with it:\n"
    "    python -m pytest tests/fixes/before_0_5_14/test_optional_kv.py",
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "8"))
