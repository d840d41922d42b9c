"""An event of an allocator has an ``__init__`` of its own: it must be that of its fields."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

from g4debug.findings.record import PageEvent

pytestmark = pytest.mark.once("an event is made without SGLang")


def test_each_field_gets_its_own_value():
    values = (7, "extend", "swa", (1, 2), 2, "r", "x.py:1 f", "note", True)
    event = PageEvent(*values)
    assert dataclasses.astuple(event) == values
    names = [field.name for field in dataclasses.fields(PageEvent)]
    assert PageEvent(**dict(zip(names, values, strict=True))) == event
    assert dataclasses.replace(event, step=8).step == 8
    assert pickle.loads(pickle.dumps(event)) == event
    assert hash(event) == hash(PageEvent(*values))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 8


def test_each_default_is_that_of_its_field():
    parameters = inspect.signature(PageEvent).parameters
    fields = dataclasses.fields(PageEvent)
    assert list(parameters) == [field.name for field in fields]
    for field in fields:
        default = parameters[field.name].default
        assert default == (
            inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        )
