"""Hooks that are joined into one frame do what they would do one around the other."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from g4debug.hooking.hooks import Hooks, Order

SITE = "scheduler.run_batch"
WHAT = st.sampled_from(["before", "after", "around"])
HOOKS = st.lists(st.tuples(WHAT, st.sampled_from(Order), st.booleans()), min_size=1, max_size=8)


class Bang(Exception):
    pass


def put(hooks, entered, number, what, order, fails):
    """One hook, which notes that it ran, and what it was given, and may raise."""

    def note(*seen):
        entered.append((number, what, seen))
        if fails:
            raise Bang(number)

    if what == "before":
        hooks.before(SITE, order, "test", lambda *a, **k: note(a, k))
    elif what == "after":

        def after(result, *args, **kwargs):
            note(result, args, kwargs)
            return (number, result)

        hooks.after(SITE, order, "test", after)
    else:

        def around(call_next, *args, **kwargs):
            note(args, kwargs)
            return (number, call_next(*args, **kwargs))

        hooks.around(SITE, order, "test", around)


def outcome(function, entered):
    """What a call gives or raises, and what ran for that, in order."""
    entered.clear()
    try:
        found = function(1, key=2)
    except Bang as e:
        found = ("raised", e.args)
    return found, list(entered)


@given(wanted=HOOKS, raises=st.booleans())
def test_the_same_order_results_and_exceptions(wanted, raises):
    hooks, entered = Hooks(), []
    for number, (what, order, fails) in enumerate(wanted):
        put(hooks, entered, number, what, order, fails and raises)

    def original(*args, **kwargs):
        entered.append(("original", args, kwargs))
        return "result"

    nested = original
    for entry in sorted(hooks._entries[SITE], key=lambda e: e.order):
        nested = functools.partial(entry.around, nested)
    composed = functools.partial(hooks._compose(SITE), original)
    assert outcome(composed, entered) == outcome(nested, entered)


def test_plain_hooks_of_a_site_take_one_frame():
    hooks, depth = Hooks(), []
    for order in Order:
        hooks.before(SITE, order, "test", lambda: None)
        hooks.after(SITE, order, "test", lambda result: result)

    def original():
        import sys

        frame = sys._getframe()
        while frame is not None:
            depth.append(frame.f_code.co_filename)
            frame = frame.f_back

    hooks._compose(SITE)(original)
    assert sum(name.endswith("hooking/hooks.py") for name in depth) == 1
