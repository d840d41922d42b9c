"""kv-integrity's lane with real streams: a forward is held back while the scheduler goes on.

The forward stream sleeps before the forward's write. Meanwhile the scheduling stream frees the page
of a request that ended, and hands it out again. With the lane the stamp lies behind the write; on
the scheduling stream it would lie in front of it, and the healthy server would be accused.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.tracers.kv_integrity.kv_pages import KvPages
from g4debug.tracers.kv_integrity.lane import Lane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
PAGES, SIZE, HEADS, DIM = 32, 64, 2, 64
LONG = 50_000_000  # cycles, some 30 ms: the host and the other stream are long done by then


class Server:
    """One KV pool, two streams, and a lane that follows the forward stream or does not."""

    def __init__(self, follows: bool = True) -> None:
        pool = SimpleNamespace(dtype=torch.bfloat16)
        shape = (PAGES * SIZE, HEADS, DIM)
        for name in ("k_buffer", "v_buffer"):
            setattr(pool, name, [torch.zeros(shape, dtype=pool.dtype, device=CUDA)])
        self.pool, self.kv = pool, KvPages(pool, PAGES, SIZE)
        self.schedule, self.forward = torch.cuda.Stream(), torch.cuda.Stream()
        self.lane = Lane(Ledger(Recorder(8)))
        if follows:
            self.lane.follow(self.forward)
        self.seen: list[list[int]] = []
        self.numbers = torch.arange(PAGES, device=CUDA)
        torch.cuda.synchronize()

    def pages(self, number: int) -> torch.Tensor:
        """A view: making a tensor of it would let the host wait for the current stream."""
        return self.numbers[number : number + 1]

    def launch(self, number: int, page: int, slot: int, held_back: int = 0) -> None:
        """A forward writes one token's KV."""
        with torch.cuda.stream(self.forward):
            self.forward.wait_stream(self.schedule)
            if held_back:
                torch.cuda._sleep(held_back)
            for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
                buffer[page * SIZE + slot].normal_()
        self.lane.last_forward = number

    def stamp(self, page: int) -> None:
        self.lane.queue(lambda: self.kv.stamp(self.pages(page)))

    def come(self, page: int) -> None:
        """The page is handed out: on the scheduling stream its index is known, and no more."""
        pages = self.pages(page)

        def work() -> torch.Tensor:
            codes = self.kv.written(pages)
            self.kv.unstamp(pages)
            return codes

        self.lane.queue(work, lambda codes: self.seen.append(codes[0].tolist()), reads=(pages,))

    def settle(self) -> None:
        torch.cuda.synchronize()
        self.lane.settle(wait=True)
        self.lane.ledger.settle(wait=True)


def a_request_that_ended(server: Server) -> None:
    with torch.cuda.stream(server.schedule):
        server.launch(1, page=3, slot=0)
        server.launch(2, page=3, slot=1, held_back=LONG)  # the request ended in forward 1
        server.stamp(3)
        server.come(3)
        server.launch(3, page=3, slot=0)
    server.settle()


def test_a_forward_that_is_held_back_is_not_a_write_after_free() -> None:
    server = Server()
    a_request_that_ended(server)
    assert server.seen == [[0]]


def test_on_the_scheduling_stream_the_next_holder_would_be_stamped_or_accused() -> None:
    """That the test above can fail: there the stamp is written before the forward's KV."""
    server = Server(follows=False)
    with torch.cuda.stream(server.schedule):
        server.launch(2, page=3, slot=1, held_back=LONG)
        server.stamp(3)
        server.schedule.wait_stream(server.forward)
        server.come(3)
    server.settle()
    assert server.seen != [[0]]


def test_a_write_behind_the_stamp_is_found() -> None:
    server = Server()
    with torch.cuda.stream(server.schedule):
        server.launch(1, page=3, slot=0, held_back=LONG)
        server.stamp(3)
        server.launch(2, page=3, slot=9)  # through a stale table
        server.come(3)
    server.settle()
    assert server.seen == [[1 + 9]]


def test_the_host_fetches_what_lies_behind_a_forward_without_the_next_one() -> None:
    server = Server()
    with torch.cuda.stream(server.schedule):
        server.launch(1, page=3, slot=0)
        server.lane.queue(lambda: server.kv.seal(server.pages(3)))
        server.lane.queue(
            lambda: server.kv.changed(server.pages(3)), lambda c: server.seen.append(c[0].tolist())
        )
        server.launch(2, page=4, slot=0, held_back=10 * LONG)
        done = torch.cuda.Event()
        done.record(server.forward)
        server.lane.settle(forward=1)
    assert server.seen == [[0]]
    assert not done.query()  # the second forward still runs
    torch.cuda.synchronize()


def test_many_forwards_and_frees_in_flight() -> None:
    """Pages change hands again and again while the host is far ahead."""
    server = Server()
    for number in range(1, 300):
        page = 1 + number % 5
        with torch.cuda.stream(server.schedule):
            server.come(page)
            server.launch(number, page, number % SIZE, held_back=20_000)
            server.launch(number, page, (number + 1) % SIZE)  # once more, for a request that ended
            server.stamp(page)
    server.settle()
    assert len(server.seen) == 299
    assert not any(code for codes in server.seen for code in codes)
