"""A plan of the KV pools on a terminal: the verdict, the table over ratios, the assumptions."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.findings.names import clean
from g4debug.pools.plan import Plan, Row
from g4debug.reporters import json

HEAD = ("ratio", "full tokens", "SWA tokens", "full holds", "SWA holds", "holds", "binds")
POOL = {"full": "full", "swa": "SWA", "both": "both", "none": "neither"}


def render(plan: Plan, console: Console) -> None:
    """Print the plan. The table needs 71 columns."""
    console.print(Text(f"{clean(plan.geometry.name)}: {model_line(plan)}", "bold"))
    console.print(Text(load_line(plan)))
    console.print()
    widths = [max(5, len(h)) for h in HEAD]
    console.print(Text(_cells(HEAD, widths), "dim"), no_wrap=True, overflow="crop")
    for row in plan.rows:
        console.print(_line(row, plan, widths), no_wrap=True, overflow="crop")
    console.print()
    best = Text("BEST  ", "bold green").append(f"--swa-full-tokens-ratio {plan.best.ratio:g}")
    console.print(best if plan.best.holds else Text("BEST  none", "bold red"))
    console.print(Text(f"WHY   {plan.reason}"))
    for hint in plan.hints:
        console.print(Text("ALSO  ", "bold yellow").append(hint))
    console.print(Text(f"\nAssumed: {assumptions(plan)}", "dim"))


def render_json(plan: Plan, stream: IO[str]) -> None:
    """Write one JSON object. ``best.ratio`` is null if no ratio holds a request."""
    need, memory, work = plan.need, plan.memory, plan.workload
    data = {
        "model": plan.geometry.name,
        "bytes_per_token": {
            "full": plan.geometry.full_bytes(memory.tp, memory.element) * plan.geometry.full_layers,
            "swa": plan.geometry.swa_bytes(memory.tp, memory.element) * plan.geometry.swa_layers,
        },
        "layers": {"full": plan.geometry.full_layers, "swa": plan.geometry.swa_layers},
        "window": plan.geometry.window,
        "experts": plan.geometry.experts,
        "memory": {"kv_bytes": memory.kv_bytes, "page": memory.page, "tp": memory.tp},
        "workload": {"draft_tokens" if k == "draft" else k: v for k, v in vars(work).items()},
        "per_request": {"full": need.full, "swa": need.swa, "swa_locked": need.swa_locked},
        "rows": [_row(row, plan) for row in plan.rows],
        "best": _row(plan.best, plan) | ({} if plan.best.holds else {"ratio": None}),
        "served": _row(plan.served, plan),
        "reason": plan.reason,
        "hints": list(plan.hints),
        "assumptions": assumptions(plan),
    }
    json.write(data, stream)


def model_line(plan: Plan) -> str:
    g = plan.geometry
    kind = f"{g.experts} experts" if g.moe else "dense"
    shared = f", {g.kv_shared} of them KV-shared" if g.kv_shared else ""
    return (
        f"{g.full_layers} full + {g.swa_layers} sliding layers{shared}, window {g.window}, {kind}; "
        f"{plan.memory.kv_bytes / (1 << 30):.1f}GiB for KV"
        + (f" on each of {plan.memory.tp} GPUs" if plan.memory.tp > 1 else "")
    )


def load_line(plan: Plan) -> str:
    w, n = plan.workload, plan.need
    locked = f", {n.swa_locked} of it locked in the radix tree" if n.swa_locked else ""
    return (
        f"{w.concurrency} x ({w.input} in, {w.output} out): a request keeps {n.full} tokens in the "
        f"full pool and {n.swa} in the SWA pool{locked}"
    )


def assumptions(plan: Plan) -> str:
    """The assumptions behind the numbers, in one line."""
    w, m = plan.workload, plan.memory
    return "; ".join(
        (
            "the worst case: all requests are alike, run to their full length, share no prefix, "
            "and none is retracted",
            f"page {m.page}, {m.element} bytes per KV element",
            f"prefill chunk {w.chunk}" if w.chunk else "prefill not chunked",
            f"{w.draft} draft tokens, all accepted" if w.draft else "no MTP",
            "radix cache off" if not w.radix else "radix cache on" + ", split" * w.split_leaf,
            "'serves' is the ratio that SGLang takes if none is given, with the fix swa-ratio on",
            "the rules are those of SGLang 0.5.12.post1; from 0.5.14 on the ratio is not read if "
            "the radix cache is off and max_running_requests is set",
        )
    )


def _row(row: Row, plan: Plan) -> dict[str, object]:
    return {
        "ratio": row.ratio,
        "full_tokens": row.pools.full,
        "swa_tokens": row.pools.swa,
        "full_holds": row.full_holds,
        "swa_holds": row.swa_holds,
        "holds": row.holds,
        "binds": row.binds(plan.workload.concurrency),
    }


def _line(row: Row, plan: Plan, widths: list[int]) -> Text:
    ratio, *numbers, binds = _row(row, plan).values()
    cells = (f"{ratio:g}", *map(str, numbers), POOL[str(binds)])
    text = Text(_cells(cells, widths))
    marks = []
    if row.ratio == plan.best.ratio and plan.best.holds:
        marks.append("best")
        text.stylize("bold green")
    if row.ratio == plan.served.ratio:
        marks.append("serves")
    elif row.holds < plan.served.holds:
        text.stylize("dim")
    return text.append(f"  {', '.join(marks)}" if marks else "")


def _cells(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
