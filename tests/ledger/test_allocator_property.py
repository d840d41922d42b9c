"""The real allocators under random operations: no false alarm, and no defect is missed.

With ``--long`` at least 100,500 operations in all, without it 24,000 (``LEAST``), the same in each
run. A defect is what a bug in SGLang would do, once an example; the call that it makes wrong must
not pass.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import effort
import pytest
import releases
import torch
from allocator_model import BYTES, FULL, SWA, Kernel, Model, decode, extend
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from g4debug import plugin
from g4debug.ledger.shadow import FREE
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.early,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
BURST, STEPS = 60, 8  # operations of a burst, rules of an example
# Examples of each case, and of each case and defect; operations with and without an SWA pool.
HEALTHY, BROKEN, LEAST = (
    (38, (5,), {True: 18_500, False: 15_000})
    if effort.long
    else (8, (2, 5), {True: 4_500, False: 3_500})
)
CASES = [(size, swa) for size in (1, 16, 64) for swa in (True, False)]
done: Counter[str] = Counter()
FAR = 10_000_000


def kv_pool(size):
    return releases.swa_pool(FULL * size, SWA * size, size, 1, [0], [1])


class Machine(RuleBasedStateMachine):
    """Bursts of operations; at most one defect, which must be found at once."""

    size = 16
    pool = None
    inject = None  # the defect, None for a healthy run

    def __init__(self):
        super().__init__()
        self.ledger = plugin.in_force.ledger
        self.ledger.pools.clear()
        self.model = Model(self.size, self.pool)
        self.injected = False

    @rule(data=st.binary(min_size=BURST * BYTES, max_size=BURST * BYTES))
    def burst(self, data):
        self.model.run(data)

    @precondition(lambda self: self.inject and not self.injected)
    @rule(whom=st.integers(0, 255))
    def defect(self, whom):
        expected = self.inject(whom)
        if expected is None:
            return  # there is nothing to break this way
        kind, call = expected
        with pytest.raises(TrapError) as error:
            call()
        assert error.value.finding.kind == kind, error.value.finding
        assert not self.ledger.broken
        done["defects"] += 1
        self.injected = True
        self.model.real.clear()  # the defect is in the free list, or in the mapping
        self.model.forget()

    @invariant()
    def the_ledger_knows(self):
        ledger, model = self.ledger, self.model
        assert not ledger.broken
        assert set(ledger.pools["full"].held.nonzero()[0].tolist()) == set(model.held)
        if model.swa:
            swa = {s for s in model.held.values() if s}
            assert set(ledger.pools["swa"].held.nonzero()[0].tolist()) == swa
            partner = ledger.pools["full"].partner
            assert all(partner[page] in (s, -1) for page, s in model.held.items())
        words = ledger.shadow.tolist()
        assert words.pop() == 1  # sound
        wrong = {page: words[page] for page, s in model.held.items() if words[page] not in (s, 0)}
        assert not wrong
        assert {p for p, word in enumerate(words) if word != FREE} == set(model.held)

    def teardown(self):
        done["operations"] += self.model.operations

    # --- defects: (kind of finding, the call that goes wrong), None where nothing fits ------

    def inner(self, whom):
        return self.model.real.full_attn_allocator if self.model.swa else self.model.real

    def tokens(self, page):
        return torch.arange(page * self.size, (page + 1) * self.size)

    def free_again(self, whom):
        loose = sorted(self.model.ever - set(self.model.held))
        if loose:
            page = loose[whom % len(loose)]
            return "double-free", lambda: self.inner(whom).free(self.tokens(page))
        return None

    def free_twice_at_once(self, whom):
        if self.size == 1 and self.model.held:  # elsewhere, SGLang makes pages unique
            twice = torch.tensor(sorted(self.model.held)[:2] * 2)
            return "double-free", lambda: self.inner(whom).free(twice)
        return None

    def free_never(self, whom):
        never = sorted(set(range(1, FULL + 1)) - self.model.ever)
        if never:
            tokens = self.tokens(never[whom % len(never)])
            return "free-unallocated", lambda: self.inner(whom).free(tokens)
        return None

    def free_far(self, whom):
        tokens = torch.tensor([FAR * self.size + whom])
        return "out-of-range", lambda: self.inner(whom).free(tokens)

    def free_zero(self, whom):
        return "page-zero", lambda: self.model.real.free(self.tokens(0))

    def hand_out(self, kind, page, whom):
        inner = self.inner(whom)
        if self.model.swa and whom % 2:
            inner = self.model.real.swa_attn_allocator
        if self.model.free_pages < 2:
            return None
        inner.free_pages = inner.free_pages.clone()
        inner.free_pages[0] = page
        return kind, lambda: self.model.take([([], 1)], "extend")

    def hand_out_far(self, whom):
        return self.hand_out("out-of-range", FAR, whom)

    def hand_out_zero(self, whom):
        return self.hand_out("page-zero", 0, whom)

    def hand_out_held(self, whom):
        whom = whom // 2 * 2  # of the full pool
        held = sorted(self.model.held)
        if held:
            return self.hand_out("double-alloc", held[whom % len(held)], whom)
        return None

    def map_wrong(self, whom):
        mapped = sorted(p for p, s in self.model.held.items() if s)
        if not mapped or not self.model.swa:
            return None
        page = mapped[whom % len(mapped)]
        wrong = self.model.held[page] % SWA + 1
        tokens = self.tokens(page)
        mapping = self.model.real.full_to_swa_index_mapping
        mapping[tokens] = torch.where(mapping[tokens] > 0, wrong * self.size, 0)
        return "mapping-mismatch", lambda: self.model.real.free_swa(tokens)

    def unmap(self, whom):
        mapped = sorted(p for p, s in self.model.held.items() if s)
        if not mapped or not self.model.swa:
            return None
        tokens = self.tokens(mapped[whom % len(mapped)])
        self.model.real.full_to_swa_index_mapping[tokens] = 0
        return "mapping-mismatch", lambda: self.model.real.free(tokens)

    def go_on_in_free_page(self, whom):
        going = [t for t in self.model.requests if len(t) % self.size]
        if not going or self.size == 1:
            return None
        tokens = going[whom % len(going)]
        last = torch.tensor(tokens[-1:])
        free = self.model.real.free_swa if self.model.swa and whom % 2 else self.model.real.free
        free(last)
        return "use-after-free", lambda: self.model.take([(tokens, 1)], "decode")


ANYWHERE = (
    Machine.free_again, Machine.free_never, Machine.free_far, Machine.free_zero,
    Machine.hand_out_far, Machine.hand_out_zero, Machine.hand_out_held,
)  # fmt: skip


def defects(size, swa):
    """The defects that an allocator can have."""
    tokens = (Machine.free_twice_at_once,) if size == 1 else (Machine.go_on_in_free_page,)
    return (*ANYWHERE, *tokens, *((Machine.map_wrong, Machine.unmap) if swa else ()))


@pytest.fixture
def watched(arm, monkeypatch):
    allocator = releases.paged_module()

    monkeypatch.setattr(allocator, "alloc_extend_kernel", Kernel(extend))
    monkeypatch.setattr(allocator, "alloc_decode_kernel", Kernel(decode))
    arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MAX_DUMPS="0")


def drive(size, pool, inject, examples):
    case = type("Case", (Machine,), {"size": size, "pool": pool, "inject": inject})
    run_state_machine_as_test(
        case,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(("size", "swa"), CASES)
def test_no_false_alarm_and_no_miss(watched, caplog, size, swa):
    caplog.set_level("CRITICAL")
    pool = kv_pool(size) if swa else None
    done.clear()
    drive(size, pool, None, HEALTHY)
    for inject in defects(size, swa):
        before = done["defects"]
        for examples in BROKEN:
            if done["defects"] == before:  # so far there was nothing to break this way
                drive(size, pool, inject, examples)
        assert done["defects"] > before, f"{inject.__name__} was never there to be found"
    assert done["operations"] >= LEAST[swa]


def test_the_stand_ins_do_what_the_kernels_do(sglang):
    allocator = releases.paged_module()

    generator = torch.Generator().manual_seed(11)
    for size in (16, 64):
        prefix = torch.tensor([0, 5, size, 3 * size - 1, 2 * size, 1])
        lengths = prefix + torch.randint(1, 3 * size, prefix.shape, generator=generator)
        last = torch.where(prefix > 0, 7 * size + (prefix - 1) % size, -1)
        free = torch.randperm(60, generator=generator)
        total = int((lengths - prefix).sum())
        real, ours = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
        allocator.alloc_extend_kernel[(6,)](prefix, lengths, last, free, real, 8, size)
        Kernel(extend)[(6,)](prefix, lengths, last, free, ours, 8, size)
        assert torch.equal(real, ours)
        real, ours = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        allocator.alloc_decode_kernel[(6,)](prefix + 1, last, free, real, 8, size)
        Kernel(decode)[(6,)](prefix + 1, last, free, ours, 8, size)
        assert torch.equal(real, ours)
