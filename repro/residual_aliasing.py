"""Gemma-4's captured hidden states, overwritten by the next layer (a later fix of the seeds' fork).

    python repro/residual_aliasing.py [--device cpu|cuda] [--json]

One real forward in each arm, its captured states compared with copies made at capture. Exit
code 0 only if all are wrong without the fix and all right with it, 1 if not, 2 for wrong
arguments. On a CPU the norm that writes in place is a stand-in for the CUDA kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _arms import default_device
from _run import _group, ended, script
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SWITCH = "G4DEBUG_FIX_RESIDUAL_ALIASING"
ARMS = {"broken": "0", "fixed": "1"}
SECONDS = 300


def run(arm: str, device: str, folder: Path) -> dict[str, Any]:
    """What the arm measured, or {"error": ...} with where its log is."""
    result, log = folder / f"{arm}.json", folder / f"{arm}.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("G4DEBUG_")}
    command = [sys.executable, str(HERE / "_residual.py"), device, str(result)]
    if device == "cpu":
        from g4debug import cpu

        environment = cpu.environment(environment)
    environment[SWITCH] = ARMS[arm]
    with log.open("wb") as sink, _group(command, environment, sink) as process:
        if ended(process, SECONDS) is None:
            return {"error": f"took longer than {SECONDS} s; log: {log}"}
    if not result.is_file():
        return {"error": f"ended with status {process.returncode}; log: {log}"}
    data: dict[str, Any] = json.loads(result.read_text())
    return data


def as_it_should(arm: str, found: dict[str, Any]) -> bool:
    if "error" in found:
        return False
    return bool(found["wrong"] == (found["captured"] if arm == "broken" else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    args = parser.parse_args()
    device = args.device or default_device()
    folder = Path(tempfile.mkdtemp(prefix="g4debug-repro-"))
    table = Table(title="residual_aliasing: hidden states that Gemma-4 captures for a draft")
    for column in ("arm", SWITCH, "as it should", "captured layers", "wrong", "lowest cosine"):
        table.add_column(column, overflow="fold")
    found = {}
    for arm, switch in ARMS.items():
        it = found[arm] = run(arm, device, folder)
        said = "yes" if as_it_should(arm, it) else "NO"
        if "error" in it:
            table.add_row(arm, switch, said, it["error"], "", "")
        else:
            wrong = ", ".join(map(str, it["wrong"])) or "none"
            table.add_row(arm, switch, said, str(len(it["captured"])), wrong, f"{it['cosine']:.3f}")
    Console(stderr=args.json, highlight=False).print(table)
    good = all(as_it_should(arm, it) for arm, it in found.items())
    if args.json:
        print(json.dumps({"device": device, "arms": found, "good": good}, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(script(main))
