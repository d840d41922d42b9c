"""The words beside lists of tokens for ``Repair.RANGES``, in the guard's kernel.

One program looks at the words of all rows: whether a word of ``kv_indptr`` may stay depends on its
neighbours, which must not change meanwhile. The rules are in
:mod:`g4debug.tracers.page_table.token_ranges`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words_in_range(
    indices,
    indptr,
    lengths,
    splits,
    offsets,
    mask_starts,
    corrects,
    size,
    tokens,
    window,
    extra,
    rows,
    max_splits,
    mask_size,
    queries,
    HAS_SPLITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
    INDPTR: tl.constexpr,
    SPLITS: tl.constexpr,
    OFFSET: tl.constexpr,
    MASK: tl.constexpr,
):
    """(wrong words, row of the first, tokens of that row, which word, its value, kind, right)."""
    row = tl.arange(0, ROWS).to(tl.int64)
    there = row < rows
    n = tl.maximum(tl.load(lengths + row, mask=there, other=0).to(tl.int64) + extra, 0)
    n = tl.where(there, n, 0)
    listed = n
    if window >= 0:
        listed = tl.minimum(n, window)
    first = n - listed
    ends = tl.cumsum(listed, axis=0)
    begins = ends - listed
    left = tl.load(indptr + row, mask=there, other=0).to(tl.int64)
    right = tl.load(indptr + row + 1, mask=there, other=0).to(tl.int64)
    part = left * 0 + 1
    if HAS_SPLITS:
        part = tl.load(splits + row, mask=there, other=1).to(tl.int64)
    offset = left * 0
    if HAS_OFFSETS:
        offset = tl.load(offsets + row, mask=there, other=0).to(tl.int64)
    mask_left = left * 0
    if HAS_MASK:
        mask_left = tl.load(mask_starts + row, mask=there, other=0).to(tl.int64)
    tl.debug_barrier()  # each thread has its words before another one changes them
    change = tl.load(corrects) != 0

    # The word with the smallest row is told, and of these the last one here.
    told, at, got, belongs, wrong = left * 0, row, left * 0, left * 0, left * 0
    if HAS_MASK:
        needs = tl.where(there, queries * (n + queries), 0)
        mask_right = tl.cumsum(needs, axis=0) - needs
        bad = there & ((mask_left != mask_right) | (mask_right + needs > mask_size))
        told, got = tl.where(bad, MASK, told), tl.where(bad, mask_left, got)
        belongs, wrong = tl.where(bad, mask_right, belongs), wrong + bad.to(tl.int64)
    if HAS_OFFSETS:
        bad = there & (offset != first)
        told, got = tl.where(bad, OFFSET, told), tl.where(bad, offset, got)
        belongs, wrong = tl.where(bad, first, belongs), wrong + bad.to(tl.int64)
    if HAS_SPLITS:
        bad = there & (n > 0) & ((part < 1) | (part > max_splits))
        told, got = tl.where(bad, SPLITS, told), tl.where(bad, part, got)
        belongs, wrong = tl.where(bad, max_splits, belongs), wrong + bad.to(tl.int64)
    bad = there & (right != ends)
    told, at = tl.where(bad, INDPTR, told), tl.where(bad, row + 1, at)
    got, belongs, wrong = (
        tl.where(bad, right, got),
        tl.where(bad, ends, belongs),
        wrong + bad.to(tl.int64),
    )
    bad = there & (row == 0) & (left != 0)
    told, at = tl.where(bad, INDPTR, told), tl.where(bad, row, at)
    got, belongs, wrong = (
        tl.where(bad, left, got),
        tl.where(bad, 0, belongs),
        wrong + bad.to(tl.int64),
    )
    bad = there & (ends > size)
    told, at = tl.where(bad, SHORT, told), tl.where(bad, size, at)
    got, belongs, wrong = (
        tl.where(bad, ends, got),
        tl.where(bad, -1, belongs),
        wrong + bad.to(tl.int64),
    )

    broken = there & ((left < 0) | (right < left) | (right > size))
    leaves = tl.sum(broken.to(tl.int32), axis=0) > 0
    safe = tl.minimum(ends, size)
    if leaves & change:
        tl.store(indptr + row + 1, safe, mask=there & (right != safe))
        tl.store(indptr + row, left * 0, mask=(row == 0) & there & (left != 0))
    read = tl.where(leaves, safe - tl.minimum(begins, size), right - left)
    if HAS_MASK:
        begin = left * 0
        if HAS_OFFSETS:
            begin = first
        out = (mask_left < 0) | (offset < 0) | (offset > mask_size)
        out |= mask_left > mask_size - queries * (offset + read + queries)
        out &= there
        fits = mask_right <= mask_size - queries * (begin + read + queries)
        if change:
            tl.store(mask_starts + row, tl.where(fits, mask_right, 0), mask=out)
            if HAS_OFFSETS:
                tl.store(offsets + row, first, mask=out)
    begin = tl.max(ends, axis=0)
    end = tl.max(tl.where(row == rows - 1, right, 0), axis=0)
    if leaves:
        end = begin
    if change:  # what is read behind the entries that the guard looks at
        for start in range(begin, end, BLOCK):
            entry = start + tl.arange(0, BLOCK).to(tl.int64)
            value = tl.load(indices + entry, mask=entry < end, other=0).to(tl.int64)
            outside = (value < 0) | (value >= tokens)
            tl.store(indices + entry, value * 0, mask=(entry < end) & outside)

    which = tl.min(tl.where(wrong > 0, row, ROWS), axis=0)
    here = row == which
    return (
        tl.sum(wrong, axis=0),
        which,
        tl.sum(tl.where(here, n, 0), axis=0),
        tl.sum(tl.where(here, at, 0), axis=0),
        tl.sum(tl.where(here, got, 0), axis=0),
        tl.sum(tl.where(here, told, 0), axis=0),
        tl.sum(tl.where(here, belongs, 0), axis=0),
    )
