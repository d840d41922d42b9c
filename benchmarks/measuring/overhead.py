"""The arithmetic of a variant's cost: plain numbers in, figures out.

A *figure* compares a variant with a base in the same rounds. Every request of the variant is
compared with the same request (same prompt, same number) of the base in the same round, so that
nothing but the variant differs. Its range is a bootstrapped interval: the rounds are drawn again
and again with replacement, because requests of one server are not independent of each other.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# request number -> its time; of a round, base and variant
Times = Mapping[int, float]
Pair = tuple[Times, Times]
DRAWS = 2000
METRICS = ("time per step", "time per token", "first token", "first token, p99", "throughput")


@dataclass(frozen=True)
class Figure:
    """value: relative overhead, 0.02 for 2 %. low, high: its 95 % interval. rounds: how many."""

    value: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        digits = 2 if self.high - self.low < 0.01 else 1  # a tenth says nothing of 0.3 %
        low, value, high = (f"{x:+.{digits}%}" for x in (self.low, self.value, self.high))
        return f"{value} ({low} to {high})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed (nearest rank)."""
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def median_of_pairs(rounds: Sequence[Pair]) -> float:
    """The median over the rounds of the median ratio of a request's two times, minus 1."""
    found = []
    for base, variant in rounds:
        ratios = [variant[n] / base[n] for n in base if n in variant]
        if ratios:
            found.append(statistics.median(ratios))
    if not found:
        raise ValueError("no request was measured with both variants")
    return statistics.median(found) - 1


def pooled_p99(rounds: Sequence[Pair]) -> float:
    """The 99th percentile of the variant's times of all rounds over the base's, minus 1.

    One round has too few requests for a 99th percentile of its own.
    """
    base = [t for of_base, _ in rounds for t in of_base.values()]
    variant = [t for _, of_variant in rounds for t in of_variant.values()]
    return percentile(variant, 99) / percentile(base, 99) - 1


def figure(rounds: Sequence[Pair], estimate: Callable[[Sequence[Pair]], float]) -> Figure:
    """The estimate and its interval. One round alone gives an interval of no width: see rounds."""
    rng = random.Random(0)
    drawn = sorted(estimate(rng.choices(rounds, k=len(rounds))) for _ in range(DRAWS))
    low, high = drawn[DRAWS * 25 // 1000], drawn[-1 - DRAWS * 25 // 1000]
    return Figure(estimate(rounds), low, high, len(rounds))


def per_second(rows: Sequence[Mapping[str, Any]]) -> float:
    """Tokens per second of the requests of one batch size at one server."""
    begin = min(float(r["sent_ms"]) for r in rows)
    end = max(float(r["end_ms"]) for r in rows)
    return sum(int(r["tokens"]) for r in rows) / (end - begin) * 1000


def compare(
    rows: Sequence[Mapping[str, Any]], batch: int, base: str, variant: str
) -> dict[str, Figure]:
    """The figure of each of METRICS, of a variant over a base, in the rounds that have both.

    rows: of the CSV: round, variant, batch, number, sent_ms, ttft_ms, tpot_ms, step_ms,
    end_ms, tokens. The figure of the throughput is the loss: positive is slower, as everywhere.
    """
    mine: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if int(row["batch"]) == batch:
            mine.setdefault((str(row["round"]), str(row["variant"])), []).append(row)
    both = [r for r, v in mine if v == base and (r, variant) in mine]

    def pairs(field: str) -> list[Pair]:
        def times(of: str, name: str) -> Times:
            return {int(r["number"]): float(r[field]) for r in mine[of, name] if r[field] != ""}

        return [(times(of, base), times(of, variant)) for of in both]

    # 1 / throughput is a time, too: the time for one token of the whole server.
    whole: list[Pair] = [
        ({0: 1 / per_second(mine[of, base])}, {0: 1 / per_second(mine[of, variant])}) for of in both
    ]
    if not both:
        return {}
    first = pairs("ttft_ms")
    fields = {"time per step": "step_ms", "time per token": "tpot_ms"}
    # A request of one token has neither.
    known = {m: f for m, f in fields.items() if any(row.get(f) for row in rows)}
    return {
        **{metric: figure(pairs(field), median_of_pairs) for metric, field in known.items()},
        "first token": figure(first, median_of_pairs),
        "first token, p99": figure(first, pooled_p99),
        "throughput": figure(whole, median_of_pairs),
    }


def absolute(rows: Sequence[Mapping[str, Any]], batch: int, variant: str) -> dict[str, float]:
    """The same metrics themselves, of all rounds together: four in ms, then tokens per second."""
    mine = [r for r in rows if int(r["batch"]) == batch and r["variant"] == variant]
    first = [float(r["ttft_ms"]) for r in mine]
    rounds = dict.fromkeys(str(r["round"]) for r in mine)
    rates = [per_second([r for r in mine if str(r["round"]) == of]) for of in rounds]
    steps = [float(r["step_ms"]) for r in mine if r.get("step_ms")]
    return {
        **({"time per step": statistics.median(steps)} if steps else {}),
        "time per token": statistics.median(float(r["tpot_ms"]) for r in mine if r["tpot_ms"]),
        "first token": statistics.median(first),
        "first token, p99": percentile(first, 99),
        "throughput": statistics.median(rates),
    }
