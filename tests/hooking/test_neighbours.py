"""Who else is at our hook sites, by SGLang's real registry and by monkeypatches of it."""

from __future__ import annotations

import sys
import types

import pytest

from g4debug.hooking import chain, plugins, targets
from g4debug.hooking.hooks import Hooks, Order
from g4debug.hooking.neighbours import neighbours
from g4debug.hooking.plugins import Plugin

SITE = "batch.filter"
MEDDLER = Plugin("meddler-plugin", "meddler_mod:register", "meddler 0.1", True)
# The functions of another plugin, in a module of its own.
SOURCE = """
def around(original, *args, **kwargs):
    return original(*args, **kwargs)

def before(*args, **kwargs):
    return None

def replace(self, *args, **kwargs):
    return "replaced"

def over(inner):
    def patched(*args, **kwargs):
        return inner(*args, **kwargs)
    return patched
"""


@pytest.fixture
def theirs(monkeypatch):
    module = types.ModuleType("meddler_mod")
    exec(compile(SOURCE, "/opt/x/meddler_mod.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "meddler_mod", module)
    return module


@pytest.fixture
def registry(sglang):
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry


@pytest.fixture
def ours():
    hooks = Hooks()
    hooks.before(SITE, Order.TRACER, "ours", lambda *a, **k: None)
    return hooks


def batch():
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return ScheduleBatch


def seen(hooks):
    return [(n.side, n.who, n.function) for n in neighbours(hooks, [MEDDLER])]


def test_nobody_else(registry, ours):
    assert neighbours(ours) == ()
    ours.install()
    registry.apply_hooks()
    assert neighbours(ours, [MEDDLER]) == ()


def test_a_plugin_registered_later_is_outside_and_earlier_inside(registry, ours, theirs):
    from sglang.srt.plugins.hook_registry import HookSource, HookType

    path, source = targets.path(SITE), HookSource("meddler-plugin", "meddler")
    registry.register(path, theirs.before, HookType.BEFORE, source=source)
    ours.install()
    registry.register(path, theirs.around, HookType.AROUND, source=source)
    registry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", theirs.around)
    registry.apply_hooks()
    assert seen(ours) == [
        ("outside", "plugin meddler-plugin", "around (meddler_mod.py:2)"),
        ("inside", "plugin meddler-plugin", "before (meddler_mod.py:5)"),
    ]


def test_a_hook_of_nobody_known_is_named_by_its_module(registry, ours, theirs):
    ours.install()
    registry.register(targets.path(SITE), theirs.before)
    registry.apply_hooks()
    (other,) = neighbours(ours)
    assert (other.side, other.who) == ("outside", "module meddler_mod")
    assert str(other) == (
        "module meddler_mod at batch.filter: before (meddler_mod.py:5) wraps our hook, so its "
        "changes are not checked"
    )


def test_a_replacement_is_inside(registry, ours, theirs):
    from sglang.srt.plugins.hook_registry import HookType

    ours.install()
    registry.register(targets.path(SITE), theirs.replace, HookType.REPLACE)
    registry.apply_hooks()
    assert seen(ours) == [("inside", "plugin meddler-plugin", "replace (meddler_mod.py:8)")]


def test_monkeypatches_before_and_after(registry, ours, theirs):
    """One that leads to SGLang's function by its closure alone, and one that leads nowhere."""
    batch().filter_batch = theirs.over(batch().filter_batch)
    ours.install()
    registry.apply_hooks()
    patch = ("plugin meddler-plugin", "over.patched (meddler_mod.py:12)")
    assert seen(ours) == [("inside", *patch)]
    batch().filter_batch = theirs.over(theirs.over(batch().filter_batch))
    assert seen(ours) == [("outside", *patch), ("outside", *patch), ("inside", *patch)]
    batch().filter_batch = theirs.replace
    assert seen(ours) == [("instead", "plugin meddler-plugin", "replace (meddler_mod.py:8)")]


def test_a_hook_that_came_too_late_never_runs(registry, ours, theirs):
    ours.install()
    registry.apply_hooks()
    registry.register(targets.path(SITE), theirs.around)
    registry.apply_hooks()
    assert seen(ours) == [("never", "plugin meddler-plugin", "around (meddler_mod.py:2)")]


def test_a_function_that_was_put_back_is_nobodys(registry, ours):
    original = batch().filter_batch
    ours.install()
    registry.apply_hooks()
    batch().filter_batch = original
    assert neighbours(ours) == ()
    (gone,), _ = ours.look()
    assert gone.why.startswith("ScheduleBatch.filter_batch (schedule_batch.py:")


def test_sglangs_own_decorators_are_no_neighbours(registry):
    """Every site of the installed SGLang, hooked by us alone."""
    hooks = Hooks()
    for site in targets.SITES:
        if targets.path(site) is not None:
            hooks.before(site, Order.TRACER, "ours", lambda *a, **k: None)
    hooks.install()
    registry.apply_hooks()
    assert len(hooks.installed) > 50
    assert neighbours(hooks) == ()
    gone, changed = hooks.look()
    assert (gone, len(changed)) == ((), len(hooks.installed))
    assert hooks.look() == ((), ())


def test_whatever_is_called_can_be_described():
    import functools

    class Thing:
        def __call__(self):
            return None

        def method(self):
            return None

    assert chain.describe(Thing().method).endswith(
        f"Thing.method (test_neighbours.py:{Thing.method.__code__.co_firstlineno})"
    )
    assert chain.describe(functools.partial(Thing.method)).startswith("a partial of ")
    assert chain.describe(Thing()).startswith("an object of ")
    assert chain.describe(len) == "an object of builtins.builtin_function_or_method"


# -- which plugins SGLang loads ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow_list", "loaded"),
    [
        (None, True),
        ("", True),
        ("g4debug", True),
        ("foo, g4debug ,", True),
        ("foo", False),
        (",", False),
        ("G4DEBUG", False),
    ],
)
def test_the_allow_list_is_read_as_sglang_reads_it(sglang, allow_list, loaded, monkeypatch):
    from sglang.srt.plugins import load_plugins_by_group

    environ = {} if allow_list is None else {"SGLANG_PLUGINS": allow_list}
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert ("g4debug" in load_plugins_by_group(plugins.GROUP)) is loaded
    assert (plugins.left_out(environ) == "") is loaded
    (ours,) = [p for p in plugins.installed(environ) if p.name == "g4debug"]
    assert ours.allowed is loaded
    assert ours.package == "g4debug"
    assert str(ours).startswith("allowed: " if loaded else "left out: ")
