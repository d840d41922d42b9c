"""The output of ``repro/healthy.py`` for each group, and the page that it writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.render import Block

from suites.healthy.run import LEAK_STEPS, Done, Ran, Served, checkers


def block(ran: Ran) -> Block:
    """What a terminal shows of a group."""
    group = ran.group
    if group.refused:
        what = ran.problem or f"SGLang cannot run it here, as expected: {group.refused}"
        return Block(group.id, ran.good, what, title=group.title)
    bad = [f"{d.workload.what}: {d.problem}" for d in ran.done if d.problem]
    what = "; ".join([ran.problem] if ran.problem else bad)
    if not what:
        requests, checks = sum(d.requests for d in ran.done), sum(map(_total, ran.done))
        what = f"{len(ran.done)} workloads, {requests} requests, {checks} checks, no finding."
    return Block(group.id, ran.good, what, title=group.title)


def served_block(served: Served) -> Block:
    sent = sum(served.sent.values())
    what = served.problem or f"{sent} requests, {sum(served.checked.values())} checks, no finding."
    title = f"launch_server under load for {served.minutes:g} minutes"
    return Block("server", not served.problem, what, title=title)


def _total(done: Done) -> int:
    return sum(done.checked.values())


def markdown(runs: Iterable[Ran], served: Served | None) -> str:
    """The whole page. The numbers differ a little from run to run."""
    from g4debug.trapping.describe import versions

    found = versions()
    runs = list(runs)
    real = [r for r in runs if not r.group.refused]
    return "\n".join(
        [
            *_intro(found),
            "## What was driven",
            "",
            "| what | how | engines | requests | what happened | checks | result |",
            "|---|---|---|--:|---|--:|---|",
            *_workloads(real),
            "",
            *_server(served),
            "## On which engines",
            "",
            "A number says how many checks a tracer made on that engine, in all workloads. The",
            "flight recorder was armed everywhere, too; it makes no checks.",
            "",
            f"| engine | what it is | {' | '.join(checkers())} |",
            f"|---|---|{'--:|' * len(checkers())}",
            *(_engine(r) for r in real),
            "",
            "`–`: the tracer has nothing to check there:",
            "",
            *_idle(real),
            "",
            *_limits(real),
            "## What could not be run",
            "",
            "The script tries these, too, and sees that SGLang itself refuses them:",
            "",
            *(f"- {r.group.title}: `{r.group.refused}`" for r in runs if r.group.refused),
            "",
            *ELSEWHERE,
        ]
    )


ELSEWHERE = [
    "Not tried, because a CPU cannot show it: CUDA graphs, more than one GPU, disaggregated",
    "prefill and decode, and memory that is really given back (torch_memory_saver). Page",
    "sizes other than 16, 32 and 64 are not for `trtllm_mha`: SGLang changes them to 64. They",
    "ran on `triton`, in interpreted kernels, or with attention in torch, which no adapter of",
    "page-table knows.",
    "",
]


def _intro(found: Mapping[str, str]) -> list[str]:
    return [
        "# Healthy servers",
        "",
        "Made by `make healthy` (`repro/healthy.py`). A debugging tool is trusted until its first",
        "false alarm, so this is what healthy servers were made to do with every tracer armed",
        "that has something to do where there is one rank, also those that are armed by their",
        "names only. The mode was `raise`, which stops at the first finding. The servers are",
        "real SGLang on the CPU engine. `pool-leak` took a census every",
        f"{LEAK_STEPS} steps and at idle, and SGLang's own check of its pools ran in every step,",
        "but for one engine, whose row says why.",
        "Where the answers do not depend on time, they were compared with those of the same",
        "engine without tracers. A workload in which the feature did not really come into play,",
        "or in which a tracer checked nothing, is no pass.",
        "",
        f"SGLang {found.get('sglang', '?')}, torch {found.get('torch', '?')}.",
        "",
    ]


def _workloads(runs: list[Ran]) -> list[str]:
    """A row for each workload, over all engines on which it ran."""
    rows: dict[str, list[tuple[Ran, Done]]] = {}
    for ran in runs:
        for done in ran.done:
            rows.setdefault(done.workload.id, []).append((ran, done))
    lines = []
    for found in rows.values():
        workload = found[0][1].workload
        facts: dict[str, int] = {}
        for _, done in found:
            for what, count in done.facts.items():
                facts[what] = facts.get(what, 0) + count
        happened = ", ".join(f"{count} {what}" for what, count in facts.items())
        engines = ", ".join(f"`{ran.group.id}`" for ran, _ in found)
        requests, checks = sum(d.requests for _, d in found), sum(_total(d) for _, d in found)
        lines.append(
            f"| {workload.what} | {workload.how} | {engines} | {requests} | {happened} "
            f"| {checks} | {_result(found)} |"
        )
    return lines


def _result(found: list[tuple[Ran, Done]]) -> str:
    bad = [f"**{ran.group.id}: {d.problem}**" for ran, d in found if d.problem]
    if bad:
        return "; ".join(bad)
    compared = [ran.group.id for ran, d in found if d.workload.compare]
    others = [f"`{ran.group.id}`" for ran, d in found if not d.workload.compare]
    if not compared:
        return "no finding"
    beside = f" (not compared on {', '.join(others)})" if others else ""
    return f"no finding, the same tokens{beside}"


def _engine(ran: Ran) -> str:
    cells = []
    for tracer in checkers():
        count = ran.checked.get(tracer, 0)
        cells.append(str(count) if count or tracer not in ran.group.idle else "–")
    wrong = f" **{ran.problem}**" if ran.problem else ""
    why = f" ({ran.group.why})" if ran.group.why else ""
    return f"| `{ran.group.id}` | {ran.group.title}{why}{wrong} | {' | '.join(cells)} |"


def _idle(runs: list[Ran]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for ran in runs:
        for tracer, why in ran.group.idle.items():
            reasons.setdefault((tracer, why), []).append(f"`{ran.group.id}`")
    return [f"- `{t}` on {', '.join(on)}: {why}." for (t, why), on in reasons.items()]


def _limits(runs: list[Ran]) -> list[str]:
    """What the tracers themselves said that they do not judge."""
    said: dict[tuple[str, str], list[str]] = {}
    for ran in runs:
        for tracer, what in ran.limits.items():
            said.setdefault((tracer, what), []).append(f"`{ran.group.id}`")
    if not said:
        return []
    lines = [f"- `{t}` on {', '.join(on)}: {what}" for (t, what), on in said.items()]
    return ["What the tracers said by themselves that they do not judge:", "", *lines, ""]


def _server(served: Served | None) -> list[str]:
    if served is None:
        return []
    sent = ", ".join(f"{n} {what}" for what, n in sorted(served.sent.items()))
    ended = ", ".join(f"{n} {what}" for what, n in sorted(served.ended.items()))
    seen = ", ".join(f"{n} {what}" for what, n in served.seen.items())
    checks = ", ".join(f"`{t}` {served.checked.get(t, 0)}" for t in checkers())
    result = f"**{served.problem}**" if served.problem else "No finding."
    return [
        "## A server under load",
        "",
        f"`sglang.launch_server` (MTP, prefix cache, small pools) for {served.minutes:g} minutes,",
        "with 12 HTTP clients at a time that stream, leave, abort and come back, and an operator",
        "who pauses the server and flushes its cache.",
        "",
        f"- Sent: {sent}.",
        f"- Ended: {ended}.",
        f"- Also: {seen}.",
        f"- Checks: {checks}.",
        f"- Result: {result}",
        "",
    ]
