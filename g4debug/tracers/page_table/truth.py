"""What a page table is compared with: ``req_to_token``, and the shadow of the page ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.hooking.layer_pools import target_pool
from g4debug.tracers.limits import moving_pages
from g4debug.tracers.page_table.backends import trtllm_mha
from g4debug.tracers.page_table.check import Truth

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger


class Books:
    """Knows what the tables of each backend must agree with."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger
        self.limits: set[str] = set()
        self._with_shadow: dict[int, bool] = {}  # by id() of each backend that can be judged
        self._frozen: set[int] = set()  # id() of backends of FROZEN_KV_MTP drafts

    def learn(self, backend: Any, model_runner: Any) -> None:
        """Learn a backend that was built for this ModelRunner."""
        args = model_runner.server_args
        found = moving_pages(args)
        self.limits.update(found)
        if found:
            return
        draft = bool(getattr(model_runner, "is_draft_worker", False))
        frozen = getattr(args, "speculative_algorithm", None) == "FROZEN_KV_MTP"
        if draft and frozen:
            self._frozen.add(id(backend))
        # Other drafts write into pages that they have given back already (restore_state), so a
        # free page in their tables is not wrong.
        self._with_shadow[id(backend)] = frozen or not draft
        if self.ledger is not None and self.ledger.owners is not None:
            self.ledger.owners.prepare(backend.req_to_token.shape[0])

    def truth(
        self, backend: Any, batch: Any, pool_name: str, rows: int, captured: bool
    ) -> Truth | None:
        """The truth for one table. None if only ranges can be checked."""
        with_shadow = self._with_shadow.get(id(backend))
        if with_shadow is None:
            return None
        indices = batch.req_pool_indices
        if indices is None or indices.shape[0] < rows:
            return None
        ledger = self.ledger
        swa = pool_name == "swa"
        shadow = mapping = owners = protected = None
        if with_shadow and ledger is not None:
            shadow = ledger.shadow
            if ledger.owners is not None:
                owners, protected = ledger.owners.known(backend.req_to_token.shape[0])
        if swa and shadow is None:
            mapping = getattr(target_pool(backend, batch), "full_to_swa_index_mapping", None)
            if mapping is None:
                return None
        padding = 0
        if captured:
            padding = trtllm_mha.padding(backend, batch, id(backend) in self._frozen)
        return Truth(
            req_to_token=backend.req_to_token,
            req_pool_indices=indices,
            swa=swa,
            shadow=shadow,
            mapping=mapping,
            owners=owners,
            protected=protected,
            padding=padding,
        )
