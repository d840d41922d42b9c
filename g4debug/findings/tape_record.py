"""Packs a tape into the field of a dump, and shortens it there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from g4debug.findings import tape as format
from g4debug.findings.record import IntArray, Plain, Tape


def pack(
    chunks: Sequence[bytes],
    closing: bytes,
    page: int,
    firsts: bool,
    steps: int,
    requests: int,
    scheduler: Mapping[str, Plain],
    limits: Mapping[str, int],
    variables: Mapping[str, str] | None = None,
    ended: Sequence[str] = (),
    made: int = format.FORMAT,
) -> Tape:
    """closing: the ends of the requests that still run. steps, requests: of the process, up to now.
    limits: what -> as ``Tape.limits_at``. made: the format of its digests.

    Raises TapeError if the first chunk does not begin as a chunk does.
    """
    data = b"".join((*chunks, closing))
    whole = Tape(
        format=made,
        page=page,
        firsts=firsts,
        begins="",
        first=0,
        steps=steps,
        requests=requests,
        size=len(data),
        events=_numbers(data),
        chunks=(0, *itertools.accumulate(map(len, chunks[:-1]))),
        scheduler=dict(scheduler),
        limits=tuple(limits),
        limits_at=tuple(limits.values()),
        variables=dict(variables or {}),
        ended=tuple(ended),
    )
    return _from(whole, data, 0)


def data(tape: Tape) -> bytes:
    """The bytes of a tape."""
    return tape.events.astype("<i8").tobytes()[: tape.size]


def shortened(tape: Tape, limit: int) -> Tape | None:
    """The newest chunks of a tape that together have at most ``limit`` bytes, None if none has."""
    at = next((at for at in tape.chunks if tape.size - at <= limit), None)
    return None if at is None else _from(tape, data(tape), at)


def _from(tape: Tape, whole: bytes, at: int) -> Tape:
    """The tape from the chunk on that begins at byte ``at`` of its bytes."""
    start, rest = format.start_at(whole, at), whole[at:]
    # What happened in the part that is cut off is no limit of the rest.
    last = itertools.chain(tape.limits_at, itertools.repeat(-1))  # an older g4debug did not say it
    limits = {
        what: at for what, at in zip(tape.limits, last, strict=False) if at < 0 or at >= start.steps
    }
    return dataclasses.replace(
        tape,
        begins=start.why.name.lower(),
        first=start.steps,
        steps=tape.first + tape.steps - start.steps,
        # For a tape that is not shortened yet, ``requests`` counts from the process's start.
        requests=tape.requests + _before(tape, whole) - start.requests,
        size=len(rest),
        events=tape.events if at == 0 else _numbers(rest),
        chunks=tuple(x - at for x in tape.chunks if x >= at),
        limits=tuple(limits),
        limits_at=tuple(limits.values()),
    )


def _before(tape: Tape, whole: bytes) -> int:
    """How many requests were before a tape, 0 if it counts them all."""
    return format.start_at(whole, 0).requests if tape.begins else 0


def _numbers(data: bytes) -> IntArray:
    return np.frombuffer(data + bytes(-len(data) % 8), dtype="<i8").astype(np.int64)
