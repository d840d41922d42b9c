"""The hidden states that Gemma-4 captures for a draft are overwritten by the next layer.

Each variant runs one real forward, and compares the captured states with copies that were made at
the moment of capture. On a CPU, a stand-in for the CUDA kernel writes the norm in place.

SGLang 0.5.23 does not have this bug. From there on only the variant "clean" runs, which has no fix.

The exit code is 0 if all captured states are wrong without the fix and all are right with it (from
0.5.23 on: right without it), 1 if not, and 2 for wrong arguments.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness import render
from harness.options import Parser, default_device
from harness.processes import run_child, script
from rich.console import Console

from g4debug.fixes.residual_aliasing import FIX
from g4debug.hooking import targets

SWITCH = "G4DEBUG_FIX_RESIDUAL_ALIASING"
VARIANTS = {  # name -> the fix's switch, title
    "broken": ("0", "the fix residual-aliasing is off"),
    "fixed": ("1", "the fix residual-aliasing is on"),
}
if not targets.matches(FIX.needs):
    title = f"SGLang {targets.sglang_version()}, which does not have this bug"
    VARIANTS = {"clean": ("0", title)}
SECONDS = 300


def run(variant: str, device: str, folder: Path) -> dict[str, Any]:
    """What the variant measured, or {"error": ...} with where its log is."""
    environment = {SWITCH: VARIANTS[variant][0]}
    done = run_child(
        variant, "workloads.residual_aliasing", {}, environment, folder, SECONDS, device=device
    )
    if done.status is None:
        return {"error": f"It took longer than {SECONDS} s. Its log: {done.log}"}
    if not done.result:
        return {"error": f"It ended with exit status {done.status}. Its log: {done.log}"}
    return done.result


def as_it_should(variant: str, found: dict[str, Any]) -> bool:
    if "error" in found:
        return False
    return bool(found["wrong"] == (found["captured"] if variant == "broken" else []))


def what(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
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


def main() -> int:
    parser = Parser(__doc__, {name: title for name, (_, title) in VARIANTS.items()})
    parser.device()
    parser.json()
    args = parser.parse_args()
    device = args.device or default_device()
    folder = Path(tempfile.mkdtemp(prefix="g4debug-repro-"))
    found = {variant: run(variant, device, folder) for variant in VARIANTS}
    blocks = [
        render.Block(
            variant,
            as_it_should(variant, it),
            what(it),
            VARIANTS[variant][1],
            switches={SWITCH: VARIANTS[variant][0]},
        )
        for variant, it in found.items()
    ]
    title = "residual_aliasing: hidden states that Gemma-4 captures for a draft"
    render.summary(Console(stderr=args.json, highlight=False), title, blocks)
    good = all(block.good for block in blocks)
    if args.json:  # the key "arms" is older than the word *variant*
        print(json.dumps({"device": device, "arms": found, "good": good}, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(script(main))
