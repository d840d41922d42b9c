"""What a page table is compared with: the pool, ``req_to_token``, and the page ledger's shadow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.hooking.layer_pools import target_pool
from g4debug.tracers.limits import moving_pages
from g4debug.tracers.page_table.check import Truth

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger


class Books:
    """Which truth each backend's tables are held against."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger
        self.limits: set[str] = set()
        self._with_shadow: dict[int, bool] = {}  # by id() of a backend that can be judged
        self._frozen: set[int] = set()  # id() of backends of FROZEN_KV_MTP drafts

    def learn(self, backend: Any, model_runner: Any) -> None:
        """A backend was built for this ModelRunner."""
        args = model_runner.server_args
        found = moving_pages(args)
        self.limits.update(found)
        if found:
            return
        draft = bool(getattr(model_runner, "is_draft_worker", False))
        frozen = getattr(args, "speculative_algorithm", None) == "FROZEN_KV_MTP"
        if draft and frozen:
            self._frozen.add(id(backend))
        # Other drafts write into pages that they gave back already (restore_state): to them a
        # free page is nothing bad.
        self._with_shadow[id(backend)] = frozen or not draft

    def truth(
        self, backend: Any, batch: Any, pool_name: str, rows: int, captured: bool
    ) -> Truth | None:
        """The truth for one table; None where only its range can be judged."""
        with_shadow = self._with_shadow.get(id(backend))
        if with_shadow is None:
            return None
        indices = batch.req_pool_indices
        if indices is None or indices.shape[0] < rows:
            return None
        ledger = self.ledger
        swa = pool_name == "swa"
        shadow = mapping = None
        if with_shadow and ledger is not None:
            shadow = ledger.shadow
        if swa and shadow is None:
            mapping = getattr(target_pool(backend, batch), "full_to_swa_index_mapping", None)
            if mapping is None:
                return None
        return Truth(
            req_to_token=backend.req_to_token,
            req_pool_indices=indices,
            swa=swa,
            shadow=shadow,
            mapping=mapping,
            padding=self._padding(backend, batch) if captured else 0,
        )

    def _padding(self, backend: Any, batch: Any) -> int:
        """Length of a captured graph's padding rows.

        SGLang resets their lengths at each replay, but not their requests: those are an earlier
        batch's (cuda_graph_runner.py, ``populate_from_forward_batch``).
        """
        fill = int(backend.get_cuda_graph_seq_len_fill_value())
        mode = batch.forward_mode
        if mode.is_target_verify():
            return fill + int(backend.speculative_num_draft_tokens)
        # FROZEN_KV_MTP builds its draft's metadata as for a decode without speculation.
        plain = batch.spec_info is None or id(backend) in self._frozen
        if mode.is_decode_or_idle() and not plain:
            return fill + int(backend.speculative_step_id) + 1
        return fill
