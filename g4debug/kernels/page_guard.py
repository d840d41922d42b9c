"""The page-table guard on the GPU: one small kernel that a CUDA graph can hold.

For each row r with n = seq_lens[r] tokens and u = min(ceil(n / page_size), columns) pages::

    out[r, c]  = table[r, c] if 0 <= table[r, c] < pages else 0           for c < u
    bad(r, c)  = c < u and c >= max(0, n - q - window) // page_size
                 and not 0 <= table[r, c] < pages          (no window term for window < 0)

``out`` past u is not written: FlashInfer never dereferences it. The first program that
finds a bad cell at a site writes what it saw *straight into pinned host memory*, so the
host reads it without a copy or a sync, and still has it if the context dies a moment
later. Which program is first may vary; that there is a bad cell does not. The host
re-checks the whole table with :func:`g4debug.checks.page_table.check_page_table`, the
torch reference of this kernel, before it reports.

Idea of checking at the hand-over to the kernel: seed PR #3 (which synchronises twice per
layer and cannot see into CUDA graphs).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from g4debug.checks.page_table import check_page_table

BLOCK = 256
FIELDS = 6  # int64 words per site in the host buffer
FLAG, ROW, COLUMN, VALUE, SEQ_LEN, COUNT = range(FIELDS)


@triton.jit(do_not_specialize=["pages", "page_size", "window", "columns", "site"])
def _page_guard_kernel(
    table,
    out,
    seq_lens,
    cu_q,
    claims,
    host,
    pages,
    page_size,
    window,
    columns,
    site,
    stride_row,
    stride_column,
    out_stride_row,
    HAS_Q: tl.constexpr,
    N_FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    n = tl.load(seq_lens + row).to(tl.int64)
    used = tl.minimum((n + page_size - 1) // page_size, columns)
    if start < used:
        column = start + tl.arange(0, BLOCK)
        inside = column < used
        value = tl.load(table + row * stride_row + column * stride_column, mask=inside, other=0).to(
            tl.int64
        )
        outside = inside & ((value < 0) | (value >= pages))
        tl.store(out + row * out_stride_row + column, tl.where(outside, 0, value), mask=inside)
        first = n * 0
        if window >= 0:
            q = first + 1
            if HAS_Q:
                q = (tl.load(cu_q + row + 1) - tl.load(cu_q + row)).to(tl.int64)
            first = tl.maximum(n - q - window, 0) // page_size
        bad = outside & (column >= first)
        count = tl.sum(bad.to(tl.int32), axis=0)
        # Nested: Triton's `and` evaluates both sides, and the atomic claims the site.
        if count > 0:  # noqa: SIM102
            if tl.atomic_add(claims + site, count) == 0:
                where = tl.min(tl.where(bad, column, 2147483647), axis=0)
                what = tl.sum(tl.where(column == where, value, 0), axis=0)
                slot = host + site.to(tl.int64) * N_FIELDS
                tl.store(slot + 1, row)
                tl.store(slot + 2, where.to(tl.int64))
                tl.store(slot + 3, what)
                tl.store(slot + 4, n)
                tl.store(slot + 5, count.to(tl.int64))
                tl.store(slot, n * 0 + 1)
                tl.store(host, n * 0 + 1)  # slot 0 is the summary flag of all sites


class TrapBuffer:
    """Where the kernel leaves what it saw: one slot of FIELDS int64 per site, in host memory.

    Slot 0 is the summary: its FLAG is non-zero as soon as any site's is. On CUDA the
    buffer is pinned and the kernel writes to it directly; elsewhere it is plain memory.
    """

    def __init__(self, device: torch.device, sites: int = 4096) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(sites * FIELDS, dtype=torch.int64, pin_memory=pinned)
        self.claims = torch.zeros(sites, dtype=torch.int32, device=device)
        self.sites = sites
        self._used = 1
        self._view = self.host.numpy()

    def new_site(self) -> int:
        """A slot of its own for one launch; the last one is shared once all are taken."""
        site = self._used
        self._used = min(self._used + 1, self.sites - 1)
        return site

    @property
    def tripped(self) -> bool:
        """True if some site saw a bad cell. A read of host memory: never waits."""
        return bool(self._view[FLAG])

    def tripped_sites(self) -> list[int]:
        """Sites whose flag is set, in order."""
        flags = self._view.reshape(-1, FIELDS)[1:, FLAG]
        return [int(i) + 1 for i in flags.nonzero()[0]]

    def fields(self, site: int) -> dict[str, int]:
        """What the kernel wrote for a site: row, column, value, seq_len, count."""
        names = ("flag", "row", "column", "value", "seq_len", "count")
        slot = self._view.reshape(-1, FIELDS)[site]
        return {name: int(v) for name, v in zip(names, slot, strict=True)}

    def clear(self) -> None:
        """Arm all sites again. The device must be idle."""
        self._view[:] = 0
        self.claims.zero_()


def launch(
    table: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor | None,
    trap: TrapBuffer,
    site: int,
    pages: int,
    page_size: int,
    window: int,
) -> None:
    """Run the guard's kernel on the current stream; never waits for it.

    table: int32/int64 [rows, columns]; out: int32, contiguous, same shape; seq_lens:
    int32/int64 [rows]; cu_q: int32/int64 [rows + 1], running sum of query lengths, or None
    for one query token per row; pages, page_size, window: as in ``check_page_table``.
    """
    rows, columns = table.shape
    if rows == 0 or columns == 0:
        return
    _page_guard_kernel[(rows, triton.cdiv(columns, BLOCK))](
        table,
        out,
        seq_lens,
        seq_lens if cu_q is None else cu_q,
        trap.claims,
        trap.host,
        pages,
        page_size,
        window,
        columns,
        site,
        table.stride(0),
        table.stride(1),
        out.stride(0),
        HAS_Q=cu_q is not None,
        N_FIELDS=FIELDS,
        BLOCK=BLOCK,
        num_warps=4,
    )


def reference(
    table: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor | None,
    trap: TrapBuffer,
    site: int,
    pages: int,
    page_size: int,
    window: int,
) -> None:
    """The same in torch, for CPU tensors; the first bad cell in row order is recorded."""
    q_lens = None if cu_q is None else cu_q.diff()
    checked = check_page_table(table, seq_lens, pages, page_size, window, q_lens)
    out.copy_(checked.safe)
    if len(checked.bad) and int(trap.claims[site]) == 0:
        row, column, value = (int(x) for x in checked.bad[0])
        slot = site * FIELDS
        words = [1, row, column, value, int(seq_lens[row]), len(checked.bad)]
        trap.host[slot : slot + FIELDS] = torch.tensor(words)
        trap.host[FLAG] = 1
    trap.claims[site] += len(checked.bad)
