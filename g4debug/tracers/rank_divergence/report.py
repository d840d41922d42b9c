"""The words of a finding: which step, which ranks, what differs, and what that points to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from g4debug.findings.kinds import RANKS_DIFFER
from g4debug.findings.record import Finding, Location
from g4debug.tracers.rank_divergence.check import Difference

if TYPE_CHECKING:
    from g4debug.findings.launch_memory import Seat

CHECK = "rank-divergence"
SHOWN = 200  # characters of a value in the headline's line
NOT_KNOWN = "not known: something on one of the ranks decides by itself"


def describe(
    step: int, me: str, other: Seat, found: Sequence[Difference], mode: str, rank: int
) -> Finding:
    """The finding about a step in which this rank and another one differ.

    me: what this rank is called. found: at least one difference, most telling first.
    """
    first = found[0]
    mine, others = (_short(_rids(first, text)) for text in (first.mine, first.other))
    got = f"{me}: {first.name} {mine}\n{other.name}: {first.name} {others}"
    if found[1:]:
        got += f"\nalso different: {', '.join(d.name for d in found[1:])}"
    return RANKS_DIFFER.finding(
        site="scheduler.run_batch",
        headline=f"g4debug: {CHECK} in step {step}: {me} and {other.name} differ in "
        f"{first.name}: {_short(mine, 60)} and {_short(others, 60)}",
        location=Location(process="scheduler", step=step, forward_mode=mode, rank=rank),
        expected="the same on all ranks that serve this batch",
        got=got,
        cause=cause_of(me, other.name, found),
    )


def cause_of(me: str, other: str, found: Sequence[Difference]) -> str:
    """The cause that the first difference points to."""
    by_name = {d.name: d for d in found}
    requests = by_name.get("requests")
    if requests is not None:
        return _cause_of_requests(me, other, requests)
    if "ending requests" in by_name:
        return (
            "a request was aborted on one rank and not on the other, or one step later: whatever "
            "aborts it is asked on each rank by itself"
        )
    if "output tokens" in by_name:
        return (
            "the ranks sampled different tokens in an earlier step: their logits or their random "
            "numbers differ, or a token was changed behind the sampling on one of them; "
            "SYNC_TOKEN_IDS_ACROSS_TP=1 makes SGLang take those of one rank"
        )
    if "prefix lengths" in by_name or "extend lengths" in by_name:
        return "the prefix caches of the ranks hold different prefixes of the same requests"
    if set(by_name) <= {"rows of req_to_token", "tokens in use", "out_cache_loc", "KV locations"}:
        return (
            "the batch is the same, but its KV is kept in other places: the allocators of the "
            "ranks were used in another order, one of them has lost or gained pages, or a row of "
            "req_to_token was overwritten on one of them; which of these is not known"
        )
    return NOT_KNOWN


def _cause_of_requests(me: str, other: str, requests: Difference) -> str:
    mine, others = requests.mine.split(", "), requests.other.split(", ")
    if " … " in f"{requests.mine} {requests.other} ":
        return "the ranks have different batches, which are too long to be compared name by name"
    if sorted(mine) == sorted(others):
        return "the same requests in another order: the ranks' queues were sorted differently"
    only = [
        f"{', '.join(rids[:4])} is in the batch of {who} only"
        for who, rids in (
            (me, [r for r in mine if r not in others and r != "none"]),
            (other, [r for r in others if r not in mine and r != "none"]),
        )
        if rids
    ]
    return (
        f"{'; '.join(only)}: on one rank it was admitted, retracted, aborted or finished at "
        "another step"
    )


def _rids(difference: Difference, text: str) -> str:
    """The beginnings of the requests' ids, which say enough."""
    if difference.name not in ("requests", "ending requests"):
        return text
    return ", ".join(rid if len(rid) <= 9 else f"{rid[:8]}…" for rid in text.split(", "))


def _short(text: str, limit: int = SHOWN) -> str:
    return text if len(text) <= limit else f"{text[: limit - 2]} …"
