"""What a page table is compared with: ``req_to_token``, and the shadow of the page ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.backends.base import Adapter
from g4debug.sanitizer.forward_snapshots import Launches
from g4debug.sanitizer.reference_state import Truth, of_forward
from g4debug.sanitizer.unsupported import as_of_launch, moving_pages, overlaps
from g4debug.speculation import draft_reads_target_kv

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger


class Books:
    """Knows what the tables of each backend must agree with."""

    def __init__(self, ledger: Ledger | None, launches: Launches) -> None:
        self.ledger = ledger
        self.launches = launches  # whose copy is compared with, if the server overlaps
        self.limits: set[str] = set()
        self.partial: tuple[str, str] | None = None  # what is limited for some tables only, and why
        self._with_shadow: dict[int, bool] = {}  # by id() of each backend that can be judged
        self._frozen: set[int] = set()  # id() of backends of drafts that read the target's KV

    def learn(self, backend: Any, model_runner: Any, page_size: int) -> None:
        """Learn a backend that was built for this ModelRunner, and the page size of its pools."""
        args = model_runner.server_args
        overlap = overlaps(args)
        found = moving_pages(args, as_of_launch(args))
        self.limits.update(found)
        if found:
            return
        draft = bool(getattr(model_runner, "is_draft_worker", False))
        frozen = draft_reads_target_kv(model_runner)
        if draft and frozen:
            self._frozen.add(id(backend))
        # Other drafts write into pages that they have given back already (restore_state), so a
        # free page in their tables is not wrong.
        self._with_shadow[id(backend)] = frozen or not draft
        if self.ledger is not None and self.ledger.owners is not None:
            self.ledger.owners.prepare(backend.req_to_token.shape[0])
        if overlap:
            self.launches.prepare(backend.req_to_token, page_size, self.ledger)
        if overlap and not self._with_shadow[id(backend)]:
            self.partial = (
                "in the draft's sliding layers only ranges",
                "this kind of draft writes into pages that it has given back, so with overlap "
                "scheduling it is not known which SWA page belongs where",
            )

    def truth(
        self,
        adapter: Adapter,
        backend: Any,
        batch: Any,
        pool_name: str,
        rows: int,
        captured: bool,
    ) -> Truth | None:
        """The truth for one table. None if only ranges can be checked."""
        with_shadow = self._with_shadow.get(id(backend))
        if with_shadow is None:
            return None
        indices = adapter.indices(backend, batch)
        if indices is None or indices.shape[0] < rows:
            return None
        padding = 0
        if captured:
            padding = adapter.padding(backend, batch, id(backend) in self._frozen)
        swa, copy = pool_name == "swa", self.launches.copy
        return of_forward(backend, batch, indices, swa, padding, self.ledger, copy, with_shadow)
