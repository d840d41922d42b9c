"""SGLang 0.5.13 and later dies if prefill and decode use different attention backends and
FROZEN_KV_MTP is on.

No fault is injected: this is SGLang as released. It dies of an IndexError in the draft's first
forward. With CUDA graphs that is at start, when the graphs are captured.
"""

from __future__ import annotations

from harness import verdicts
from harness.processes import Outcome
from harness.variants import Repro, Variant, broken, main
from harness.workload import Workload
from workloads import e4b_trtllm_mtp

ERROR = "IndexError: list index out of range"
PLACE = "in _get_key_buffer"
OFF = {"G4DEBUG_FIX_HYBRID_POOL_SWAP": "0"}
# If every guess is rejected, the accept length is 1.0. With the right KV it is well above that.
ACCEPTED = 1.2


@verdicts.judge
def judge_broken(run: Outcome) -> str:
    frames = verdicts.died_of(run, ERROR, PLACE)
    wrapper = any("hybrid_attn_backend.py" in line for line in frames)
    passed = "passes" if wrapper else "does not pass"
    return verdicts.only_if(
        wrapper, f"It dies: {ERROR}, {PLACE}. The traceback {passed} hybrid_attn_backend.py."
    )


@verdicts.compared
def judge_fixed(run: Outcome, clean: Outcome) -> str:
    """On a GPU, verify and decode round differently. So the accept length is the proof there."""
    same, of = verdicts.alike(run, clean)
    return verdicts.only_if(
        run.result["accept_length"] > ACCEPTED and (same == of or not verdicts.exact(run)),
        f"It completes, and {same} of {of} outputs equal those of clean. "
        f"{verdicts.accept_length(run)}",
    )


def cpu(requests: int | None) -> Workload:
    """Few tokens, because Triton is interpreted. Verify runs on the decode backend, to avoid it."""
    return Workload.toy(
        requests or 3,
        (150, 250),
        30,
        attention_backend=None,
        prefill_attention_backend="triton",
        decode_attention_backend="trtllm_mha",
        speculative_attention_mode="decode",
    )


def cuda(requests: int | None) -> Workload:
    """The demo's. The draft's first forward is the capture of its CUDA graphs, at start."""
    return e4b_trtllm_mtp.cuda(requests or 8)


DEVICES = {"cpu": cpu, "cuda": cuda}
PLAIN = {name: (lambda n, make=make: make(n).without_mtp()) for name, make in DEVICES.items()}


REPRO = Repro(
    name="hybrid_pool_swap",
    serves="prefill on triton, decode on trtllm_mha, FROZEN_KV_MTP",
    refuses=" or an SGLang before 0.5.13",
    variants={
        "clean": Variant("the same backends without MTP", OFF, verdicts.answers, "PLAIN"),
        "broken": broken("SGLang as installed, the fix is off", OFF, judge_broken),
        "fixed": Variant("the fix hybrid-pool-swap is on", {}, judge_fixed),
    },
    releases=">=0.5.13",
    shown_on="0.5.13.post1",
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3 on a CPU, 8 on a GPU"))
