"""SGLANG_GEMMA4_FORCE_EAGLE=1: NEXTN with a Gemma-4 assistant, as FROZEN_KV_MTP and as EAGLE.

    python repro/force_eagle.py [--arm NAME] [--requests N] [--json] [--keep]

SGLang makes FROZEN_KV_MTP of NEXTN. Forced, an assistant whose hidden size or head dimensions
EAGLE has no room for stops at start. Without CUDA graphs, as the refusal advises, SGLang's EAGLE
worker serves the same assistant, and guesses worse: the draft reads KV of its own, not the
target's. CPU only, so that the *graphs* have no room for its hidden states is read, not run; which
arguments EAGLE needs here: :mod:`_force_eagle`. Exit code 0 only if every arm did as it should, 1
if one did not, 2 for wrong arguments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _arms import Arm, Repro, Verdict, main, same_outputs
from _force_eagle import DEVICES, geometry
from _run import UP, Outcome

SWITCH = "SGLANG_GEMMA4_FORCE_EAGLE"
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}  # off by name: the caller's own may say otherwise
PROMOTED = "FROZEN_KV_MTP"
REFUSED = f"g4debug: {SWITCH}=1: this assistant cannot be served by EAGLE: "
_ALGORITHM = re.compile(r"server_args=ServerArgs\(.*speculative_algorithm='?(\w+)")


def algorithm(run: Outcome) -> str:
    """What SGLang made of --speculative-algorithm NEXTN, in its own start-up line."""
    found = _ALGORITHM.search(run.text)
    return found[1] if found else "nothing"


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    different = len({tuple(tokens) for tokens in run.result["tokens"]})
    return Verdict(algorithm(run) == "None", f"completes; {different} different outputs")


def _served(run: Outcome, clean: Outcome | None, wanted: str) -> Verdict:
    """The outputs of no MTP at all, by the algorithm that was wanted, and some guess was right."""
    verdict = same_outputs(run, clean)
    if not verdict.good:
        return verdict
    if algorithm(run) != wanted:
        return Verdict(False, f"served as {algorithm(run)}, not as {wanted}")
    guessed = run.result["accept_length"] > 1
    return Verdict(guessed, f"served as {wanted}: {verdict.what}")


def judge_promoted(run: Outcome, clean: Outcome | None) -> Verdict:
    return _served(run, clean, PROMOTED)


def judge_served(run: Outcome, clean: Outcome | None) -> Verdict:
    return _served(run, clean, "EAGLE")


def _stopped(run: Outcome, *reasons: str) -> Verdict:
    """One line that says why, nothing began, and no traceback is in the way."""
    line = next((x for x in run.text.splitlines() if x.startswith(REFUSED)), "")
    if not line or UP in run.text or run.status in (0, None):
        return Verdict(False, f"not refused (status {run.status}); log: {run.log}")
    if "Traceback" in run.text:
        return Verdict(False, f"refused, and a traceback, too; log: {run.log}")
    missing = [r for r in (*reasons, f"Unset {SWITCH}") if r not in line]
    if missing:
        return Verdict(False, f"the refusal does not say {', '.join(missing)}: {line}")
    return Verdict(True, f"stops at start: {line.removeprefix(REFUSED)}")


def judge_forced(run: Outcome, clean: Outcome | None) -> Verdict:
    shape = geometry(even=True)
    sizes = f"its hidden size is {shape.assistant_hidden}, the target's {shape.hidden}"
    return _stopped(run, sizes, "--disable-cuda-graph")


def judge_uneven(run: Outcome, clean: Outcome | None) -> Verdict:
    shape = geometry(even=False)
    small, large = sorted((shape.head_dim, shape.swa_head_dim))
    return _stopped(run, f"its layers have head dimensions {small} and {large}")


REPRO = Repro(
    title="force_eagle: toy Gemma-4 and its assistant, --speculative-algorithm NEXTN",
    arms={
        "clean": Arm("no MTP", OFF, judge_clean, "_force_eagle:PLAIN"),
        "promoted": Arm("SGLang as installed", OFF, judge_promoted, "_force_eagle"),
        "forced": Arm("forced, CUDA graphs on", ON, judge_forced, "_force_eagle:GRAPHS"),
        "uneven": Arm("forced, two head dimensions", ON, judge_uneven, "_force_eagle:UNEVEN"),
        "served": Arm("forced, CUDA graphs off", ON, judge_served, "_force_eagle:EAGLE"),
    },
    devices=DEVICES,
    compares=("promoted", "served"),
    elsewhere="force_eagle runs on the CPU engine, which refuses a GPU; hide it:\n"
    "    CUDA_VISIBLE_DEVICES='' python repro/force_eagle.py",
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", "3"))
