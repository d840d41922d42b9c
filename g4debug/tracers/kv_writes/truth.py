"""What the writes of each attention backend must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.hooking.layer_pools import target_pool
from g4debug.tracers.as_of_launch import Launches
from g4debug.tracers.limits import as_of_launch, moving_pages, overlaps
from g4debug.tracers.truth import Truth

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger
    from g4debug.tracers.launch_copy import Copy


class Books:
    """Knows the backends that were built, and what is true of the forwards of each."""

    def __init__(self, ledger: Ledger | None, launches: Launches) -> None:
        self.ledger = ledger
        self.launches = launches
        self.limits: set[str] = set()  # why only ranges and doubles can be checked
        self.drafts: set[int] = set()  # id() of backends of drafts
        self._judged: dict[int, bool] = {}  # id() of each backend -> can it be judged?

    def learn(self, backend: Any, model_runner: Any) -> None:
        """Learn a backend that was built for this ModelRunner."""
        if getattr(model_runner, "is_draft_worker", False):
            self.drafts.add(id(backend))
            return
        args = model_runner.server_args
        found = moving_pages(args, as_of_launch(args))
        self.limits.update(found)
        self._judged[id(backend)] = not found
        if found:
            return
        if self.ledger is not None and self.ledger.owners is not None:
            self.ledger.owners.prepare(backend.req_to_token.shape[0])
        if overlaps(args):
            page_size = int(model_runner.page_size)
            self.launches.prepare(backend.req_to_token, page_size, self.ledger)

    def knows(self, backend: Any) -> bool:
        """True for the backend of a target, whose writes are looked at."""
        return id(backend) in self._judged

    @property
    def targets(self) -> int:
        """How many backends of targets were built."""
        return len(self._judged)

    def truth(self, backend: Any, batch: Any, pool_name: str, captured: bool) -> Truth | None:
        """The truth for one forward. None if only ranges and doubles can be checked."""
        if not self._judged.get(id(backend), False):
            return None
        swa = pool_name == "swa"
        padding = int(backend.get_cuda_graph_seq_len_fill_value()) if captured else 0
        copy = self.launches.copy
        if copy is not None:
            return self._as_of_launch(copy, backend, batch, swa, padding)
        ledger = self.ledger
        shadow = owners = protected = mapping = None
        if ledger is not None:
            shadow = ledger.shadow
            if ledger.owners is not None:
                owners, protected = ledger.owners.known(backend.req_to_token.shape[0])
        if swa and shadow is None:
            mapping = getattr(target_pool(backend, batch), "full_to_swa_index_mapping", None)
            if mapping is None:
                return None
        return Truth(
            backend.req_to_token,
            batch.req_pool_indices,
            swa=swa,
            shadow=shadow,
            mapping=mapping,
            owners=owners,
            protected=protected,
            padding=padding,
        )

    def _as_of_launch(
        self, copy: Copy, backend: Any, batch: Any, swa: bool, padding: int
    ) -> Truth | None:
        """The truth from the copy that was made when the forward was launched."""
        if backend.req_to_token is not copy.source or (swa and copy.shadow is None):
            return None
        return Truth(
            copy.first_tokens,
            batch.req_pool_indices,
            swa=swa,
            shadow=copy.shadow,
            owners=copy.owners,
            protected=copy.protected,
            apart=1,
            step=copy.step,
            padding=padding,
        )
