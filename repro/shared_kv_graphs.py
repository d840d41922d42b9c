"""SGLang 0.5.21 and later dies at start if a text-only Gemma-4 has KV-shared layers.

No fault is injected: this is SGLang as released. Its CUDA graphs of a prefill, which are on by
default on a GPU, look up attention layers by an id that such layers have in common. On the CPU
engine, where these graphs are off by default, they are asked for; SGLang dies before it would
capture one.
"""

from __future__ import annotations

from harness import verdicts
from harness.processes import Outcome
from harness.variants import Repro, Variant, broken, main
from harness.workload import Workload
from workloads import e4b_trtllm_mtp

ERROR = "ValueError: invalid or duplicate attention layer_id"
PLACE = "in index_attention_layers_by_global_id"
OFF = {"G4DEBUG_FIX_SHARED_KV_GRAPHS": "0"}
SAYS = "shared-kv-graphs: prefills run without CUDA graphs"


@verdicts.judge
def judge_broken(run: Outcome) -> str:
    verdicts.died_of(run, ERROR, PLACE)
    return f"It dies at start: {ERROR}, {PLACE}."


@verdicts.compared
def judge_fixed(run: Outcome, clean: Outcome) -> str:
    """On a GPU the outputs hang on the batches, which need not be the same twice."""
    verdicts.only_if(SAYS in run.text, "It completes, but the fix did nothing.")
    same, of = verdicts.alike(run, clean)
    return verdicts.only_if(
        same == of or not verdicts.exact(run),
        f"It completes, and {same} of {of} outputs equal those of clean.",
    )


def cpu(requests: int | None) -> Workload:
    return Workload.toy(
        requests or 3, (60, 120), 8, cuda_graph_backend_prefill="breakable"
    ).without_mtp()


def cuda(requests: int | None) -> Workload:
    """E4B's shape with seeded weights, and SGLang's own choice for the graphs of a prefill."""
    made = e4b_trtllm_mtp.cuda(requests or 8).without_mtp()
    return made.given(disable_piecewise_cuda_graph=False)


DEVICES = {"cpu": cpu, "cuda": cuda}
EAGER = {
    "cpu": lambda n: cpu(n).given(cuda_graph_backend_prefill="disabled"),
    "cuda": lambda n: cuda(n).given(disable_piecewise_cuda_graph=True),
}


REPRO = Repro(
    name="shared_kv_graphs",
    serves="a text-only model with KV-shared layers, without a draft",
    refuses=" or an SGLang before 0.5.21",
    variants={
        "clean": Variant("without CUDA graphs for prefills", OFF, verdicts.answers, "EAGER"),
        "broken": broken("SGLang as installed, the fix is off", OFF, judge_broken),
        "fixed": Variant("the fix shared-kv-graphs is on", {}, judge_fixed),
    },
    releases=">=0.5.21",
    shown_on="0.5.23",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3 on a CPU, 8 on a GPU"))
