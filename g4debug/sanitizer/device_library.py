"""The Triton functions with which a program leaves a record of a bad thing for the host.

The rules are in :mod:`g4debug.sanitizer.trap_buffer`. A program picks one bad thing of its block,
claims the mailbox, keeps the cells around it if the check has cells, and leaves the record.
:mod:`g4debug.sanitizer.resolve` reads the truth that a program compares with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from g4debug.sanitizer.trap_buffer import CELLS, SEQ, SUMMARY, WORDS


@triton.jit
def fence_system(anything):
    """Make earlier writes visible to the host before later writes."""
    tl.inline_asm_elementwise(
        "fence.sc.sys; mov.u32 $0, $1;",
        "=r,r",
        [anything],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def pick(here, block):
    """The element of a block at the one place where ``here`` is true."""
    return tl.sum(tl.where(here, block, 0), axis=0)


@triton.jit
def claim(claims, acks, mailbox, mailboxes, suspicion, LANES: tl.constexpr):
    """Claim the right to write the next record. Returns (place, may it be written, its number).

    suspicion: the record needs a confirmation; such records have mailboxes of their own. LANES: the
    length of the calling program's blocks.
    """
    place = mailbox.to(tl.int64) + tl.where(suspicion, mailboxes, 0)
    # The host may write this word now. Each thread loads it for itself, and all must go on with
    # the same number, or they part at the next line. The latest one is right.
    acked = tl.max(tl.load(acks + place + tl.arange(0, LANES) * 0, volatile=True), axis=0)
    return place, tl.atomic_cas(claims + place, acked, acked + 1) == acked, acked + 1


@triton.jit
def keep(kept, place, at, where, inside, value, expected, N_CELLS: tl.constexpr = CELLS):
    """Keep the cells around ``where`` with the record: the host may look when they are changed.

    at, inside, value, expected: blocks; the place of each cell in the row, whether it is one of
    the row's, its content, and the right content.
    """
    origin = where // N_CELLS * N_CELLS
    near = inside & (at >= origin) & (at < origin + N_CELLS)
    to = kept + place * (2 * N_CELLS) + (at - origin)
    tl.store(to, value.to(tl.int32), mask=near)
    tl.store(to + N_CELLS, expected.to(tl.int32), mask=near)


@triton.jit
def leave(
    host,
    total,
    place,
    claimed,
    number,
    row,
    at,
    value,
    length,
    bad,
    kind,
    expected,
    step,
    request,
    full,
    twin,
    FENCE: tl.constexpr,  # False where the interpreter runs it, which has no such instruction
    N_WORDS: tl.constexpr = WORDS,
    AT_SEQ: tl.constexpr = SEQ,
    AT_SUMMARY: tl.constexpr = SUMMARY,
):
    """Write the record if it was claimed, and count the bad things.

    row .. twin: the words of a ``trap_buffer.Record``, in its order, int64.
    """
    if claimed:
        to = host + place * N_WORDS
        tl.store(to + 1, row)
        tl.store(to + 2, at)
        tl.store(to + 3, value)
        tl.store(to + 4, length)
        tl.store(to + 5, bad)
        tl.store(to + 6, kind)
        tl.store(to + 7, expected)
        tl.store(to + 8, step)
        tl.store(to + 9, request)
        tl.store(to + 10, full)
        tl.store(to + 11, twin)
        if FENCE:
            fence_system(bad.to(tl.int32))
        tl.store(to + AT_SEQ, number)
    now = tl.atomic_add(total, bad) + bad
    if FENCE:
        fence_system(bad.to(tl.int32))
    tl.store(host + AT_SUMMARY, now)
