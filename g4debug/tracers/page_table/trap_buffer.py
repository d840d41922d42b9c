"""Where the page-table guard leaves what it saw: in host memory, readable without a sync."""

from __future__ import annotations

import torch

FIELDS = 8  # int64 words per site in the host buffer
FLAG = 0  # first word of a slot: something was seen


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
        """What the kernel wrote for a site: row, column, value, seq_len, count, kind, expected.

        Of a row that is too short, column is its columns, and value how many it needs.
        """
        names = ("flag", "row", "column", "value", "seq_len", "count", "kind", "expected")
        slot = self._view.reshape(-1, FIELDS)[site]
        return {name: int(v) for name, v in zip(names, slot, strict=True)}

    def clear(self) -> None:
        """Arm all sites again. The device must be idle."""
        self._view[:] = 0
        self.claims.zero_()
