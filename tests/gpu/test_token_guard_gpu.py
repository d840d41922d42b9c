"""The guard of token lists on a GPU: its compiled kernel, and in a CUDA graph at replay only."""

from __future__ import annotations

import random

import pytest
import torch
from list_cases import expected, list_case, rows_of

from g4debug.backends.handed_over import TokenLists
from g4debug.ledger import shadow as shadows
from g4debug.sanitizer.trap_buffer import CELLS, TrapBuffer
from g4debug.tracers.page_table import token_check, token_guard
from g4debug.tracers.page_table.check import Kind, Truth
from g4debug.tracers.page_table.token_check import Repair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("repair", list(Repair))
@pytest.mark.parametrize("seed", range(20))
def test_the_compiled_kernel_is_its_reference(seed, repair):
    rng = random.Random(seed)
    case = list_case(rng, rng.randint(1, 6), rng.randint(1, 12), rng.choice((0.0, 0.03, 0.2)))
    bad, words = expected(case)
    mine, trap = case.copy("cuda"), TrapBuffer(CUDA, mailboxes=8)
    trap.keep_cells(3)
    token_guard.launch(mine.lists, trap, 3, case.tokens, case.page_size, mine.truth, repair)
    torch.cuda.synchronize()
    assert int(trap.total) == len(bad) + len(words)
    seen = {*bad, *words}
    for left in trap.take():
        found = tuple(getattr(left.record, f) for f in ("row", "at", "value", "kind", "expected"))
        assert found in seen
        if found in bad:
            tokens, first, begin = rows_of(case)[found[0]]
            origin = found[1] // CELLS * CELLS
            entries = case.lists.indices[begin : begin + tokens - first]
            kept = entries[origin : origin + CELLS].to(torch.int32).tolist()
            assert left.cells[0, : len(kept)].tolist() == kept
    other = case.copy()
    token_check.reference(
        other.lists, TrapBuffer(torch.device("cpu")), 3, case.tokens, case.page_size, other.truth,
        repair,
    )  # fmt: skip
    for name in ("indices", "indptr", "splits", "offsets", "mask_starts"):
        a, b = getattr(mine.lists, name), getattr(other.lists, name)
        assert a is None or torch.equal(a.cpu(), b), name


class Served:
    """Three requests with sound lists, the last of them padding; the guard in a CUDA graph."""

    SIZE, PAGES, LENGTHS = 16, 4096, (30_000, 700, 1)

    def __init__(self, repair: Repair = Repair.ALL) -> None:
        self.trap = TrapBuffer(CUDA)
        pages = torch.randperm(self.PAGES - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.req_to_token = torch.zeros(5, 32_768, dtype=torch.int32)
        lists, ends, at = [], [0], 0
        for row, n in enumerate(self.LENGTHS, 1):
            count = -(-n // self.SIZE)
            own = pages[at : at + count, None] * self.SIZE + torch.arange(self.SIZE)
            at += count
            self.req_to_token[row, : own.numel()] = own.flatten().to(torch.int32)
            lists.append(own.flatten()[:n])
            ends.append(ends[-1] + n)
        self.req_to_token = self.req_to_token.to(CUDA)
        held = torch.cat(lists).to(CUDA)
        self.shadow = shadows.new(self.PAGES, CUDA)
        shadows.mark(self.shadow, held, self.SIZE, value=shadows.HELD)
        self.lists = TokenLists(
            indices=torch.cat([*lists, torch.full((5000,), 10**8)]).to(CUDA),
            indptr=torch.tensor(ends, dtype=torch.int32, device=CUDA),
            lengths=torch.tensor(self.LENGTHS, device=CUDA),
        )
        self.truth = Truth(
            self.req_to_token, torch.tensor([1, 2, 3], device=CUDA), False, self.shadow, padding=1
        )
        self.mailbox, self.repair = self.trap.new_mailbox(), repair
        self.trap.keep_cells(self.mailbox)
        self.guard()
        torch.cuda.synchronize()
        assert not self.trap.tripped
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.guard()
        torch.cuda.synchronize()

    def guard(self) -> None:
        token_guard.launch(
            self.lists, self.trap, self.mailbox, self.PAGES * self.SIZE, self.SIZE, self.truth,
            self.repair,
        )  # fmt: skip

    def replay(self):
        self.graph.replay()
        torch.cuda.synchronize()
        return [left.record for left in self.trap.take()]


def test_a_sound_list_stays_as_it_is():
    served = Served()
    before = served.lists.indices.clone()
    for _ in range(100):
        assert served.replay() == []
    assert torch.equal(served.lists.indices, before)


@pytest.mark.parametrize("at", [0, 511, 512, 20_000, 29_999, 30_000, 30_699])
@pytest.mark.parametrize(
    ("value", "kind"), [(-1, Kind.NEGATIVE), (10**8, Kind.RANGE), (3, Kind.ZERO)]
)
def test_a_bad_entry_that_appears_only_at_replay_is_named_and_repaired(at, value, kind):
    served = Served()
    right = int(served.lists.indices[at])
    served.lists.indices[at] = value
    (found,) = served.replay()
    row = 0 if at < 30_000 else 1
    assert (found.row, found.at) == (row, at - 30_000 * row)
    assert (found.value, found.kind, found.expected) == (value, kind, right)
    assert int(served.lists.indices[at]) == right
    assert served.replay() == []


@pytest.mark.parametrize(
    ("value", "after"), [(29_999, 29_999), (30_001, 30_001), (10**9, 30_000), (-5, 30_000)]
)
def test_watch_changes_an_indptr_only_where_it_leads_outside_and_until_it_only_reports(
    value, after
):
    served = Served(Repair.RANGES)
    served.lists.indptr[1] = value
    (found,) = served.replay()
    assert (found.kind, found.value, found.expected) == (Kind.INDPTR, value, 30_000)
    assert served.lists.indptr.tolist() == [0, after, 30_700, 30_701]
    served.lists.indptr[1], served.lists.indices[7] = value, 10**8
    served.trap.report_only()
    assert served.replay()
    assert served.lists.indptr.tolist() == [0, value, 30_700, 30_701]
    assert int(served.lists.indices[7]) == 10**8


@pytest.mark.parametrize("value", [29_999, 30_001, 10**9, -5])
def test_a_broken_indptr_is_named_and_repaired(value):
    served = Served(Repair.UNSAFE)
    served.lists.indptr[1] = value
    (found,) = served.replay()
    assert (found.kind, found.value, found.expected) == (Kind.INDPTR, value, 30_000)
    assert served.lists.indptr.tolist() == [0, 30_000, 30_700, 30_701]


def test_a_freed_page_is_named_in_the_next_replay():
    served = Served()
    token = int(served.lists.indices[1600])
    shadows.mark(served.shadow, torch.tensor([token], device=CUDA), served.SIZE, value=shadows.FREE)
    (found,) = served.replay()
    assert (found.kind, found.row) == (Kind.FREED, 0)
    assert found.at // served.SIZE == 100
