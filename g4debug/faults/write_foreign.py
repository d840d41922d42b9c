"""Writes a token's KV over the KV of another request.

It hits the newest token of the other request that has KV already, so that the lost KV is read in
the next forward. Pages that the prefix cache lent are left alone: they may be anybody's.
"""

from __future__ import annotations

from g4debug.faults import locations
from g4debug.faults.base import Injection


def _newest(forward: locations.Forward) -> dict[int, locations.Token]:
    """Row -> the first token that it writes, if the token before that one is the request's own."""
    first: dict[int, locations.Token] = {}
    for token in forward.tokens:
        first.setdefault(token.row, token)
    own = {row: t for row, t in first.items() if t.position - 1 >= max(t.protected, 1)}
    return {row: token for row, token in own.items() if _before(forward, token) > 0}


def _before(forward: locations.Forward, token: locations.Token) -> int:
    return int(forward.req_to_token[token.request, token.position - 1])


def spoil(forward: locations.Forward, injection: Injection) -> tuple[int, int, str]:
    victims = _newest(forward)
    row = injection.random.choice(sorted(victims))
    writers = sorted({t.row for t in forward.tokens} - {row})
    # The first token of a row: in a verify, the one that is accepted for certain.
    at = injection.random.choice(writers)
    writer = next(t for t in forward.tokens if t.row == at)
    victim = victims[row]
    where = f"which is token {victim.position - 1} of row {row}"
    return writer.index, _before(forward, victim), where


FAULT, install = locations.declare(
    "write-foreign",
    "a token's KV is written over that of another request",
    lambda forward: bool(_newest(forward)) and len({t.row for t in forward.tokens}) > 1,
    spoil,
    ("20*on@mode=target_verify",),
)
