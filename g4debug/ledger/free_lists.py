"""Whether something that a pool's allocator did was missed, by its own free lists.

SGLang makes a new tensor whenever pages leave a free list or come back to it. So as long as the
lists before an event are those that the event before it left, nothing happened in between that no
hook saw. This is asked when the ledger and SGLang's structures differ: if nothing was missed, it is
not the ledger that is wrong.
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
    """What is known of one allocator's events.

    before: the lists when the call began that runs now, or ran last. gaps: how often they were not
    those that the call before had left. called, entered: events that were seen, and those that are
    in the books.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.forget()

    def forget(self) -> None:
        """The allocator was cleared, so what was missed before does not matter any more."""
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
        """True if an event was missed. What is still on its way to the host counts as missed."""
        whole = _same(lists_of(self._allocator), self._left) and self.called == self.entered
        return self.gaps > 0 or not whole


def _same(one: Lists, other: Lists) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
