"""Who called the allocator is told, also where another plugin stands in between."""

from __future__ import annotations

import types

from g4debug.ledger.callsite import caller


def function(source: str, file: str, **names):
    """The function ``f`` of a source text that says it is in ``file``."""
    space = dict(names)
    exec(compile(source, file, "exec"), space)
    return space["f"]


SGLANG = "/site-packages/sglang/srt/managers/schedule_batch.py"
ALLOCATOR = "/site-packages/sglang/srt/mem_cache/allocator/swa.py"
PLUGIN = "/site-packages/their_plugin/look.py"


def chain(*files: str):
    """A call through functions of these files, outermost first."""
    inner = caller
    for file in reversed(files):
        inner = function("def f():\n    return inner()\n", file, inner=inner)
    assert isinstance(inner, types.FunctionType)
    return inner()


def test_sglangs_function_is_named_and_the_allocators_own_are_not():
    assert chain(SGLANG, ALLOCATOR) == "schedule_batch.py:2 f"


def test_another_plugin_is_named_and_who_called_it():
    assert chain(SGLANG, PLUGIN, ALLOCATOR) == "look.py:2 f, called by schedule_batch.py:2 f"


def test_of_two_plugins_the_inner_one_is_named():
    other = PLUGIN.replace("look", "other")
    assert chain(SGLANG, other, PLUGIN).startswith("look.py:2 f, called by schedule_batch.py")


def test_without_sglang_the_nearest_is_named():
    assert chain(PLUGIN) == "look.py:2 f"
