"""The hand-over of the guard's records, under stress: real kernels, streams and CUDA graphs.

While two streams launch guards as fast as they can, some of them as replays of a CUDA graph, the
host polls without a pause. Each launch looks at a table of its own, and the bad cells in it name
the launch. So it shows if a record is torn (its words are of two launches), given twice, or lost:
all bad cells are either in a record that was read, or counted as merged.
"""

from __future__ import annotations

import pytest
import torch

from g4debug.sanitizer.trap_buffer import Record, TrapBuffer
from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table.check import Kind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
PAGES, SIZE = 100, 16
ROWS, COLUMNS = 7, 300  # two programs for each row
LAUNCHES = 4000
FIRST = 1_000_000  # bad pages begin here; launch n has FIRST + n * ROWS * 2 and the next ones


def lay(table: torch.Tensor, number: torch.Tensor, bad_rows: int) -> None:
    """On the device: bad cells of launch ``number``, one in each half of the first rows."""
    rows = torch.arange(bad_rows, device=CUDA)
    value = FIRST + number * (ROWS * 2) + rows * 2
    table.fill_(1)
    # The column depends on the launch, too.
    table[rows, (number % 200).expand(bad_rows)] = value.to(torch.int32)
    table[rows, 256 + (number % 40).expand(bad_rows)] = (value + 1).to(torch.int32)


class Stress:
    """A stream that launches guards; each launch has the next number."""

    def __init__(self, trap: TrapBuffer, start: int, bad_rows: int) -> None:
        self.trap, self.mailbox, self.bad_rows = trap, trap.new_mailbox(), bad_rows
        self.stream = torch.cuda.Stream()
        self.number = torch.full((1,), start, dtype=torch.int64, device=CUDA)
        self.table = torch.ones(ROWS, COLUMNS, dtype=torch.int32, device=CUDA)
        self.out = torch.empty_like(self.table)
        self.lengths = torch.full((ROWS,), COLUMNS * SIZE, dtype=torch.int32, device=CUDA)
        self.launches = 0
        torch.cuda.synchronize()  # what was made here is there for the other stream, too
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        lay(self.table, self.number, self.bad_rows)
        # The length of a row tells the launch once more: 16 values, all of the same pages.
        self.lengths.copy_((COLUMNS * SIZE - self.number % SIZE).expand(ROWS))
        page_guard.launch(
            self.table, self.out, self.lengths, None, self.trap, self.mailbox, PAGES, SIZE, -1
        )
        self.number += 1

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.step()

    def launch(self) -> None:
        with torch.cuda.stream(self.stream):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
        self.launches += 1


def check(record: Record) -> tuple[int, int, int]:
    """(launch, row, half) of a record, after a check that its words belong together."""
    number, cell = divmod(record.value - FIRST, ROWS * 2)
    row, half = divmod(cell, 2)
    assert record.row == row, record
    assert record.at == (256 + number % 40 if half else number % 200), record
    assert record.length == COLUMNS * SIZE - number % SIZE, record
    assert record.kind == Kind.RANGE, record
    assert record.expected == -1, record
    assert record.bad == 1, record  # one in each half of a row, which is a program's part
    return number, row, half


@pytest.mark.parametrize("bad_rows", [1, ROWS])
def test_nothing_is_lost_and_nothing_is_torn(bad_rows):
    trap = TrapBuffer(CUDA, mailboxes=8)
    # Compiled and captured before anything trips: all that is launched is then counted.
    warm = Stress(trap, 0, 0)
    warm.launch()
    torch.cuda.synchronize()
    assert not trap.tripped
    far = 10_000_000
    eager, captured = Stress(trap, far, bad_rows), Stress(trap, 2 * far, bad_rows)
    captured.capture()
    torch.cuda.synchronize()
    assert not trap.tripped  # a capture runs nothing
    seen: dict[int, list[tuple[int, int, int]]] = {eager.mailbox: [], captured.mailbox: []}
    polls = 0

    def poll() -> None:
        nonlocal polls
        if trap.tripped:
            polls += 1
            for left in trap.take():
                assert not left.suspicion
                assert left.number == len(seen[left.mailbox]) + 1  # no number is left out
                seen[left.mailbox].append(check(left.record))

    for _ in range(LAUNCHES):
        eager.launch()
        captured.launch()
        poll()
        poll()
    torch.cuda.synchronize()
    poll()
    assert not trap.tripped
    assert not trap.spoilt
    cells = (eager.launches + captured.launches) * bad_rows * 2
    assert int(trap.total) == cells
    told = sum(map(len, seen.values()))
    assert trap.told == told
    assert told + trap.merged() == cells
    for stress in (eager, captured):
        found = seen[stress.mailbox]
        assert len(found) == len(set(found))  # each cell at most once
        first = far if stress is eager else 2 * far
        assert {n for n, _, _ in found} <= set(range(first, first + stress.launches))
        assert [n for n, _, _ in found] == sorted(n for n, _, _ in found)  # as launched
    # The host really read while the device wrote, and more than a handful of times.
    assert polls > 20
    print(f"{cells} bad cells: {told} records read in {polls} polls, {trap.merged()} merged")


def test_the_host_reads_while_the_device_waits_for_nobody():
    """Readers never block writers: with nobody polling, the first record stands and the rest is
    counted, and a single look afterwards finds both."""
    trap = TrapBuffer(CUDA, mailboxes=8)
    stress = Stress(trap, 0, ROWS)
    for _ in range(500):
        stress.launch()
    torch.cuda.synchronize()
    (left,) = trap.take()
    assert check(left.record)[0] == 0
    assert trap.merged() == 500 * ROWS * 2 - 1
    stress.launch()
    torch.cuda.synchronize()
    (left,) = trap.take()
    assert (left.number, check(left.record)[0]) == (2, 500)
