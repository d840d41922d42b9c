"""The record as JSON for machines: the fields of :class:`g4debug.findings.record.TrapRecord`."""

from __future__ import annotations

import json
import math
from typing import IO, Any

import torch

from g4debug.dumps.plain import to_plain
from g4debug.findings.record import TrapRecord


def render(record: TrapRecord, stream: IO[str]) -> None:
    """Write one JSON object: the record's own field names, plus ``kind``.

    Tensors become nested lists. Numbers that JSON lacks (nan, inf) become strings. The text
    is ASCII, so that it passes any stream.
    """
    json.dump(jsonable(to_plain(record)), stream, indent=2, allow_nan=False)
    stream.write("\n")


def jsonable(value: Any) -> Any:
    """``value`` as JSON can have it: no tensors, no nan, no inf."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
