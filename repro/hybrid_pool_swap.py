"""SGLang 0.5.13 and later dies if prefill and decode use different attention backends and
FROZEN_KV_MTP is on.

    python repro/hybrid_pool_swap.py [--device cpu|cuda] [--variant NAME] [--requests N] [--json]
                                     [--keep]

No fault is injected: this is SGLang as released. It dies of an IndexError in the draft's first
forward. With CUDA graphs that is at start, when the graphs are captured.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong
arguments or an
SGLang before 0.5.13.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _hybrid import DEVICES
from _run import Outcome
from _variants import (
    Repro,
    Variant,
    Verdict,
    accept_length,
    died_otherwise,
    main,
    not_comparable,
    not_completed,
)

ERROR = "IndexError: list index out of range"
PLACE = "in _get_key_buffer"
OFF = {"G4DEBUG_FIX_HYBRID_POOL_SWAP": "0"}
# If every guess is rejected, the accept length is 1.0. With the right KV it is well above that.
ACCEPTED = 1.2


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, not_completed(run))
    different = len({tuple(tokens) for tokens in run.result["tokens"]})
    return Verdict(True, f"It completes, with {different} different outputs.")


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed:
        return Verdict(False, "It completes: the bug is not there.")
    frames = run.traceback(400)
    if not any(ERROR in line for line in frames) or not any(PLACE in line for line in frames):
        return Verdict(False, died_otherwise(run, ERROR))
    wrapper = any("hybrid_attn_backend.py" in line for line in frames)
    passed = "passes" if wrapper else "does not pass"
    return Verdict(
        wrapper, f"It dies: {ERROR}, {PLACE}. The traceback {passed} hybrid_attn_backend.py."
    )


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    """On a GPU, verify and decode round differently. So the accept length is the proof there."""
    why_not = not_comparable(run, clean)
    if why_not or clean is None:
        return Verdict(False, why_not)
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    same, accepted = sum(a == b for a, b in pairs), run.result["accept_length"]
    exact = "float32" in run.text and "device='cpu'" in run.text
    return Verdict(
        accepted > ACCEPTED and (same == len(pairs) or not exact),
        f"It completes, and {same} of {len(pairs)} outputs equal those of clean. "
        f"{accept_length(run)}",
    )


REPRO = Repro(
    title="hybrid_pool_swap: prefill on triton, decode on trtllm_mha, FROZEN_KV_MTP",
    variants={
        "clean": Variant("the same backends without MTP", OFF, judge_clean, "_hybrid:PLAIN"),
        "broken": Variant(
            "SGLang as installed, the fix is off", OFF, judge_broken, "_hybrid", "traceback"
        ),
        "fixed": Variant("the fix hybrid-pool-swap is on", {}, judge_fixed, "_hybrid"),
    },
    devices=DEVICES,
    compares=("fixed",),
    releases=">=0.5.13",
    shown_on="0.5.13.post1",
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "3 on a CPU, 8 on a GPU"))
