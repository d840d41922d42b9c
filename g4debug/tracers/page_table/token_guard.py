"""The guard of lists of tokens: one kernel, which can be captured into a CUDA graph.

What it checks, and all formulas, are in :mod:`g4debug.tracers.page_table.token_check`, its torch
reference. What it leaves, and how, is as for page tables
(:mod:`g4debug.sanitizer.trap_buffer`). Two things differ:

* It changes SGLang's own tensors, where :class:`Repair` says so. In a decode they are as long as
  the context of all requests together, so that a second list would cost as much memory again. All
  layers of one kind read the same list. An entry, and each word beside the entries, is read and
  written by one program only, so no program sees what another one has changed.
* The record keeps the entries around the bad one always, because the list may be repaired by the
  time that the host looks.

One program looks at every ``parts``-th block of one row's list. A row's list begins where the
lengths say, which each program adds up for itself: the lengths are few.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
import triton
import triton.language as tl

from g4debug import launching
from g4debug.backends.handed_over import TokenLists
from g4debug.sanitizer import trap_buffer
from g4debug.sanitizer.device_library import fence_system
from g4debug.sanitizer.reference_state import arguments
from g4debug.sanitizer.trap_buffer import CELLS, FIELDS, TrapBuffer
from g4debug.tracers.page_table.check import UNKNOWN, Kind, Truth, belongs
from g4debug.tracers.page_table.token_check import ListCheck, check_token_lists

BLOCK = 512
PROGRAMS = 1024  # so many are started at most, if there are fewer rows than that


class Repair(IntEnum):
    """What the guard changes. What cannot be mended at all (MASK) is made harmless."""

    NOTHING = 0
    UNSAFE = 1  # entries and words that would make a kernel read outside of what it may read
    ALL = 2  # all that is wrong, but not what is only suspected


@triton.jit
def _leave(
    row,
    column,
    value,
    length,
    many,
    kind,
    expected,
    step,
    request,
    full,
    claimed,
    mine,
    acked,
    host,
    total,
    FENCE: tl.constexpr,
    N_FIELDS: tl.constexpr = FIELDS,
    AT_SEQ: tl.constexpr = trap_buffer.SEQ,
    AT_ROW: tl.constexpr = trap_buffer.ROW,
    AT_COLUMN: tl.constexpr = trap_buffer.COLUMN,
    AT_VALUE: tl.constexpr = trap_buffer.VALUE,
    AT_SEQ_LEN: tl.constexpr = trap_buffer.SEQ_LEN,
    AT_COUNT: tl.constexpr = trap_buffer.COUNT,
    AT_KIND: tl.constexpr = trap_buffer.KIND,
    AT_EXPECTED: tl.constexpr = trap_buffer.EXPECTED,
    AT_STEP: tl.constexpr = trap_buffer.STEP,
    AT_REQUEST: tl.constexpr = trap_buffer.REQUEST,
    AT_FULL: tl.constexpr = trap_buffer.FULL,
    AT_SUMMARY: tl.constexpr = trap_buffer.SUMMARY,
):
    """Write a record if this program has claimed it, and count what was seen."""
    if claimed:
        at = host + mine * N_FIELDS
        tl.store(at + AT_ROW, row)
        tl.store(at + AT_COLUMN, column)
        tl.store(at + AT_VALUE, value)
        tl.store(at + AT_SEQ_LEN, length)
        tl.store(at + AT_COUNT, many)
        tl.store(at + AT_KIND, kind)
        tl.store(at + AT_EXPECTED, expected)
        tl.store(at + AT_STEP, step)
        tl.store(at + AT_REQUEST, request)
        tl.store(at + AT_FULL, full)
        if FENCE:
            fence_system(many.to(tl.int32))
        tl.store(at + AT_SEQ, acked + 1)
    now = tl.atomic_add(total, many) + many
    if FENCE:
        fence_system(many.to(tl.int32))
    tl.store(host + AT_SUMMARY, now)


@launching.kernel(tensors=17, numbers=17)
def _token_guard_kernel(
    indices,
    indptr,
    lengths,
    splits,
    offsets,
    mask_starts,
    claims,
    total,
    acks,
    host,
    kept,
    req_to_token,
    req_pool_indices,
    book,  # the shadow, or where there is none the full-to-SWA mapping
    owners,
    protected,
    step,
    size,
    tokens,
    page_size,
    window,
    extra,
    rows,
    slot,
    slots,
    requests,
    words,
    apart,
    known,
    padding,
    max_splits,
    mask_size,
    queries,
    stride_request,
    HAS_SPLITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TRUTH: tl.constexpr,
    HAS_SHADOW: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    HAS_STEP: tl.constexpr,
    SWA: tl.constexpr,
    REPAIR: tl.constexpr,
    FENCE: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, >= rows
    # Constants are arguments here: Triton compares each global of a kernel at each launch.
    N_CELLS: tl.constexpr = CELLS,
    BLOCK: tl.constexpr = BLOCK,
    NEGATIVE: tl.constexpr = int(Kind.NEGATIVE),
    RANGE: tl.constexpr = int(Kind.RANGE),
    SHORT: tl.constexpr = int(Kind.SHORT),
    ZERO: tl.constexpr = int(Kind.ZERO),
    MISMATCH: tl.constexpr = int(Kind.MISMATCH),
    FREED: tl.constexpr = int(Kind.FREED),
    EVICTED: tl.constexpr = int(Kind.EVICTED),
    FOREIGN: tl.constexpr = int(Kind.FOREIGN),
    INDPTR: tl.constexpr = int(Kind.INDPTR),
    SPLITS: tl.constexpr = int(Kind.SPLITS),
    OFFSET: tl.constexpr = int(Kind.OFFSET),
    MASK: tl.constexpr = int(Kind.MASK),
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    n = tl.maximum(tl.load(lengths + row).to(tl.int64) + extra, 0)
    listed = n
    if window >= 0:
        listed = tl.minimum(n, window)
    if (part == 0) | (part * BLOCK < listed):
        first = n - listed  # the position of the row's first entry
        every = tl.arange(0, ROWS)
        before = tl.load(lengths + every, mask=every < row, other=0).to(tl.int64)
        before = tl.where(every < row, tl.maximum(before + extra, 0), 0)
        mask_right = tl.sum(tl.where(every < row, queries * (before + queries), 0), axis=0)
        if window >= 0:
            before = tl.minimum(before, window)
        begin = tl.sum(before, axis=0)
        end = begin + listed
        request = n * 0 - 1
        theirs = n < 0
        when = n * 0 - 1
        if HAS_TRUTH:
            request = tl.load(req_pool_indices + row).to(tl.int64)
            theirs = (request > 0) & (request < requests) & (n > padding)
        if HAS_STEP:
            when = tl.load(step)

        if part == 0:
            # The words beside the entries. The one with the smallest number is told.
            told = n * 0
            at_word = n * 0
            got = n * 0
            right_word = n * 0
            wrong = n * 0
            if HAS_MASK:
                needs = queries * (n + queries)
                word = tl.load(mask_starts + row).to(tl.int64)
                bad_word = (word != mask_right) | (mask_right + needs > mask_size)
                if bad_word:
                    told, at_word, got, right_word = n * 0 + MASK, row, word, mask_right
                    wrong += 1
                    if REPAIR > 0:
                        harmless = tl.where(mask_right + needs > mask_size, 0, mask_right)
                        if (REPAIR > 1) | (word < 0) | (word + needs > mask_size):
                            tl.store(mask_starts + row, harmless)
            if HAS_OFFSETS:
                word = tl.load(offsets + row).to(tl.int64)
                if word != first:
                    told, at_word, got, right_word = n * 0 + OFFSET, row, word, first
                    wrong += 1
                    if REPAIR > 0:  # it says where in the mask the row begins
                        tl.store(offsets + row, first)
            if HAS_SPLITS:
                word = tl.load(splits + row).to(tl.int64)
                if (n > 0) & ((word < 1) | (word > max_splits)):
                    told, at_word, got = n * 0 + SPLITS, row, word
                    right_word = n * 0 + max_splits
                    wrong += 1
                    if REPAIR > 0:
                        tl.store(splits + row, tl.where(word < 1, 1, max_splits))
            safe_end = tl.minimum(end, size)
            word = tl.load(indptr + row + 1).to(tl.int64)
            if word != end:
                told, at_word, got, right_word = n * 0 + INDPTR, row + 1, word, end
                wrong += 1
            # Only with all of them right does every row read what this guard has looked at.
            if (REPAIR > 0) & (word != safe_end):
                tl.store(indptr + row + 1, safe_end)
            if row == 0:
                word = tl.load(indptr + row).to(tl.int64)
                if word != 0:
                    told, at_word, got, right_word = n * 0 + INDPTR, row, word, n * 0
                    wrong += 1
                    if REPAIR > 0:
                        tl.store(indptr + row, n * 0)
            if end > size:
                told, at_word, got, right_word = n * 0 + SHORT, n * 0 + size, end, n * 0 - 1
                wrong += 1
            if wrong > 0:
                mine = slot.to(tl.int64)
                each = tl.load(acks + mine + tl.arange(0, BLOCK) * 0, volatile=True)
                acked = tl.max(each, axis=0)
                claimed = tl.atomic_cas(claims + mine, acked, acked + 1) == acked
                _leave(
                    row, at_word, got, n, wrong, told, right_word, when,
                    tl.where(when >= 0, request, -1), n * 0 - 1,
                    claimed, mine, acked, host, total, FENCE,
                )  # fmt: skip

        # A length that is far too long must not keep the GPU busy.
        stop = tl.minimum(listed, tl.maximum(size - begin, 0))
        for start in range(part * BLOCK, stop, tl.num_programs(1) * BLOCK):
            entry = (start + tl.arange(0, BLOCK)).to(tl.int64)
            at = begin + entry
            live = (entry < listed) & (at < size)
            value = tl.load(indices + at, mask=live, other=0).to(tl.int64)
            kind = tl.zeros([BLOCK], tl.int32)
            expected = tl.zeros([BLOCK], tl.int64) - 1
            repaired = tl.zeros([BLOCK], tl.int64)
            full = tl.zeros([BLOCK], tl.int64) - 1
            if HAS_TRUTH:
                position = first + entry
                column = position // page_size
                inner = position - column * page_size
                cell = column * apart
                judged = live & (entry < tl.where(theirs, listed, 0)) & (cell < words)
                token = tl.load(
                    req_to_token + request * stride_request + cell, mask=judged, other=0
                ).to(tl.int64)
                full = tl.where(judged & (token >= 0), token // page_size, -1)
                freed = judged & (entry < 0)
                foreign = judged & (entry < 0)
                word = tl.zeros([BLOCK], tl.int64)
                if HAS_SHADOW:
                    sound = entry < tl.where(tl.load(book + known) == 1, listed, 0)
                    there = judged & (full > 0) & (full < known)
                    word = tl.load(book + full, mask=there, other=0).to(tl.int64)
                    freed = there & sound & (word == -1)
                    if HAS_OWNERS:
                        owner = tl.load(owners + full, mask=there, other=0).to(tl.int64)
                        cached = tl.load(protected + request, mask=theirs, other=0).to(tl.int64)
                        foreign = (
                            there & sound & (owner > 0) & (owner != request)
                            & (column * page_size >= cached)
                        )  # fmt: skip
                    if SWA:
                        judged = judged & sound & (there | (full == 0))
                elif SWA:
                    judged = judged & (token >= 0) & (token < known)
                    mapped = tl.load(book + token, mask=judged, other=0).to(tl.int64)
                    judged = judged & (mapped >= 0)
                    word = mapped // page_size
                page = full
                if SWA:
                    page = tl.where(freed, -1, word)
                right = tl.where(page == -1, -1, page * page_size + inner)
                kind = tl.where(value != right, MISMATCH, kind)
                reserved = (value >= 0) & (value < page_size) & (right != -1)
                kind = tl.where(reserved, ZERO, kind)
                if SWA:
                    kind = tl.where((full > 0) & (word == 0), EVICTED, kind)
                kind = tl.where(freed, FREED, kind)
                kind = tl.where(foreign & (kind == 0), FOREIGN, kind)
                kind = tl.where(judged, kind, 0)
                expected = tl.where(judged & (kind != FOREIGN), right, -1)
                held = judged & (freed == 0) & (page > 0)
                repaired = tl.where(held & (expected >= 0) & (expected < tokens), expected, 0)
                full = tl.where(judged, full, -1)
            outside = (value < 0) | (value >= tokens)
            kind = tl.where(value < 0, NEGATIVE, tl.where(outside, RANGE, kind))
            bad = live & (kind > 0)
            sure = bad & (kind != FOREIGN)
            count = tl.sum(bad.to(tl.int32), axis=0)
            if count > 0:
                if REPAIR > 1:
                    tl.store(indices + at, repaired, mask=sure)
                elif REPAIR > 0:
                    tl.store(indices + at, repaired, mask=sure & outside)
                many = count.to(tl.int64)
                suspicion = tl.sum(sure.to(tl.int32), axis=0) == 0
                mine = slot.to(tl.int64) + tl.where(suspicion, slots, 0)
                each = tl.load(acks + mine + tl.arange(0, BLOCK) * 0, volatile=True)
                acked = tl.max(each, axis=0)
                claimed = tl.atomic_cas(claims + mine, acked, acked + 1) == acked
                chosen = tl.where(suspicion, bad, sure)
                where = tl.min(tl.where(chosen, entry, 2147483647), axis=0)
                here = entry == where
                if claimed:
                    origin = where // N_CELLS * N_CELLS
                    near = live & (entry >= origin) & (entry < origin + N_CELLS)
                    to = kept + mine * (2 * N_CELLS) + (entry - origin)
                    tl.store(to, value.to(tl.int32), mask=near)
                    tl.store(to + N_CELLS, expected.to(tl.int32), mask=near)
                _leave(
                    row,
                    where.to(tl.int64),
                    tl.sum(tl.where(here, value, 0), axis=0),
                    n,
                    many,
                    tl.sum(tl.where(here, kind, 0), axis=0).to(tl.int64),
                    tl.sum(tl.where(here, expected, 0), axis=0),
                    when,
                    tl.where(when >= 0, request, -1),
                    tl.where(when >= 0, tl.sum(tl.where(here, full, 0), axis=0), -1),
                    claimed, mine, acked, host, total, FENCE,
                )  # fmt: skip


_launch = launching.Launcher(_token_guard_kernel, num_warps=4)


def launch(
    lists: TokenLists,
    trap: TrapBuffer,
    slot: int,
    tokens: int,
    page_size: int,
    truth: Truth | None = None,
    repair: Repair = Repair.UNSAFE,
) -> None:
    """Run the guard's kernel on the current stream, without waiting for it.

    tokens, page_size, truth: as in ``check_token_lists``.
    """
    rows = lists.rows
    if rows <= 0:
        return
    none = lists.lengths
    given = arguments(truth, none, page_size)
    longest = lists.indices.shape[0]
    if truth is not None:
        words = truth.req_to_token.shape[1]
        longest = min(longest, words * page_size if truth.apart == 1 else words)
    if lists.window >= 0:
        longest = min(longest, lists.window)
    parts = max(1, min(-(-longest // BLOCK), -(-PROGRAMS // rows)))
    _launch(
        (rows, parts, 1),
        (
            lists.indices,
            lists.indptr,
            lists.lengths,
            none if lists.splits is None else lists.splits,
            none if lists.offsets is None else lists.offsets,
            none if lists.mask_starts is None else lists.mask_starts,
            trap.claims,
            trap.total,
            trap.acks,
            trap.host,
            trap.cells,
            *given.tensors,
        ),
        (
            lists.indices.shape[0],
            tokens,
            page_size,
            lists.window,
            lists.extra,
            rows,
            slot,
            trap.slots,
            *given.numbers,
            lists.max_splits,
            lists.mask_size,
            lists.queries,
            given.stride,
        ),
        (
            lists.splits is not None,
            lists.offsets is not None,
            lists.mask_starts is not None,
            truth is not None,
            *given.flags,
            int(repair),
            lists.indices.is_cuda,
            max(16, triton.next_power_of_2(rows)),
        ),
    )


def reference(
    lists: TokenLists,
    trap: TrapBuffer,
    slot: int,
    tokens: int,
    page_size: int,
    truth: Truth | None = None,
    repair: Repair = Repair.UNSAFE,
) -> None:
    """The same as :func:`launch`, for CPU tensors. Records the first violation in row order."""
    if lists.rows <= 0:
        return
    found = check_token_lists(lists, tokens, page_size, truth)
    bad: list[list[int]] = found.bad.tolist()
    wrong: list[list[int]] = found.wrong.tolist()
    if not bad and not wrong:
        return
    around = [_around(lists, found, i, tokens, page_size, truth) for i in range(len(bad))]
    mend(lists, found, tokens, repair)
    step = -1 if truth is None or truth.step is None else int(truth.step)
    if wrong:
        row, at, got, kind, right = min(wrong, key=lambda w: (w[0], w[3] != Kind.SHORT))
        request = int(truth.req_pool_indices[row]) if step >= 0 and truth is not None else -1
        n = int(found.listed[row] + found.starts[row])
        words = [row, at, got, n, len(wrong), kind, right, step, request, -1]
        trap.leave(slot, words)
    sure = [i for i, b in enumerate(bad) if b[3] != Kind.FOREIGN]
    suspicions = [i for i, b in enumerate(bad) if b[3] == Kind.FOREIGN]
    for part, suspicion in ((sure, False), (suspicions, True)):
        if part:
            i = part[0]
            row, entry, value, kind, right = bad[i]
            n = int(found.listed[row] + found.starts[row])
            words = [row, entry, value, n, len(part), kind, right, -1, -1, -1]
            if step >= 0 and truth is not None:
                words[-3:] = [step, int(truth.req_pool_indices[row]), int(found.full[i])]
            trap.leave(slot, words, suspicion, around[i])


def mend(lists: TokenLists, found: ListCheck, tokens: int, repair: Repair) -> None:
    """Change what ``repair`` says."""
    if repair is Repair.NOTHING:
        return
    kinds, values = found.bad[:, 3], found.bad[:, 2]
    replaced = kinds != int(Kind.FOREIGN)
    if repair is Repair.UNSAFE:
        replaced = (values < 0) | (values >= tokens)
    lists.indices[found.at[replaced]] = found.safe[replaced].to(lists.indices.dtype)
    size = lists.indices.shape[0]
    n = found.starts + found.listed
    for row, at, got, kind, right in found.wrong.tolist():
        if kind == Kind.INDPTR:
            lists.indptr[at] = min(right, size)
        elif kind == Kind.SHORT:
            lists.indptr[row + 1] = size
        elif kind == Kind.SPLITS and lists.splits is not None:
            lists.splits[row] = 1 if got < 1 else lists.max_splits
        elif kind == Kind.OFFSET and lists.offsets is not None:
            lists.offsets[row] = right
        elif kind == Kind.MASK and lists.mask_starts is not None:
            needs = lists.queries * (int(n[row]) + lists.queries)
            unsafe = got < 0 or got + needs > lists.mask_size
            if unsafe or repair is Repair.ALL:
                lists.mask_starts[row] = 0 if right + needs > lists.mask_size else right


def _around(
    lists: TokenLists,
    found: ListCheck,
    i: int,
    tokens: int,
    page_size: int,
    truth: Truth | None,
) -> trap_buffer.Cells:
    """The entries around a bad one, and what belongs there: int32 [2, <= CELLS]."""
    row, entry = found.bad[i, :2].tolist()
    origin = entry // CELLS * CELLS
    first = int(found.begins[row]) + origin
    last = min(first + CELLS, int(found.begins[row] + found.listed[row]), lists.indices.shape[0])
    values = lists.indices[first:last].to(torch.int64)
    right = _belong_to(lists, found, row, origin, len(values), page_size, truth)
    # As the kernel writes them: 32 bits of each.
    return torch.stack([values, right]).numpy().astype(np.int64).astype(np.int32)


def _belong_to(
    lists: TokenLists,
    found: ListCheck,
    row: int,
    origin: int,
    count: int,
    page_size: int,
    truth: Truth | None,
) -> torch.Tensor:
    """The tokens that belong into ``count`` entries of a row, -1 where it is not known."""
    position = int(found.starts[row]) + origin + torch.arange(count)
    if truth is None:
        return torch.full_like(position, UNKNOWN)
    n = int(found.starts[row] + found.listed[row])
    judged = torch.full_like(position, n > truth.padding, dtype=torch.bool)
    known = belongs(torch.full_like(position, row), position // page_size, judged, page_size, truth)
    values = lists.indices[int(found.begins[row]) + origin :][:count].to(torch.int64)
    token = known.page * page_size + position % page_size
    token = torch.where(known.page == UNKNOWN, UNKNOWN, token)
    foreign = known.foreign & (values == token) & (values >= page_size)
    return torch.where(known.judged & ~foreign, token, UNKNOWN)
