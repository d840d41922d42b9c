"""The page-table guard: one small kernel, which can be captured into a CUDA graph.

For each row r with n = seq_lens[r] tokens and u = min(ceil(n / page_size), columns) pages::

    full       = req_to_token[req_pool_indices[r], c * page_size] // page_size
    right      = full, or for the SWA pool the shadow's word of it (ledger/shadow.py)
    live(r, c) = c < u and c >= max(0, n - q - window) // page_size  (all c < u for window < 0)
    bad(r, c)  = live(r, c) and table[r, c] is no page of the pool, or not the right one,
                 or ``full`` was handed out to another request or column (ledger/owners.py)
    out[r, c]  = table[r, c]; if it is no page of the pool, or (with ``repair``) bad in another way
                 than the last one: ``right`` if that is a held page, else page 0   for c < u

All kinds and conditions are in :func:`g4debug.tracers.page_table.check.check_page_table`, the
torch reference of this kernel.

``out`` is not written from column u on, because FlashInfer never reads those cells. The first
program that finds a bad cell writes what it saw *straight into pinned host memory*. So the host can
read it without a copy and without waiting, and still has it if the CUDA context dies a moment
later. Until the host has read it, the bad cells of other programs are only counted
(:mod:`g4debug.sanitizer.trap_buffer`). Each run finds a bad cell, but another program may be the
first. The host checks the whole table again before it reports.

The idea of checking where the table is handed to the kernel comes from seed PR #3 (which
synchronises twice for each layer and cannot see into CUDA graphs).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from g4debug import launching
from g4debug.sanitizer.device_library import claim, keep, leave, pick
from g4debug.sanitizer.reference_state import Truth, arguments
from g4debug.sanitizer.resolve import resolve
from g4debug.sanitizer.trap_buffer import TrapBuffer
from g4debug.tracers.page_table.check import Kind

BLOCK = 256


@triton.jit
def verdict(
    value,
    right,
    page,
    own_page,
    judged,
    freed,
    foreign,
    reserved,
    SWA: tl.constexpr,
    ZERO: tl.constexpr = int(Kind.ZERO),
    MISMATCH: tl.constexpr = int(Kind.MISMATCH),
    FREED: tl.constexpr = int(Kind.FREED),
    EVICTED: tl.constexpr = int(Kind.EVICTED),
    FOREIGN: tl.constexpr = int(Kind.FOREIGN),
):
    """(kind, expected, held) of each cell or entry, see ``check.verdict``."""
    kind = tl.where(value != right, MISMATCH, 0)
    kind = tl.where((value >= 0) & (value < reserved) & (right != -1), ZERO, kind)
    if SWA:
        kind = tl.where((page > 0) & (own_page == 0), EVICTED, kind)
    kind = tl.where(freed, FREED, kind)
    kind = tl.where(foreign & (kind == 0), FOREIGN, kind)
    kind = tl.where(judged, kind, 0)
    expected = tl.where(judged & (kind != FOREIGN), right, -1)
    return kind, expected, judged & (freed == 0) & (own_page > 0)


@launching.kernel(tensors=16, numbers=15)
def _page_guard_kernel(
    table,
    out,
    seq_lens,
    cu_q,
    claims,
    total,
    acks,
    host,
    req_to_token,
    req_pool_indices,
    book,
    owners,
    protected,
    step,  # of the copy that req_to_token is, if HAS_STEP
    kept,  # the cells of bad rows, in host memory
    corrects,  # read if SWITCHED: whether anything is replaced
    pages,
    page_size,
    window,
    columns,
    mailbox,
    mailboxes,
    requests,
    words,
    apart,
    known,
    padding,
    stride_row,
    stride_column,
    out_stride_row,
    stride_request,
    HAS_Q: tl.constexpr,
    HAS_TRUTH: tl.constexpr,
    HAS_SHADOW: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    HAS_STEP: tl.constexpr,
    SWA: tl.constexpr,
    REPAIR: tl.constexpr,
    SWITCHED: tl.constexpr,
    FENCE: tl.constexpr,
    # Constants are arguments here: Triton compares each global of a kernel at each launch, which
    # takes four times as long.
    BLOCK: tl.constexpr = BLOCK,
    NEGATIVE: tl.constexpr = int(Kind.NEGATIVE),
    RANGE: tl.constexpr = int(Kind.RANGE),
    SHORT: tl.constexpr = int(Kind.SHORT),
    FOREIGN: tl.constexpr = int(Kind.FOREIGN),
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    n = tl.load(seq_lens + row).to(tl.int64)
    needed = (n + page_size - 1) // page_size
    used = tl.minimum(needed, columns)
    if start < used:
        column = start + tl.arange(0, BLOCK)
        inside = column < used
        value = tl.load(table + row * stride_row + column * stride_column, mask=inside, other=0).to(
            tl.int64
        )
        first = n * 0
        if window >= 0:
            q = first + 1
            if HAS_Q:
                q = (tl.load(cu_q + row + 1) - tl.load(cu_q + row)).to(tl.int64)
            first = tl.maximum(n - q - window, 0) // page_size
        live = inside & (column >= first)
        kind = tl.zeros([BLOCK], tl.int32)
        expected = tl.zeros([BLOCK], tl.int64) - 1
        repaired = tl.zeros([BLOCK], tl.int64)
        full = tl.zeros([BLOCK], tl.int64) - 1
        request = n * 0 - 1
        if HAS_TRUTH:
            request = tl.load(req_pool_indices + row).to(tl.int64)
            theirs = (request > 0) & (request < requests) & (n > padding)  # some request's row
            cell = column.to(tl.int64) * apart
            at = column.to(tl.int64) * page_size
            judged, _, full, _, right, freed, foreign, _ = resolve(
                req_to_token, book, owners, protected, request, theirs, cell, 0, at, at, live,
                words, known, stride_request, page_size, HAS_SHADOW, HAS_OWNERS, SWA,
            )  # fmt: skip
            kind, expected, held = verdict(
                value, right, full, right, judged, freed, foreign, 1, SWA
            )
            repaired = tl.where(held & (expected >= 0) & (expected < pages), expected, 0)
        outside = (value < 0) | (value >= pages)
        kind = tl.where(value < 0, NEGATIVE, tl.where(outside, RANGE, kind))
        bad = live & (kind > 0)
        sure = bad & (kind != FOREIGN)
        replaced = sure
        if not REPAIR:
            replaced = sure & outside
        safe = tl.where(replaced, repaired, tl.where(outside, 0, value))
        if SWITCHED:
            safe = tl.where(tl.load(corrects) != 0, safe, value)
        tl.store(out + row * out_stride_row + column, safe, mask=inside)
        certain = tl.sum(sure.to(tl.int32), axis=0)
        lacks = (needed > columns).to(tl.int32)
        if start != 0:
            lacks = lacks * 0
        many = tl.sum(bad.to(tl.int32), axis=0) + lacks
        if many > 0:
            suspicion = certain + lacks == 0
            place, claimed, seq = claim(claims, acks, mailbox, mailboxes, suspicion, BLOCK)
            where = tl.min(tl.where(tl.where(suspicion, bad, sure), column, 2147483647), axis=0)
            here = column == where
            short = (certain == 0) & (lacks > 0)
            as_of = n * 0 - 1
            of = n * 0 - 1
            named = n * 0 - 1
            if HAS_STEP:
                if claimed:
                    keep(kept, place, column, tl.where(short, 0, where), inside, value, expected)
                as_of = tl.load(step).to(tl.int64)
                of = request
                named = tl.where(short, -1, pick(here, full))
            leave(
                host, total, place, claimed, seq,
                row,
                tl.where(short, columns, where).to(tl.int64),
                tl.where(short, needed, pick(here, value)),
                n,
                many.to(tl.int64),
                tl.where(short, SHORT, pick(here, kind)).to(tl.int64),
                tl.where(short, -1, pick(here, expected)),
                as_of, of, named, n * 0 - 1, FENCE,
            )  # fmt: skip


_launch = launching.Launcher(_page_guard_kernel, num_warps=4)


def launch(
    table: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor | None,
    trap: TrapBuffer,
    mailbox: int,
    pages: int,
    page_size: int,
    window: int,
    truth: Truth | None = None,
    repair: bool = True,
    switched: bool = False,
) -> None:
    """Run the guard's kernel on the current stream, without waiting for it.

    table: int32/int64 [rows, columns].
    out: int32, contiguous, of the same shape.
    seq_lens: int32/int64 [rows].
    cu_q: int32/int64 [rows + 1], the running sum of the query lengths, or None for one query token
        in each row.
    pages, page_size, window, truth, repair: as in ``check_page_table``.
    switched: ``out`` is the table as it is while ``TrapBuffer.corrects`` is 0.
    """
    rows, columns = table.shape
    if rows == 0 or columns == 0:
        return
    given = arguments(truth, seq_lens, page_size)
    _launch(
        (rows, -(-columns // BLOCK), 1),
        (
            table,
            out,
            seq_lens,
            seq_lens if cu_q is None else cu_q,
            trap.claims,
            trap.total,
            trap.acks,
            trap.host,
            *given.tensors,
            trap.cells,
            trap.corrects,
        ),
        (
            pages,
            page_size,
            window,
            columns,
            mailbox,
            trap.mailboxes,
            *given.numbers,
            *table.stride(),
            out.stride(0),
            given.stride,
        ),
        (
            cu_q is not None,
            truth is not None,
            *given.flags,
            repair,
            switched,
            table.is_cuda,
        ),
    )
