"""The page tables that SGLang's FlashAttention backend, of versions 3 and 4, hands to its kernel.

One class serves both. It calls ``flash_attn_with_kvcache``, a function of its module, with the
table, and ``forward_extend`` or ``forward_decode`` tells whose layer that is. The tables of a
forward are ``page_table`` and, of a SWA pool, ``swa_page_table`` of its metadata. Any other one is
made for a special purpose: the branches of a draft's tree, local attention, an encoder, a part of
a prompt on each rank. Those are not judged. A prefill of MLA has none.

With a draft of one path a verify and the forwards of the draft have tables as a decode has, and
lengths that count the draft's tokens, too. With several paths SGLang hands over two tables for
each layer, one of them for the branches, and none of these is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from g4debug.backends.base import (
    ENCODER,
    SHARDS,
    Guarding,
    Sites,
    TableAdapter,
    has_encoder,
    never_run,
    prefix_is_fetched,
)
from g4debug.hooking import targets
from g4debug.hooking.targets import CPU, H100, H200

if TYPE_CHECKING:
    import torch

BRANCHES = "a draft has several paths, and their branches have tables of their own"
SPECIAL = "it is made for a special kind of attention, and says other things than rows do"


class Fa3(TableAdapter):
    name = "fa3"
    built = "attn.fa3.init"
    needs = "sgl_kernel.flash_attn"
    sites = ("attn.fa3.kernel", "attn.fa3.extend", "attn.fa3.decode")
    metadata = "attn.fa3.metadata"
    replay = "attn.fa3.metadata_replay"
    in_graph = "attn.fa3.metadata_in_graph" if targets.fills_tables_in_graph("fa3") else ""
    tables: ClassVar = {"full": "page_table", "swa": "swa_page_table"}
    lengths = "cache_seqlens_int32"
    unknown_modes = ("MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")
    run: ClassVar = {"0.5.15.post1": (CPU, H200), "0.5.23": (CPU, H100)}

    def __init__(self) -> None:
        self._now: tuple[Any, Any, Any] | None = None  # backend, layer and batch that run

    def install(self, context: Sites, guard: Guarding) -> None:
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
            self._now = backend, layer, forward_batch
            attends = getattr(forward_batch, "attn_attend_prefix_cache", None) is not None
            if attends and any(forward_batch.extend_prefix_lens_cpu):
                prefix_is_fetched(guard)

        def table_of(table: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            if self._now is None:
                return table
            if table is None:
                guard.reads_nothing()
                return table
            backend, layer, batch = self._now
            known = guard.again(table, backend, layer)
            if known is not None:
                return known
            why = strange(table, given, backend, batch)
            if why:
                self.leave_out(backend, guard, why)
                return table
            return guard.page_table(self, self.handed(table, backend, layer), backend, layer, batch)

        context.before("attn.fa3.extend", before_attention)
        context.before("attn.fa3.decode", before_attention)
        context.replace("attn.fa3.kernel", "page_table", table_of)

    def called(self, backend: Any) -> str:
        return f"fa{backend.fa_impl_ver}"

    def learn(self, backend: Any, model_runner: Any, guard: Guarding) -> bool:
        if getattr(backend, "use_mla", False):
            guard.judged_in_part([backend], ("prefill",))
        return super().learn(backend, model_runner, guard)

    def left_out(self, backend: Any, model_runner: Any) -> Iterator[tuple[str, Iterable[str]]]:
        yield from super().left_out(backend, model_runner)
        if _has_branches(backend):
            yield BRANCHES, ("verify", "draft")
        if getattr(backend, "_kv_shard_pool", None) is not None:
            yield SHARDS, self.phases
        if has_encoder(model_runner):
            yield ENCODER, self.phases
        if getattr(backend, "is_prefill_aware_swa", False):
            yield SPECIAL, ("decode",)

    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        """Before each replay SGLang resets the lengths of the padding rows."""
        fill, mode = int(backend.get_cuda_graph_seq_len_fill_value()), batch.forward_mode
        if mode.name == "TARGET_VERIFY":
            return fill + int(backend.speculative_num_draft_tokens)
        if mode.name in ("DECODE", "IDLE") and batch.spec_info is not None and not frozen:
            return fill + int(backend.speculative_step_id) + 1
        return fill


def strange(table: torch.Tensor, given: dict[str, Any], backend: Any, batch: Any) -> str:
    """Why this table is not judged; '' if it is. given: the arguments of the kernel."""
    metadata, mode = backend.forward_metadata, batch.forward_mode
    if mode.name not in ("EXTEND", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"):
        return never_run(mode.name)
    if getattr(batch, "encoder_lens", None) is not None:
        return ENCODER
    if batch.spec_info is not None and _has_branches(backend):
        return BRANCHES
    if table is not metadata.page_table and table is not metadata.swa_page_table:
        return SPECIAL
    if given.get("cache_seqlens") is not metadata.cache_seqlens_int32:
        return "it is handed over with lengths that are not those of the rows"
    if getattr(backend, "_kv_shard_pool", None) is not None:
        return SHARDS
    return ""


def _has_branches(backend: Any) -> bool:
    return int(getattr(backend, "topk", 0) or 0) > 1


ADAPTER = Fa3()
