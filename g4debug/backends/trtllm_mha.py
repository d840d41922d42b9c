"""The table that SGLang's ``trtllm_mha`` backend hands to an attention kernel, and where it is.

``TRTLLMHAAttnBackend._get_layer_page_table`` returns the table that the kernel of a layer gets.
The lengths that belong to the table are in the backend's ``forward_metadata``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from g4debug.backends.base import Guarding, Sites, TableAdapter
from g4debug.hooking import targets
from g4debug.hooking.targets import CPU, H200

if TYPE_CHECKING:
    import torch


class TrtllmMha(TableAdapter):
    name = "trtllm_mha"
    built = "attn.trtllm_mha.init"
    sites = ("attn.trtllm_mha.layer_page_table",)
    fused_writes = ("attn.trtllm_mha.layer_cache_loc",)  # with FP8 KV
    metadata = "attn.trtllm_mha.metadata"
    replay = "attn.trtllm_mha.metadata_replay"
    in_graph = (
        "attn.trtllm_mha.metadata_in_graph" if targets.fills_tables_in_graph("trtllm_mha") else ""
    )
    tables: ClassVar = {"full": "page_table", "swa": "swa_page_table"}
    lengths = "cache_seqlens_int32"
    run: ClassVar = {
        "0.5.12.post1": (CPU, H200),
        "0.5.13.post1": (CPU,),
        "0.5.15.post1": (CPU, H200),
        "0.5.23": (CPU, H200),
    }
    views = ()
    lengths_on_device = True
    kernels: ClassVar = {"kernel_mha": "z"}  # FlashInfer's XQA, on Hopper
    # From 0.5.14 on there is the mapping, too, from full to SWA slots, for its CUDA graphs.
    without_swa: ClassVar = {
        "use_sliding_window_kv_pool": False,
        "_swa_kv_pool": None,
        "_swa_full_to_swa_mapping": None,
    }

    def install(self, context: Sites, guard: Guarding) -> None:
        def after_page_table(
            table: torch.Tensor, backend: Any, layer: Any, forward_batch: Any
        ) -> torch.Tensor:
            known = guard.again(table, backend, layer)
            if known is not None:
                return known
            handed = self.handed(table, backend, layer)
            return guard.page_table(self, handed, backend, layer, forward_batch)

        context.after("attn.trtllm_mha.layer_page_table", after_page_table)

    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        """Before each replay SGLang resets the lengths of the padding rows, but not their requests.

        An earlier batch has left these (cuda_graph_runner.py, ``populate_from_forward_batch``).
        """
        fill = int(backend.get_cuda_graph_seq_len_fill_value())
        mode = batch.forward_mode
        if mode.is_target_verify():
            return fill + int(backend.speculative_num_draft_tokens)
        # FROZEN_KV_MTP builds the metadata of its draft as for a decode without speculation.
        plain = batch.spec_info is None or frozen
        if mode.is_decode_or_idle() and not plain:
            return fill + int(backend.speculative_step_id) + 1
        return fill

    def forgot_swa(self, backend: Any) -> bool:
        """The upstream regression. ``use_sliding_window_kv_pool`` does not tell this: in 0.5.13 it
        is False for every sound draft, because a draft's own pool is a dummy.
        """
        return backend._swa_kv_pool is None

    def swa_state(self, backend: Any) -> str:
        return f"use_sliding_window_kv_pool={backend.use_sliding_window_kv_pool}, _swa_kv_pool=None"


ADAPTER = TrtllmMha()
