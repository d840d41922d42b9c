"""A Gemma-4 with experts under long requests: the same KV memory, divided by 0.8 and by 0.15.

    python repro/swa_ratio.py [--arm NAME] [--requests N] [--json] [--keep]

With 0.8, half of the requests wait while the SWA pool is idle; with fix swa-ratio all run at a
time; a ratio that the user gives is kept. The last arm shows where 0.15 is the *worse* ratio:
with prefill chunks as long as the prompts, each running request keeps its whole prompt locked in
the SWA pool. CPU only. Exit code 0 only if every arm did as it should, 1 if one did not, 2 for
wrong arguments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import _swa_ratio as load
from _arms import Arm, Repro, Verdict, main, same_outputs
from _run import Outcome

OFF = {"G4DEBUG_FIX_SWA_RATIO": "0"}
_RUNNING = re.compile(r"Decode batch, #running-req: (\d+)")
_POOLS = re.compile(r"full_layer_tokens=(\d+), swa_layer_tokens=(\d+)")
_FULL_USAGE = re.compile(r"full token usage: ([0-9.]+)")
_RETRACTED = "KV cache pool is full. Retract requests."


def running(run: Outcome) -> int:
    """The most requests that ran at a time."""
    return max((int(n) for n in _RUNNING.findall(run.text)), default=0)


def pools(run: Outcome) -> tuple[int, int]:
    """Tokens of the full and the SWA pool, as SGLang logged them last."""
    found = _POOLS.findall(run.text)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)


def told(run: Outcome) -> str:
    full_use = max((float(x) for x in _FULL_USAGE.findall(run.text)), default=0.0)
    full, swa = pools(run)
    count = len(run.result["tokens"])
    return (
        f"{running(run)} of {count} at a time; full pool {full} tokens, {full_use:.0%} used, "
        f"SWA pool {swa}, {run.swa_peak:.0%}"
    )


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    return Verdict(running(run) == len(run.result["tokens"]), told(run))


def _judge(run: Outcome, clean: Outcome | None, ratio: float, chunk: int, good: bool) -> Verdict:
    """Same outputs, the pools of ``ratio`` in the same memory, and ``good`` concurrency."""
    verdict = same_outputs(run, clean)
    if not verdict.good:
        return verdict
    wanted = load.plan(ratio, chunk)
    used = load.bytes_of(*pools(run))
    if pools(run) != (wanted.pools.full, wanted.pools.swa) or not 0.99 < used / load.KV_BYTES <= 1:
        return Verdict(False, f"got other pools than those of {ratio:g}: {told(run)}")
    if _RETRACTED in run.text:
        return Verdict(False, f"requests were retracted: {told(run)}")
    enough = running(run) == len(run.result["tokens"])
    return Verdict(enough is good, told(run))


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    return _judge(run, clean, load.DEFAULT, load.SMALL_CHUNK, False)


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    return _judge(run, clean, load.MOE, load.SMALL_CHUNK, True)


def judge_worse(run: Outcome, clean: Outcome | None) -> Verdict:
    """Fewer at a time than the full pool of 0.8 holds, as g4debug pools says."""
    verdict = _judge(run, clean, load.MOE, load.LARGE_CHUNK, False)
    holds = load.plan(load.DEFAULT, load.LARGE_CHUNK).holds
    return Verdict(verdict.good and running(run) < holds, f"{verdict.what}; 0.8 would hold {holds}")


REPRO = Repro(
    title=f"swa_ratio: toy Gemma-4 with experts, {load.KV_BYTES / 1e6:.0f} MB for KV, "
    f"{load.REQUESTS} x ({load.INPUT} in, {load.OUTPUT} out)",
    arms={
        "clean": Arm("memory for all of it, fix off", OFF, judge_clean, "_swa_ratio"),
        "broken": Arm("SGLang's 0.8", OFF, judge_broken, "_swa_ratio:AT_DEFAULT"),
        "fixed": Arm("fix swa-ratio", {}, judge_fixed, "_swa_ratio:AT_MOE"),
        "given": Arm("fix on, the user says 0.8", {}, judge_broken, "_swa_ratio:GIVEN"),
        "large-chunk": Arm(
            f"fix on, prefill chunk {load.LARGE_CHUNK}",
            {},
            judge_worse,
            "_swa_ratio:AT_MOE_LARGE_CHUNK",
        ),
    },
    devices=load.DEVICES,
    compares=("broken", "fixed", "given", "large-chunk"),
)

if __name__ == "__main__":
    sys.exit(main(REPRO, __doc__ or "", str(load.REQUESTS)))
