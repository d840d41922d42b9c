"""What the key that is missing from a decode on SGLang's triton backend changes in the answers.

Each variant lets an engine answer the same prompts, many of them longer than the sliding window of
128 tokens. Hugging Face's own Gemma-4, on the same toy checkpoint, is given each answer so far: is
the next token the one that it would choose, and how far apart are the log probabilities of it? The
script runs on the CPU engine only.

Before SGLang 0.5.14 Gemma-4's sliding layers have a window that is one key too long, on every
backend but in triton's decode. So there no variant is right behind the window, and the fix only
makes the difference smaller.
"""

from __future__ import annotations

from typing import Any

from harness.processes import Outcome
from harness.variants import CPU_ONLY, Repro, Variant, main
from harness.verdicts import Bad, compared, completed, judge, only_if
from workloads.triton_decode_window import behind, figures

from g4debug.hooking import targets

SWITCH = "G4DEBUG_FIX_TRITON_DECODE_WINDOW"
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}
WHOLE = targets.matches(">=0.5.14")  # the layers' window is the model's
CLOSE = 1e-3  # in log probability; the same numbers in another order differ by 1e-4


def told(found: dict[str, Any]) -> str:
    tokens = behind(found)
    wrong, off = figures(tokens)
    first = [t for t in found["tokens"] if not t["decode"]]
    return (
        f"Of {len(tokens)} tokens decoded behind the window, the model would choose others for "
        f"{wrong}; the log probabilities are up to {off:.4f} apart. Of the {len(first)} tokens "
        f"that a prefill made, it would choose others for {figures(first)[0]} (up to "
        f"{figures(first)[1]:.4f} apart)."
    )


def inside(run: Outcome) -> tuple[int, float]:
    """The figures behind the window. Raises Bad unless all tokens inside it are right."""
    completed(run)
    tokens = behind(run.result)
    inner = [t for t in run.result["tokens"] if t["query"] < run.result["window"] - 1]
    if not tokens or not inner:
        raise Bad("There are no tokens on either side of the window: raise --requests.")
    if figures(inner)[0] or figures(inner)[1] > CLOSE:
        raise Bad(f"Tokens inside the window are other ones, too. {told(run.result)}")
    return figures(tokens)


@judge
def judge_clean(run: Outcome) -> str:
    wrong, off = inside(run)
    return only_if(not WHOLE or (wrong == 0 and off < CLOSE), told(run.result))


@judge
def judge_broken(run: Outcome) -> str:
    return only_if(inside(run)[1] > CLOSE, told(run.result))


@compared
def judge_fixed(run: Outcome, broken: Outcome) -> str:
    """Behind the window all are right, or before 0.5.14 nearer than without the fix."""
    wrong, off = inside(run)
    nearer = off < figures(behind(broken.result))[1]
    return only_if(wrong == 0 and off < CLOSE if WHOLE else nearer, told(run.result))


REPRO = Repro(
    name="triton_decode_window",
    serves="the key that a decode on triton loses",
    refuses=" or on a machine with a GPU",
    workload="workloads.triton_decode_window",
    child="workloads.triton_decode_window",
    variants={
        "clean": Variant("trtllm_mha, which reads the whole window in a decode", OFF, judge_clean),
        "broken": Variant("triton as it is", OFF, judge_broken, "TRITON"),
        "fixed": Variant(
            "triton, the fix triton-decode-window is on",
            ON,
            judge_fixed,
            "TRITON",
            against="broken",
        ),
    },
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "64"))
