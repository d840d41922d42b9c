"""The modes in which servers with more than one GPU run, and the check of a healthy one in each.

In every mode two ranks serve the mixed workload (`harness.mixed`) with every tracer armed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.arguments import mtp_has_overlap
from harness.processes import Outcome
from harness.tracers import RECORDS, accuses
from harness.verdicts import not_completed
from harness.workload import without_mtp

from g4debug.dumps import reading
from g4debug.fixes.source import source

TP: dict[str, Any] = {"tp_size": 2}
STRESS = "seed=11;abort-request=3%on;forced-retract=3%on;radix-evict=4%on(512)"
REPAIRED = "seed=5;page-oob=5*on@rank=1"


@dataclass(frozen=True)
class Mode:
    """title: in a few words. engine: arguments of ``sgl.Engine`` besides the usual ones.

    faults: injected. repaired: in ``contain`` mode, the one tracer that must have findings; no
    other one may have any. not_on_cpu: why the CPU engine cannot run it. not_here: why
    the installed SGLang cannot.
    """

    title: str
    engine: Mapping[str, Any]
    faults: str = STRESS
    repaired: str = ""
    not_on_cpu: str = ""
    not_here: str = ""


def no_dp_attention() -> str:
    """Why the installed SGLang cannot run Gemma-4 with DP attention; '' if it can.

    Seen on two H100 with 0.5.23, and described in docs/upstream/gemma4-dp-attention.md.
    """
    heads = source("sglang.srt.models.gemma4_causal.Gemma4Attention.__init__")
    if "attn_tp" in heads or "get_attention_tp" in heads:
        return ""
    return (
        "SGLang's Gemma-4 divides its heads among all tensor-parallel ranks, the KV pool does "
        "not (docs/upstream/gemma4-dp-attention.md)"
    )


def modes() -> dict[str, Mode]:
    """By name. Overlap scheduling is on where the release has it with FROZEN_KV_MTP."""
    overlap = {"disable_overlap_schedule": False}
    plain = without_mtp()
    found = {
        "mtp": Mode("two tensor-parallel ranks, MTP, prefix cache", TP),
        "no-custom-all-reduce": Mode(
            "the same, with NCCL's all-reduce only", {**TP, "disable_custom_all_reduce": True}
        ),
        "mixed-chunk": Mode(
            "without MTP: overlap scheduling, chunks of prompts in the same step as decodes",
            {**TP, **plain, **overlap, "enable_mixed_chunk": True},
        ),
        "dp": Mode(
            "two servers of one rank each behind one controller, MTP",
            {"dp_size": 2, "nccl_port": None},  # each takes one of its own
        ),
        "dp-attention": Mode(
            "each rank computes the attention of its own requests, without MTP",
            {**TP, **plain, **overlap, "dp_size": 2, "enable_dp_attention": True},
            not_on_cpu="there SGLang asks for an attention backend that only Intel's CPUs have",
            not_here=no_dp_attention(),
        ),
        "contain": Mode(
            "five cells of page tables on rank 1 are repaired, in contain mode",
            TP,
            REPAIRED,
            "page-table",
        ),
    }
    if not mtp_has_overlap():
        found["overlap"] = Mode("overlap scheduling, without MTP", {**TP, **plain, **overlap})
    return found


@dataclass
class Seen:
    """The result of a mode. checked: tracer -> the fewest checks that one rank made."""

    mode: str
    title: str
    good: bool
    what: str
    requests: int = 0
    seconds: float = 0.0
    accept_length: float = 0.0
    checked: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)  # tracer -> why it checks nothing


def judge(name: str, mode: Mode, run: Outcome, dumps: Path) -> Seen:
    seen = Seen(name, mode.title, False, "")
    findings = [reading.read(p).finding for p in sorted(dumps.glob("*.pt"))]
    repairs = [f for f in findings if f.check == mode.repaired]
    others = [f for f in findings if f.check != mode.repaired and accuses(f, run.completed)]
    seen.what = f"A false finding: {others[0].headline}" if others else _problem(run, seen)
    if not seen.what and mode.repaired and not repairs:
        seen.what = "No cell was repaired: nothing is shown."
    if not seen.what:
        repaired = f"{len(repairs)} findings of {mode.repaired}, as it must. " if repairs else ""
        none = "no other finding" if repairs else "no finding"
        seen.good = True
        seen.what = f"It completes. {repaired}{seen.requests} requests, {none}."
    return seen


def _problem(run: Outcome, seen: Seen) -> str:
    """The fault of a run without findings, or ''. Notes the run's results in ``seen``."""
    if not run.completed:
        return not_completed(run)
    seen.requests, seen.seconds = len(run.result["outputs"]), run.result["s"]
    seen.accept_length = run.result["accept_length"]
    ranks: dict[str, dict[str, Any]] = run.result["checked"]
    if len(ranks) != 2:
        return f"Expected the status of two schedulers, got that of {len(ranks)}."
    for tracer in sorted({t for rank in ranks.values() for t in rank} - {RECORDS}):
        mine = [rank.get(tracer, {"off": "not armed", "count": 0}) for rank in ranks.values()]
        off = next((r["off"] for r in mine if r["off"]), "")
        if off:
            seen.said[tracer] = off
        else:
            seen.checked[tracer] = min(int(r["count"]) for r in mine)
    blind = [t for t, count in seen.checked.items() if not count]
    return f"A tracer is armed and checked nothing: {', '.join(blind)}." if blind else ""
