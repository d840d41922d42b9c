"""Which tracers a repro arms."""

from __future__ import annotations

from g4debug import discovery

COMPARES = "rank-divergence"  # ranks.py and tests/tracers/rank_divergence have two ranks


def on_one_rank() -> tuple[str, ...]:
    """Every tracer that has something to do where there is one rank."""
    return tuple(t for t in discovery.names("tracer") if t != COMPARES)
