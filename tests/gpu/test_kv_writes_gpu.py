"""kv-writes' kernels compiled and on a GPU: agreement, and CUDA graphs of which a replay is bad.

What a forward writes is written with SGLang's way of writing, ``cache[loc] = k``, so that it shows
where it lands.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from write_cases import SUSPICIONS, Case, expected, random_case

from g4debug.sanitizer.reference_state import Truth
from g4debug.sanitizer.trap_buffer import Record, TrapBuffer
from g4debug.tracers.kv_writes import kernels
from g4debug.tracers.kv_writes.check import Kind, Rows, Stamps, check_writes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
POISON = -77


def on_gpu(thing):
    """A dataclass with its tensors on the device."""
    tensors = {
        f.name: value.to(CUDA)
        for f in dataclasses.fields(thing)
        if isinstance(value := getattr(thing, f.name), torch.Tensor)
    }
    return dataclasses.replace(thing, **tensors)


def agrees(case: Case, repair: bool, trap: TrapBuffer, mailbox: int, stamps: Stamps) -> set[int]:
    bad = expected(case)
    want = check_writes(case.loc, case.slots, case.size, case.rows, case.truth, repair)
    n = case.loc.numel()
    memory = torch.full((n + 2 * kernels.BLOCK,), POISON, dtype=case.loc.dtype, device=CUDA)
    truth = None if case.truth is None else on_gpu(case.truth)
    before = int(trap.total)
    kernels.launch(
        case.loc.to(CUDA), memory[:n], stamps, trap, mailbox, case.size, on_gpu(case.rows), truth,
        repair,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert torch.equal(memory[:n].cpu(), want.safe)
    assert bool((memory[n:] == POISON).all())
    assert int(trap.total) == before + len(bad)
    assert trap.tripped == bool(bad)
    left = trap.take()
    assert any(not x.suspicion for x in left) == any(k not in SUSPICIONS for k in bad.values())
    for x in left:
        i = case.place.index((x.record.row, x.record.at))
        assert (x.record.kind, x.record.value) == (bad[i], int(case.loc[i]))
        assert x.record.expected == int(want.expected[i])
        assert (x.record.full, x.record.twin) == (int(want.full[i]), int(want.twins[i]))
    return set(bad.values())


def test_compiled_kernel_and_reference_agree():
    trap, seen = TrapBuffer(CUDA), set()
    for seed in range(400):
        case = random_case(random.Random(seed))
        stamps = Stamps.new(case.slots, CUDA)
        for _ in range(2):  # the stamps of the first check do not count in the second
            seen |= agrees(case, seed % 2 == 0, trap, 1 + seed % 5, stamps)
    assert seen == {int(k) for k in Kind} - {int(Kind.UNREADABLE)}


class Graph:
    """A captured verify of two requests and a row of padding, which writes into a cache."""

    SIZE, PAGES, COLUMNS, DRAFTS = 16, 40, 8, 4

    def __init__(self) -> None:
        self.trap = TrapBuffer(CUDA)
        self.table = torch.zeros(5, self.COLUMNS * self.SIZE, dtype=torch.int32, device=CUDA)
        pages = torch.arange(1, 1 + 3 * self.COLUMNS, device=CUDA).view(3, -1)
        within = torch.arange(self.SIZE, device=CUDA)
        self.table[1:4] = (pages[:, :, None] * self.SIZE + within).view(3, -1).to(torch.int32)
        self.requests = torch.tensor([1, 2, 3], device=CUDA)
        self.lengths = torch.tensor([50, 33, 1], device=CUDA)  # the last one is padding
        self.loc = torch.zeros(3 * self.DRAFTS, dtype=torch.int64, device=CUDA)
        self.out = torch.empty_like(self.loc)
        self.slots = self.PAGES * self.SIZE
        self.stamps = Stamps.new(self.slots, CUDA)
        self.mailbox = self.trap.new_mailbox()
        self.cache = torch.zeros(self.slots, device=CUDA)
        self.new = torch.arange(1.0, 1 + len(self.loc), device=CUDA)
        self.sound()
        self.forward()
        torch.cuda.synchronize()
        assert not self.trap.tripped
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.forward()
        torch.cuda.synchronize()
        assert not self.trap.tripped

    def sound(self) -> None:
        for row, first in enumerate((50, 33)):
            begin = row * self.DRAFTS
            cells = self.table[row + 1, first : first + self.DRAFTS]
            self.loc[begin : begin + self.DRAFTS] = cells.to(torch.int64)
        self.loc[2 * self.DRAFTS :] = 0

    def forward(self) -> None:
        rows = Rows(3, self.DRAFTS, self.lengths, per_row=self.DRAFTS)
        truth = Truth(self.table, self.requests, padding=1)
        kernels.launch(
            self.loc, self.out, self.stamps, self.trap, self.mailbox, self.SIZE, rows, truth, True
        )
        self.cache[self.out] = self.new

    def replay(self) -> list[Record]:
        self.cache.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        return [left.record for left in self.trap.take()]


def test_sound_replays_are_silent():
    it = Graph()
    for _ in range(1000):
        it.graph.replay()
    torch.cuda.synchronize()
    assert not it.trap.tripped
    assert int(it.stamps.number) == 1 + 1 + 1000  # one eager forward, then the replays


@pytest.mark.parametrize(
    ("index", "value", "kind"),
    [
        (1, -1, Kind.NEGATIVE),
        (1, 10_000_000, Kind.RANGE),
        (5, 40 * 16, Kind.RANGE),
        (2, 0, Kind.ZERO),
        (2, 20 * 16, Kind.MISMATCH),
        (9, 20 * 16, Kind.PADDING),
    ],
)
def test_a_bad_location_only_in_a_replay(index: int, value: int, kind: Kind):
    it = Graph()
    right = int(it.loc[index])
    it.loc[index] = value
    (record,) = it.replay()
    assert record.kind == kind
    assert record.value == value
    assert record.row == index // it.DRAFTS
    written = it.cache.cpu()
    if kind is not Kind.PADDING:
        assert record.expected == right
        assert float(written[right]) == index + 1  # at its own place after all
    if 0 < value < it.slots:
        assert float(written[value]) == 0  # nobody else's KV was overwritten
    it.sound()
    assert it.replay() == []


def test_two_tokens_at_one_place_only_in_a_replay():
    it = Graph()
    it.loc[6] = it.loc[1].clone()
    found = it.replay()
    assert {record.kind for record in found} == {Kind.TWICE}
    assert int(it.trap.total) == 2
    assert float(it.cache[int(it.table[1, 51])]) == 2
    assert float(it.cache[int(it.table[2, 35])]) == 7
    it.sound()
    assert it.replay() == []


def test_a_long_prefill_in_many_programs():
    n, size = 20_000, 16
    loc = torch.randperm(n, device=CUDA) + size
    loc[n - 1] = loc[7].clone()
    starts, counts = torch.tensor([0, 5], device=CUDA), torch.tensor([5, n - 5], device=CUDA)
    firsts = torch.zeros(2, device=CUDA, dtype=torch.int64)
    rows = Rows(2, n - 5, firsts, starts=starts, counts=counts)
    out, trap = torch.empty_like(loc), TrapBuffer(CUDA)
    kernels.launch(loc, out, Stamps.new(n + 64, CUDA), trap, 1, size, rows, None, True)
    torch.cuda.synchronize()
    assert torch.equal(out, loc)  # which of the two is right is not known
    assert int(trap.total) == 2
    record = trap.take()[0].record
    assert record.kind == Kind.TWICE
    assert {record.at + 5, record.twin} == {7, n - 1}
