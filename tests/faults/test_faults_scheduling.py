"""The stress faults: abort, retract, evict. On a real engine, with every tracer silent."""

from __future__ import annotations

import pytest

from g4debug.faults.base import install_all
from g4debug.faults.grammar import GrammarError, parse
from g4debug.hooking.hooks import Hooks


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_an_argument_that_is_no_number(text, sglang):
    with pytest.raises(GrammarError, match="radix-evict"):
        install_all(parse(f"radix-evict=on({text})"), Hooks())


def test_a_retract_is_forced_once_and_only_where_somebody_can_go(arm):
    from types import SimpleNamespace

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    arm(G4DEBUG_FAULTS="forced-retract=1*on")
    batch = ScheduleBatch.__new__(ScheduleBatch)
    batch.reqs = [SimpleNamespace(rid="a")]
    batch.new_tokens_required_next_decode = lambda selected: 0
    batch.tree_cache = None
    batch.spec_algorithm = None
    batch.token_to_kv_pool_allocator = SimpleNamespace(
        available_size=lambda: 0,
        check_decode_capacity=lambda **asked: True,  # 0.5.23 asks this way
    )
    assert batch.check_decode_mem() is True  # alone: SGLang would abort it
    batch.reqs = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    assert batch.check_decode_mem(selected_indices=[0]) is True
    assert batch.check_decode_mem() is False
    assert batch.check_decode_mem() is True
