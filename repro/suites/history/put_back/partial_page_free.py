"""Put back: the tokens on the last, partly filled page of a free are freed in a call of their own.

Half of that page's tokens go with the pages before it, and the other half follow. A caller
may do that by the allocator's contract, and HiCache's callers did it in upstream's #27789.
"""

from __future__ import annotations

import functools
from typing import Any

from suites.history.counter import swa_allocator


def install() -> None:
    allocator_class = swa_allocator()
    free_swa = allocator_class.free_swa

    @functools.wraps(free_swa)
    def in_two_calls(allocator: Any, slots: Any) -> None:
        size = allocator.page_size
        last = int((slots // size == slots[-1] // size).sum()) if slots.numel() else 0
        if not 2 <= last < size:
            free_swa(allocator, slots)
            return
        cut = len(slots) - last // 2
        free_swa(allocator, slots[:cut])
        free_swa(allocator, slots[cut:])

    allocator_class.free_swa = in_two_calls
