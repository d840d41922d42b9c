"""The page-table guard: one small kernel, which can be captured into a CUDA graph.

For each row r with n = seq_lens[r] tokens and u = min(ceil(n / page_size), columns) pages::

    full       = req_to_token[req_pool_indices[r], c * page_size] // page_size
    right      = full, or for the SWA pool the shadow's word of it (ledger/shadow.py)
    live(r, c) = c < u and c >= max(0, n - q - window) // page_size  (all c < u for window < 0)
    bad(r, c)  = live(r, c) and table[r, c] is no page of the pool, or not the right one,
                 or ``full`` was handed out to another request (ledger/owners.py)
    out[r, c]  = table[r, c]; if it is no page of the pool, or (with ``repair``) bad in another way
                 than the last one: ``right`` if that is a held page, else page 0   for c < u

All kinds and conditions are in :func:`g4debug.tracers.page_table.check.check_page_table`, the
torch reference of this kernel.

``out`` is not written from column u on, because FlashInfer never reads those cells. The first
program that finds a bad cell writes what it saw *straight into pinned host memory*. So the host can
read it without a copy and without waiting, and still has it if the CUDA context dies a moment
later. Until the host has read it, what others see is only counted
(:mod:`g4debug.sanitizer.trap_buffer`). Which program is the first may vary from run to
run, but not that there is a bad cell. The host checks the whole table again before it reports.

The idea of checking where the table is handed to the kernel is that of seed PR #3 (which
synchronises twice for each layer and cannot see into CUDA graphs).
"""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from g4debug import launching
from g4debug.sanitizer import trap_buffer
from g4debug.sanitizer.device_library import fence_system
from g4debug.sanitizer.reference_state import arguments
from g4debug.sanitizer.trap_buffer import CELLS, FIELDS, NO_CELLS, Cells, TrapBuffer
from g4debug.tracers.page_table.check import Kind, Truth, check_page_table, disagreements

BLOCK = 256


@launching.kernel(tensors=15, numbers=15)
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
    book,  # the shadow, or where there is none the full-to-SWA mapping
    owners,
    protected,
    step,  # of the copy that req_to_token is, if HAS_STEP
    kept,  # the cells of bad rows, in host memory
    pages,
    page_size,
    window,
    columns,
    slot,
    slots,
    requests,
    words,
    apart,
    known,  # words of the book: full pages, or tokens of the mapping
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
    FENCE: tl.constexpr,  # False where the interpreter runs it, which has no such instruction
    # Constants are arguments here: Triton compares each global of a kernel at each launch, which
    # takes four times as long.
    N_FIELDS: tl.constexpr = FIELDS,
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
            at = column.to(tl.int64) * page_size
            theirs = (request > 0) & (request < requests) & (n > padding)  # some request's row
            cell = column.to(tl.int64) * apart
            judged = live & (column < tl.where(theirs, used, 0)) & (cell < words)
            token = tl.load(req_to_token + request * stride_request + cell, mask=judged, other=0)
            token = token.to(tl.int64)
            full = tl.where(judged & (token >= 0), token // page_size, -1)
            freed = judged & (column < 0)
            foreign = judged & (column < 0)
            word = tl.zeros([BLOCK], tl.int64)
            if HAS_SHADOW:
                sound = column < tl.where(tl.load(book + known) == 1, used, 0)
                there = judged & (full > 0) & (full < known)
                word = tl.load(book + full, mask=there, other=0).to(tl.int64)
                freed = there & sound & (word == -1)
                if HAS_OWNERS:
                    owner = tl.load(owners + full, mask=there, other=0).to(tl.int64)
                    begin = tl.load(protected + request, mask=theirs, other=0).to(tl.int64)
                    foreign = there & sound & (owner > 0) & (owner != request) & (at >= begin)
                if SWA:
                    judged = judged & sound & (there | (full == 0))
            elif SWA:
                judged = judged & (token >= 0) & (token < known)
                mapped = tl.load(book + token, mask=judged, other=0).to(tl.int64)
                judged = judged & (mapped >= 0)
                word = mapped // page_size
            right = full
            if SWA:
                right = tl.where(freed, -1, word)
            kind = tl.where(value != right, MISMATCH, kind)
            kind = tl.where((value == 0) & (right != -1), ZERO, kind)
            if SWA:
                kind = tl.where((full > 0) & (word == 0), EVICTED, kind)
            kind = tl.where(freed, FREED, kind)
            kind = tl.where(foreign & (kind == 0), FOREIGN, kind)
            kind = tl.where(judged, kind, 0)
            expected = tl.where(judged & (kind != FOREIGN), right, -1)
            held = judged & (freed == 0)
            repaired = tl.where(held & (expected > 0) & (expected < pages), expected, 0)
        outside = (value < 0) | (value >= pages)
        kind = tl.where(value < 0, NEGATIVE, tl.where(outside, RANGE, kind))
        bad = live & (kind > 0)
        sure = bad & (kind != FOREIGN)
        replaced = sure
        if not REPAIR:
            replaced = sure & outside
        safe = tl.where(replaced, repaired, tl.where(outside, 0, value))
        tl.store(out + row * out_stride_row + column, safe, mask=inside)
        cells = tl.sum(bad.to(tl.int32), axis=0)
        certain = tl.sum(sure.to(tl.int32), axis=0)
        lacks = (needed > columns).to(tl.int32)
        if start != 0:
            lacks = lacks * 0
        # What follows is the writer's side of the hand-over in trap_buffer.py.
        if cells + lacks > 0:
            many = (cells + lacks).to(tl.int64)
            # What must be confirmed first has a slot of its own: it must not hide what is certain.
            suspicion = certain + lacks == 0
            mine = slot.to(tl.int64) + tl.where(suspicion, slots, 0)
            at_host = host + mine * N_FIELDS
            # The host may write this word now. Each thread loads it for itself, and all must go on
            # with the same number, or they part at the next line. The latest one is right.
            each = tl.load(acks + mine + tl.arange(0, BLOCK) * 0, volatile=True)
            acked = tl.max(each, axis=0)
            if tl.atomic_cas(claims + mine, acked, acked + 1) == acked:
                where = tl.min(tl.where(tl.where(suspicion, bad, sure), column, 2147483647), axis=0)
                here = column == where
                short = (certain == 0) & (lacks > 0)
                what = tl.sum(tl.where(here, value, 0), axis=0)
                why = tl.sum(tl.where(here, kind, 0), axis=0)
                belongs = tl.sum(tl.where(here, expected, 0), axis=0)
                if HAS_STEP:
                    # The next forward may overwrite the table before the host looks at this.
                    origin = tl.where(short, 0, where) // N_CELLS * N_CELLS
                    near = inside & (column >= origin) & (column < origin + N_CELLS)
                    to = kept + mine * (2 * N_CELLS) + (column - origin)
                    tl.store(to, value.to(tl.int32), mask=near)
                    tl.store(to + N_CELLS, expected.to(tl.int32), mask=near)
                    named = tl.sum(tl.where(here, full, 0), axis=0)
                    tl.store(at_host + AT_STEP, tl.load(step))
                    tl.store(at_host + AT_REQUEST, request)
                    tl.store(at_host + AT_FULL, tl.where(short, -1, named))
                else:
                    tl.store(at_host + AT_STEP, n * 0 - 1)
                    tl.store(at_host + AT_REQUEST, n * 0 - 1)
                    tl.store(at_host + AT_FULL, n * 0 - 1)
                tl.store(at_host + AT_ROW, row)
                tl.store(at_host + AT_COLUMN, tl.where(short, columns, where).to(tl.int64))
                tl.store(at_host + AT_VALUE, tl.where(short, needed, what))
                tl.store(at_host + AT_SEQ_LEN, n)
                tl.store(at_host + AT_COUNT, many)
                tl.store(at_host + AT_KIND, tl.where(short, SHORT, why).to(tl.int64))
                tl.store(at_host + AT_EXPECTED, tl.where(short, -1, belongs))
                if FENCE:
                    fence_system(cells)
                tl.store(at_host + AT_SEQ, acked + 1)
            now = tl.atomic_add(total, many) + many
            if FENCE:
                fence_system(cells)
            tl.store(host + AT_SUMMARY, now)


_launch = launching.Launcher(_page_guard_kernel, num_warps=4)


def launch(
    table: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor | None,
    trap: TrapBuffer,
    slot: int,
    pages: int,
    page_size: int,
    window: int,
    truth: Truth | None = None,
    repair: bool = True,
) -> None:
    """Run the guard's kernel on the current stream, without waiting for it.

    table: int32/int64 [rows, columns].
    out: int32, contiguous, of the same shape.
    seq_lens: int32/int64 [rows].
    cu_q: int32/int64 [rows + 1], the running sum of the query lengths, or None for one query token
        in each row.
    pages, page_size, window, truth, repair: as in ``check_page_table``.
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
        ),
        (
            pages,
            page_size,
            window,
            columns,
            slot,
            trap.slots,
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
            table.is_cuda,
        ),
    )


def reference(
    table: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor | None,
    trap: TrapBuffer,
    slot: int,
    pages: int,
    page_size: int,
    window: int,
    truth: Truth | None = None,
    repair: bool = True,
) -> None:
    """The same as :func:`launch`, for CPU tensors. Records the first violation in row order."""
    q_lens = None if cu_q is None else cu_q.diff()
    checked = check_page_table(table, seq_lens, pages, page_size, window, q_lens, truth, repair)
    out.copy_(checked.safe)
    found = torch.cat([checked.bad, checked.kinds[:, None], checked.expected[:, None]], dim=1)
    cells: list[list[int]] = found.tolist()
    suspicions = [cell for cell in cells if cell[3] == Kind.FOREIGN]
    sure = [cell for cell in cells if cell[3] != Kind.FOREIGN]
    for row, needed in checked.short.tolist():
        sure.append([row, table.shape[1], needed, int(Kind.SHORT), -1])
    for part, suspicion in ((sure, False), (suspicions, True)):
        if part:
            row, column, value, kind, right = min(part, key=lambda cell: cell[:2])
            words = [row, column, value, int(seq_lens[row]), len(part), kind, right]
            short = kind == Kind.SHORT
            at = (row, 0 if short else column, int(seq_lens[row]))
            (step, request, full), kept = _as_of_launch(table, *at, page_size, truth)
            words += [step, request, -1 if short else full]
            trap.leave(slot, words, suspicion, kept)


def _as_of_launch(
    table: torch.Tensor, row: int, column: int, length: int, page_size: int, truth: Truth | None
) -> tuple[list[int], Cells]:
    """The words step, request and full of a record, and the cells of the row around a column."""
    if truth is None or truth.step is None:
        return [-1, -1, -1], NO_CELLS
    origin = column // CELLS * CELLS
    values = table[row : row + 1, origin : origin + CELLS].to(torch.int64)
    request = int(truth.req_pool_indices[row])
    part = dataclasses.replace(
        truth,
        req_to_token=truth.req_to_token[:, origin:],
        req_pool_indices=truth.req_pool_indices[row : row + 1],
    )
    judged = torch.full_like(values, length > truth.padding, dtype=torch.bool)
    _, right, _ = disagreements(values, judged, page_size, part)
    full, rows = -1, truth.req_to_token
    if 0 < request < rows.shape[0] and column < rows.shape[1] and length > truth.padding:
        token = int(rows[request, column])
        full = token // page_size if token >= 0 else -1
    cells = torch.cat([values, right]).to(torch.int32).numpy()
    return [int(truth.step), request, full], cells
