"""What SGLANG_GEMMA4_FORCE_EAGLE=1 does to --speculative-algorithm NEXTN with a Gemma-4 assistant.

    python repro/force_eagle.py [--variant NAME] [--requests N] [--json] [--keep]

SGLang turns NEXTN into FROZEN_KV_MTP. The switch forces EAGLE instead, and g4debug then stops the
server at start if EAGLE has no room for the assistant's hidden size or head dimensions. Without
CUDA graphs, as the message at start advises, SGLang's EAGLE worker serves the same assistant. But
it guesses worse, because the draft reads KV of its own and not the target's.

The script runs on the CPU engine only. That the CUDA graphs have no room for the hidden states was
therefore read in SGLang's code, and not run.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong
arguments, on a machine with a GPU or on SGLang 0.5.14 and later.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _force_eagle import DEVICES, geometry
from _run import UP, Outcome
from _variants import CPU_ONLY, Repro, Variant, Verdict, main, not_completed, same_outputs

SWITCH = "SGLANG_GEMMA4_FORCE_EAGLE"
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}  # "0", because the caller's environment may say "1"
PROMOTED = "FROZEN_KV_MTP"
REFUSED = f"g4debug: {SWITCH}=1: this assistant cannot be served by EAGLE: "
_ALGORITHM = re.compile(r"server_args=ServerArgs\(.*speculative_algorithm='?(\w+)")


def algorithm(run: Outcome) -> str:
    """What SGLang made of --speculative-algorithm NEXTN, in its own start-up line."""
    found = _ALGORITHM.search(run.text)
    return found[1] if found else "nothing"


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, not_completed(run))
    different = len({tuple(tokens) for tokens in run.result["tokens"]})
    if algorithm(run) != "None":
        return Verdict(False, f"It is served with {algorithm(run)}, but should be without MTP.")
    return Verdict(True, f"It completes, with {different} different outputs.")


def _served(run: Outcome, clean: Outcome | None, wanted: str) -> Verdict:
    """Good if the outputs are those without MTP, the algorithm is the one that was wanted, and at
    least one guess was right.
    """
    verdict = same_outputs(run, clean)
    if not verdict.good:
        return verdict
    if algorithm(run) != wanted:
        return Verdict(False, f"It is served as {algorithm(run)}, and not as {wanted}.")
    guessed = run.result["accept_length"] > 1
    return Verdict(guessed, f"It is served as {wanted}. {verdict.what}")


def judge_promoted(run: Outcome, clean: Outcome | None) -> Verdict:
    return _served(run, clean, PROMOTED)


def judge_served(run: Outcome, clean: Outcome | None) -> Verdict:
    return _served(run, clean, "EAGLE")


def _stopped(run: Outcome, *reasons: str) -> Verdict:
    """Good if one line says why, before anything was started, and without a traceback."""
    line = next((x for x in run.text.splitlines() if x.startswith(REFUSED)), "")
    if not line or UP in run.text or run.status in (0, None):
        return Verdict(False, f"It was not stopped at start (exit status {run.status}).")
    if "Traceback" in run.text:
        return Verdict(False, "It stops at start, but with a traceback.")
    missing = [r for r in (*reasons, f"Unset {SWITCH}") if r not in line]
    if missing:
        return Verdict(False, f"It stops at start, but does not say {', '.join(missing)}: {line}")
    return Verdict(True, f"It stops at start, and says why: {line.removeprefix(REFUSED)}")


def judge_forced(run: Outcome, clean: Outcome | None) -> Verdict:
    shape = geometry(even=True)
    sizes = f"its hidden size is {shape.assistant_hidden}, the target's {shape.hidden}"
    return _stopped(run, sizes, "--disable-cuda-graph")


def judge_uneven(run: Outcome, clean: Outcome | None) -> Verdict:
    shape = geometry(even=False)
    small, large = sorted((shape.head_dim, shape.swa_head_dim))
    return _stopped(run, f"its layers have head dimensions {small} and {large}")


REPRO = Repro(
    title="force_eagle: a toy Gemma-4 and its assistant, --speculative-algorithm NEXTN",
    variants={
        "clean": Variant("without MTP", OFF, judge_clean, "_force_eagle:PLAIN"),
        "promoted": Variant("SGLang as installed", OFF, judge_promoted, "_force_eagle"),
        "forced": Variant(
            "EAGLE is forced, CUDA graphs are on", ON, judge_forced, "_force_eagle:GRAPHS"
        ),
        "uneven": Variant(
            "EAGLE is forced, the layers have two head dimensions",
            ON,
            judge_uneven,
            "_force_eagle:UNEVEN",
        ),
        "served": Variant(
            "EAGLE is forced, CUDA graphs are off", ON, judge_served, "_force_eagle:EAGLE"
        ),
    },
    devices=DEVICES,
    releases="<0.5.14",
    compares=("promoted", "served"),
    elsewhere=CPU_ONLY.format("force_eagle"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "3"))
