"""The work of kv_pages.py on a GPU: all buffers of a pool in one launch.

A pool has two buffers for each layer. In torch each of them needs launches of its own, so that one
comparison is well over a hundred launches, and these cost a server more time than reading the
memory does. Here one program reads one page of one buffer. It finds the buffer by its address in a
table, as SGLang's own kernel that moves KV does. What it finds is a flag for each place that was
looked at, and a second launch makes the codes of the pages from their flags.

The functions take and return what the methods of ``KvPages`` of the same name do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

STAMPED_WORD = 0x2BAD2BAD2BAD2BAD  # the four int16 words of a stamp as one int64
WORDS_AT_ONCE = 1024  # int64 words of a page that a program reads at a time
ROWS, ELEMENTS = 4, 512  # tile of elements in which a program looks for NaN and Inf
PLACES = 1024  # flags of a page that a program reads at a time
# dtype -> (bits to look at, their value in a NaN or an Inf)
NOT_FINITE = {
    torch.bfloat16: (0x7F80, 0x7F80),
    torch.float16: (0x7C00, 0x7C00),
    torch.float32: (0x7F800000, 0x7F800000),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float8_e4m3fnuz: (0xFF, 0x80),
    torch.float8_e5m2fnuz: (0xFF, 0x80),
}


@triton.jit(do_not_specialize=["pages", "count"])
def _digest_kernel(
    addresses,
    row_words,
    page_of,
    digests,
    flags,
    pages,
    count,
    PAGE_SIZE: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i, buffer, buffers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    page = tl.load(page_of + i)
    words = tl.load(row_words + buffer) * PAGE_SIZE
    memory = tl.load(addresses + buffer).to(tl.pointer_type(tl.int64)) + page * words
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, words, BLOCK):
        at = begin + tl.arange(0, BLOCK).to(tl.int64)
        total += tl.load(memory + at, mask=at < words, other=0) * (2 * at + 1)
    digest = tl.sum(total, 0)
    mine = digests + buffer.to(tl.int64) * pages + page
    if KEEP:
        tl.store(mine, digest)
    else:
        tl.store(flags + i.to(tl.int64) * buffers + buffer, (digest != tl.load(mine)).to(tl.int8))


@triton.jit
def _stamp_kernel(
    addresses, row_words, page_of, word, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    page, buffer = tl.load(page_of + tl.program_id(0)), tl.program_id(1)
    step = tl.load(row_words + buffer)
    memory = tl.load(addresses + buffer).to(tl.pointer_type(tl.int64)) + page * step * PAGE_SIZE
    row = tl.arange(0, BLOCK)
    tl.store(memory + row * step, tl.zeros([BLOCK], tl.int64) + word, mask=row < PAGE_SIZE)


@triton.jit
def _written_kernel(
    addresses,
    row_words,
    page_of,
    stamped,
    flags,
    word,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i, buffer, buffers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    page = tl.load(page_of + i)
    step = tl.load(row_words + buffer)
    memory = tl.load(addresses + buffer).to(tl.pointer_type(tl.int64)) + page * step * PAGE_SIZE
    row = tl.arange(0, BLOCK)
    inside = row < PAGE_SIZE
    found = tl.load(memory + row * step, mask=inside, other=0)
    gone = (found != word) & (tl.load(stamped + page) != 0)
    place = (i.to(tl.int64) * buffers + buffer) * PAGE_SIZE + row
    tl.store(flags + place, gone.to(tl.int8), mask=inside)


@triton.jit
def _not_finite_kernel(
    addresses,
    row_words,
    page_of,
    flags,
    MASK: tl.constexpr,
    VALUE: tl.constexpr,
    BYTES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    i, buffer, buffers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    page = tl.load(page_of + i)
    elements = tl.load(row_words + buffer) * (8 // BYTES)
    address = tl.load(addresses + buffer)
    if BYTES == 1:
        memory = address.to(tl.pointer_type(tl.uint8))
    elif BYTES == 2:
        memory = address.to(tl.pointer_type(tl.int16))
    else:
        memory = address.to(tl.pointer_type(tl.int32))
    memory += page * elements * PAGE_SIZE
    for first in range(0, PAGE_SIZE, ROWS):
        row = first + tl.arange(0, ROWS)
        bad = tl.zeros([ROWS], tl.int32)
        for begin in range(0, elements, ELEMENTS):
            at = begin + tl.arange(0, ELEMENTS)
            inside = (row < PAGE_SIZE)[:, None] & (at < elements)[None, :]
            bits = tl.load(memory + row[:, None] * elements + at[None, :], mask=inside, other=0)
            bad = tl.maximum(bad, tl.max(((bits.to(tl.int32) & MASK) == VALUE).to(tl.int32), 1))
        place = (i.to(tl.int64) * buffers + buffer) * PAGE_SIZE + row
        tl.store(flags + place, bad.to(tl.int8), mask=row < PAGE_SIZE)


@triton.jit(do_not_specialize=["places", "count"])
def _codes_kernel(flags, codes, places, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    first = tl.zeros([BLOCK], tl.int32) + places
    for begin in range(0, places, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        flag = tl.load(flags + i * places + at, mask=at < places, other=0)
        bad += flag.to(tl.int32)
        first = tl.minimum(first, tl.where(flag != 0, at, places))
    number = tl.sum(bad, 0)
    tl.store(codes + i, tl.where(number > 0, tl.min(first, 0) + 1, 0).to(tl.int64))
    tl.store(codes + count + i, number.to(tl.int64))


class Launcher:
    """Launches these kernels for one pool.

    buffers: the K and V buffers, each with ``pages`` pages of ``page_size`` rows of a multiple of 8
    bytes. Their memory must stay where it is. Arguments called "pages" are int64 [n] on the device,
    and so are the results, int64 [2, n]. No call waits for the device.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], pages: int, page_size: int) -> None:
        device = buffers[0].device
        self.pages, self.page_size = pages, page_size
        self.buffers = list(buffers)
        self._addresses = torch.tensor([b.data_ptr() for b in buffers], device=device)
        words = [b[0].numel() * b.element_size() // 8 for b in buffers]
        self._row_words = torch.tensor(words, device=device)
        self._rows = triton.next_power_of_2(page_size)

    def keep(self, pages: torch.Tensor, digests: torch.Tensor) -> None:
        """Write the checksums of these pages into ``digests``, int64 [buffers, pages]."""
        self._digest(pages, digests, digests, keep=True)

    def changed(self, pages: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
        flags = self._flags(pages, 1)
        self._digest(pages, digests, flags, keep=False)
        return self._codes(flags)

    def _digest(
        self, pages: torch.Tensor, digests: torch.Tensor, flags: torch.Tensor, keep: bool
    ) -> None:
        tensors = (digests, flags, self.pages, len(pages))
        self._launch(_digest_kernel, pages, *tensors, KEEP=keep, BLOCK=WORDS_AT_ONCE)

    def stamp(self, pages: torch.Tensor) -> None:
        self._launch(_stamp_kernel, pages, STAMPED_WORD, BLOCK=self._rows)

    def written(self, pages: torch.Tensor, stamped: torch.Tensor) -> torch.Tensor:
        """stamped: bool [pages]."""
        flags = self._flags(pages, self.page_size)
        self._launch(_written_kernel, pages, stamped, flags, STAMPED_WORD, BLOCK=self._rows)
        return self._codes(flags)

    def not_finite(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """dtype: the buffers' contents', one of NOT_FINITE."""
        mask, value = NOT_FINITE[dtype]
        flags = self._flags(pages, self.page_size)
        sizes = {"BYTES": dtype.itemsize, "ROWS": ROWS, "ELEMENTS": ELEMENTS}
        self._launch(_not_finite_kernel, pages, flags, MASK=mask, VALUE=value, **sizes)
        return self._codes(flags)

    def _launch(self, kernel: Any, pages: torch.Tensor, *rest: Any, **constants: int) -> None:
        """One program for each of these pages and each buffer."""
        if len(pages):
            kernel[len(pages), len(self.buffers)](
                self._addresses, self._row_words, pages, *rest,
                PAGE_SIZE=self.page_size, **constants,
            )  # fmt: skip

    def _flags(self, pages: torch.Tensor, places: int) -> torch.Tensor:
        """int8 [n, places of a page], which a kernel fills."""
        shape = (len(pages), len(self.buffers) * places)
        return torch.empty(shape, dtype=torch.int8, device=pages.device)

    def _codes(self, flags: torch.Tensor) -> torch.Tensor:
        count, places = flags.shape
        codes = torch.empty(2, count, dtype=torch.int64, device=flags.device)
        if count:
            _codes_kernel[(count,)](flags, codes, places, count, BLOCK=PLACES)
        return codes
