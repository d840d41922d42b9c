"""Does a multimodal Gemma-4 answer the same in piecewise CUDA graphs as without (seed PR #16)?

The script serves text prompts on Gemma4ForConditionalGeneration, with three geometries. Two of them
are allowed to use the graphs: their outputs must equal the eager ones, token by token. The third,
with per-layer inputs, must be refused. If the graphs are enforced for it all the same, it must die
of an illegal memory access or answer differently: that is the reason to refuse it.

The exit code is 0 if all of this is so, 1 if not, and 2 for wrong arguments or if there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness import render
from harness.options import Parser, logs
from harness.processes import ILLEGAL, Outcome, run_child, script
from harness.verdicts import Verdict, alike, different, not_completed
from harness.workload import Make, Workload, each, in_memory
from kv_shared_piecewise import ENGINE
from rich.console import Console
from workloads import multimodal

SWITCH = "SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM"
CAPTURED = "Capture piecewise CUDA graph end"
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}
REASON = "That is reason enough to refuse it."


REQUESTS = 20


def _of(name: str, ple: bool = False, kv_shared: bool = False) -> dict[str, Make]:
    """E4B's layers, fewer of them, and a small vocabulary. ple: with per-layer inputs."""

    def cuda(requests: int | None) -> Workload:
        from g4debug.cpu.geometry import E4B_256

        geometry = replace(
            E4B_256,
            vocab=16_384,
            pattern="sssssf" * 3,
            kv_shared=6,
            ple=256 if ple else 0,
            centroids=256,
        )
        folder = in_memory(f"g4debug-mm-{name}")
        model = folder / "mm"
        if not (model / "model.safetensors.index.json").is_file():
            model = multimodal.write(geometry, kv_shared, folder, "cuda")
        engine = ENGINE | {"model_path": str(model), "mem_fraction_static": 0.5}
        count = requests or REQUESTS
        return Workload(count, (200, 900), 32, geometry.vocab, engine, timeout=300)

    return {"cuda": cuda}


DENSE = _of("dense")
KV_SHARED = _of("kv-shared", kv_shared=True)
PER_LAYER_INPUTS = _of("per-layer-inputs", ple=True, kv_shared=True)
# SGLang's own flag for tests. It skips every reason to switch the graphs off, also ours.
PER_LAYER_INPUTS_ENFORCED = each(PER_LAYER_INPUTS, enforce_piecewise_cuda_graph=True)


def compare(graphs: Outcome, eager: Outcome, wanted: bool) -> Verdict:
    """``wanted``: whether the outputs should be equal."""
    for run, captured in ((eager, False), (graphs, True)):
        found = CAPTURED in run.text
        if not run.completed:
            if captured and found and not wanted and run.illegal_access:
                return Verdict(True, f"It captures the graphs, then it dies: {ILLEGAL}. {REASON}")
            return Verdict(False, f"The run {run.variant} failed. {not_completed(run)}")
        if found is not captured:
            none = "no " if captured else ""
            return Verdict(False, f"The run {run.variant} captured {none}piecewise CUDA graphs.")
    same, of = alike(graphs, eager)
    answers = different(eager)
    if answers < of / 2:
        return Verdict(
            False,
            f"There are only {answers} different outputs of {of}, so equal ones prove little.",
        )
    text = f"{same} of {of} outputs equal the eager ones."
    if wanted:
        return Verdict(same == of, text)
    if same == of:
        return Verdict(False, f"{text} There is no reason to refuse it.")
    return Verdict(True, f"{text} {REASON}")


def refused(run: Outcome) -> Verdict:
    line = next((s for s in run.text.splitlines() if f"{SWITCH}=1 is refused" in s), "")
    return Verdict(bool(line) and run.status != 0, line or "It was not refused.")


def measure(requests: int, folder: Path, console: Console) -> list[render.Block]:
    def run(variant: str, workload: str, environment: dict[str, str]) -> Outcome:
        render.say(console, f"{variant} …")
        arguments = {"workload": f"mm_piecewise_parity:{workload}", "requests": requests}
        return run_child(
            variant, "harness.engine", arguments, environment, folder, 300, device="cuda"
        )

    def block(name: str, switch: str, run: Outcome, verdict: Verdict) -> render.Block:
        return render.Block(f"{name}, {switch}", *verdict, seconds=run.seconds)

    found = []
    for name, workload in (("dense", "DENSE"), ("kv-shared", "KV_SHARED")):
        eager = run(f"{name}-eager", workload, OFF)
        graphs = run(f"{name}-graphs", workload, ON)
        found.append(block(name, f"{SWITCH}=1", graphs, compare(graphs, eager, wanted=True)))
    name, workload = "per-layer-inputs", "PER_LAYER_INPUTS"
    stopped = run(f"{name}-refused", workload, ON)
    found.append(block(name, f"{SWITCH}=1", stopped, refused(stopped)))
    eager = run(f"{name}-eager", workload, OFF)
    graphs = run(f"{name}-graphs", f"{workload}_ENFORCED", OFF)
    verdict = compare(graphs, eager, wanted=False)
    found.append(block(name, "--enforce-piecewise-cuda-graph", graphs, verdict))
    return found


def main() -> int:
    parser = Parser(__doc__)
    parser.requests("requests each run serves", "20")
    parser.keep("logs")
    args = parser.parse_args()
    console = Console(highlight=False)
    import torch

    if not torch.cuda.is_available():
        render.for_copying(
            console,
            "mm_piecewise_parity needs CUDA graphs, and so a GPU. Without a GPU, this test shows "
            "how SGLang's own ServerArgs decide:",
            "python -m pytest tests/fixes/before_0_5_14/test_mm_piecewise_graph.py",
        )
        return 2
    with logs("parity", console, "The logs are kept in:", args.keep) as kept:
        blocks = measure(args.requests, kept.folder, console)
        kept.good = all(block.good for block in blocks)
        title = "mm_piecewise_parity: Gemma4ForConditionalGeneration, text prompts"
        render.summary(console, title, blocks, "runs")
    return kept.status


if __name__ == "__main__":
    raise SystemExit(script(main))
