"""A tracer's own bug never reaches SGLang; a TrapError always does."""

from __future__ import annotations

import logging
import sys

import pytest

from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.trapping.trap import Trap, TrapError

SITE = "scheduler.run_batch"


@pytest.fixture
def context():
    settings = Settings()
    return Context("mine", Hooks(), settings, Recorder(1), Trap(settings, lambda *a: None))


def call(context: Context, *args, **kwargs):
    """The site as SGLang would run it, with what the tracer put around it."""
    assert targets.path(SITE)
    return context.hooks._compose(SITE)(lambda *a, **k: ("original", a, k), *args, **kwargs)


def boom(*args, **kwargs):
    raise ValueError("a bug")


def test_hooks_see_the_arguments_and_after_may_change_the_result(context):
    seen = []
    context.before(SITE, lambda *a, **k: seen.append((a, k)))
    context.after(SITE, lambda result, *a, **k: (result, a, k))
    assert call(context, 1, x=2) == (("original", (1,), {"x": 2}), (1,), {"x": 2})
    assert seen == [((1,), {"x": 2})]


def test_a_result_of_none_stays_none(context):
    context.after(SITE, lambda result, *a: result)
    assert context.hooks._compose(SITE)(lambda: None) is None
    context.after(SITE, boom)
    assert context.hooks._compose(SITE)(lambda: None) is None


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_bug_is_logged_once_and_the_result_stands(context, caplog, kind):
    getattr(context, kind)(SITE, boom)
    for _ in range(3):
        assert call(context, 1) == ("original", (1,), {})
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.ERROR
    assert "mine is limited: its hook boom is off" in caplog.text
    assert "ValueError: a bug" in caplog.text
    assert context.disabled == "ValueError: a bug"


def test_only_the_failed_hook_is_off(context):
    """A guard in a captured graph goes on by itself, so what reports it must go on, too."""
    seen, runs = [], []

    def fails(result, *args):
        runs.append(args)
        raise ValueError("a bug")

    context.after(SITE, fails)
    context.before("scheduler.stream_output", lambda *a: seen.append(a))
    call(context, 1)
    call(context, 2)
    context.hooks._compose("scheduler.stream_output")(lambda *a: None, 3)
    assert runs == [(1,)]
    assert seen == [(3,)]


def test_an_argument_is_replaced_if_it_is_there_and_the_hook_works(context):
    context.replace(SITE, "x", lambda value, given: value + given["y"])
    assert call(context, 1, x=2, y=3) == ("original", (1,), {"x": 5, "y": 3})
    assert call(context, 1) == ("original", (1,), {})
    assert call(context, x=2) == ("original", (), {"x": 2})  # it failed: its own value
    assert context.disabled == "KeyError: 'y'"
    assert call(context, x=2, y=3) == ("original", (), {"x": 2, "y": 3})


def test_an_exception_is_told_to_the_tracer_and_goes_on(context):
    told = []
    context.on_exception(SITE, lambda: told.append(1))
    site = context.hooks._compose(SITE)
    assert site(lambda: "fine") == "fine"
    assert told == []
    with pytest.raises(RuntimeError, match="the device"):
        site(lambda: (_ for _ in ()).throw(RuntimeError("the device")))
    assert told == [1]


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_finding_passes_through(context, kind):
    finding = Finding("c", "k", "s", "g4debug: h", Location(), "e", "g")

    def found(*args):
        raise TrapError(finding, None, "x")

    getattr(context, kind)(SITE, found)
    for _ in range(2):
        with pytest.raises(TrapError):
            call(context)
    assert not context.disabled


def test_an_error_of_sglangs_own_is_not_ours(context, caplog):
    context.before(SITE, lambda *a: None)
    context.after(SITE, lambda result, *a: result)
    with pytest.raises(ZeroDivisionError):
        context.hooks._compose(SITE)(lambda: 1 // 0)
    assert not context.disabled
    assert not caplog.records


def test_isolation_takes_no_frame_of_its_own(context):
    """A step passes some hundred hooks, and each frame of ours costs it time."""
    names = []

    def hook(*args):
        frame = sys._getframe(1)
        while frame.f_code.co_name != "call":
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return args[0] if args else None

    context.before(SITE, hook)
    context.after(SITE, hook)
    call(context)
    assert names == ["around", "around"]
