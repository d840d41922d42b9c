"""How the same KV memory serves a Gemma-4 with experts if it is divided between the full and the
SWA pool by SGLang's ratio 0.8, and by the fix's 0.15.

With 0.8, half of the long requests wait while most of the SWA pool is unused. With the fix
swa-ratio, all of them run at the same time. A ratio that the user gives is kept. The last variant
shows a load for which 0.15 is worse: the prefill chunks are as long as the prompts, so each running
request keeps its whole prompt locked in the SWA pool. The script runs on the CPU engine only.
"""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from harness.processes import Outcome
from harness.variants import CPU_ONLY, Repro, Variant, main
from harness.verdicts import Bad, compared, completed, equal_outputs, judge, only_if
from harness.workload import Make, Workload

from g4debug.cpu.geometry import TINY_MOE
from g4debug.pools import config, solve
from g4debug.pools import plan as planned

KV_BYTES = 28_000_000
PAGE, INPUT, OUTPUT, REQUESTS = 16, 800, 48, 8
DEFAULT, MOE = 0.8, 0.15
SMALL_CHUNK, LARGE_CHUNK = 128, 1024
OFF, ON = {"G4DEBUG_FIX_SWA_RATIO": "0"}, {"G4DEBUG_FIX_SWA_RATIO": "1"}
_RUNNING = re.compile(r"Decode batch, #running-req: (\d+)")
_POOLS = re.compile(r"full_layer_tokens=(\d+), swa_layer_tokens=(\d+)")
_FULL_USAGE = re.compile(r"full token usage: ([0-9.]+)")
_RETRACTED = "KV cache pool is full. Retract requests."


def running(run: Outcome) -> int:
    """How many requests ran at the same time, at most."""
    return max((int(n) for n in _RUNNING.findall(run.text)), default=0)


def pools(run: Outcome) -> tuple[int, int]:
    """Tokens of the full and the SWA pool, as SGLang logged them last."""
    found = _POOLS.findall(run.text)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)


def shown(run: Outcome) -> str:
    full_use = max((float(x) for x in _FULL_USAGE.findall(run.text)), default=0.0)
    full, swa = pools(run)
    count = len(run.result["tokens"])
    return (
        f"{running(run)} of {count} requests run at the same time. The full pool has {full} tokens "
        f"and gets {full_use:.0%} full. The SWA pool has {swa} tokens and gets {run.swa_peak:.0%} "
        "full."
    )


@judge
def judge_clean(run: Outcome) -> str:
    completed(run)
    return only_if(running(run) == len(run.result["tokens"]), shown(run))


def _divided(ratio: float, chunk: int, together: bool, run: Outcome, clean: Outcome) -> str:
    """Good if the outputs equal clean's, the pools have the sizes of ``ratio`` in the same memory,
    no request was retracted, and all requests ran at the same time (``together``), or not all did.
    """
    equal_outputs(run, clean)
    wanted = plan(ratio, chunk)
    used = bytes_of(*pools(run))
    if pools(run) != (wanted.pools.full, wanted.pools.swa) or not 0.99 < used / KV_BYTES <= 1:
        raise Bad(f"The pools are not those of the ratio {ratio:g}. {shown(run)}")
    if _RETRACTED in run.text:
        raise Bad(f"Requests were retracted. {shown(run)}")
    enough = running(run) == len(run.result["tokens"])
    return only_if(enough is together, shown(run))


judge_broken = compared(partial(_divided, DEFAULT, SMALL_CHUNK, False))
judge_fixed = compared(partial(_divided, MOE, SMALL_CHUNK, True))


@compared
def judge_worse(run: Outcome, clean: Outcome) -> str:
    """Good if fewer run at the same time than the ratio 0.8 would hold, by g4debug pools."""
    what = _divided(MOE, LARGE_CHUNK, False, run, clean)
    holds = plan(DEFAULT, LARGE_CHUNK).holds
    return only_if(running(run) < holds, f"{what} The ratio 0.8 would hold {holds} requests.")


GEOMETRY = config.parse(TINY_MOE.target_config(), "tiny-moe")
MEMORY = solve.Memory(KV_BYTES, PAGE, element=4)


def plan(ratio: float, chunk: int) -> planned.Row:
    """The plan by ``g4debug pools``: the pools at ``ratio``, and the requests that they hold."""
    load = planned.Workload(INPUT, OUTPUT, REQUESTS, chunk)
    return planned.row(GEOMETRY, MEMORY, planned.need_of(GEOMETRY, MEMORY, load), ratio)


def bytes_of(full: int, swa: int) -> int:
    """How many bytes pools of so many tokens take."""
    return solve.bytes_of(GEOMETRY, MEMORY, solve.Pools(0, full, swa))


def cpu(requests: int | None) -> Workload:
    """Pools that hold all requests. The other variants must give the same outputs."""
    from g4debug.cpu.models import write
    from g4debug.cpu.server import server_arguments

    models = write(TINY_MOE, Path(tempfile.gettempdir()) / "g4debug-tiny-moe")
    count = requests or REQUESTS
    arguments = server_arguments(
        models,
        mtp=False,
        log_level="info",
        decode_log_interval=1,
        skip_tokenizer_init=True,
        page_size=PAGE,
        max_total_tokens=2 * count * (INPUT + OUTPUT),
        max_running_requests=count,
        chunked_prefill_size=SMALL_CHUNK,
    )
    return Workload(count, (INPUT, INPUT), OUTPUT, TINY_MOE.vocab, arguments, timeout=300)


def short(ratio: float, chunk: int = SMALL_CHUNK, **given: Any) -> dict[str, Make]:
    """KV_BYTES of memory, divided by ``ratio``. The server has to choose that ratio by itself.

    On a CPU, SGLang measures another amount of free memory each time. So it is given the size of
    the full pool that SGLang would make of these bytes at that ratio.
    """

    def make(requests: int | None) -> Workload:
        full = plan(ratio, chunk).pools.full
        return cpu(requests).given(max_total_tokens=full, chunked_prefill_size=chunk, **given)

    return {"cpu": make}


DEVICES = {"cpu": cpu}
AT_DEFAULT = short(DEFAULT)
AT_MOE = short(MOE)
GIVEN = short(DEFAULT, swa_full_tokens_ratio=0.8)
AT_MOE_LARGE_CHUNK = short(MOE, LARGE_CHUNK)


REPRO = Repro(
    name="swa_ratio",
    serves=f"a toy Gemma-4 with experts, {KV_BYTES / 1e6:.0f} MB for KV, requests of "
    f"{INPUT} tokens in and {OUTPUT} out",
    refuses=" or on a machine with a GPU",
    variants={
        "clean": Variant("enough memory for all requests, the fix is off", OFF, judge_clean),
        "broken": Variant(
            "short memory, SGLang's own ratio 0.8, the fix is off", OFF, judge_broken, "AT_DEFAULT"
        ),
        "fixed": Variant("short memory, the fix swa-ratio is on", ON, judge_fixed, "AT_MOE"),
        "given": Variant(
            "short memory, the fix is on, but the user gives 0.8", ON, judge_broken, "GIVEN"
        ),
        "large-chunk": Variant(
            f"short memory, the fix is on, prefill chunks of {LARGE_CHUNK} tokens",
            ON,
            judge_worse,
            "AT_MOE_LARGE_CHUNK",
        ),
    },
    elsewhere=CPU_ONLY,
)

if __name__ == "__main__":
    raise SystemExit(main(REPRO, __doc__, str(REQUESTS)))
