"""The stress faults: abort, retract, evict, compile. On a real engine, with every tracer silent."""

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


def test_a_grammar_takes_long_in_the_thread_that_compiles_it(arm, caplog):
    import threading
    import time

    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

    threads = []

    class Backend(BaseGrammarBackend):
        grammar_stats = None

        def dispatch_regex(self, key_string):
            threads.append(threading.get_ident())
            return self

    arm(G4DEBUG_FAULTS="slow-grammar=1*on(300)")
    backend, began = Backend(), time.monotonic()
    for _ in range(2):
        future, there = backend.get_cached_or_future_value(("regex", "a+"), False)
        assert not there
        assert future.result() is backend
    assert time.monotonic() - began >= 0.3
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    said = [m for m in caplog.messages if "slow-grammar #" in m]
    assert len(said) == 1
    assert "slow-grammar #1: regex: 300 ms" in said[0]
