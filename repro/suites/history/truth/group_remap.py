"""Counts the full positions that lose their new SWA positions at the end of a free group.

The situation: in a free group, full positions give their SWA half back, and later in the same group
they are mapped to new SWA positions. The upstream fix (#36381; 0.5.21,
``SWATokenToKVPoolAllocator.free_swa``) looks up the SWA positions when ``free_swa`` is called.
Without the fix they are looked up at the end of the group: the new positions are freed, the mapping
becomes 0, and the old positions are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around, swa_allocator


def install(counter: Counter) -> None:
    allocator_class = swa_allocator()
    group: list[bool] = []  # one entry while a group is open
    given: set[int] = set()  # full positions that gave their SWA half back in this group
    remapped: dict[int, int] = {}  # full position -> its new SWA position

    @around(allocator_class, "free_group_begin")
    def begin(_allocator: Any) -> None:
        group[:] = [True]
        given.clear()
        remapped.clear()

    @around(allocator_class, "free_swa")
    def free_swa(_allocator: Any, positions: Any, *_: Any, **__: Any) -> None:
        if group:
            found = positions.tolist()
            given.update(found)
            for position in found:  # it gives the new one back, too, and rightly
                remapped.pop(position, None)

    @around(allocator_class, "set_full_to_swa_mapping")
    def remap(_allocator: Any, full: Any, swa: Any) -> None:
        if group and full.numel():
            found = {
                a: b
                for a, b in zip(full.tolist(), swa.tolist(), strict=True)
                if a in given and b > 0
            }
            if found:
                counter.reached()
                remapped.update(found)

    @around(allocator_class, "free_group_end")
    def end(allocator: Any) -> Callable[[Any], None]:
        group.clear()
        due = dict(remapped)

        def after(_result: Any) -> None:
            mapping = allocator.full_to_swa_index_mapping
            lost = [full for full, swa in due.items() if int(mapping[full]) != swa]
            if lost:
                counter.triggered(f"{len(lost)} full positions from {lost[0]} on map to no SWA one")

        return after

    if hasattr(allocator_class, "free_swa_segment"):
        around(allocator_class, "free_swa_segment")(free_swa)
