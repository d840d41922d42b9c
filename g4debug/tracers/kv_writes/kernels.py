"""The kernels of kv-writes: two small launches for each forward and pool, which can be captured.

The first one copies each location, or 0 for one that the pool does not have. So every token gets a
location, whatever the rows of a batch say. The kernel also stamps the slot of each location:
``stamps[loc, 0]`` becomes the largest, and ``stamps[loc, 1]`` the smallest token that the forward
writes there, both behind the number of this check. So a stamp of an earlier forward never counts,
and nothing has to be cleared. The second one compares token by token, as
:func:`g4debug.tracers.kv_writes.check.check_writes` says, replaces bad locations where it must, and
leaves a record in the trap buffer. There is no sort, and no wait.
"""

from __future__ import annotations

import torch
import triton.language as tl

from g4debug import launching
from g4debug.sanitizer.device_library import claim, leave, pick
from g4debug.sanitizer.reference_state import Truth, arguments
from g4debug.sanitizer.resolve import resolve
from g4debug.sanitizer.trap_buffer import TrapBuffer
from g4debug.tracers.kv_writes.check import Kind, Rows, Stamps

BLOCK = 256
BITS = 24  # of a stamp that say which token; the others are the number of the check
TOKENS = 1 << BITS  # that one forward can have at most


@launching.kernel(tensors=4, numbers=3)
def _stamp_kernel(
    loc,
    out,
    stamps,
    number,
    count,
    slots,
    page_size,
    STAMP: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr = BITS,
    TOKENS: tl.constexpr = TOKENS,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(loc + i, mask=i < count, other=0).to(tl.int64)
    inside = (value >= 0) & (value < slots)
    tl.store(out + i, tl.where(inside, value, 0).to(out.dtype.element_ty), mask=i < count)
    if STAMP:
        real = (i < count) & (value >= page_size) & inside
        at = stamps + 2 * tl.where(real, value, 0)
        base = tl.load(number) << BITS
        tl.atomic_max(at, base + i, mask=real)
        tl.atomic_max(at + 1, base + (TOKENS - 1 - i), mask=real)


@launching.kernel(tensors=17, numbers=13)
def _write_kernel(
    loc,
    out,
    stamps,
    number,
    firsts,
    starts,
    counts,
    claims,
    total,
    acks,
    host,
    req_to_token,
    req_pool_indices,
    book,  # the shadow, or where there is none the full-to-SWA mapping
    owners,
    protected,
    step,  # of the copy that req_to_token is, if HAS_STEP
    tokens,
    offset,
    per_row,
    slots,
    page_size,
    mailbox,
    mailboxes,
    requests,
    words,
    apart,
    known,  # words of the book: full pages, or tokens of the mapping
    padding,
    stride_request,
    HAS_ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_TRUTH: tl.constexpr,
    BY_PAGE: tl.constexpr,
    HAS_SHADOW: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    HAS_STEP: tl.constexpr,
    SWA: tl.constexpr,
    REPAIR: tl.constexpr,
    FENCE: tl.constexpr,
    # Constants are arguments here: Triton compares each global of a kernel at each launch, which
    # takes four times as long.
    BLOCK: tl.constexpr = BLOCK,
    BITS: tl.constexpr = BITS,
    TOKENS: tl.constexpr = TOKENS,
    NEGATIVE: tl.constexpr = int(Kind.NEGATIVE),
    RANGE: tl.constexpr = int(Kind.RANGE),
    TWICE: tl.constexpr = int(Kind.TWICE),
    ZERO: tl.constexpr = int(Kind.ZERO),
    MISMATCH: tl.constexpr = int(Kind.MISMATCH),
    FREED: tl.constexpr = int(Kind.FREED),
    PADDING: tl.constexpr = int(Kind.PADDING),
    FOREIGN: tl.constexpr = int(Kind.FOREIGN),
    CACHED: tl.constexpr = int(Kind.CACHED),
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    begin = row * per_row
    many = begin * 0 + per_row
    if RAGGED:
        begin = tl.load(starts + row).to(tl.int64)
        many = tl.load(counts + row).to(tl.int64)
    if (row == 0) & (start == 0):
        # No program of this launch reads it. The next check has the next number.
        tl.store(number, tl.load(number) + 1)
    if start < many:
        j = start + tl.arange(0, BLOCK)
        i = begin + j
        live = (j < many) & (i >= 0) & (i < tokens)
        value = tl.load(loc + i, mask=live, other=0).to(tl.int64)
        outside = live & ((value < 0) | (value >= slots))
        kind = tl.zeros([BLOCK], tl.int32)
        expected = tl.zeros([BLOCK], tl.int64) - 1
        full = tl.zeros([BLOCK], tl.int64) - 1
        position = tl.zeros([BLOCK], tl.int64) - 1
        held = live
        first = row * 0
        request = row * 0 - 1
        if HAS_ROWS:
            first = tl.load(firsts + row).to(tl.int64)
            position = first + offset + j
            if HAS_TRUTH:
                request = tl.load(req_pool_indices + row).to(tl.int64)
                of_row = (request > 0) & (request < requests)
                cell = position * apart
                within = position * 0
                if BY_PAGE:
                    cell = position // page_size
                    within = position % page_size
                begins = position // page_size * page_size
                judged, full, _, right, _, freed, foreign, cached = resolve(
                    req_to_token, book, owners, protected, request, of_row, cell, within,
                    position, begins, live & (position >= 0), words, known, stride_request,
                    page_size, HAS_SHADOW, HAS_OWNERS, SWA,
                )  # fmt: skip
                named = full >= 0
                theirs = named & ((first > padding) | (padding == 0))
                judged = judged & named
                if SWA:
                    judged = judged & (freed == 0)
                right = tl.where(judged, right, -1)
                in_zero = (value >= 0) & (value < page_size)
                wrong = judged & (value != right) & ((in_zero & (right < page_size)) == 0)
                kind = tl.where(cached, CACHED, kind)
                kind = tl.where(foreign, FOREIGN, kind)
                kind = tl.where(freed, FREED, kind)
                kind = tl.where(wrong, tl.where(in_zero, ZERO, MISMATCH), kind)
                kind = tl.where(theirs, kind, 0)
                stray = live & (theirs == 0) & (in_zero == 0) & ((judged & (wrong == 0)) == 0)
                kind = tl.where(stray & (padding > 0), PADDING, kind)
                expected = tl.where(theirs, right, -1)
                full = tl.where(theirs, full, -1)
                held = live & ((theirs & (freed | foreign)) == 0)
            real = live & (outside == 0) & (value >= page_size)
            at = stamps + 2 * tl.where(real, value, 0)
            last = tl.load(at, mask=real, other=0) & (TOKENS - 1)
            earliest = (TOKENS - 1) - (tl.load(at + 1, mask=real, other=0) & (TOKENS - 1))
            twice = real & (last != earliest)
            kind = tl.where(twice, TWICE, kind)
        kind = tl.where(outside, tl.where(value < 0, NEGATIVE, RANGE), kind)
        bad = live & (kind > 0)
        sure = bad & (kind != FOREIGN) & (kind != CACHED)
        replaced = outside
        if REPAIR:
            replaced = outside | (sure & ((expected != -1) | (kind != TWICE)))
        sound_place = held & (expected > 0) & (expected < slots)
        safe = tl.where(replaced, tl.where(sound_place, expected, 0), value)
        tl.store(out + i, safe.to(out.dtype.element_ty), mask=live)
        cells = tl.sum(bad.to(tl.int32), axis=0)
        certain = tl.sum(sure.to(tl.int32), axis=0)
        if cells > 0:
            suspicion = certain == 0
            place, claimed, seq = claim(claims, acks, mailbox, mailboxes, suspicion, BLOCK)
            where = tl.min(tl.where(tl.where(suspicion, bad, sure), j, 2147483647), axis=0)
            here = j == where
            why = pick(here, kind)
            what = pick(here, value)
            twin = row * 0 - 1
            if why == TWICE:  # the first other token, or of the first one the last
                twin = (TOKENS - 1) - (tl.load(stamps + 2 * what + 1) & (TOKENS - 1))
                if twin == begin + where:
                    twin = tl.load(stamps + 2 * what) & (TOKENS - 1)
            as_of = row * 0 - 1
            if HAS_STEP:
                as_of = tl.load(step).to(tl.int64)
            leave(
                host, total, place, claimed, seq,
                row,
                pick(here, position),
                what,
                first,
                cells.to(tl.int64),
                why.to(tl.int64),
                pick(here, expected),
                as_of,
                request,
                pick(here, full),
                twin,
                FENCE,
            )  # fmt: skip


_launch_stamp = launching.Launcher(_stamp_kernel)
_launch_write = launching.Launcher(_write_kernel, num_warps=4)


def launch(
    loc: torch.Tensor,
    out: torch.Tensor,
    stamps: Stamps,
    trap: TrapBuffer,
    mailbox: int,
    page_size: int,
    rows: Rows,
    truth: Truth | None = None,
    repair: bool = True,
) -> None:
    """Run both kernels on the current stream, without waiting for them.

    loc: int32/int64 [tokens], contiguous. out: the same shape and dtype, contiguous.
    page_size, rows, truth, repair: as in ``check_writes``. stamps: the stamps of the pool.
    """
    count, slots = loc.numel(), stamps.slots.shape[0]
    if count == 0:
        return
    assert count < TOKENS, f"{count} tokens in one forward, expected fewer than {TOKENS}"
    _launch_stamp(
        (-(-count // BLOCK), 1, 1),
        (loc, out, stamps.slots, stamps.number),
        (count, slots, page_size),
        (rows.firsts is not None, BLOCK),
    )
    if rows.rows == 0 or rows.most == 0:
        return
    given = arguments(truth, loc, 1)
    _launch_write(
        (rows.rows, -(-rows.most // BLOCK), 1),
        (
            loc,
            out,
            stamps.slots,
            stamps.number,
            loc if rows.firsts is None else rows.firsts,
            loc if rows.starts is None else rows.starts,
            loc if rows.counts is None else rows.counts,
            trap.claims,
            trap.total,
            trap.acks,
            trap.host,
            *given.tensors,
        ),
        (
            count,
            rows.offset,
            rows.per_row,
            slots,
            page_size,
            mailbox,
            trap.mailboxes,
            *given.numbers,
            given.stride,
        ),
        (
            rows.firsts is not None,
            rows.starts is not None,
            truth is not None and rows.firsts is not None,
            truth is not None and truth.apart == 1 and page_size > 1,
            *given.flags,
            repair,
            loc.is_cuda,
        ),
    )
