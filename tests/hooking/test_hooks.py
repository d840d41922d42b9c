"""Hooks on SGLang's real HookRegistry: order, neighbours, and an audit that cannot be fooled."""

from __future__ import annotations

import functools
import pkgutil
import sys
import types

import hook_search
import pytest
from packaging.version import Version

from g4debug.hooking import targets
from g4debug.hooking.hooks import HookError, Hooks, Order

MODULE = "g4debug_test_target"


class Thing:
    def method(self, x, *, y=0):
        return ("method", x, y)

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, x)

    @staticmethod
    def static(x):
        return ("static", x)


def function(x):
    return ("function", x)


# In a dict: SGLang re-points every module-level name of a function that it patches.
ORIGINALS = {**vars(Thing), "function": function}
SITES = {
    "t.method": (("", f"{MODULE}.Thing.method"),),
    "t.class": (("", f"{MODULE}.Thing.of_class"),),
    "t.static": (("", f"{MODULE}.Thing.static"),),
    "t.function": (("", f"{MODULE}.function"),),
    "t.gone": (("", f"{MODULE}.Thing.gone"),),
    "t.no-module": (("", "g4debug_no_such_module.f"),),
    "t.absent": (("", None),),
}


@pytest.fixture
def registry(sglang, monkeypatch):
    """SGLang's registry, empty, with sites in a module of ours that is put back after."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    module = types.ModuleType(MODULE)
    module.Thing, module.function = Thing, function
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(targets, "SITES", SITES)
    yield HookRegistry
    for name in ("method", "of_class", "static"):
        setattr(Thing, name, ORIGINALS[name])
    globals()["function"] = ORIGINALS["function"]


def call(site):
    module = sys.modules[MODULE]
    return {
        "t.method": lambda: module.Thing().method(1, y=2),
        "t.class": lambda: module.Thing.of_class(1),
        "t.static": lambda: module.Thing.static(1),
        "t.function": lambda: module.function(1),
    }[site]()


def state(hooks: Hooks, site: str) -> str:
    return next(s.state for s in hooks.audit() if s.site == site)


def tag(name, log=None):
    def around(call_next, *args, **kwargs):
        if log is not None:
            log.append(name)
        return (name, call_next(*args, **kwargs))

    return around


@pytest.mark.parametrize("site", ["t.method", "t.class", "t.static", "t.function"])
def test_tracers_are_outermost_and_fixes_innermost(registry, site):
    plain = call(site)
    hooks = Hooks()
    hooks.around(site, Order.TRACER, "tracer", tag("tracer"))
    hooks.around(site, Order.FIX, "fix", tag("fix"))
    hooks.around(site, Order.FAULT, "fault", tag("fault"))
    hooks.around(site, Order.FIX, "fix2", tag("fix2"))
    assert hooks.owners(site) == ("fix", "fix2", "fault", "tracer")
    assert hooks.sites == (site,)
    assert state(hooks, site) == "found"
    hooks.install()
    assert state(hooks, site) == "found"  # registered is not yet wrapped
    assert len(hooks.missing()) == 1
    registry.apply_hooks()
    assert state(hooks, site) == "wrapped"
    assert hooks.missing() == ()
    assert len(registry._hooks[targets.path(site)]) == 1
    assert call(site) == ("tracer", ("fault", ("fix2", ("fix", plain))))


def test_before_and_after(registry):
    seen = []
    hooks = Hooks()
    hooks.before("t.method", Order.TRACER, "a", lambda self, x, **k: seen.append((x, k)))
    hooks.after("t.method", Order.FIX, "b", lambda result, self, x, **k: [result, x])
    hooks.install()
    registry.apply_hooks()
    assert call("t.method") == [("method", 1, 2), 1]
    assert seen == [(1, {"y": 2})]


def test_a_result_may_be_replaced_by_none(registry):
    hooks = Hooks()
    hooks.after("t.function", Order.FAULT, "a", lambda result, x: None)
    hooks.install()
    registry.apply_hooks()
    assert call("t.function") is None  # SGLang's own AFTER hooks cannot do that


@pytest.mark.parametrize("ours_first", [True, False])
def test_another_plugins_hook_on_the_same_target_runs_too(registry, ours_first):
    from sglang.srt.plugins.hook_registry import HookType

    hooks, log = Hooks(), []
    hooks.around("t.method", Order.TRACER, "ours", tag("ours", log))
    if ours_first:
        hooks.install()
    registry.register(targets.path("t.method"), tag("theirs", log), HookType.AROUND)
    if not ours_first:
        hooks.install()
    registry.apply_hooks()
    call("t.method")
    assert sorted(log) == ["ours", "theirs"]
    assert state(hooks, "t.method") == "wrapped"


def test_a_replacement_by_another_plugin_is_wrapped(registry):
    from sglang.srt.plugins.hook_registry import HookType

    hooks = Hooks()
    hooks.around("t.method", Order.TRACER, "ours", tag("ours"))
    hooks.install()
    registry.register(targets.path("t.method"), lambda self, x, y: "theirs", HookType.REPLACE)
    registry.apply_hooks()
    assert call("t.method") == ("ours", "theirs")
    assert state(hooks, "t.method") == "wrapped"


def test_a_hook_that_comes_too_late_never_runs_and_the_audit_says_so(registry):
    from sglang.srt.plugins.hook_registry import HookType

    registry.register(targets.path("t.method"), tag("theirs"), HookType.AROUND)
    registry.apply_hooks()
    hooks = Hooks()
    hooks.around("t.method", Order.TRACER, "ours", tag("ours"))
    hooks.install()
    registry.apply_hooks()
    assert call("t.method") == ("theirs", ("method", 1, 2))  # SGLang ignores ours, silently
    assert targets.path("t.method") in registry._patched
    assert [(s.site, s.state, s.owners) for s in hooks.missing()] == [
        ("t.method", "found", ("ours",))
    ]


def test_a_wrapper_that_was_put_over_ours_does_not_hide_it(registry):
    hooks = Hooks()
    hooks.around("t.method", Order.TRACER, "ours", tag("ours"))
    hooks.install()
    registry.apply_hooks()
    inner = Thing.method
    late = None

    @functools.wraps(inner)
    def patched(*args, **kwargs):
        return (late, inner(*args, **kwargs))  # noqa: F821 - deleted below, on purpose

    del late  # leaves an empty cell in the closure; the audit must survive it
    Thing.method = patched
    assert state(hooks, "t.method") == "wrapped"


def test_one_that_threw_ours_away_is_noticed(registry):
    hooks = Hooks()
    hooks.around("t.method", Order.TRACER, "ours", tag("ours"))
    hooks.install()
    registry.apply_hooks()
    Thing.method = ORIGINALS["method"]
    assert [s.state for s in hooks.missing()] == ["found"]


# -- while the server runs -----------------------------------------------------------------------


def looked(hooks: Hooks) -> list[str]:
    return [gone.site for gone in hooks.look()[0]]


@pytest.fixture
def running(registry):
    """Hooks on four sites, in place, looked at once."""
    hooks = Hooks()
    for site in ("t.method", "t.class", "t.static", "t.function"):
        hooks.around(site, Order.TRACER, "ours", tag("ours"))
    hooks.install()
    registry.apply_hooks()
    assert looked(hooks) == []
    return hooks


@pytest.mark.parametrize(
    ("site", "put_back"),
    [
        ("t.method", lambda: setattr(Thing, "method", ORIGINALS["method"])),
        ("t.class", lambda: setattr(Thing, "of_class", ORIGINALS["of_class"])),
        ("t.static", lambda: setattr(Thing, "static", ORIGINALS["static"])),
        ("t.function", lambda: setattr(sys.modules[MODULE], "function", ORIGINALS["function"])),
    ],
)
def test_an_original_that_was_put_back_is_noticed(running, site, put_back):
    put_back()
    (gone,), _ = running.look()
    assert (gone.site, gone.owners) == (site, ("ours",))
    assert "(test_hooks.py:" in gone.why
    assert "is there instead" in gone.why


def test_a_class_that_was_loaded_anew_is_noticed(running):
    class Anew(Thing):
        def method(self, x, *, y=0):
            return "anew"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[MODULE], "Thing", Anew)
        assert looked(running) == ["t.method"]
    assert looked(running) == []  # ours is back


def test_a_function_or_module_that_is_gone_is_noticed(running, monkeypatch):
    monkeypatch.delattr(sys.modules[MODULE], "function")
    (gone,), _ = running.look()
    assert (gone.site, "is not there any more" in gone.why) == ("t.function", True)
    monkeypatch.delitem(sys.modules, MODULE)
    assert looked(running) == ["t.class", "t.function", "t.method", "t.static"]
    assert MODULE not in sys.modules  # to look imports nothing


inner_global = None


def through_a_global(*args, **kwargs):
    return inner_global(*args, **kwargs)


class Callable_:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def wrapped_by(kind, inner):
    """A function that calls ``inner``, in one of the ways in which people keep what they wrap."""
    global inner_global
    if kind == "closure":
        return lambda *args, **kwargs: inner(*args, **kwargs)
    if kind == "default":
        return lambda self, x, y=0, real=inner: real(self, x, y=y)
    if kind == "partial":
        return functools.partialmethod(lambda self, f, *a, **k: f(self, *a, **k), inner)
    if kind == "global":
        inner_global = inner
        return through_a_global
    if kind == "object":
        # A callable object is no method: it does not get ``self``.
        thing = Thing()
        return Callable_(functools.partial(inner, thing))
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["closure", "default", "partial", "global", "object"])
def test_a_wrapper_without_wraps_does_not_hide_ours(running, kind):
    """Neither at start nor later: it would stop a server although all hooks run."""
    Thing.method = wrapped_by(kind, Thing.method)
    assert call("t.method") == ("ours", ("method", 1, 2))
    assert looked(running) == []
    assert running.missing() == ()


def test_only_what_has_changed_is_looked_into(running, monkeypatch):
    from g4debug.hooking import chain

    walked = []
    real = chain.way
    monkeypatch.setattr(chain, "way", lambda f, arrived: walked.append(f) or real(f, arrived))
    assert looked(running) == []
    assert walked == []
    Thing.method = wrapped_by("closure", Thing.method)
    assert looked(running) == looked(running) == []
    assert len(walked) == 1
    Thing.method = ORIGINALS["method"]
    assert looked(running) == looked(running) == ["t.method"]
    assert len(walked) == 3


def test_a_function_that_leads_in_circles_or_far_away_ends(running):
    def circle(*args, **kwargs):
        return circle, other

    def other(*args, **kwargs):
        return circle

    Thing.method = circle
    assert looked(running) == ["t.method"]
    far = ORIGINALS["method"]
    for _ in range(5000):
        far = wrapped_by("closure", far)
    Thing.method = far
    assert looked(running) == ["t.method"]


def test_a_missing_target(registry):
    hooks = Hooks()
    hooks.around("t.gone", Order.TRACER, "a", tag("a"))
    hooks.around("t.no-module", Order.FIX, "b", tag("b"))
    hooks.install()
    registry.apply_hooks()  # SGLang only logs
    gone, no_module = hooks.missing()
    assert (gone.site, gone.state, gone.owners) == ("t.gone", "missing", ("a",))
    assert "gone" in gone.detail
    assert (no_module.site, no_module.state) == ("t.no-module", "missing")
    assert "g4debug_no_such_module" in no_module.detail


def test_a_site_that_the_release_does_not_have(registry):
    with pytest.raises(HookError, match=r"mine: SGLang .* has no t\.absent"):
        Hooks().around("t.absent", Order.FIX, "mine", tag("a"))
    assert state(Hooks(), "t.absent") == "absent"
    assert Hooks().missing() == ()


def test_an_unknown_site(registry):
    with pytest.raises(targets.UnknownSite, match=r"valid: t\.absent, t\.class"):
        Hooks().around("t.methd", Order.FIX, "mine", tag("a"))


def test_nothing_asked_nothing_registered(registry):
    hooks = Hooks()
    hooks.install()
    assert not registry._hooks
    assert hooks.sites == hooks.missing() == ()


def test_every_site_is_in_the_installed_sglang(sglang):
    states = {s.site: s for s in Hooks().audit()}
    assert set(states) == set(targets.SITES)
    if str(targets.sglang_version()) in targets.RUN:
        for site, state in states.items():
            declared = "found" if targets.path(site) is not None else "absent"
            assert state.state == declared, site


@pytest.mark.parametrize(
    ("installed", "site", "ends"),
    [
        ("0.5.12.post1", "attn.trtllm_mha.metadata_replay", "replay_cuda_graph"),
        ("0.5.12.post1", "worker.frozen_view", "_frozen_kv_target_view"),
        ("0.5.13.post1", "attn.trtllm_mha.metadata_replay", "out_graph"),
        ("0.5.13.dev1+g123", "attn.trtllm_mha.metadata_replay", "out_graph"),
        ("0.5.14", "worker.frozen_view", "FrozenKVMTPDraftWorker._frozen_kv_target_view"),
        ("0.5.14", "worker.seed_step", None),
        ("0.6.0rc1", "attn.trtllm_mha.layer_page_table", "_get_layer_page_table"),
    ],
)
def test_paths_by_release(installed, site, ends):
    path = targets.path(site, Version(installed))
    assert path is None if ends is None else path.endswith(ends)


def test_without_sglang_nothing_matches(monkeypatch):
    monkeypatch.setattr(targets, "sglang_version", lambda: None)
    assert not targets.matches(">=0")
    assert targets.path("attn.trtllm_mha.init")  # a site that never moved needs no version


def test_the_shorter_search_of_the_tests_finds_all_that_sglangs_own_does(sglang, monkeypatch):
    """See hook_search.py: other names of hooked functions, in whichever module."""
    from sglang.srt.plugins import hook_registry
    from sglang.srt.utils import common

    monkeypatch.setattr(hook_registry, "_propagate_patch", hook_registry._propagate_patch)
    search = hook_search.shorten()
    originals = list(vars(common).values())  # no hook site has as many other names
    for site in filter(None, map(targets.path, targets.SITES)):
        owner, _, name = site.rpartition(".")
        originals.append(vars(pkgutil.resolve_name(owner)).get(name))
    originals = [original for original in originals if hook_search.of_sglang(original)]
    assert len(originals) > 50
    wanted = {id(original): set() for original in originals}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            for value in list(vars(module).values()):
                if id(value) in wanted:
                    wanted[id(value)].add(name)
    assert sum(len(names) > 1 for names in wanted.values()) > 50
    for original in originals:
        searched = search.modules(original)
        assert wanted[id(original)] <= set(searched), original
        # Far fewer than all; how many of them are SGLang's hangs on what other tests imported.
        assert len(searched) < len(sys.modules) / 2


def test_where_anything_may_be_is_searched_for_everything(sglang, monkeypatch):
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import hook_registry

    search = hook_search.Search()
    sglangs = hook_registry._wrap_fn
    assert __name__ in search.modules(sglangs)
    assert search.modules(function) is sys.modules
    assert scheduler.__name__ not in search.modules(sglangs)
    monkeypatch.setattr(scheduler, "another_name", sglangs, raising=False)
    later = types.ModuleType(MODULE)
    later.name = sglangs
    monkeypatch.setitem(sys.modules, MODULE, later)
    assert {scheduler.__name__, MODULE} <= set(search.modules(sglangs))
    assert MODULE not in search.modules(hook_registry.HookRegistry)
