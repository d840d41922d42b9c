"""Does a multimodal Gemma-4 answer the same in piecewise CUDA graphs as without (seed PR #16)?

The script serves text prompts on Gemma4ForConditionalGeneration, with three geometries. Two of them
are allowed to use the graphs: their outputs must equal the eager ones, token by token. The third,
with per-layer inputs, must be refused. If the graphs are enforced for it all the same, it must die
of an illegal memory access or answer differently: that is the reason to refuse it.
"""

from __future__ import annotations

from dataclasses import replace

from harness.processes import ILLEGAL, Outcome
from harness.variants import Repro, Variant, main
from harness.verdicts import Bad, Judge, alike, compared, completed, different, judge, only_if
from harness.workload import Make, Workload, each, in_memory
from kv_shared_piecewise import ENGINE
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


@judge
def judge_eager(run: Outcome) -> str:
    completed(run)
    if CAPTURED in run.text:
        raise Bad("It captured piecewise CUDA graphs.")
    answers, of = different(run), len(run.result["tokens"])
    few = f"There are only {answers} different outputs of {of}, so equal ones prove little."
    if answers < of / 2:
        raise Bad(few)
    return f"It completes, with {answers} different outputs."


def _alike(graphs: Outcome, eager: Outcome) -> tuple[bool, str]:
    """Whether the outputs of both are equal, and how many are. Raises Bad if that says nothing."""
    completed(graphs)
    if CAPTURED not in graphs.text:
        raise Bad("It captured no piecewise CUDA graphs.")
    judge_eager.said(eager)
    same, of = alike(graphs, eager)
    return same == of, f"{same} of {of} outputs equal the eager ones."


@compared
def judge_equal(graphs: Outcome, eager: Outcome) -> str:
    return only_if(*_alike(graphs, eager))


def _refusable(graphs: Outcome, eager: Outcome) -> str:
    """Good if it dies of an illegal memory access, or answers differently."""
    judge_eager.said(eager)
    if not graphs.completed and CAPTURED in graphs.text and graphs.illegal_access:
        return f"It captures the graphs, then it dies: {ILLEGAL}. {REASON}"
    equal, text = _alike(graphs, eager)
    return only_if(not equal, f"{text} {'There is no reason to refuse it.' if equal else REASON}")


judge_refusable = Judge(_refusable, compares=True, dead=True)


@judge
def judge_refused(run: Outcome) -> str:
    line = next((s for s in run.text.splitlines() if f"{SWITCH}=1 is refused" in s), "")
    return only_if(bool(line) and run.status != 0, line or "It was not refused.")


EAGER, GRAPHS = "piecewise CUDA graphs are off", "piecewise CUDA graphs are on"
DEVICES = DENSE
REPRO = Repro(
    name="mm_piecewise_parity",
    serves="Gemma4ForConditionalGeneration, text prompts",
    refuses=" or if there is no GPU",
    variants={
        "dense-eager": Variant(EAGER, OFF, judge_eager, "DENSE"),
        "dense": Variant(GRAPHS, ON, judge_equal, "DENSE", against="dense-eager"),
        "kv-shared-eager": Variant(EAGER, OFF, judge_eager, "KV_SHARED"),
        "kv-shared": Variant(GRAPHS, ON, judge_equal, "KV_SHARED", against="kv-shared-eager"),
        "refused": Variant(f"per-layer inputs, {GRAPHS}", ON, judge_refused, "PER_LAYER_INPUTS"),
        "ple-eager": Variant(f"per-layer inputs, {EAGER}", OFF, judge_eager, "PER_LAYER_INPUTS"),
        "enforced": Variant(
            "per-layer inputs, --enforce-piecewise-cuda-graph",
            OFF,
            judge_refusable,
            "PER_LAYER_INPUTS_ENFORCED",
            against="ple-eager",
        ),
    },
    elsewhere="mm_piecewise_parity needs CUDA graphs, and so a GPU. Without a GPU, this test shows "
    "how SGLang's own ServerArgs decide:\n"
    "    python -m pytest tests/fixes/before_0_5_14/test_mm_piecewise_graph.py",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "20"))
