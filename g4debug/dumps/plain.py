"""Turns a record into plain values and tensors, and back. Every field is checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from g4debug.findings.record import (
    KIND,
    Checked,
    DeviceAssert,
    Finding,
    Holding,
    Limit,
    Location,
    Lookup,
    OtherHook,
    PageEvent,
    Pool,
    Step,
    Table,
    TracerStatus,
    Transition,
    TrapRecord,
)


def to_plain(record: TrapRecord) -> dict[str, Any]:
    """The record as nested dicts, lists, plain values and tensors.

    An instance of a subclass becomes the plain value. Otherwise a pickle would store an object,
    which cannot be read back, for ``torch.__version__`` or ``ForwardMode.DECODE``.
    """
    payload = {k: _exact(v) for k, v in dataclasses.asdict(record).items()}
    payload["kind"] = KIND
    return payload


def _exact(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    # Convert by the base class: str() of an Enum gives its name, not its value.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, dict):
        return {_exact(k): _exact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(v) for v in value]
    return value


def from_plain(payload: dict[str, Any]) -> TrapRecord:
    """The inverse of :func:`to_plain`.

    Raises ValueError with the name of the field if a value is missing or has the wrong type, or
    if the field is unknown.
    """
    data = {k: v for k, v in payload.items() if k != "kind"}
    data["finding"] = _finding(data.get("finding"))
    for name, cls in _LISTS.items():
        data[name] = tuple(_build(cls, item, name) for item in _seq(data.get(name, ()), name))
    data["tracers"] = tracers(data.get("tracers", ()))
    if data.get("table") is not None:
        table = dict(_mapping(data["table"], "table"))
        table["pool"] = _build(Pool, table.get("pool"), "table.pool")
        data["table"] = _build(Table, table, "table")
        _check_table(data["table"])
    record: TrapRecord = _build(TrapRecord, data, "dump")
    return record


_LISTS: dict[str, type] = {
    "pools": Pool,
    "steps": Step,
    "events": PageEvent,
    "transitions": Transition,
    "holdings": Holding,
    "allocator": PageEvent,
    "others": OtherHook,
    "asserts": DeviceAssert,
    "lookups": Lookup,
}


def _finding(value: Any) -> Finding:
    data = dict(_mapping(value, "finding"))
    data["location"] = _build(Location, data.get("location"), "finding.location")
    finding: Finding = _build(Finding, data, "finding")
    return finding


def tracers(value: Any) -> tuple[TracerStatus, ...]:
    """The status of the tracers from plain values. Raises ValueError with the field's name."""
    if isinstance(value, dict):  # schema 1 and 2: name -> "armed: mode", as it was at the start
        states = _coerce("dict[str, str]", value, "tracers")
        return tuple(TracerStatus(k, v.removeprefix("armed: ")) for k, v in states.items())
    found = []
    for item in _seq(value, "tracers"):
        data = dict(_mapping(item, "tracers"))
        for name, cls in (("limits", Limit), ("checked", Checked)):
            where = f"tracers.{name}"
            data[name] = tuple(_build(cls, x, where) for x in _seq(data.get(name, ()), where))
        found.append(_build(TracerStatus, data, "tracers"))
    return tuple(found)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping, got {type(value).__name__}")
    return value


def _seq(value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
    return list(value)


def _build(cls: Any, value: Any, where: str) -> Any:
    data = dict(_mapping(value, where))
    out: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name not in data:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"{where}.{f.name}: missing")
            continue
        out[f.name] = _coerce(str(f.type), data.pop(f.name), f"{where}.{f.name}")
    if data:
        raise ValueError(f"{where}: unknown field {sorted(map(str, data))[0]!r}")
    return cls(**out)


_SIMPLE: dict[str, type] = {"str": str, "int": int, "bool": bool, "LayerKind": str}


def _coerce(annotation: str, value: Any, where: str) -> Any:
    """Check a value against its annotation. Knows the few annotations that a record uses."""
    ok = True
    if annotation in _SIMPLE:
        expected = _SIMPLE[annotation]
        ok = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
    elif annotation == "torch.Tensor":
        ok = isinstance(value, torch.Tensor)
    elif annotation.startswith("tuple[str"):
        value = tuple(_seq(value, where))
        ok = all(isinstance(v, str) for v in value)
    elif annotation.startswith("tuple[int"):
        value = tuple(_seq(value, where))
        ok = all(isinstance(v, int) for v in value)
    elif annotation.startswith("dict["):
        kinds = (str,) if annotation == "dict[str, str]" else (str, int, float, bool, type(None))
        items = _mapping(value, where).items()
        ok = all(isinstance(k, str) and isinstance(v, kinds) for k, v in items)
    if not ok:
        raise ValueError(f"{where}: expected {annotation}, got {type(value).__name__}")
    return value


def _check_table(table: Table) -> None:
    rows = table.values.shape[0] if table.values.dim() == 2 else -1
    for name, tensor, dim in (
        ("values", table.values, 2),
        ("seq_lens", table.seq_lens, 1),
        ("first_live", table.first_live, 1),
        ("bad", table.bad, 2),
    ):
        if tensor.dim() != dim or tensor.dtype != torch.int64 or tensor.is_sparse:
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ValueError(f"table.{name}: expected int64 with {dim} dimensions, got {got}")
        if tensor.device.type != "cpu":
            raise ValueError(f"table.{name}: expected a CPU tensor, got {tensor.device}")
    if table.seq_lens.shape[0] != rows or table.first_live.shape[0] != rows:
        raise ValueError("table: seq_lens and first_live must have one entry per row")
    if table.bad.shape[1] != 3:
        raise ValueError("table.bad: expected three columns (row, column, value)")
    if table.rids and len(table.rids) != rows:
        raise ValueError("table.rids: must be empty or have one entry per row")
    if table.pool.page_size <= 0 or table.pool.pages < 0:
        raise ValueError("table.pool: page_size must be positive, pages not negative")
