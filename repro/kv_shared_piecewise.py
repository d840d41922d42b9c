"""A Gemma-4 with KV-shared layers does not start with SGLang's default piecewise CUDA graphs (seed
PR #16).

No fault is injected: this is SGLang 0.5.12.post1 as released. The script needs a GPU, because there
are no CUDA graphs without one.
"""

from __future__ import annotations

from typing import Any

from harness import verdicts
from harness.processes import UP, Outcome
from harness.variants import Repro, Variant, broken, main
from harness.workload import GPU_ENGINE, Workload, each, in_memory

ERROR = "TypeError: 'NoneType' object is not subscriptable"
CAPTURED = "Capture piecewise CUDA graph end"
OFF = {"G4DEBUG_FIX_OPTIONAL_KV": "0"}


@verdicts.judge
def judge_clean(run: Outcome) -> str:
    verdicts.completed(run)
    if CAPTURED in run.text:
        raise verdicts.Bad("It captured piecewise CUDA graphs although they are switched off.")
    return f"It completes, with {verdicts.different(run)} different outputs."


@verdicts.judge
def judge_broken(run: Outcome) -> str:
    if UP in run.text:
        raise verdicts.Bad("The engine started: the bug is not there.")
    if ERROR not in run.text:
        raise verdicts.Bad(verdicts.died_otherwise(run, ERROR))
    return f"It dies at start: {ERROR}, in {verdicts.blamed(run)}."


@verdicts.compared
def judge_fixed(run: Outcome, clean: Outcome) -> str:
    if CAPTURED not in run.text:
        raise verdicts.Bad("It completes, but it captured no piecewise CUDA graphs.")
    return verdicts.equal_outputs(run, clean)


# Default arguments. Triton is named because SGLang would choose it for the real E2B, too.
ENGINE: dict[str, Any] = {
    **GPU_ENGINE,
    "attention_backend": "triton",
    "context_length": 8192,
    "disable_radix_cache": True,
}


def cuda(requests: int | None) -> Workload:
    from g4debug.cpu.models import E2B, write

    target, _ = write(E2B, in_memory("g4debug-e2b"), device="cuda")
    own = {"model_path": str(target), "mem_fraction_static": 0.6, "decode_log_interval": 1}
    return Workload(requests or 8, (300, 900), 32, E2B.vocab, ENGINE | own, timeout=400)


DEVICES = {"cuda": cuda}
EAGER = each(DEVICES, disable_piecewise_cuda_graph=True)


REPRO = Repro(
    name="kv_shared_piecewise",
    serves="Gemma-4 E2B's shape, default arguments",
    refuses=", if there is no GPU or on SGLang 0.5.13 and later",
    variants={
        "clean": Variant(
            "piecewise CUDA graphs are off, the fix is off", OFF, judge_clean, "EAGER"
        ),
        "broken": broken("default arguments, the fix is off", OFF, judge_broken),
        "fixed": Variant("default arguments, the fix optional-kv is on", {}, judge_fixed),
    },
    releases="<0.5.13",
    elsewhere="kv_shared_piecewise needs CUDA graphs, and so a GPU. Without a GPU, this test calls "
    "SGLang's own custom op without K and V. It crashes without the fix, and gives the eager "
    "numbers with it:\n"
    "    python -m pytest tests/fixes/before_0_5_14/test_optional_kv.py",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "8"))
