"""The page tables that SGLang's ``trtllm_mla`` backend hands to TensorRT-LLM's kernel for MLA.

``_run_decode_kernel`` gets the table of a decode, as wide as the longest row and rounded up; a
CUDA graph has a static one, of full width. Cells behind a row's end hold -1. ``cutedsl_mla``
inherits from this backend and has a kernel of its own, so it is not judged.

A prefill hands the kernel K and V of the new tokens, and those of the prefix, which the model
fetches in parts. With ``--disable-chunked-prefix-cache`` a prefill with a prefix is that of
``flashinfer_mla``, and so it is in a CUDA graph, where it is not judged.
"""

from __future__ import annotations

from typing import Any

from g4debug.backends.mla_tables import MlaTables


class TrtllmMla(MlaTables):
    name = "trtllm_mla"
    built = "attn.trtllm_mla.init"
    sites = ("attn.trtllm_mla.kernel", "attn.trtllm_mla.decode", "attn.trtllm_mla.extend")
    metadata = "attn.trtllm_mla.metadata"
    replay = "attn.trtllm_mla.metadata_replay"
    argument = "block_tables"

    def in_decode(self, backend: Any, batch: Any) -> Any:
        found = getattr(batch, "decode_trtllm_mla_metadata", None)
        return backend.forward_decode_metadata if found is None else found

    def has_lists(self, backend: Any) -> bool:
        return bool(getattr(backend.forward_prefill_metadata, "fallback_to_flashinfer_impl", False))


ADAPTER = TrtllmMla()
