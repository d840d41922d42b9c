"""Finds the requests that get the tokens of an allocation, if a page is one token.

For pages of several tokens SGLang's allocators are told the lengths of all rows. For pages of one
token they are told only how many tokens are needed. SGLang then gives them to the rows of the batch
in order (sglang mem_cache/common.py ``alloc_for_extend``, ``alloc_for_decode``;
speculative/eagle_info.py ``prepare_for_verify``). So the lengths in the batch that
allocates tell which request gets which tokens. Where its numbers do not add up, nothing is
concluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from g4debug.hooking import req_kv
from g4debug.ledger.books import Pages

Kind = Literal["extend", "decode", "verify"]
# Where a batch allocates: what for, if that is known, and which argument of the site is the batch.
SITES: dict[str, tuple[Kind | None, int]] = {
    "batch.prepare_for_extend": ("extend", 0),
    "batch.prepare_for_decode": ("decode", 0),
    "scheduler.run_batch": (None, 1),
    "worker.verify": ("verify", 1),
}


class Share(NamedTuple):
    """The tokens from ``first`` to ``end`` - 1 of an allocation, and the request that gets them.

    positions: int64 [end - first], where they are in the request; None if that is not known. row:
    the request's row of ``req_to_token``, -1 if it has none; two requests may have the same rid.
    """

    rid: str
    first: int
    end: int | None
    positions: Pages | list[int] | None
    row: int = -1


class Each(NamedTuple):
    """An allocation of one token for each of several requests, in their order.

    rids, rows: as in :class:`Share`. positions: int64 [requests].
    """

    rids: list[str]
    rows: list[int]
    positions: Pages

    def shares(self) -> tuple[Share, ...]:
        """The same as shares, one for each request."""
        known = zip(self.rids, self.rows, self.positions.tolist(), strict=True)
        return tuple(Share(rid, at, at + 1, [p], row) for at, (rid, row, p) in enumerate(known))


NOBODY = Share("", 0, None, None)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The batch that allocates now, and for which kind of step."""

    batch: Any
    kind: Kind

    def shares(self, tokens: int) -> tuple[Share, ...]:
        """The requests that get these ``tokens``, with their parts; empty if not known."""
        requests = self.batch.reqs
        begins, counts = self._lengths(tokens, len(requests))
        if not len(counts) or len(counts) != len(requests) or len(begins) != len(requests):
            return ()
        if int(counts.sum()) != tokens:
            return ()
        found, at = [], 0
        for request, begin, count in zip(requests, begins.tolist(), counts.tolist(), strict=True):
            if count:
                positions = np.arange(begin, begin + count) if self._in_order else None
                row = req_kv.row(request)
                found.append(Share(str(request.rid), at, at + count, positions, row))
            at += count
        return tuple(found)

    def each(self, tokens: int) -> Each | None:
        """The requests that get a token each, in a decode; None if it is another allocation."""
        requests = self.batch.reqs
        if self.kind != "decode" or tokens != len(requests):
            return None
        begins, counts = self._lengths(tokens, tokens)
        if len(begins) != tokens or not len(counts) or counts[0] != 1:
            return None
        rids = [str(request.rid) for request in requests]
        return Each(rids, req_kv.column(requests, req_kv.ROW), begins)

    def _lengths(self, tokens: int, rows: int) -> tuple[Pages, Pages]:
        """int64 [rows]: the tokens that each row has already, and the tokens that it gets."""
        if self.kind == "extend":
            return (
                np.array(self.batch.prefix_lens, dtype=np.int64),
                np.array(self.batch.extend_lens, dtype=np.int64),
            )
        if self.batch.seq_lens_cpu is None:  # the triton backend does not need them on the host
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        begins = self.batch.seq_lens_cpu.numpy().astype(np.int64)
        each = tokens // rows if rows and tokens % rows == 0 else 0
        if self.kind == "decode" and (each != 1 or _speculates(self.batch)):
            each = 0  # speculative decoding v2 allocates ahead here, for each row differently
        return begins, np.full(rows, each, dtype=np.int64)

    @property
    def _in_order(self) -> bool:
        """False if the tokens of a row are the branches of a tree, of which one is kept."""
        if self.kind != "verify":
            return True
        return int(getattr(self.batch.spec_info, "topk", 1) or 1) == 1


def _speculates(batch: Any) -> bool:
    algorithm = getattr(batch, "spec_algorithm", None)
    return algorithm is not None and not algorithm.is_none()
