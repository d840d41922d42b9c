"""Turns a record into plain values and arrays, and back. On both ways every field is checked.

What a field may hold is read from its annotation in :mod:`g4debug.findings.record`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from g4debug.findings.record import KIND, Table, Tape, TrapRecord
from g4debug.findings.status import TracerStatus


def to_plain(record: TrapRecord) -> dict[str, Any]:
    """The record as nested dicts, lists, plain values and arrays.

    An instance of a subclass becomes the plain value. Otherwise a pickle would store an object,
    which cannot be read back, for ``torch.__version__`` or ``ForwardMode.DECODE``. The arrays are
    the record's own. Raises ValueError with the name of the field if a value has the wrong type,
    or if an array of the table is not int64 or has the wrong shape.
    """
    payload = _pack(TrapRecord, record, "dump")
    _check_arrays(record)
    payload["kind"] = KIND
    return payload


def from_plain(payload: dict[str, Any]) -> TrapRecord:
    """The inverse of :func:`to_plain`.

    Raises ValueError with the name of the field if a value is missing or has the wrong type, or
    if the field is unknown.
    """
    data = {k: v for k, v in payload.items() if k != "kind"}
    data["tracers"] = _of_any_schema(data.get("tracers", ()))
    record: TrapRecord = _build(TrapRecord, data, "dump")
    _check_arrays(record)
    return record


def tracers(value: Any) -> tuple[TracerStatus, ...]:
    """The status of the tracers from plain values. Raises ValueError with the field's name."""
    items = _seq(_of_any_schema(value), "tracers")
    return tuple(_build(TracerStatus, item, "tracers") for item in items)


def _of_any_schema(tracers: Any) -> Any:
    if not isinstance(tracers, dict):
        return tracers
    # Schema 1 and 2: name -> "armed: mode", as it was at the start.
    modes = _checked("dict[str, str]", tracers, "tracers")
    return [{"name": k, "mode": v.removeprefix("armed: ")} for k, v in modes.items()]


class _Field(NamedTuple):
    name: str
    annotation: str
    cls: Any  # the dataclass that it holds, or that its items are of; None for a plain value
    required: bool


@cache
def _fields(cls: Any) -> tuple[_Field, ...]:
    found = []
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kinds = (hints[f.name], *typing.get_args(hints[f.name]))
        inner = next(filter(dataclasses.is_dataclass, kinds), None)
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        found.append(_Field(f.name, str(f.type), inner, required))
    return tuple(found)


def _place(field: _Field, where: str) -> str:
    """The field's name in an error: ``dump.created``, but ``steps.forward_mode``."""
    return field.name if field.cls is not None and where == "dump" else f"{where}.{field.name}"


def _pack(cls: Any, item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, cls):
        raise ValueError(f"{where}: expected a {cls.__name__}, got {type(item).__name__}")
    out: dict[str, Any] = {}
    for field in _fields(cls):
        value = _convert(field, getattr(item, field.name), _place(field, where), _pack)
        out[field.name] = _exact(value) if field.cls is None else value
    return out


def _build(cls: Any, value: Any, where: str) -> Any:
    data = dict(_mapping(value, where))
    out: dict[str, Any] = {}
    for field in _fields(cls):
        at = _place(field, where)
        if field.name in data:
            value = _convert(field, data.pop(field.name), at, _build)
            out[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.required:
            raise ValueError(f"{at}: missing")
    if data:
        raise ValueError(f"{where}: unknown field {sorted(map(str, data))[0]!r}")
    return cls(**out)


def _convert(field: _Field, value: Any, at: str, one: Callable[[Any, Any, str], Any]) -> Any:
    """A plain value is only checked. ``one(cls, value, at)`` converts a value of a dataclass."""
    if field.cls is None:
        return _checked(field.annotation, value, at)
    if field.annotation.startswith("tuple["):
        return [one(field.cls, item, at) for item in _seq(value, at)]
    if value is None and field.annotation.endswith("| None"):
        return None
    return one(field.cls, value, at)


# How a subclass becomes a plain value: str() of an Enum would give its name.
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


def _exact(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    for kind, plain in _BASES:
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, dict):
        return {_exact(k): _exact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(v) for v in value]
    return value


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping, got {type(value).__name__}")
    return value


def _seq(value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
    return list(value)


_SIMPLE: dict[str, type] = {"str": str, "int": int, "bool": bool, "LayerKind": str}


def _checked(annotation: str, value: Any, where: str) -> Any:
    """Check a value against its annotation. Knows the few annotations that a record uses."""
    ok = True
    if annotation in _SIMPLE:
        expected = _SIMPLE[annotation]
        ok = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
    elif annotation == "IntArray":
        ok = isinstance(value, np.ndarray)
    elif annotation.startswith("tuple["):
        value = tuple(_seq(value, where))
        item = str if annotation.startswith("tuple[str") else int
        ok = all(isinstance(v, item) for v in value)
    elif annotation.startswith("dict["):
        kinds = (str,) if annotation == "dict[str, str]" else (str, int, float, bool, type(None))
        items = _mapping(value, where).items()
        ok = all(isinstance(k, str) and isinstance(v, kinds) for k, v in items)
    if not ok:
        raise ValueError(f"{where}: expected {annotation}, got {type(value).__name__}")
    return value


def _check_arrays(record: TrapRecord) -> None:
    if record.table is not None:
        _check_table(record.table)
    if record.tape is not None:
        _check_tape(record.tape)


def _check_tape(tape: Tape) -> None:
    """What is on it is looked at by whoever reads it."""
    events = tape.events
    if events.ndim != 1 or events.dtype != np.int64:
        got = f"{events.dtype} with {events.ndim} dimensions"
        raise ValueError(f"tape.events: expected int64 with one dimension, got {got}")
    if not 0 <= 8 * len(events) - tape.size < 8:
        raise ValueError(f"tape.size: {tape.size} bytes do not fill {len(events)} numbers")
    if not all(0 <= at < tape.size for at in tape.chunks):
        raise ValueError("tape.chunks: a chunk begins outside the tape")


def _check_table(table: Table) -> None:
    rows = table.values.shape[0] if table.values.ndim == 2 else -1
    for name, dim in (("values", 2), ("seq_lens", 1), ("first_live", 1), ("bad", 2)):
        array = getattr(table, name)
        if array.ndim != dim or array.dtype != np.int64:
            got = f"{array.dtype} of shape {array.shape}"
            raise ValueError(f"table.{name}: expected int64 with {dim} dimensions, got {got}")
    if table.seq_lens.shape[0] != rows or table.first_live.shape[0] != rows:
        raise ValueError("table: seq_lens and first_live must have one entry per row")
    if table.bad.shape[1] != 3:
        raise ValueError("table.bad: expected three columns (row, column, value)")
    if table.rids and len(table.rids) != rows:
        raise ValueError("table.rids: must be empty or have one entry per row")
    if table.pool.page_size <= 0 or table.pool.pages < 0:
        raise ValueError("table.pool: page_size must be positive, pages not negative")
