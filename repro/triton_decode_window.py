"""What the key that is missing from a decode on SGLang's triton backend changes in the answers.

Each variant lets an engine answer the same prompts, many of them longer than the sliding window of
128 tokens. Hugging Face's own Gemma-4, on the same toy checkpoint, is given each answer so far: is
the next token the one that it would choose, and how far apart are the log probabilities of it? The
script runs on the CPU engine only.

Before SGLang 0.5.14 Gemma-4's sliding layers have a window that is one key too long, on every
backend but in triton's decode. So there no variant is right behind the window, and the fix only
makes the difference smaller.

The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong arguments
or on a machine with a GPU.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness import render
from harness.options import Parser, default_device
from harness.processes import Outcome, run_child, script
from harness.variants import CPU_ONLY
from harness.verdicts import Verdict, not_completed
from rich.console import Console

from g4debug.hooking import targets

SWITCH = "G4DEBUG_FIX_TRITON_DECODE_WINDOW"
VARIANTS = {  # name -> attention backend, the fix's switch, title
    "clean": ("trtllm_mha", "0", "trtllm_mha, which reads the whole window in a decode"),
    "broken": ("triton", "0", "triton as it is"),
    "fixed": ("triton", "1", "triton, the fix triton-decode-window is on"),
}
REQUESTS, SECONDS = 64, 900
WHOLE = targets.matches(">=0.5.14")  # the layers' window is the model's
CLOSE = 1e-3  # in log probability; the same numbers in another order differ by 1e-4


def behind(found: dict[str, Any], decode: bool = True) -> list[dict[str, Any]]:
    """The tokens that a decode step (or a prefill) made for queries with a full window.

    The query at position p has p + 1 keys before it or at it.
    """
    full = found["window"] - 1
    return [t for t in found["tokens"] if t["decode"] is decode and t["query"] >= full]


def figures(tokens: list[dict[str, Any]]) -> tuple[int, float]:
    """How many tokens the model would not choose, and the largest difference."""
    return sum(not t["chosen"] for t in tokens), max((t["off"] for t in tokens), default=0.0)


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


def judge(variant: str, run: Outcome, broken: Outcome | None) -> Verdict:
    """broken: that variant's outcome, if it ran before. Inside the window all must be right.

    Behind it, ``broken`` must not be; the others must, and before 0.5.14 be nearer than it.
    """
    if not run.completed:
        return Verdict(False, not_completed(run))
    found = run.result
    tokens = behind(found)
    inside = [t for t in found["tokens"] if t["query"] < found["window"] - 1]
    if not tokens or not inside:
        return Verdict(False, "There are no tokens on either side of the window: raise --requests.")
    if figures(inside)[0] or figures(inside)[1] > CLOSE:
        return Verdict(False, f"Tokens inside the window are other ones, too. {told(found)}")
    if variant == "broken":
        return Verdict(figures(tokens)[1] > CLOSE, told(found))
    if WHOLE:
        return Verdict(figures(tokens)[0] == 0 and figures(tokens)[1] < CLOSE, told(found))
    if variant == "clean" or broken is None or not broken.completed:
        return Verdict(True, told(found))
    nearer = figures(tokens)[1] < figures(behind(broken.result))[1]
    return Verdict(nearer, told(found))


def main() -> int:
    titles = {name: title for name, (_, _, title) in VARIANTS.items()}
    parser = Parser(__doc__, titles)
    parser.number("--requests", "how many prompts each variant answers", REQUESTS)
    parser.json()
    args = parser.parse_args()
    console = Console(stderr=args.json, highlight=False)
    if default_device() == "cuda":
        render.say(console, CPU_ONLY.format("triton_decode_window"))
        return 2
    folder = Path(tempfile.mkdtemp(prefix="g4debug-repro-"))
    runs: dict[str, Outcome] = {}
    blocks = []
    for name, (backend, switch, title) in VARIANTS.items():
        environment = {SWITCH: switch}
        render.say(console, f"{name}: {title}")
        arguments = {"backend": backend, "requests": args.requests}
        runs[name] = run_child(
            name, "workloads.triton_decode_window", arguments, environment, folder, SECONDS
        )
        verdict = judge(name, runs[name], runs.get("broken"))
        blocks.append(
            render.Block(name, *verdict, title, runs[name].seconds, environment, runs[name].log)
        )
    render.summary(console, "triton_decode_window: the key that a decode on triton loses", blocks)
    good = all(block.good for block in blocks)
    if args.json:  # the key "arms" is older than the word *variant*
        found = {
            name: {"good": block.good, "what": block.what, **numbers(runs[name])}
            for name, block in zip(runs, blocks, strict=True)
        }
        print(json.dumps({"device": "cpu", "arms": found, "good": good}, indent=2))
    return 0 if good else 1


def numbers(run: Outcome) -> dict[str, Any]:
    if not run.completed:
        return {}
    wrong, off = figures(behind(run.result))
    return {"behind": len(behind(run.result)), "wrong": wrong, "off": off}


if __name__ == "__main__":
    raise SystemExit(script(main))
