"""The kernel's side of the trap buffer: how a Triton program leaves a record for the host.

The rules of the hand-over are in :mod:`g4debug.sanitizer.trap_buffer`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from g4debug.sanitizer import trap_buffer
from g4debug.sanitizer.trap_buffer import FIELDS


@triton.jit
def fence_system(anything):
    """What was written before is visible to the host before what is written after."""
    tl.inline_asm_elementwise(
        "fence.sc.sys; mov.u32 $0, $1;",
        "=r,r",
        [anything],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def leave(
    claims,
    total,
    acks,
    host,
    place,
    many,
    row,
    column,
    value,
    seq_len,
    kind,
    expected,
    step,
    request,
    full,
    LANES: tl.constexpr,
    FENCE: tl.constexpr,  # False where the interpreter runs it, which has no such instruction
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
    """Leave one record at ``place``, unless the last one there is unread, and count ``many``.

    place: slot of the record; that of a suspicion lies behind all the others. many: int64, what
    this program saw. row .. full: the words of the record, int64. LANES: of the calling program's
    blocks.
    """
    at_host = host + place * N_FIELDS
    # The host may write this word now. Each thread loads it for itself, and all must go on with
    # the same number, or they part at the next line. The latest one is right.
    each = tl.load(acks + place + tl.arange(0, LANES) * 0, volatile=True)
    acked = tl.max(each, axis=0)
    if tl.atomic_cas(claims + place, acked, acked + 1) == acked:
        tl.store(at_host + AT_ROW, row)
        tl.store(at_host + AT_COLUMN, column)
        tl.store(at_host + AT_VALUE, value)
        tl.store(at_host + AT_SEQ_LEN, seq_len)
        tl.store(at_host + AT_COUNT, many)
        tl.store(at_host + AT_KIND, kind)
        tl.store(at_host + AT_EXPECTED, expected)
        tl.store(at_host + AT_STEP, step)
        tl.store(at_host + AT_REQUEST, request)
        tl.store(at_host + AT_FULL, full)
        if FENCE:
            fence_system(many.to(tl.int32))
        tl.store(at_host + AT_SEQ, acked + 1)
    now = tl.atomic_add(total, many) + many
    if FENCE:
        fence_system(many.to(tl.int32))
    tl.store(host + AT_SUMMARY, now)
