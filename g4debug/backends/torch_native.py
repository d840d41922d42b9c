"""SGLang's ``torch_native`` backend, which reads ``req_to_token`` itself, layer by layer.

It makes no table, so there is nothing that could differ from SGLang's rows. What is worth asking is
whether a row names pages that are free, another request's, or none. The first token of each page
stands for the page. The kernel has no argument in which it could be given other pages, so nothing
is repaired: in raise mode a finding stops a CPU before it reads, and in contain mode the bad page
is read.

Of a SWA pool this backend reads the sliding layers by the indices of the full pool (upstream's own
mistake), so these are not judged. CUDA graphs it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from g4debug.backends.base import ENCODER, Guarding, Sites, TableAdapter, has_encoder, never_run
from g4debug.backends.handed_over import PageTable
from g4debug.hooking.layer_pools import pool_of_layer, request_table
from g4debug.hooking.targets import CPU

if TYPE_CHECKING:
    import torch

SWA = "it reads the SWA pool by indices of the full pool, which is SGLang's mistake"


class TorchNative(TableAdapter):
    name = "torch_native"
    hands = "rows"
    unknown_modes = ("SPLIT_PREFILL", "DLLM_EXTEND")
    built = "attn.torch_native.init"
    sites = ("attn.torch_native.extend", "attn.torch_native.decode")
    metadata = "attn.torch_native.metadata"
    phases = ("prefill", "decode")
    tables: ClassVar = {}
    lengths = ""
    run: ClassVar = {"0.5.15.post1": (CPU,), "0.5.23": (CPU,)}

    def __init__(self) -> None:
        # The batch that runs, its first layer, and the table that was made of it.
        self._made: tuple[Any, Any, torch.Tensor] | None = None
        self._pages = 1  # tokens of a page

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
            why = self._strange(backend, layer, forward_batch)
            if why:
                self.leave_out(backend, guard, why)
                return
            table = self._table(backend, layer, forward_batch)
            if guard.again(table, backend, layer) is None:
                handed = PageTable(table, forward_batch.seq_lens, None, -1)
                guard.page_table(self, handed, backend, layer, forward_batch)

        for site in self.sites:
            context.before(site, before_attention)

    def learn(self, backend: Any, model_runner: Any, guard: Guarding) -> bool:
        self._pages = self.page_size(backend, model_runner)
        return super().learn(backend, model_runner, guard)

    def left_out(self, backend: Any, model_runner: Any) -> Iterator[tuple[str, Iterable[str]]]:
        yield from super().left_out(backend, model_runner)
        if getattr(getattr(model_runner, "token_to_kv_pool", None), "swa_kv_pool", None):
            yield SWA, self.phases
        if has_encoder(model_runner):
            yield ENCODER, self.phases

    def _strange(self, backend: Any, layer: Any, batch: Any) -> str:
        """Why this layer is not judged; '' if it is."""
        if pool_of_layer(backend, layer, batch)[1] == "swa":
            return SWA
        if batch.encoder_lens is not None:
            return ENCODER
        if batch.forward_mode.name not in ("EXTEND", "DECODE", "MIXED"):
            return never_run(batch.forward_mode.name)
        return ""

    def _table(self, backend: Any, layer: Any, batch: Any) -> torch.Tensor:
        """The page of each page's first token, int32 [rows, columns]; the same for all layers."""
        made = self._made
        if made is None or made[0] is not batch or made[1] is layer:
            longest = int(batch.seq_lens.max()) if len(batch.seq_lens) else 0
            firsts = request_table(backend, batch)[:, : longest : self._pages]
            made = self._made = batch, layer, firsts[batch.req_pool_indices] // self._pages
        return made[2]

    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        return 0

    def handed_at(self, batch: Any) -> str:
        decode = batch.forward_mode.name in ("DECODE", "IDLE")
        return self.sites[1] if decode else self.sites[0]


ADAPTER = TorchNative()
