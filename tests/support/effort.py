"""How many examples a property is tried with: all with ``--long``, a third of them without.

They are the same in each run, so those that are left out would find what they found last time:
what a change breaks is mostly found by the first ones.
"""

from __future__ import annotations

long = False  # whether pytest was given --long; tests/conftest.py sets it before it collects


def examples(count: int) -> int:
    """Of ``count``, those that are tried in this run."""
    return count if long else max(count // 3, 10)
