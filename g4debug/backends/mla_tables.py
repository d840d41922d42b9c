"""What SGLang's backends for MLA share that have a page table in a decode and none in a prefill.

``flashmla`` and ``trtllm_mla`` inherit from the class of ``flashinfer_mla``. A decode hands its
kernel a table, of which row r has the pages of that request's first ``seq_lens[r]`` tokens; behind
them it says nothing. A prefill hands over K and V, or runs the parent's code, and so lists
(:class:`InheritedLists`). A verify and the forwards of a draft hand over tables, too. These were
never run and are not judged. (The draft extend of ``trtllm_mla`` reads each row as far as the
longest one, behind its own tokens, so that there only ranges could be.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from g4debug.backends.base import SHARDS, Guarding, Sites, TableAdapter, prefix_is_fetched
from g4debug.backends.flashinfer_mla import FlashInferMla
from g4debug.backends.handed_over import PageTable
from g4debug.hooking.targets import CPU

if TYPE_CHECKING:
    import torch


class InheritedLists(FlashInferMla):
    """The lists of a prefill that runs the code of ``flashinfer_mla``. of: whose prefill it is."""

    def __init__(self, of: MlaTables) -> None:
        super().__init__()
        self.name = of.name
        self._site = of.sites[2]

    def handed_at(self, batch: Any) -> str:
        return self._site


class MlaTables(TableAdapter):
    """sites: those of the kernel, of a decode and of an extend. argument: the kernel's table."""

    phases = ("prefill", "decode")
    tables: ClassVar = {"full": "block_kv_indices"}
    lengths = ""  # those of the batch
    argument: str
    unknown_modes = ("SPLIT_PREFILL", "DLLM_EXTEND")
    run: ClassVar = {"0.5.23": (CPU,)}

    def __init__(self) -> None:
        self._now: tuple[Any, Any, Any] | None = None  # backend, layer and batch that run
        self._prefill = InheritedLists(self)

    @abstractmethod
    def in_decode(self, backend: Any, batch: Any) -> Any:
        """The metadata of this decode, with its table ``block_kv_indices``."""

    @abstractmethod
    def has_lists(self, backend: Any) -> bool:
        """True if the prefill that runs now is that of ``flashinfer_mla``."""

    def whole(self, table: torch.Tensor, backend: Any, batch: Any) -> torch.Tensor:
        """The same tensor for each layer of a forward, as wide as its kernel reads."""
        return table

    def install(self, context: Sites, guard: Guarding) -> None:
        def after_metadata(result: Any, backend: Any, forward_batch: Any) -> Any:
            if self.is_inherited_by(backend) or not _is_prefill(forward_batch):
                return result
            if self.has_lists(backend):
                self._prefill.note(backend, forward_batch, captured=False)
            return result

        def before_attention(
            backend: Any,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            self._now = None
            if self.is_inherited_by(backend):
                return
            if _is_prefill(forward_batch):
                self._prefilled(backend, layer, forward_batch, guard)
            else:
                self._now = backend, layer, forward_batch

        def table_of(table: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            if self._now is None or table is None:
                return table
            backend, layer, batch = self._now
            why = _strange(backend, batch)
            if why:
                self.leave_out(backend, guard, why)
                return table
            whole = self.whole(table, backend, batch)
            known = guard.again(whole, backend, layer)
            if known is None:
                handed = PageTable(whole, batch.seq_lens, None, -1)
                known = guard.page_table(self, handed, backend, layer, batch)
            return table if known is whole else known[: table.shape[0]]

        context.after(self.metadata, after_metadata)
        context.replace(self.sites[0], self.argument, table_of)
        for site in self.sites[1:]:
            context.before(site, before_attention)

    def _prefilled(self, backend: Any, layer: Any, batch: Any, guard: Guarding) -> None:
        """A layer of a prefill begins. Its kernel gets K and V, or a list."""
        attends = getattr(batch, "attn_attend_prefix_cache", None) is not None
        if self.has_lists(backend):
            if self._prefill.reads_no_list(backend, batch, guard):
                guard.reads_nothing()
            else:
                self._prefill.hand_over(backend, layer, batch, guard)
        elif attends and any(batch.extend_prefix_lens_cpu):
            prefix_is_fetched(guard)
        else:
            guard.reads_nothing()

    def learn(self, backend: Any, model_runner: Any, guard: Guarding) -> bool:
        if getattr(backend, "enable_chunk_kv", False):
            guard.judged_in_part([backend], ("prefill",))
        return super().learn(backend, model_runner, guard)

    def left_out(self, backend: Any, model_runner: Any) -> Iterator[tuple[str, Iterable[str]]]:
        yield from super().left_out(backend, model_runner)
        if getattr(backend, "_kv_shard_pool", None) is not None:
            yield SHARDS, self.phases

    def made(self, backend: Any, batch: Any) -> Any:
        plain = batch is not None and not _strange(backend, batch)
        return self.in_decode(backend, batch) if plain else None

    def lengths_in(self, metadata: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = batch.seq_lens
        return found

    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        """Before each replay SGLang resets the lengths of the padding rows, not their requests."""
        return int(backend.get_cuda_graph_seq_len_fill_value())


def _is_prefill(batch: Any) -> bool:
    return batch.forward_mode.name in ("EXTEND", "MIXED")


def _strange(backend: Any, batch: Any) -> str:
    """Why the table of this forward is not judged; '' if it is."""
    if batch.forward_mode.name != "DECODE" or batch.spec_info is not None:
        return f"a {batch.forward_mode.name} of a draft, or of a kind that was never run with it"
    if getattr(backend, "_kv_shard_pool", None) is not None:
        return SHARDS
    return ""
