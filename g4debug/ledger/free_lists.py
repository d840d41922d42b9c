"""Tells from a pool's free lists whether the hooks missed a call of its allocator.

SGLang makes a new tensor whenever pages leave a free list or come back to it. So if each event
finds the same tensors that the last event left, the hooks missed nothing in between. This is asked
when the ledger and SGLang's structures differ: if nothing was missed, the ledger is right.
"""

from __future__ import annotations

from typing import Any

import torch

Lists = tuple[torch.Tensor, ...]


def lists_of(allocator: Any) -> Lists:
    """The free lists of the allocator of one pool, of pages of any order. Does not wait.

    From 0.5.21 on, pages of the paged allocator that wait to be sorted are "staged".
    """
    staged = getattr(allocator, "staged_pages", None) or ()
    found = (allocator.free_pages, getattr(allocator, "release_pages", None), *staged)
    return tuple(pages for pages in found if pages is not None)


class FreeLists:
    """Follows the free lists of one allocator from call to call.

    before: the lists at the beginning of the call that runs now, or ran last. gaps: how often a
    call found other lists than the call before it had left. called: how many events were seen.
    entered: how many events are in the books.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.forget()

    def forget(self) -> None:
        """The allocator was cleared, so events missed before that do not matter any more."""
        self.before = self._left = lists_of(self._allocator)
        self.gaps = self.called = self.entered = 0

    def begins(self) -> None:
        """A call of the allocator begins."""
        self.before = lists_of(self._allocator)

    def ends(self, restored: bool = False) -> None:
        """That call was seen, and has ended. restored: it went back to lists of before."""
        if not restored and not _same(self.before, self._left):
            self.gaps += 1
        self._left = lists_of(self._allocator)

    @property
    def missed(self) -> bool:
        """True if an event was missed. One that is still on its way to the host counts, too."""
        whole = _same(lists_of(self._allocator), self._left) and self.called == self.entered
        return self.gaps > 0 or not whole


def _same(one: Lists, other: Lists) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
