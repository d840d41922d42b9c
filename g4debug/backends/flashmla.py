"""The page tables that SGLang's ``flashmla`` backend hands to FlashMLA's kernel, and its lists.

The module calls ``flash_mla_with_kvcache`` with the table, and ``forward_decode`` tells whose layer
that is. The pages have 64 tokens. A prefill is that of ``flashinfer_mla``, lists and all.

In a CUDA graph the kernel reads a static table. SGLang hands over a part of it that is as wide as
the longest row was at the capture, which is one page. The kernel goes by the lengths and by where
a row begins, and so reads on behind that part. The guard gets the table as wide as it is.

Before 0.5.23 its kernel came with ``sgl_kernel``. That was never run, so it is not hooked there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.backends.mla_tables import MlaTables

if TYPE_CHECKING:
    import torch

_WHOLE = "g4debug_whole"  # attribute of SGLang's metadata


class FlashMla(MlaTables):
    name = "flashmla"
    built = "attn.flashmla.init"
    needs = "flash_mla"
    releases = ">=0.5.23"
    sites = ("attn.flashmla.kernel", "attn.flashmla.decode", "attn.flashmla.extend")
    metadata = "attn.flashmla.metadata"
    replay = "attn.flashmla.metadata_replay"
    argument = "block_table"

    def in_decode(self, backend: Any, batch: Any) -> Any:
        return backend.forward_metadata

    def has_lists(self, backend: Any) -> bool:
        return True

    def whole(self, table: torch.Tensor, backend: Any, batch: Any) -> torch.Tensor:
        metadata = backend.forward_metadata
        found: torch.Tensor | None = getattr(metadata, _WHOLE, None)
        if found is None:
            found, static = metadata.block_kv_indices, backend.cuda_graph_kv_indices
            if static is not None and static.data_ptr() == table.data_ptr():
                found = static[: table.shape[0]]
            setattr(metadata, _WHOLE, found)
        return found


ADAPTER = FlashMla()
