"""Multimodal Gemma-4: are outputs in piecewise CUDA graphs the eager ones? (seed PR #16)

    python repro/mm_piecewise_parity.py [--requests N] [--keep]

Needs a GPU. Text prompts on Gemma4ForConditionalGeneration, three geometries. Exit code 0 only if
the allowed geometries are equal, token by token, and the refused one is refused and, enforced,
dies of an illegal memory access or differs; 1 if not; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parent))
from _run import ILLEGAL, Outcome, run_arm, script

SWITCH = "SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM"
CAPTURED = "Capture piecewise CUDA graph end"
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}
MODULE = "_mm_parity"


def equal(graphs: Outcome, eager: Outcome) -> tuple[int, int]:
    """How many outputs are equal, of how many."""
    pairs = list(zip(graphs.result["tokens"], eager.result["tokens"], strict=True))
    return sum(a == b for a, b in pairs), len(pairs)


def compare(graphs: Outcome, eager: Outcome, wanted: bool) -> tuple[bool, str]:
    """As it should?, and one line; ``wanted``: the outputs should be equal."""
    for run, captured in ((eager, False), (graphs, True)):
        found = CAPTURED in run.text
        if not run.completed:
            if captured and found and not wanted and run.illegal_access:
                return True, f"captures, then dies: {ILLEGAL}: reason enough to refuse it"
            return False, f"{run.arm} did not complete (status {run.status}); log: {run.log}"
        if found is not captured:
            return False, f"{run.arm} captured {'no ' * captured}piecewise CUDA graphs"
    same, of = equal(graphs, eager)
    different = len({tuple(tokens) for tokens in eager.result["tokens"]})
    if different < of / 2:
        return False, f"only {different} different outputs of {of}: equal ones would prove little"
    text = f"{same} of {of} outputs equal eager's"
    if wanted:
        return same == of, text
    return same < of, f"{text}: {'no reason' if same == of else 'reason enough'} to refuse it"


def refused(run: Outcome) -> tuple[bool, str]:
    line = next((s for s in run.text.splitlines() if f"{SWITCH}=1 is refused" in s), "")
    return bool(line) and run.status != 0, line or f"not refused; log: {run.log}"


def measure(requests: int, folder: Path, console: Console) -> list[tuple[str, bool, str]]:
    def run(arm: str, workload: str, environment: dict[str, str]) -> Outcome:
        console.print(f"{arm} …")
        name = f"{MODULE}:{workload}"
        return run_arm(arm, "cuda", requests, environment, folder, 300, lambda text: None, name)

    rows = []
    for name, workload in (("dense", "DENSE"), ("kv-shared", "KV_SHARED")):
        eager = run(f"{name}-eager", workload, OFF)
        rows.append((name, *compare(run(f"{name}-graphs", workload, ON), eager, wanted=True)))
    name, workload = "per-layer-inputs", "PER_LAYER_INPUTS"
    rows.append((f"{name}, {SWITCH}=1", *refused(run(f"{name}-refused", workload, ON))))
    eager = run(f"{name}-eager", workload, OFF)
    graphs = run(f"{name}-graphs", f"{workload}_ENFORCED", OFF)
    verdict = compare(graphs, eager, wanted=False)
    rows.append((f"{name}, --enforce-piecewise-cuda-graph", *verdict))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=0, help="default: 20")
    parser.add_argument("--keep", action="store_true", help="keep the logs and say where")
    args = parser.parse_args()
    console = Console(highlight=False)
    import torch

    if not torch.cuda.is_available():
        console.print(
            "mm_piecewise_parity needs CUDA graphs, so a GPU. What can be shown without one, the "
            "decision on SGLang's own ServerArgs:\n"
            "    python -m pytest tests/fixes/test_mm_piecewise_graph.py",
            soft_wrap=True,
        )
        return 2
    folder = Path(tempfile.mkdtemp(prefix="g4debug-parity-"))
    good = False
    try:
        rows = measure(args.requests, folder, console)
        good = all(ok for _, ok, _ in rows)
        table = Table(title="mm_piecewise_parity: Gemma4ForConditionalGeneration, text prompts")
        for column in ("geometry", "as it should", "what happened"):
            table.add_column(column, overflow="fold")
        for name, ok, what in rows:
            table.add_row(name, "yes" if ok else "NO", what)
        console.print(table)
    finally:
        if args.keep or not good:
            console.print(Text(f"logs: {folder}"), soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(script(main))
