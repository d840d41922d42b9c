"""The attention backends of this process: which of them may be judged, and against which truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from g4debug.hooking import targets
from g4debug.hooking.layer_pools import request_table, target_pool
from g4debug.sanitizer.forward_snapshots import ForwardSnapshots
from g4debug.sanitizer.reference_state import Truth, of_forward
from g4debug.sanitizer.unsupported import moving_pages, overlaps, takes_snapshots
from g4debug.speculation import draft_reads_target_kv, draft_writes_own_kv

if TYPE_CHECKING:
    import torch

    from g4debug.ledger.ledger import Ledger


class Partial(NamedTuple):
    """What is not judged, and why."""

    what: str
    why: str


class BackendState:
    """Knows the truth that the forwards of each backend must agree with.

    limits: why only ranges can be checked for some backends. partial: a limit for only a part of a
    forward.
    """

    def __init__(self, ledger: Ledger | None, snapshots: ForwardSnapshots) -> None:
        self.ledger = ledger
        self.snapshots = snapshots  # whose copy is compared with, if the server overlaps
        self.limits: set[str] = set()
        self.partial: Partial | None = None
        self.known: set[int] = set()  # id() of each backend that was learned
        self._with_shadow: dict[int, bool] = {}  # by id() of each backend that can be judged
        self._tables: dict[int, torch.Tensor] = {}  # req_to_token, by the same
        self._frozen: set[int] = set()  # id() of backends of drafts that read the target's KV

    def learn(self, backend: Any, model_runner: Any, page_size: int) -> None:
        """Learn a backend that was built for this ModelRunner, and the page size of its pools."""
        self.known.add(id(backend))
        args = model_runner.server_args
        overlap = overlaps(args)
        found = moving_pages(args, takes_snapshots(args))
        self.limits.update(found)
        if found:
            return
        draft = bool(getattr(model_runner, "is_draft_worker", False))
        frozen = draft_reads_target_kv(model_runner)
        if draft and frozen:
            self._frozen.add(id(backend))
        why = _without_shadow(model_runner) if draft and not frozen else ""
        self._with_shadow[id(backend)] = not why
        table = self._tables[id(backend)] = request_table(backend, model_runner)
        if self.ledger is not None and self.ledger.owners is not None:
            self.ledger.owners.prepare(table.shape[0])
        if overlap:
            self.snapshots.prepare(table, page_size, self.ledger)
        sliding = getattr(model_runner, "sliding_window_size", True)  # True: not known
        if why:
            ranges = ", and in its sliding layers only ranges" if overlap and sliding else ""
            self.partial = Partial(
                f"no page of the draft is told to be free or another request's{ranges}",
                why,
            )

    def judges(self, backend: Any) -> bool:
        """True if more than ranges can be checked of this backend's forwards."""
        return id(backend) in self._with_shadow

    def is_frozen(self, backend: Any) -> bool:
        """True for the backend of a FROZEN_KV_MTP draft."""
        return id(backend) in self._frozen

    def truth(
        self,
        backend: Any,
        batch: Any,
        indices: torch.Tensor | None,
        rows: int,
        pool_name: str,
        padding: int,
    ) -> Truth | None:
        """The truth of one forward and pool. None if only ranges can be checked.

        indices: the row of ``req_to_token`` of each row. padding: the length of padding rows.
        """
        if indices is None or indices.shape[0] < rows or not self.judges(backend):
            return None
        copy, with_shadow = self.snapshots.copy, self._with_shadow[id(backend)]
        swa = pool_name == "swa"
        pool, table = target_pool(backend, batch), self._tables[id(backend)]
        return of_forward(pool, table, indices, swa, padding, self.ledger, copy, with_shadow)


def _without_shadow(model_runner: Any) -> str:
    """Why the ledger does not say which pages a draft's forwards may have; '' if it does."""
    if targets.restores_pages():
        return (
            "on this release of SGLang a draft may write into pages that were given back already "
            "(restore_state)"
        )
    if not draft_writes_own_kv(model_runner):
        return "this kind of draft was never run with it"
    return ""
