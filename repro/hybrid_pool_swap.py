"""Split prefill and decode attention backends + FROZEN_KV_MTP, on SGLang 0.5.13 and later.

    python repro/hybrid_pool_swap.py [--device cpu|cuda] [--arm NAME] [--requests N] [--json]

No fault is injected: released SGLang dies of an IndexError in the draft's first forward (with
CUDA graphs, at start). Exit code 0 only if every arm did as it should, 1 if one did not, 2 for
wrong arguments or an SGLang before 0.5.13.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arms import Arm, Repro, Verdict, main, not_comparable
from _hybrid import DEVICES
from _run import Outcome

from g4debug.hooking import targets

ERROR = "IndexError: list index out of range"
PLACE = "in _get_key_buffer"
OFF = {"G4DEBUG_FIX_HYBRID_POOL_SWAP": "0"}
# Every draft rejected gives 1.0. What a draft that sees the right KV gets here is well above.
ACCEPTED = 1.2


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    different = len({tuple(tokens) for tokens in run.result["tokens"]})
    return Verdict(True, f"completes; {different} different outputs")


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed:
        return Verdict(False, "completed: the bug is not there")
    frames = run.traceback(400)
    if not any(ERROR in line for line in frames) or not any(PLACE in line for line in frames):
        return Verdict(False, f"died of something else (status {run.status}); log: {run.log}")
    wrapper = any("hybrid_attn_backend.py" in line for line in frames)
    return Verdict(wrapper, f"dies: {ERROR}, {PLACE}, below hybrid_attn_backend.py")


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    """On a GPU verify and decode round differently, so the draft's acceptance is the proof."""
    reason = not_comparable(run, clean)
    if reason or clean is None:
        return Verdict(False, reason)
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    same, accepted = sum(a == b for a, b in pairs), run.result["accept_length"]
    exact = "float32" in run.text and "device='cpu'" in run.text
    return Verdict(
        accepted > ACCEPTED and (same == len(pairs) or not exact),
        f"completes; {same} of {len(pairs)} outputs equal those without MTP, "
        f"accept length {accepted:.2f}",
    )


THERE = targets.matches(">=0.5.13")
REPRO = Repro(
    title="hybrid_pool_swap: prefill on triton, decode on trtllm_mha, FROZEN_KV_MTP",
    arms={
        "clean": Arm("the same backends without MTP", OFF, judge_clean, "_hybrid:PLAIN"),
        "broken": Arm("SGLang as installed, fix off", OFF, judge_broken, "_hybrid", "traceback"),
        "fixed": Arm("fix hybrid-pool-swap on", {}, judge_fixed, "_hybrid"),
    },
    devices=DEVICES if THERE else {},
    compares=("fixed",),
    elsewhere=f"the bug is in SGLang 0.5.13 and later, found {targets.sglang_version()}; run:\n"
    "    make env SGLANG=0.5.13.post1\n"
    "    .venv-0.5.13.post1/bin/python repro/hybrid_pool_swap.py",
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "3 on a CPU, 8 on a GPU"))
