"""Who called the allocator is told, also where another plugin stands in between."""

from __future__ import annotations

import types

import pytest

from g4debug.ledger.callsite import caller


def function(module: str, folder: str = "/site-packages", **names):
    """A function ``f`` of a module that lies in this folder."""
    space = {**names, "__name__": module}
    file = f"{folder}/{module.replace('.', '/')}.py"
    exec(compile("def f():\n    return inner()\n", file, "exec"), space)
    return space["f"]


SGLANG = "sglang.srt.managers.schedule_batch"
ALLOCATOR = "sglang.srt.mem_cache.allocator.swa"
PLUGIN = "their_plugin.look"


def chain(*modules: str, folder: str = "/site-packages"):
    """A call through functions of these modules, outermost first."""
    inner = caller
    for module in reversed(modules):
        inner = function(module, folder, inner=inner)
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


@pytest.mark.parametrize(
    "folder", ["/sglang/srt", "/mem_cache/allocator", "/functools", "/g4debug"]
)
def test_a_folder_of_any_name_is_only_a_place(folder):
    """A user may clone anything below a folder that is called like a package."""
    called = "schedule_batch.py:2 f"
    assert chain(PLUGIN, folder=folder) == "look.py:2 f"
    assert chain(SGLANG, ALLOCATOR, folder=folder) == called
    assert chain(SGLANG, PLUGIN, folder=folder) == f"look.py:2 f, called by {called}"
