"""The fault string: what it means, what it refuses, and that a seed repeats itself."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4debug.faults.grammar import SELECTORS, Action, Chain, GrammarError, Plan, parse

pytestmark = pytest.mark.once("the code is ours alone")

ON = Action("on")


def chain(text: str, seed: int = 0, name: str = "page-oob") -> Chain:
    return Chain(parse(f"page-oob={text}").chains["page-oob"], seed, name)


def fires(text: str, times: int, seed: int = 0, **context: object) -> list[str]:
    running = chain(text, seed)
    actions = [running.fire(**context) for _ in range(times)]
    return [a.task if a else "-" for a in actions]


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", Plan()),
        (" ; ;", Plan()),
        ("seed=7", Plan(7)),
        ("seed=-3;page-oob=on", Plan(-3, {"page-oob": (ON,)})),
        ("page-oob=off", Plan(0, {"page-oob": (Action("off"),)})),
        ("page-oob=3*on", Plan(0, {"page-oob": (Action("on", count=3),)})),
        ("page-oob=5%on", Plan(0, {"page-oob": (Action("on", probability=0.05),)})),
        (
            "seed=7;page-oob=5%3*corrupt(1);stale-swa-state=on",
            Plan(
                7,
                {
                    "page-oob": (Action("corrupt", "1", 0.05, 3),),
                    "stale-swa-state": (ON,),
                },
            ),
        ),
        (
            " page-oob = 2*off -> 0.5%1*corrupt(2)@mode=decode@runner=draft -> on ; seed= 4 ",
            Plan(
                4,
                {
                    "page-oob": (
                        Action("off", count=2),
                        Action("corrupt", "2", 0.005, 1, (("mode", "decode"), ("runner", "draft"))),
                        ON,
                    )
                },
            ),
        ),
    ],
)
def test_parses(text, plan):
    assert parse(text) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("page-oob", "name=action"),
        ("page-oob=", "name=action"),
        ("=on", "unknown fault ''; valid: abort-request, "),
        ("oob=on", "unknown fault 'oob'; valid: abort-request, "),
        ("seed=x", "whole number"),
        ("seed=1;seed=2", "twice"),
        ("page-oob=on;page-oob=off", "twice"),
        ("page-oob=0*on", "count of 0"),
        ("page-oob=00*on", "count of 0"),
        ("page-oob=0%on", "probability"),
        ("page-oob=101%on", "probability"),
        ("page-oob=on->", "expected"),
        ("page-oob=->on", "expected"),
        ("page-oob=3*5%on", "expected"),
        ("page-oob=-1*on", "expected"),
        ("page-oob=1.5*on", "expected"),
        ("page-oob=ON", "expected"),
        ("page-oob=on(", "expected"),
        ("page-oob=on@mode", "expected"),
        ("page-oob=on@mode=", "expected"),
        ("page-oob=on@colour=red", "@at, @layer, @mode, @rank, @request, @runner, @step"),
        ("page-oob=on on", "expected"),
    ],
)
def test_refuses(text, says):
    with pytest.raises(GrammarError) as error:
        parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_counts_and_chains():
    assert fires("on", 3) == ["on", "on", "on"]
    assert fires("off", 2) == ["-", "-"]
    assert fires("2*on", 4) == ["on", "on", "-", "-"]
    assert fires("2*off->1*on", 4) == ["-", "-", "on", "-"]
    assert fires("1*on->2*corrupt(1)->off", 5) == ["on", "corrupt", "corrupt", "-", "-"]
    assert fires("on->1*corrupt(1)", 3) == ["on", "on", "on"]  # no count: never hands over


def test_an_opportunity_that_a_selector_declines_is_not_counted():
    running = chain("2*on@mode=decode@layer=3")
    got = [
        running.fire(mode=mode, layer=layer) is not None
        for mode, layer in (
            ("decode", 3), ("extend", 3), ("decode", 2), ("DECODE", "3"), ("decode", 3),
        )
    ]  # fmt: skip
    assert got == [True, False, False, True, False]
    assert chain("on@request=r1").fire() is None  # unknown here: no match


def test_probability_repeats_with_its_seed_and_only_with_it():
    first = fires("30%on", 400, seed=1)
    assert fires("30%on", 400, seed=1) == first
    assert fires("30%on", 400, seed=2) != first
    assert 60 < first.count("on") < 180  # 120 expected; 6.5 standard deviations
    assert fires("100%on", 5) == ["on"] * 5


def test_a_second_fault_does_not_move_the_first_ones_firings():
    alone = chain("30%on", 5)
    together, other = chain("30%on", 5), chain("30%on", 5, "stale-swa-state")
    mine, others = [], []
    for _ in range(100):
        others.append(other.fire() is not None)
        mine.append(together.fire() is not None)
    assert mine == [alone.fire() is not None for _ in range(100)]
    assert mine != others


def text_of(plan: Plan) -> str:
    """The plan as a person would write it."""
    items = [f"seed={plan.seed}"]
    for name, actions in plan.chains.items():
        parts = []
        for a in actions:
            part = "" if a.probability == 1 else f"{a.probability * 100:.10g}%"
            part += "" if a.count is None else f"{a.count}*"
            part += a.task + (f"({a.argument})" if a.argument else "")
            parts.append(part + "".join(f"@{k}={v}" for k, v in a.select))
        items.append(f"{name}={'->'.join(parts)}")
    return ";".join(items)


words = st.text("abcdefghijklmnopqrstuvwxyz0123456789_.-", min_size=1, max_size=8)
actions = st.builds(
    Action,
    task=st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z]{1,4})?", fullmatch=True),
    argument=st.one_of(st.just(""), words),
    probability=st.integers(1, 10_000).map(lambda n: float(f"{n / 100:.10g}") / 100),
    count=st.one_of(st.none(), st.integers(1, 10**6)),
    select=st.lists(st.tuples(st.sampled_from(SELECTORS), words), max_size=3).map(tuple),
)
plans = st.builds(
    Plan,
    seed=st.integers(-(10**9), 10**9),
    chains=st.dictionaries(
        st.sampled_from(["page-oob", "stale-swa-state"]),
        st.lists(actions, min_size=1, max_size=4).map(tuple),
    ),
)


@given(plans)
def test_what_is_written_is_what_is_read(plan):
    got = parse(text_of(plan))
    assert got == plan


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    for spec in (text, f"page-oob={text}"):
        with contextlib.suppress(GrammarError):  # and nothing else
            assert isinstance(parse(spec), Plan)
