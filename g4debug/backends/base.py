"""What an adapter is: the file that knows one attention backend of SGLang.

An adapter says where the backend is built, where it hands something to a kernel, and what that is.
What is handed over has one of two shapes: a page table, or lists of tokens
(:mod:`g4debug.backends.handed_over`). How each of them is checked, compared, repaired and
reported does not depend on the backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from g4debug.backends.handed_over import PageTable, TokenLists


class Sites(Protocol):
    """Where an adapter puts its hooks: a tracer's context, which isolates them."""

    def before(self, site: str, hook: Callable[..., None]) -> None: ...

    def after(self, site: str, hook: Callable[..., Any]) -> None: ...


class Guarding(Protocol):
    """What an adapter calls at a hand-over: the tracer."""

    def again(self, table: torch.Tensor, backend: Any, layer: Any) -> torch.Tensor | None:
        """What the kernel gets, if this page table was checked for another layer of the forward.

        None if it was not. It is asked at each layer, so it must cost next to nothing.
        """
        ...

    def page_table(
        self, adapter: Adapter, handed: PageTable, backend: Any, layer: Any, batch: Any
    ) -> torch.Tensor:
        """A layer's page table goes to its kernel. Returns the one that the kernel gets."""
        ...

    def listed(self, indices: torch.Tensor, backend: Any, layer: Any) -> bool:
        """True if these entries of lists were checked for another layer of the forward.

        It is asked at each layer, so it must cost next to nothing.
        """
        ...

    def token_lists(
        self, adapter: Adapter, lists: TokenLists, backend: Any, layer: Any, batch: Any
    ) -> None:
        """A layer's lists go to its kernel. What must not be read is changed in them."""
        ...

    def judged_in_part(self, backends: Iterable[Any]) -> None:
        """Of these backends some forwards are not judged; which, is said when one comes."""
        ...

    def not_guarded(self, what: str, why: str) -> None:
        """Something is handed over that this adapter cannot judge. It is said once."""
        ...


class Adapter(ABC):
    """One attention backend.

    name: what SGLang calls it on its command line. built: the hook site at which it is built for a
    ModelRunner, with the arguments (backend, model_runner, ...). sites: the other hook sites.
    """

    name: str
    built: str
    sites: tuple[str, ...]

    @abstractmethod
    def install(self, context: Sites, guard: Guarding) -> None:
        """Put hooks at the hand-overs."""

    def learn(self, backend: Any, model_runner: Any, guard: Guarding) -> bool:
        """A backend was built. False if entries cannot be compared with ``req_to_token``."""
        translator = getattr(backend, "kv_index_translator", None)
        moves = getattr(backend, "_translate_kv_loc", None) is not None or bool(
            getattr(translator, "is_translating", False)
        )
        if moves:
            guard.not_guarded(
                f"what {self.name} hands over for ranges only",
                "the KV pools share their memory (unified memory pool), so a kernel gets other "
                "places than req_to_token has",
            )
        return not moves

    def page_size(self, backend: Any, model_runner: Any) -> int:
        """Tokens in a page of the KV pools. model_runner: None if it is not known."""
        found = getattr(backend, "page_size", None) or model_runner.page_size
        return int(found)

    def indices(self, backend: Any, batch: Any) -> torch.Tensor | None:
        """The row of ``req_to_token`` of each row of this forward. None if it is not known."""
        found: torch.Tensor | None = batch.req_pool_indices
        return found

    @abstractmethod
    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        """The length of the padding rows in a captured CUDA graph.

        frozen: this is the backend of a FROZEN_KV_MTP draft.
        """

    def handed_at(self, batch: Any) -> str:
        """The hook site at which a layer of this forward hands over; for the report."""
        return self.sites[0]

    def forgot_swa(self, backend: Any) -> bool:
        """True if the backend does not know that its pool is a SWA pool."""
        return False

    def swa_state(self, backend: Any) -> str:
        """The backend's fields that show it, for the report."""
        return ""
