"""What the writes of each attention backend must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.sanitizer.forward_snapshots import Launches
from g4debug.sanitizer.reference_state import Truth, of_forward
from g4debug.sanitizer.unsupported import as_of_launch, moving_pages, other_rows, overlaps
from g4debug.speculation import draft_reads_target_kv

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger


class Books:
    """Knows the backends that were built, and what is true of the forwards of each."""

    def __init__(self, ledger: Ledger | None, launches: Launches) -> None:
        self.ledger = ledger
        self.launches = launches
        self.limits: set[str] = set()  # why only ranges and doubles can be checked
        self.drafts: set[int] = set()  # id() of backends of drafts
        self.draft_writes = False  # a draft has KV of its own, which is not looked at
        self.unjudged = ""  # why nothing is looked at, '' if that is not so
        self._judged: dict[int, bool] = {}  # id() of each backend -> can it be judged?

    def learn(self, backend: Any, model_runner: Any) -> None:
        """Learn a backend that was built for this ModelRunner."""
        if getattr(model_runner, "is_draft_worker", False):
            self.drafts.add(id(backend))
            self.draft_writes |= not draft_reads_target_kv(model_runner)
            return
        args = model_runner.server_args
        self.unjudged = other_rows(args)
        if self.unjudged:
            return
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
        padding = int(backend.get_cuda_graph_seq_len_fill_value()) if captured else 0
        copy, indices = self.launches.copy, batch.req_pool_indices
        return of_forward(backend, batch, indices, pool_name == "swa", padding, self.ledger, copy)
