"""What SGLANG_GEMMA4_FORCE_EAGLE=1 does to --speculative-algorithm NEXTN with a Gemma-4 assistant.

SGLang turns NEXTN into FROZEN_KV_MTP. The switch forces EAGLE instead, and g4debug then stops the
server at start if EAGLE has no room for the assistant's hidden size or head dimensions. Without
CUDA graphs, as the message at start advises, SGLang's EAGLE worker serves the same assistant. But
it guesses worse, because the draft reads KV of its own and not the target's.

The script runs on the CPU engine only. That the CUDA graphs have no room for the hidden states was
therefore read in SGLang's code, and not run.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.processes import UP, Outcome
from harness.variants import CPU_ONLY, Repro, Variant, main
from harness.verdicts import Bad, compared, completed, different, equal_outputs, judge, only_if
from harness.workload import Workload, each
from workloads import e4b_trtllm_mtp

SWITCH = "SGLANG_GEMMA4_FORCE_EAGLE"
OFF, ON = {SWITCH: "0"}, {SWITCH: "1"}  # "0", because the caller's environment may say "1"
PROMOTED = "FROZEN_KV_MTP"
REFUSED = f"g4debug: {SWITCH}=1: this assistant cannot be served by EAGLE: "
_ALGORITHM = re.compile(r"server_args=ServerArgs\(.*speculative_algorithm='?(\w+)")


def algorithm(run: Outcome) -> str:
    """The algorithm that SGLang made of NEXTN, from its own start-up line."""
    found = _ALGORITHM.search(run.text)
    return found[1] if found else "nothing"


@judge
def judge_clean(run: Outcome) -> str:
    completed(run)
    if algorithm(run) != "None":
        raise Bad(f"It is served with {algorithm(run)}, but should be without MTP.")
    return f"It completes, with {different(run)} different outputs."


def _served(wanted: str, run: Outcome, clean: Outcome) -> str:
    """Good if the outputs are those without MTP, the algorithm is the one that was wanted, and at
    least one guess was right.
    """
    what = equal_outputs(run, clean)
    if algorithm(run) != wanted:
        raise Bad(f"It is served as {algorithm(run)}, and not as {wanted}.")
    return only_if(run.result["accept_length"] > 1, f"It is served as {wanted}. {what}")


judge_promoted = compared(partial(_served, PROMOTED))
judge_served = compared(partial(_served, "EAGLE"))


def _stopped(run: Outcome, *reasons: str) -> str:
    """Good if one line says why, before anything was started, and without a traceback."""
    line = next((x for x in run.text.splitlines() if x.startswith(REFUSED)), "")
    if not line or UP in run.text or run.status in (0, None):
        raise Bad(f"It was not stopped at start (exit status {run.status}).")
    if "Traceback" in run.text:
        raise Bad("It stops at start, but with a traceback.")
    missing = [r for r in (*reasons, f"Unset {SWITCH}") if r not in line]
    if missing:
        raise Bad(f"It stops at start, but does not say {', '.join(missing)}: {line}")
    return f"It stops at start, and says why: {line.removeprefix(REFUSED)}"


@judge
def judge_forced(run: Outcome) -> str:
    shape = geometry(even=True)
    sizes = f"its hidden size is {shape.assistant_hidden}, the target's {shape.hidden}"
    return _stopped(run, sizes, "--disable-cuda-graph")


@judge
def judge_uneven(run: Outcome) -> str:
    shape = geometry(even=False)
    small, large = sorted((shape.head_dim, shape.swa_head_dim))
    return _stopped(run, f"its layers have head dimensions {small} and {large}")


def geometry(even: bool) -> Any:
    """TINY. ``even``: all layers get the head dimension of the full ones: EAGLE's pool needs it."""
    from g4debug.cpu.geometry import TINY

    return replace(TINY, swa_head_dim=TINY.head_dim) if even else TINY


def cpu(requests: int | None, even: bool = True) -> Workload:
    """The engine runs eagerly, as always on the CPU."""
    from g4debug.cpu.models import write
    from g4debug.cpu.server import server_arguments

    folder = Path(tempfile.gettempdir()) / f"g4debug-force-eagle-{'even' if even else 'tiny'}"
    models = write(geometry(even), folder)
    engine = server_arguments(models, log_level="info", skip_tokenizer_init=True)
    small = e4b_trtllm_mtp.cpu(requests or 3)
    return replace(small, prompt=(60, 120), output=24, engine=engine)


DEVICES = {"cpu": cpu}
PLAIN = {"cpu": lambda requests: cpu(requests).without_mtp()}
# CUDA graphs are on, as is SGLang's default. The server stops before it captures one.
GRAPHS = each(DEVICES, disable_cuda_graph=False)
UNEVEN = {"cpu": lambda requests: cpu(requests, even=False)}
# EAGLE's worker needs these on the CPU engine. On trtllm_mha its draft steps use FlashInfer, which
# has no stand-in. So the draft runs on triton, interpreted; the target stays on trtllm_mha. Overlap
# is off, because the overlapping worker needs CUDA streams.
EAGLE = each(DEVICES, speculative_draft_attention_backend="triton", disable_overlap_schedule=True)


REPRO = Repro(
    name="force_eagle",
    serves="a toy Gemma-4 and its assistant, --speculative-algorithm NEXTN",
    refuses=", on a machine with a GPU or on SGLang 0.5.14 and later",
    variants={
        "clean": Variant("without MTP", OFF, judge_clean, "PLAIN"),
        "promoted": Variant("SGLang as installed", OFF, judge_promoted),
        "forced": Variant("EAGLE is forced, CUDA graphs are on", ON, judge_forced, "GRAPHS"),
        "uneven": Variant(
            "EAGLE is forced, the layers have two head dimensions", ON, judge_uneven, "UNEVEN"
        ),
        "served": Variant("EAGLE is forced, CUDA graphs are off", ON, judge_served, "EAGLE"),
    },
    releases="<0.5.14",
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, "3"))
