"""The guard's kernel compiled and on a GPU: agreement, CUDA graphs, and a context that survives."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from guard_cases import LAYOUTS, POISON, Case, expected, lay_out, random_case, truthful

from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.guard import TrapBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HERE = Path(__file__).parent
CUDA = torch.device("cuda")


def run(case: Case, trap: TrapBuffer, mailbox: int) -> torch.Tensor:
    """Launch on a device copy of a case; returns the device's ``out``, poisoned before."""
    on_gpu = case.to("cuda")
    cells = case.table.numel()
    memory = torch.full((cells + 4 * page_guard.BLOCK,), POISON, dtype=torch.int32, device=CUDA)
    out = memory[:cells].view(case.table.shape)
    page_guard.launch(
        on_gpu.table, out, on_gpu.seq_lens, on_gpu.cu_q, trap, mailbox,
        case.pages, case.page_size, case.window, on_gpu.truth,
    )  # fmt: skip
    assert bool((memory[cells:] == POISON).all())  # nothing behind the table is written
    return out


def agrees(case: Case, trap: TrapBuffer, mailbox: int) -> None:
    safe, bad, short = expected(case)
    seen = set(bad) | {(row, case.table.shape[1], n, int(Kind.SHORT), -1) for row, n in short}
    out = run(case, trap, mailbox)
    torch.cuda.synchronize()
    want = torch.full(case.table.shape, POISON, dtype=torch.int32)
    for (row, column), value in safe.items():
        want[row, column] = value
    assert torch.equal(out.cpu(), want)
    assert trap.tripped == bool(seen)
    before = trap.told + trap.merged() - len(seen)
    left = trap.take()
    sure = {cell for cell in seen if cell[3] != Kind.FOREIGN}
    assert int(trap.total) == before + len(seen)
    assert {x.mailbox for x in left} == ({mailbox} if seen else set())
    assert any(not x.suspicion for x in left) == bool(sure)
    for x in left:
        found = tuple(getattr(x.record, f) for f in ("row", "at", "value", "kind", "expected"))
        assert found in (seen - sure if x.suspicion else sure)
        assert x.record.length == int(case.seq_lens[x.record.row])
        assert 0 < x.record.bad <= len(seen)


def test_many_random_tables():
    rng = random.Random(0)
    trap = TrapBuffer(CUDA)
    for _ in range(150):
        rows, columns = rng.randint(0, 24), rng.choice((0, 1, 7, 255, 256, 257, 700))
        bad = rng.choice((0.0, 0.001, 0.3))
        agrees(random_case(rng, rows, columns, bad), trap, trap.new_mailbox())


def test_many_random_tables_with_a_truth():
    rng = random.Random(5)
    trap = TrapBuffer(CUDA)
    for _ in range(150):
        rows, columns = rng.randint(1, 12), rng.choice((1, 7, 40, 256, 300))
        bad = rng.choice((0.01, 0.1))
        agrees(truthful(rng, rows, columns, bad), trap, trap.new_mailbox())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_wider_than_a_block(layout):
    rng = random.Random(1)
    cells = [[rng.randrange(50) for _ in range(1000)] for _ in range(3)]
    for column in (0, 255, 256, 999):
        cells[1][column] = 50
    table = lay_out(torch.tensor(cells, dtype=torch.int32), layout)
    lengths = torch.tensor([4000, 3997, 0])
    trap = TrapBuffer(CUDA)
    for window in (-1, 7, 3000):
        agrees(Case(table, lengths, None, 50, 4, window), trap, trap.new_mailbox())


def test_the_buffer_is_pinned_and_read_without_a_sync():
    trap = TrapBuffer(CUDA)
    assert trap.host.is_pinned()
    assert trap.acks.is_pinned()
    assert trap.claims.is_cuda
    assert trap.total.is_cuda
    torch.cuda.set_sync_debug_mode("error")  # any synchronising call of torch raises
    try:
        table = torch.zeros(2, 3, dtype=torch.int32, device=CUDA)
        lengths = torch.full((2,), 48, dtype=torch.int32, device=CUDA)
        out = torch.empty_like(table)
        page_guard.launch(table, out, lengths, None, trap, trap.new_mailbox(), 10, 16, -1)
        assert trap.tripped is False
        assert trap.take() == []
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Graph:
    """Static buffers and one captured guard for each of two pools, as SGLang has them."""

    def __init__(self) -> None:
        self.trap = TrapBuffer(CUDA)
        self.full = torch.ones(4, 600, dtype=torch.int32, device=CUDA)
        self.swa = torch.ones_like(self.full)
        self.out_full = torch.full_like(self.full, POISON)
        self.out_swa = torch.full_like(self.full, POISON)
        self.lengths = torch.full((4,), 600 * 64, dtype=torch.int32, device=CUDA)
        self.mailboxes = self.trap.new_mailbox(), self.trap.new_mailbox()
        self._guard()  # compiles; must not happen inside the capture
        torch.cuda.synchronize()
        assert not self.trap.tripped
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._guard()
        torch.cuda.synchronize()
        assert not self.trap.tripped  # sound tables at capture

    def _guard(self) -> None:
        for table, out, mailbox, pages, window in (
            (self.full, self.out_full, self.mailboxes[0], 1000, -1),
            (self.swa, self.out_swa, self.mailboxes[1], 100, 511),
        ):
            page_guard.launch(table, out, self.lengths, None, self.trap, mailbox, pages, 64, window)

    def replay(self) -> None:
        self.graph.replay()
        torch.cuda.synchronize()


def test_a_fault_that_exists_only_at_replay():
    g = Graph()
    g.replay()
    assert not g.trap.tripped
    g.full[2, 300] = 10_000_000
    g.replay()
    assert g.trap.tripped
    (left,) = g.trap.take()
    record = left.record
    assert left.mailbox == g.mailboxes[0]
    assert (record.row, record.at, record.value) == (2, 300, 10_000_000)
    assert (record.length, record.bad) == (600 * 64, 1)
    assert int(g.out_full[2, 300]) == 0
    assert int(g.out_full.sum()) == g.full.numel() - 1
    # Read and sound again: armed as before, and nothing sticks to the graph.
    g.full[2, 300] = 1
    g.replay()
    assert not g.trap.tripped
    g.full[1, 599] = -5
    g.replay()
    (left,) = g.trap.take()
    assert (left.number, left.record.value) == (2, -5)


def test_watchs_guard_in_a_graph_replaces_nothing_when_it_may_only_report():
    trap, table = TrapBuffer(CUDA), torch.ones(2, 8, dtype=torch.int32, device=CUDA)
    out, lengths = torch.zeros_like(table), torch.full((2,), 512, dtype=torch.int32, device=CUDA)

    def guard() -> None:
        page_guard.launch(
            table, out, lengths, None, trap, 1, 100, 64, -1, repair=False, switched=True
        )

    guard()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        guard()
    table[1, 3] = 5000
    for replaced in (0, 5000):
        graph.replay()
        torch.cuda.synchronize()
        assert [left.record.value for left in trap.take()] == [5000]
        assert int(out[1, 3]) == replaced
        trap.report_only()


def test_two_sites_of_one_graph_are_told_apart():
    g = Graph()
    g.swa[3, 599] = 100  # the SWA pool's first invalid page, and a good one of the full pool
    g.full[3, 599] = 100
    g.replay()
    (left,) = g.trap.take()
    assert (left.mailbox, left.record.value) == (g.mailboxes[1], 100)
    g.full[0, 0] = 1000
    g.replay()
    assert [(x.mailbox, x.record.value) for x in g.trap.take()] == [
        (g.mailboxes[0], 1000),
        (g.mailboxes[1], 100),
    ]


def test_cells_outside_the_window_and_past_the_end_do_not_trip_at_replay():
    g = Graph()
    g.swa[0, 10] = 5000  # dead: 599 * 64 - 512 is far to the right
    g.lengths[1] = 64
    g.full[1, 1] = 5000  # past the row's only page
    g.replay()
    assert not g.trap.tripped
    assert int(g.out_swa[0, 10]) == 0  # made safe all the same: the kernel may prefetch it


def attend(mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "attend_bad_page.py"), mode],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_without_the_guard_the_bad_page_ends_the_context():
    pytest.importorskip("flashinfer")
    done = attend("bare")
    assert done.returncode != 0, done.stdout
    assert "an illegal memory access was encountered" in done.stderr
    assert "survived" not in done.stdout


@pytest.mark.parametrize("mode", ["guarded", "graph"])
def test_with_the_guards_table_the_context_lives(mode):
    pytest.importorskip("flashinfer")
    done = attend(mode)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tripped row 0 column 31 value 10000000" in done.stdout
    assert "survived; other rows as without the bad page: True" in done.stdout
