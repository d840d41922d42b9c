"""SGLang's allocators driven by random bytes, beside a plain model of the right results.

The model is dicts and sets, written from what SGLang's callers do, and knows nothing of the page
ledger. Real are the allocators, their KV pool, the hooks, the ledger and the tracer; the two
Triton kernels that fill in indices are stand-ins (`Kernel`), checked against the real ones in
test_allocator_property.py: interpreted, they take milliseconds a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import releases
import torch
from releases import allocator_class

FULL, SWA = 40, 28  # pages
LONGEST = 4  # pages of one request at first
BYTES = 3  # of one operation


class Kernel:
    """Stands for a Triton kernel: ``kernel[grid](*args)`` calls a function on numpy arrays."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any) -> None:
            self.function(*(a.numpy() if isinstance(a, torch.Tensor) else a for a in args))

        return call


def extend(prefix, lengths, last, free, out, _, size) -> None:
    """``alloc_extend_kernel``: the rest of the last page, then new ones."""
    at = taken = 0
    for begin, end, loc in zip(prefix.tolist(), lengths.tolist(), last.tolist(), strict=True):
        first = min(-(-begin // size) * size, end)
        out[at : at + first - begin] = loc + 1 + np.arange(first - begin)
        at += first - begin
        for position in range(first, end, size):
            count = min(size, end - position)
            if taken < len(free):
                out[at : at + count] = free[taken] * size + np.arange(count)
            at, taken = at + count, taken + 1


def decode(lengths, last, free, out, _, size) -> None:
    """``alloc_decode_kernel``: one more token for each row."""
    taken = 0
    for row, (end, loc) in enumerate(zip(lengths.tolist(), last.tolist(), strict=True)):
        if (end - 1) % size:
            out[row] = loc + 1
        else:
            out[row] = free[taken] * size if taken < len(free) else 0
            taken += 1


class Model:
    """One allocator, its requests, and where every page must be."""

    def __init__(self, page_size: int, kv_pool: Any) -> None:
        """``kv_pool``: a SWAKVPool for the SWA allocator, None for the plain one."""
        self.size = page_size
        self.swa = kv_pool is not None
        full, dtype = FULL * page_size, torch.float32
        if self.swa:
            self.real: Any = allocator_class("swa.init")(
                full, SWA * page_size, page_size, dtype, "cpu", kv_pool, False
            )
        elif page_size == 1:
            self.real = allocator_class("pool.init.token")(full, dtype, "cpu", None, False)
        else:
            self.real = allocator_class("pool.init")(full, page_size, dtype, "cpu", None, False)
        self.ever: set[int] = set()  # full pages that were handed out once
        self.operations = 0  # that did something
        self.forget()

    def forget(self) -> None:
        self.requests: list[list[int]] = []  # each one's full-pool tokens
        self.held: dict[int, int] = {}  # full page -> its SWA page, 0 for none

    @property
    def free_pages(self) -> int:
        full = FULL - len(self.held)
        return min(full, SWA - sum(1 for s in self.held.values() if s)) if self.swa else full

    def pages(self, tokens: list[int]) -> list[int]:
        return sorted({t // self.size for t in tokens})

    def run(self, data: bytes) -> None:
        """Operations from bytes: which, on whom, how much."""
        for at in range(0, len(data) - BYTES + 1, BYTES):
            what, whom, much = data[at : at + BYTES]
            # Those with nobody to work on do nothing, and do not count.
            self.operations += bool(OPERATIONS[what % len(OPERATIONS)](self, whom, much))

    # --- what SGLang's callers do ----------------------------------------------------------

    def take(self, rows: list[tuple[list[int], int]], how: str) -> bool:
        """(tokens so far, tokens more) of each row. False if there was no room."""
        need = sum(-(-(len(t) + n) // self.size) - -(-len(t) // self.size) for t, n in rows)
        room = need <= self.free_pages
        if self.size == 1:
            out = self.real.alloc(sum(n for _, n in rows))
        elif not room and how == "decode":
            return False  # SGLang's scheduler retracts before it asks; each pool would answer
        else:
            prefix = torch.tensor([len(t) for t, _ in rows])
            lengths = torch.tensor([len(t) + n for t, n in rows])
            last = torch.tensor([t[-1] if t else -1 for t, _ in rows])
            total = int((lengths - prefix).sum())
            out = (
                self.real.alloc_decode(lengths, lengths, last)
                if how == "decode"
                else self.real.alloc_extend(prefix, prefix, lengths, lengths, last, total)
            )
        assert (out is None) == (not room)
        if out is None:
            return False
        found, at = out.tolist(), 0
        for tokens, n in rows:
            tokens += found[at : at + n]
            at += n
            for page in self.pages(tokens[-n:]):
                assert 0 < page <= FULL
                if page not in self.held:
                    self.ever.add(page)
                    self.held[page] = self.mapped(page) if self.swa else 0
                    assert not self.swa or 0 < self.held[page] <= SWA
        swa = [s for s in self.held.values() if s]
        assert len(swa) == len(set(swa))
        return True

    def mapped(self, page: int) -> int:
        return int(self.real.full_to_swa_index_mapping[page * self.size]) // self.size

    def give(self, tokens: list[int]) -> None:
        if tokens:
            self.free(tokens)
            for page in self.pages(tokens):
                del self.held[page]

    def free(self, tokens: list[int]) -> None:
        """From 0.5.23 on a caller says which of its tokens have no SWA page any more."""
        if not hasattr(self.real, "free_full"):
            self.real.free(torch.tensor(tokens))
            return
        for free, with_swa in ((self.real.free_full, False), (self.real.free, True)):
            theirs = [t for t in tokens if bool(self.held[t // self.size]) == with_swa]
            if theirs:
                free(torch.tensor(theirs))

    def nothing(self, whom: int, much: int) -> bool:
        """The last bytes that shrinking leaves."""
        self.real.free(torch.empty(0, dtype=torch.int64))
        return False

    def come(self, whom: int, much: int) -> bool:
        rows = [([], 1 + (much * 7 + i * 31) % (LONGEST * self.size)) for i in range(1 + whom % 3)]
        if self.take(rows, "extend"):
            self.requests += [tokens for tokens, _ in rows]
        return True

    def grow(self, whom: int, much: int) -> bool:
        if not self.requests:
            return False
        tokens = self.requests[whom % len(self.requests)]
        self.take([(tokens, 1 + much % (2 * self.size))], "extend")
        return True

    def decode(self, whom: int, much: int) -> bool:
        if not self.requests:
            return False
        first = whom % len(self.requests)
        rows = [(tokens, 1) for tokens in self.requests[first : first + 1 + much % 8]]
        return self.take(rows, "decode")

    def verify(self, whom: int, much: int) -> bool:
        """Room for four tokens; of those that are not accepted, whole pages go back."""
        if not self.requests:
            return False
        tokens = self.requests[whom % len(self.requests)]
        before = len(tokens)
        if self.take([(tokens, 4)], "extend"):
            accepted = before + 1 + much % 4
            keep = -(-accepted // self.size) * self.size
            self.give(tokens[keep:])
            del tokens[accepted:]
        return True

    def leave(self, whom: int, much: int) -> bool:
        if not self.requests:
            return False
        self.give(self.requests.pop(whom % len(self.requests)))
        return True

    def leave_together(self, whom: int, much: int) -> bool:
        """A free group: everything goes at its end, in one free."""
        leaving = [self.requests.pop() for _ in range(min(1 + much % 3, len(self.requests)))]
        self.real.free_group_begin()
        for tokens in leaving:
            self.free(tokens)
        self.real.free_group_end()
        for tokens in leaving:
            for page in self.pages(tokens):
                del self.held[page]
        return bool(leaving)

    def evict(self, whom: int, much: int) -> bool:
        """SWA pages of a sequence's front; never the page that it goes on in."""
        if not self.requests or not self.swa:
            return False
        tokens = self.requests[whom % len(self.requests)]
        if hasattr(self.real, "free_full"):  # see free(): not those that were given back before
            tokens = [t for t in tokens if self.held[t // self.size]]
        pages = (len(tokens) - 1) // self.size
        front = tokens[: much % (pages + 1) * self.size]
        self.real.free_swa(torch.tensor(front, dtype=torch.int64))
        for page in self.pages(front):
            self.held[page] = 0
        return bool(front)

    def undo(self, whom: int, much: int) -> bool:
        """What a draft tree takes is given back by going back to the saved state.

        Only the workers of v1 do so. Their mapping keeps what was taken back, and the allocator of
        later releases would free that together with the page. There, requests come and are aborted.
        """
        if not releases.has_v1_worker():
            before = len(self.requests)
            self.come(whom, much)
            for tokens in self.requests[before:]:
                self.give(tokens)
            del self.requests[before:]
            return True
        state = self.real.backup_state()
        held, requests = dict(self.held), [list(t) for t in self.requests]
        self.come(whom, much)
        self.grow(whom, much)
        self.real.restore_state(state)
        self.held, self.requests = held, requests
        return True

    def clear(self, whom: int, much: int) -> bool:
        if much < 200:
            return False
        self.real.clear()
        self.forget()
        return True


OPERATIONS = (
    Model.nothing, Model.come, Model.come, Model.grow, Model.decode, Model.decode, Model.decode,
    Model.verify, Model.verify, Model.leave, Model.leave, Model.leave_together, Model.evict,
    Model.evict, Model.undo, Model.clear,
)  # fmt: skip
