"""The truth as of launch, with real streams: the forward is held back while the scheduler goes on.

The forward stream sleeps before its first kernel. Meanwhile the scheduling stream frees the pages
of a request that ended, and gives its row to another. The guard is captured in a CUDA graph.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from releases import Request

from g4debug.ledger import shadow as shadows
from g4debug.sanitizer.forward_snapshots import ForwardSnapshots
from g4debug.sanitizer.snapshot_copy import Copy
from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table.check import Kind, Truth
from g4debug.tracers.page_table.guard import TrapBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
PAGES, COLUMNS, SIZE = 64, 12, 16
# A scheduler of 0.5.18 or later: SGLang's own barrier is right behind the launch.
BARRIER_COMES_EARLY = SimpleNamespace(
    model_worker=SimpleNamespace(), _apply_war_barrier=lambda: None
)
LONG = 50_000_000  # cycles, some 30 ms: the host and the other stream are long done by then


class Server:
    """Two requests of 10 pages, two streams, and a guard in a CUDA graph."""

    def __init__(self, waits: bool = True) -> None:
        self.waits = waits  # the scheduling stream waits for the copy
        self.trap = TrapBuffer(CUDA)
        self.full = torch.arange(1, 21, dtype=torch.int32, device=CUDA).view(2, 10)
        self.req_to_token = torch.zeros(5, COLUMNS * SIZE, dtype=torch.int32, device=CUDA)
        within = torch.arange(SIZE, device=CUDA)
        self.tokens = (self.full[:, :, None] * SIZE + within).view(2, -1).to(torch.int32)
        self.req_to_token[1:3, : 10 * SIZE] = self.tokens
        self.rows = torch.tensor([1, 2], device=CUDA)
        shadow = shadows.new(PAGES, CUDA)
        shadows.mark(shadow, self.tokens.reshape(-1).to(torch.int64), SIZE)
        self.ledger = SimpleNamespace(shadow=shadow, owners=None)
        self.snapshots = ForwardSnapshots()
        self.copy = self.snapshots.copy = Copy(self.req_to_token, SIZE, self.ledger)
        self.table = torch.zeros(2, COLUMNS, dtype=torch.int32, device=CUDA)
        self.out = torch.zeros_like(self.table)
        self.lengths = torch.tensor([160, 155], dtype=torch.int32, device=CUDA)
        self.mailbox = self.trap.new_mailbox()
        self.schedule, self.forward = torch.cuda.Stream(), torch.cuda.Stream()
        self.copy.make(self.rows, 0)
        self.build()
        self.guard()
        torch.cuda.synchronize()
        assert not self.trap.tripped
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.guard()
        torch.cuda.synchronize()

    def build(self) -> None:
        """SGLang's page table, from its live rows."""
        self.table[:, :10] = self.req_to_token[1:3, : 10 * SIZE : SIZE] // SIZE

    def guard(self) -> None:
        truth = Truth(
            self.copy.first_tokens,
            self.rows,
            shadow=self.copy.shadow,
            apart=1,
            step=self.copy.step,
            padding=1,
        )
        page_guard.launch(
            self.table,
            self.out,
            self.lengths,
            None,
            self.trap,
            self.mailbox,
            PAGES,
            SIZE,
            -1,
            truth,
        )

    def launch(self, step: int, spoil: int | None = None) -> None:
        """What ``run_batch`` does."""
        requests = [Request(rid=f"r{row}", req_pool_idx=row) for row in (1, 2)]
        batch = SimpleNamespace(req_pool_indices=self.rows, reqs=requests, forward_iter=step)
        self.snapshots.begin()
        with torch.cuda.stream(self.schedule):
            with torch.cuda.stream(self.forward):
                self.forward.wait_stream(self.schedule)
                self.build()
                torch.cuda._sleep(LONG)
                self.snapshots.take(batch, step)
                if spoil is not None:
                    self.table[1, 4] = spoil
                self.graph.replay()
            if self.waits:
                self.snapshots.returned(BARRIER_COMES_EARLY)

    def goes_on(self) -> None:
        """The scheduler frees the first request's pages, and gives its row to another."""
        with torch.cuda.stream(self.schedule):
            freed = self.tokens[0].to(torch.int64)
            shadows.mark(self.ledger.shadow, freed, SIZE, shadows.FREE)
            self.req_to_token[1].fill_(40 * SIZE)

    def seen(self):
        torch.cuda.synchronize()
        return self.trap.take()


def test_a_forward_that_is_held_back_is_judged_by_what_was_true_at_its_launch():
    server = Server()
    server.launch(1)
    server.goes_on()
    assert server.seen() == []
    assert int(server.req_to_token[1, 0]) == 40 * SIZE  # the scheduler did go on


def test_without_the_wait_it_would_be_accused():
    """That the test above can fail: nothing else keeps the scheduler from going on."""
    server = Server(waits=False)
    server.launch(1)
    server.goes_on()
    assert [left.record.row for left in server.seen()] == [0]


def test_a_wrong_cell_is_found_all_the_same_and_its_row_is_kept():
    server = Server()
    server.launch(7, spoil=5)
    server.goes_on()
    with torch.cuda.stream(server.forward):
        server.table.zero_()  # the next forward builds its own table
    (left,) = server.seen()
    record = left.record
    assert (record.row, record.at, record.value) == (1, 4, 5)
    assert (record.kind, record.expected) == (Kind.MISMATCH, 15)
    assert (record.step, record.request, record.full) == (7, 2, 15)
    assert left.cells[0, :10].tolist() == [11, 12, 13, 14, 5, 16, 17, 18, 19, 20]
    assert left.cells[1, :10].tolist() == list(range(11, 21))


def test_many_forwards_in_flight():
    """Each replay compares with the copy of its own launch, however far the host is ahead."""
    server = Server()
    server.ledger.shadow[1:21] = shadows.HELD
    for step in range(1, 200):
        with torch.cuda.stream(server.schedule):
            moved = torch.roll(server.tokens, step % 10 * SIZE, dims=1)
            server.req_to_token[1:3, : 10 * SIZE] = moved
        requests = SimpleNamespace(req_pool_indices=server.rows, reqs=[], forward_iter=step)
        server.snapshots.begin()
        with torch.cuda.stream(server.schedule):
            with torch.cuda.stream(server.forward):
                server.forward.wait_stream(server.schedule)
                torch.cuda._sleep(20_000)
                server.snapshots.take(requests, step)
                server.build()
                server.graph.replay()
            server.snapshots.returned(BARRIER_COMES_EARLY)
            # SGLang's own barrier: the table is built before the rows change.
            server.schedule.wait_stream(server.forward)
    assert server.seen() == []


CANARY = -77_777


class Guarded:
    """A copy whose ``first_tokens`` lie between canary words, as other memory lies on a server."""

    ROWS, TOKENS, SIZE, AROUND = 6, 5000, 4, 40_000  # more columns than one block has

    def __init__(self) -> None:
        table = torch.randint(0, 10**6, (self.ROWS, self.TOKENS), dtype=torch.int32, device=CUDA)
        shadow = torch.randint(0, 900, (3000,), dtype=torch.int32, device=CUDA)
        self.copy = Copy(table, self.SIZE, SimpleNamespace(shadow=shadow, owners=None))
        self.columns = self.copy.first_tokens.shape[1]
        cells = self.ROWS * self.columns
        self.memory = torch.full((cells + 2 * self.AROUND,), CANARY, dtype=torch.int32, device=CUDA)
        inside = self.memory[self.AROUND : self.AROUND + cells]
        self.copy.first_tokens = inside.view(self.ROWS, self.columns)

    def holds(self, rows: list[int], step: int) -> None:
        """The rows that are there are copied, and nothing else was written."""
        torch.cuda.synchronize()
        expected = torch.full_like(self.memory, CANARY)
        at = expected[self.AROUND : -self.AROUND].view(self.ROWS, self.columns)
        for row in rows:
            if 0 <= row < self.ROWS:
                at[row] = self.copy.source[row, :: self.SIZE]
        assert torch.equal(self.memory, expected)
        assert int(self.copy.step) == step
        assert torch.equal(self.copy.shadow, self.copy.ledger.shadow)


WRONG_ROWS = [
    [-1, 2],
    [Guarded.ROWS, 0, 1],
    [3, Guarded.ROWS + 20, -20, 5],
    [-(2**31), 2**31 - 1],
    [0, 0, 4, -1, 4],
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", WRONG_ROWS, ids=str)
def test_a_row_that_is_not_there_writes_to_no_other_memory(rows, dtype):
    guarded = Guarded()
    guarded.copy.make(torch.tensor(rows, dtype=dtype, device=CUDA), 7)
    guarded.holds(rows, 7)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_row_that_is_not_there_in_the_replay_of_a_cuda_graph(dtype):
    guarded = Guarded()
    rows = torch.tensor([1, 2, 3, 4, 5], dtype=dtype, device=CUDA)
    guarded.copy.make(rows, 7)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        guarded.copy.make(rows, 7)
    for wrong in WRONG_ROWS:
        guarded.memory.fill_(CANARY)
        wrong = (wrong * 5)[:5]
        rows.copy_(torch.tensor(wrong, dtype=dtype))
        graph.replay()
        guarded.holds(wrong, 7)
