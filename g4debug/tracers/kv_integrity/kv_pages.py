"""Reads and writes the pages of one KV pool: stamps on freed pages, checksums of complete pages.

These are operations on the current stream, and none of them waits for the device: torch operations
on a CPU, kernels (kernels.py) on a GPU. A KV pool has for each layer a K buffer and a V buffer
``[tokens, heads, dim]``, or with MLA one that is both. A page is ``page_size`` rows of each buffer.
Their numbers go by layers: where there are two, b is K (if b is even) or V (if b is odd) of the
pool's layer b // 2.

A stamp is the value STAMP in the first WORDS int16 of every row of a page, in all buffers. Writing
KV replaces whole rows, and so the stamp. As a number of any KV dtype the stamp is small and finite
(bf16 1.2e-12, fp16 0.06, fp32 1.2e-12, fp8 e4m3 0.34 and -0.41). So a kernel that loads a masked
row and multiplies it by zero still gets zero. The idea comes from KFENCE's canaries and KASAN's
poison.

The checksum (digest) of page p in buffer b is, with x the page as int64 words::

    digest[b, p] = sum_i (2 i + 1) x[i]   mod 2^64

The weights are odd, so a single changed word, and so a single changed bit, always changes it.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.hooking.kv_buffers import buffers_of
from g4debug.tracers.kv_integrity.kernels import NOT_FINITE, Launcher

STAMP = 0x2BAD
WORDS = 4  # how many int16 words of a row are stamped: 8 bytes


class Unsupported(Exception):
    """The KV pool is not laid out as this module needs it. The text says how it is laid out."""


class KvPages:
    """K and V of one pool, by page. Raises Unsupported.

    kv_pool: SGLang's MHATokenToKVPool or MLATokenToKVPool. It has buffers, with one tensor for each
    layer (:mod:`g4debug.hooking.kv_buffers`), and ``dtype``, the dtype of their contents. pages:
    includes the reserved page 0.

    Arguments called "pages" are int64 [n] on the device of the buffers, each from 0 to pages - 1.
    Results called "codes" are int64 [2, n] on the device. For each page they hold a code, which is
    0 if the page is sound, else 1 + the index of its first bad place, and the number of bad places.
    """

    def __init__(self, kv_pool: Any, pages: int, page_size: int) -> None:
        of, name = buffers_of(kv_pool), type(kv_pool).__name__
        if tuple(of) not in (("K", "V"), ("KV",)) or not all(of.values()):
            raise Unsupported(
                f"{name} has neither k_buffer and v_buffer nor kv_buffer, with one tensor for each "
                "layer"
            )
        if tuple(of) == ("KV",) and name != "MLATokenToKVPool":
            raise Unsupported(f"{name} packs a row in a way that is not known")
        self.parts = tuple(of)
        self.buffers: list[torch.Tensor] = [
            b for layer in zip(*of.values(), strict=True) for b in layer
        ]
        self.pages, self.page_size = pages, page_size
        self.dtype: torch.dtype = kv_pool.dtype
        self.device = self.buffers[0].device
        tokens = pages * page_size
        for b in self.buffers:
            row = b[0].numel() * b.element_size() if len(b) else 0
            if len(b) < tokens or not b.is_contiguous() or row % 8:
                raise Unsupported(
                    f"{name} has a buffer of shape {tuple(b.shape)}, {b.dtype}; expected at "
                    f"least {tokens} rows of a multiple of 8 bytes"
                )
        # Two views of the same memory: [pages, rows, int16 words] and [pages, int64 words].
        self._rows = [
            b[:tokens].view(-1).view(torch.int16).view(pages, page_size, -1) for b in self.buffers
        ]
        self._words = [b[:tokens].view(-1).view(torch.int64).view(pages, -1) for b in self.buffers]
        self._weights: dict[int, torch.Tensor] = {}
        self.kernels = Launcher(self.buffers, pages, page_size) if self.buffers[0].is_cuda else None
        self.stamped = torch.zeros(pages, dtype=torch.bool, device=self.device)
        self.digests = torch.zeros(len(self.buffers), pages, dtype=torch.int64, device=self.device)

    def stamp(self, pages: torch.Tensor) -> None:
        """Write the stamp into freed pages."""
        self._write_stamp(pages)
        self.stamped.index_fill_(0, pages, True)

    def stamp_again(self, pages: torch.Tensor) -> None:
        """Write the stamp anew into the pages among these that have it, or had it."""
        self._write_stamp(torch.where(self.stamped[pages], pages, 0))  # nobody reads page 0

    def _write_stamp(self, pages: torch.Tensor) -> None:
        if self.kernels is not None:
            self.kernels.stamp(pages)
            return
        for rows in self._rows:
            rows[:, :, :WORDS].index_fill_(
                0, pages, STAMP
            )  # an assignment would wait for the device

    def written(self, pages: torch.Tensor) -> torch.Tensor:
        """Codes of the places [buffer, row] where the stamp of a stamped page is gone."""
        if self.kernels is not None:
            return self.kernels.written(pages, self.stamped)
        bad = torch.stack([(rows[pages, :, :WORDS] != STAMP).any(-1) for rows in self._rows])
        return _codes(bad & self.stamped[pages, None])

    def unstamp(self, pages: torch.Tensor) -> None:
        """Forget the stamps of these pages, which somebody holds now."""
        self.stamped.index_fill_(0, pages, False)

    def forget(self) -> None:
        """Forget all stamps."""
        self.stamped.zero_()

    def seal(self, pages: torch.Tensor) -> None:
        """Remember the checksums of these pages."""
        if self.kernels is not None:
            self.kernels.keep(pages, self.digests)
        else:
            self.digests[:, pages] = self._digest(pages)

    def changed(self, pages: torch.Tensor) -> torch.Tensor:
        """Codes of the buffers in which a page has changed since it was sealed."""
        if self.kernels is not None:
            return self.kernels.changed(pages, self.digests)
        return _codes((self._digest(pages) != self.digests[:, pages])[:, :, None])

    def not_finite(self, pages: torch.Tensor) -> torch.Tensor:
        """Codes of the places [buffer, row] that have NaN or Inf."""
        if self.kernels is not None and self.dtype in NOT_FINITE:
            return self.kernels.not_finite(pages, self.dtype)
        bad = [~torch.isfinite(self._values(b, pages)).all(-1) for b in range(len(self.buffers))]
        return _codes(torch.stack(bad))

    @property
    def has_floats(self) -> bool:
        """False for a packed dtype (FP4). Then ``not_finite`` must not be called."""
        return (
            self.dtype.is_floating_point and self.dtype.itemsize == self.buffers[0].element_size()
        )

    def place(self, code: int) -> tuple[int, str, int]:
        """(layer of the pool, "K", "V" or "KV", row) of a code of ``written`` or ``not_finite``."""
        buffer, row = divmod(code - 1, self.page_size)
        return (*self.buffer(buffer + 1), row)

    def buffer(self, code: int) -> tuple[int, str]:
        """(layer of the pool, "K", "V" or "KV") of a code of ``changed``."""
        layer, part = divmod(code - 1, len(self.parts))
        return layer, self.parts[part]

    def _values(self, buffer: int, pages: torch.Tensor) -> torch.Tensor:
        """[n, page_size, elements]. float32 if torch cannot tell NaN in the dtype itself."""
        rows = self._rows[buffer][pages].view(self.dtype)
        return rows.float() if self.dtype.itemsize == 1 else rows

    def _digest(self, pages: torch.Tensor) -> torch.Tensor:
        """The checksums of these pages, int64 [buffers, n]."""
        return torch.stack([(w[pages] * self._weight(w.shape[1])).sum(1) for w in self._words])

    def _weight(self, words: int) -> torch.Tensor:
        if words not in self._weights:
            self._weights[words] = 2 * torch.arange(words, device=self.device) + 1
        return self._weights[words]


def _codes(bad: torch.Tensor) -> torch.Tensor:
    """The codes of n pages. bad: bool [buffers, n, places of a page]."""
    flat = bad.permute(1, 0, 2).flatten(1)
    count = flat.sum(1)
    # argmax gives the first of equal maxima. On CUDA it does not take bool.
    first = flat.to(torch.uint8).argmax(1) + 1
    return torch.stack((torch.where(count > 0, first, 0), count))
