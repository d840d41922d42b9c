"""The guard in a CUDA graph, against req_to_token and the shadow: each kind, only at replay."""

from __future__ import annotations

import pytest
import torch

from g4debug.ledger import shadow as shadows
from g4debug.sanitizer.trap_buffer import Record, TrapBuffer
from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table.check import Kind, Truth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


class Books:
    """Two requests of 10 pages with sound tables, a third of padding; guards in one CUDA graph."""

    PAGES, SWA_PAGES, COLUMNS, SIZE = 64, 40, 12, 16

    def __init__(self) -> None:
        self.trap = TrapBuffer(CUDA)
        full = torch.arange(1, 31, dtype=torch.int32, device=CUDA).view(3, 10)
        self.swa_of = (full + 7) % 37 + 1
        self.req_to_token = torch.zeros(5, self.COLUMNS * self.SIZE, dtype=torch.int32, device=CUDA)
        within = torch.arange(self.SIZE, device=CUDA)
        tokens = (full[:, :, None] * self.SIZE + within).view(3, -1).to(torch.int32)
        self.req_to_token[1:4, : 10 * self.SIZE] = tokens
        self.requests = torch.tensor([1, 2, 3], device=CUDA)
        self.shadow = shadows.new(self.PAGES, CUDA)
        self.tokens = tokens.reshape(-1).to(torch.int64)
        swa_tokens = (self.swa_of[:, :, None] * self.SIZE + within).reshape(-1)
        shadows.mark(self.shadow, self.tokens, self.SIZE, swa=swa_tokens)
        self.full = torch.zeros(3, self.COLUMNS, dtype=torch.int32, device=CUDA)
        self.full[:, :10] = full
        self.swa = torch.zeros_like(self.full)
        self.swa[:, :10] = self.swa_of
        self.out_full, self.out_swa = torch.empty_like(self.full), torch.empty_like(self.full)
        self.lengths = torch.tensor([160, 155, 1], dtype=torch.int32, device=CUDA)
        self.mailboxes = self.trap.new_mailbox(), self.trap.new_mailbox()
        self.guard()
        torch.cuda.synchronize()
        assert not self.trap.tripped
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.guard()
        torch.cuda.synchronize()
        assert not self.trap.tripped

    def guard(self) -> None:
        for swa, table, out, mailbox, pages, window in (
            (False, self.full, self.out_full, self.mailboxes[0], self.PAGES, -1),
            (True, self.swa, self.out_swa, self.mailboxes[1], self.SWA_PAGES, 40),
        ):
            truth = Truth(self.req_to_token, self.requests, swa, self.shadow, padding=1)
            page_guard.launch(
                table, out, self.lengths, None, self.trap, mailbox, pages, self.SIZE, window, truth
            )

    def replay(self) -> dict[str, Record]:
        """What each pool's guard saw in one replay."""
        self.graph.replay()
        torch.cuda.synchronize()
        names = dict(zip(self.mailboxes, ("full", "swa"), strict=True))
        return {names[left.mailbox]: left.record for left in self.trap.take()}


@pytest.mark.parametrize(
    ("pool", "value", "kind"),
    [
        ("full", -1, Kind.NEGATIVE),
        ("full", 64, Kind.RANGE),
        ("full", 0, Kind.ZERO),
        ("full", 12, Kind.MISMATCH),  # the other request's
        ("swa", -1, Kind.NEGATIVE),
        ("swa", 40, Kind.RANGE),
        ("swa", 0, Kind.ZERO),
        ("swa", 10, Kind.MISMATCH),  # the request's own full-pool page
    ],
)
def test_a_wrong_cell_that_appears_only_at_replay_is_named_and_repaired(pool, value, kind):
    books = Books()
    assert books.replay() == {}
    table, out = getattr(books, pool), getattr(books, f"out_{pool}")
    right = int(table[0, 9])
    assert right != value
    table[0, 9] = value
    seen = books.replay()
    assert list(seen) == [pool]
    record = seen[pool]
    assert (record.row, record.at, record.value) == (0, 9, value)
    assert (record.kind, record.expected) == (kind, right)
    assert int(out[0, 9]) == right
    table[0, 9] = right
    assert books.replay() == {}


def test_a_page_that_is_freed_between_replays():
    books = Books()
    page = int(books.full[1, 9])
    freed = books.req_to_token[2, 9 * books.SIZE : 10 * books.SIZE].to(torch.int64)
    shadows.mark(books.shadow, freed, books.SIZE, shadows.FREE)
    seen = books.replay()
    assert {name: f.kind for name, f in seen.items()} == {
        "full": Kind.FREED,
        "swa": Kind.FREED,
    }
    assert seen["full"].value == page
    assert int(books.out_full[1, 9]) == int(books.out_swa[1, 9]) == 0


def test_a_swa_page_that_is_evicted_between_replays():
    books = Books()
    for column, seen in ((0, []), (9, ["swa"])):  # behind the window of 40; inside it
        tokens = books.req_to_token[2, column * books.SIZE : (column + 1) * books.SIZE]
        shadows.mark(books.shadow, tokens.to(torch.int64), books.SIZE, shadows.HELD)
        found = books.replay()
        assert list(found) == seen
    assert found["swa"].kind == Kind.EVICTED


def test_a_row_that_outgrows_its_table_between_replays():
    books = Books()
    books.lengths[1] = 13 * books.SIZE
    seen = books.replay()
    assert seen["full"].row == seen["swa"].row == 1
    # Columns 10 and 11 of the row are zero, too: what is told first is the first bad cell's.
    assert {f.kind for f in seen.values()} <= {Kind.SHORT, Kind.ZERO}
    assert seen["full"].bad == 3  # two cells and the row


def test_padding_rows_and_request_0_are_nobodys():
    books = Books()
    books.full[2, 0] = 5  # one token: as long as a graph's padding
    books.requests[1] = 0
    books.full[1, 3] = 6
    assert books.replay() == {}
    books.full[1, 3] = books.PAGES  # out of range is out of range in any row
    assert books.replay()["full"].kind == Kind.RANGE


def test_a_ledger_that_was_given_up_is_not_believed_at_replay():
    books = Books()
    books.shadow[-1] = 0
    books.shadow[int(books.full[0, 9])] = shadows.FREE
    books.swa[0, 9] = 3
    assert books.replay() == {}
    books.full[0, 9] = 3
    assert books.replay()["full"].kind == Kind.MISMATCH


def test_a_launch_with_a_truth_waits_for_nothing():
    books = Books()
    torch.cuda.set_sync_debug_mode("error")
    try:
        books.guard()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("with_swa", [False, True])
def test_marking_is_the_references(with_swa: bool, begins: bool) -> None:
    """One word for each page, whichever of its tokens comes last; with pages to skip."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(-640, 640, (5000,), generator=generator)
    swa = indices // 16 * 7 % 40 * 16 if with_swa else None
    right, got = shadows.new(30, "cpu"), shadows.new(30, CUDA)
    shadows.reference(right, indices, 16, shadows.HELD, swa, begins)
    on_gpu = None if swa is None else swa.to(CUDA)
    shadows.mark(got, indices.to(CUDA), 16, shadows.HELD, on_gpu, begins)
    assert torch.equal(got.cpu(), right)
    assert (right[1:-1] != shadows.FREE).any()
