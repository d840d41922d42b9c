"""The guard of lists of tokens: one kernel, which can be captured into a CUDA graph.

The rules and all formulas are in :mod:`g4debug.tracers.page_table.token_check`, its torch
reference. Its records are left as for page tables (:mod:`g4debug.sanitizer.trap_buffer`). Two
things differ:

* It changes SGLang's own tensors, where :class:`Repair` says so. In a decode they are as long as
  the context of all requests together, so that a second list would cost as much memory again. All
  layers of one kind read the same list. An entry, and each word beside the entries, is read and
  written by one program only, so no program sees what another one has changed. With
  ``Repair.RANGES`` one program looks at all words
  (:mod:`g4debug.tracers.page_table.token_ranges_guard`).
* The record keeps the entries around the bad one always, because the list may be repaired by the
  time that the host looks.

One program looks at every ``parts``-th block of one row's list. A row's list begins where the
lengths say, which each program adds up for itself: the lengths are few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from g4debug import launching
from g4debug.backends.handed_over import TokenLists
from g4debug.sanitizer.device_library import claim, keep, leave, pick
from g4debug.sanitizer.reference_state import Truth, arguments
from g4debug.sanitizer.resolve import resolve
from g4debug.sanitizer.trap_buffer import TrapBuffer
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.guard import verdict
from g4debug.tracers.page_table.token_check import Repair
from g4debug.tracers.page_table.token_ranges_guard import words_in_range

BLOCK = 512
PROGRAMS = 1024  # so many are started at most, if there are fewer rows than that


@launching.kernel(tensors=18, numbers=17)
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
    corrects,  # read with Repair.RANGES: whether anything is changed
    size,
    tokens,
    page_size,
    window,
    extra,
    rows,
    mailbox,
    mailboxes,
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
    BLOCK: tl.constexpr = BLOCK,
    NEGATIVE: tl.constexpr = int(Kind.NEGATIVE),
    RANGE: tl.constexpr = int(Kind.RANGE),
    SHORT: tl.constexpr = int(Kind.SHORT),
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

        change = n == n
        if REPAIR < 0:
            change = tl.load(corrects) != 0
            if (part == 0) & (row == 0):
                wrong, at_row, length, at_word, got, told, right_word = words_in_range(
                    indices, indptr, lengths, splits, offsets, mask_starts, corrects,
                    size, tokens, window, extra, rows, max_splits, mask_size, queries,
                    HAS_SPLITS, HAS_OFFSETS, HAS_MASK, ROWS, BLOCK,
                    SHORT, INDPTR, SPLITS, OFFSET, MASK,
                )  # fmt: skip
                if wrong > 0:
                    whose = n * 0 - 1
                    if HAS_TRUTH:
                        whose = tl.load(req_pool_indices + at_row).to(tl.int64)
                    place, claimed, seq = claim(claims, acks, mailbox, mailboxes, wrong < 0, BLOCK)
                    leave(
                        host, total, place, claimed, seq, at_row, at_word, got, length, wrong, told,
                        right_word, when, tl.where(when >= 0, whose, -1), n * 0 - 1, n * 0 - 1,
                        FENCE,
                    )  # fmt: skip
        elif part == 0:
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
                place, claimed, seq = claim(claims, acks, mailbox, mailboxes, wrong < 0, BLOCK)
                leave(
                    host, total, place, claimed, seq, row, at_word, got, n, wrong, told,
                    right_word, when, tl.where(when >= 0, request, -1), n * 0 - 1, n * 0 - 1, FENCE,
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
                begins = column * page_size
                judged, _, full, _, page, freed, foreign, _ = resolve(
                    req_to_token, book, owners, protected, request, theirs, column * apart, 0,
                    begins, begins, live, words, known, stride_request, page_size,
                    HAS_SHADOW, HAS_OWNERS, SWA,
                )  # fmt: skip
                right = tl.where(page == -1, -1, page * page_size + inner)
                kind, expected, held = verdict(
                    value, right, full, page, judged, freed, foreign, page_size, SWA
                )
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
                elif REPAIR < 0:  # noqa: SIM102
                    if change:
                        tl.store(indices + at, value * 0, mask=sure & outside)
                suspicion = tl.sum(sure.to(tl.int32), axis=0) == 0
                place, claimed, seq = claim(claims, acks, mailbox, mailboxes, suspicion, BLOCK)
                where = tl.min(tl.where(tl.where(suspicion, bad, sure), entry, 2147483647), axis=0)
                here = entry == where
                if claimed:
                    keep(kept, place, entry, where, live, value, expected)
                leave(
                    host, total, place, claimed, seq,
                    row,
                    where.to(tl.int64),
                    pick(here, value),
                    n,
                    count.to(tl.int64),
                    pick(here, kind).to(tl.int64),
                    pick(here, expected),
                    when,
                    tl.where(when >= 0, request, -1),
                    tl.where(when >= 0, pick(here, full), -1),
                    n * 0 - 1,
                    FENCE,
                )  # fmt: skip


_launch = launching.Launcher(_token_guard_kernel, num_warps=4)


def launch(
    lists: TokenLists,
    trap: TrapBuffer,
    mailbox: int,
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
            trap.corrects,
        ),
        (
            lists.indices.shape[0],
            tokens,
            page_size,
            lists.window,
            lists.extra,
            rows,
            mailbox,
            trap.mailboxes,
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
