"""One slot of the mapping is wrong, about to be written: told, and it costs the ledger nothing.

Only SGLang's ``full_to_swa_index_mapping`` is changed, behind everybody's back. Each slot counts,
not only a page's first one.
"""

from __future__ import annotations

import pytest
from real_backend import PAGE, SWA
from writing import ARMED, Writing

from g4debug.dumps import reading
from g4debug.trapping.trap import TrapError


def mapping(it):
    return it.rig.allocator.full_to_swa_index_mapping


def anothers(it, slot):
    return int(mapping(it)[it.right("c", 40 + slot % PAGE)])


def zero(it, slot):
    return 0


def negative(it, slot):
    return -1


def out_of_range(it, slot):
    return SWA + 5 * PAGE + 3


def its_own_of_another_page(it, slot):
    return int(mapping(it)[it.right("b", 70)])


def its_own_of_another_place(it, slot):
    return int(mapping(it)[slot]) // PAGE * PAGE + (slot + 5) % PAGE


WRONG = [
    anothers,
    zero,
    negative,
    out_of_range,
    its_own_of_another_page,
    its_own_of_another_place,
]


@pytest.fixture
def writing(arm):
    folder = arm(**ARMED)
    it = Writing()
    it.cache(0)
    it.forward()
    return it, folder


# The token of b that is changed: the first, one in the middle, the last of those that are written.
@pytest.mark.parametrize("position", [90, 95, 96, 99])
@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_told(writing, position, wrong, caplog):
    it, _ = writing
    slot = it.right("b", position)
    before = int(mapping(it)[slot])
    value = wrong(it, slot)
    if value == before:
        pytest.skip("the same slot")
    mapping(it)[slot] = value
    with pytest.raises(TrapError) as error:
        it.forward("extend")
    finding = error.value.finding
    assert finding.check == "kv-writes"
    assert finding.location.request == "b" or finding.kind == "written-twice"
    assert finding.cause.startswith("full_to_swa_index_mapping is wrong"), finding.cause
    assert not it.ledger.broken
    assert not any("in doubt" in line for line in caplog.messages)


def rolled(slots):
    return slots.roll(1)


def turned_round(slots):
    return slots.flip(0)


def one_slot_further(slots):
    return slots + 1


@pytest.mark.parametrize("wrong", [rolled, turned_round, one_slot_further])
def test_a_whole_page_in_another_order_is_told(writing, wrong, caplog):
    """The slots of the page agree with each other, so they are no proof for one of them."""
    it, _ = writing
    begin = it.right("b", 90) // PAGE * PAGE
    page = slice(begin, begin + PAGE)
    mapping(it)[page] = wrong(mapping(it)[page].clone())
    with pytest.raises(TrapError) as error:
        it.forward("extend")
    finding = error.value.finding
    assert (finding.check, finding.location.request) == ("kv-writes", "b")
    assert finding.cause.startswith("full_to_swa_index_mapping is wrong"), finding.cause
    assert not it.ledger.broken
    assert not any("in doubt" in line for line in caplog.messages)


def test_a_sound_mapping_is_not(writing, caplog):
    it, folder = writing
    for mode in ("extend", "decode", "target_verify"):
        it.forward(mode)
    assert not [reading.read(p) for p in folder.glob("*.pt")]
    assert not any("doubt" in line for line in caplog.messages)
