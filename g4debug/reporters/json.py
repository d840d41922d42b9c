"""JSON for machines: a record's own fields, and what every other reporter has to say."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from g4debug.findings.record import TrapRecord


def render(record: TrapRecord, stream: IO[str]) -> None:
    """Write one JSON object: the fields of :class:`TrapRecord`, plus ``kind``."""
    from g4debug.dumps.plain import to_plain  # imports numpy, which the other reporters do without

    plain = to_plain(record)
    if plain["tape"] is not None:
        del plain["tape"]["events"]  # megabytes, which only g4debug reads
    # More of each request than a report needs.
    del plain["requests"], plain["requests_lost"], plain["held"]
    write(plain, stream)


def write(value: Any, stream: IO[str]) -> None:
    """Write a value. The text is ASCII, so that it passes any stream.

    A dataclass becomes an object, and an array nested lists. Numbers that JSON lacks (nan, inf)
    become strings.
    """
    json.dump(_jsonable(value), stream, indent=2, allow_nan=False)
    stream.write("\n")


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value.tolist() if hasattr(value, "tolist") else value
