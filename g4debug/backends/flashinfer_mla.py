"""The lists that SGLang's ``flashinfer`` backend hands over for a model with MLA.

It is a class of its own. A decode lists all tokens of each row, and so does a prefill that reads
its own new tokens from the pool, too. A prefill without a prefix reads K and V only. One with a
long prefix (or with chunks of it) fetches that prefix by another list, which is not judged.

Where the lists begin is planned on the host, and the kernels get it from there. On the device
SGLang notes it in ``kv_indptr`` of the backend, for each forward and each replay of a CUDA graph,
when it makes the lists. The wrapper of a graph has a buffer of that name, too, which a replay
leaves as it was captured (``fast_mla_decode_plan``): it is read by nobody and says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from g4debug.backends.base import Guarding
from g4debug.backends.flashinfer import FlashInfer
from g4debug.hooking.targets import CPU

if TYPE_CHECKING:
    import torch


class FlashInferMla(FlashInfer):
    name = "flashinfer_mla"
    built = "attn.flashinfer_mla.init"
    sites = (
        "attn.flashinfer_mla.metadata",
        "attn.flashinfer_mla.decode",
        "attn.flashinfer_mla.extend",
    )
    metadata = "attn.flashinfer_mla.metadata"
    replay = "attn.flashinfer_mla.metadata_replay"
    run: ClassVar = {"0.5.23": (CPU,)}

    def learn(self, backend: Any, model_runner: Any, guard: Guarding) -> bool:
        if getattr(backend, "enable_chunk_kv", False):
            guard.judged_in_part([backend], ("prefill",))
        return super().learn(backend, model_runner, guard)

    def reads_no_list(self, backend: Any, batch: Any, guard: Guarding | None = None) -> bool:
        attends = getattr(batch, "attn_attend_prefix_cache", None) is not None
        if attends and any(batch.extend_prefix_lens_cpu):
            if guard is not None:
                guard.not_guarded(
                    "what a prefill of MLA reads of its prefix",
                    "the model fetches it by a list of tokens, and hands the kernel K and V",
                )
            return True
        return bool(getattr(backend.forward_metadata, "use_ragged", False))

    def wrappers(self, metadata: Any) -> list[Any]:
        found = getattr(metadata, "decode_wrapper", None)
        found = getattr(metadata, "prefill_wrapper", None) if found is None else found
        return [] if found is None else [found]

    def wrapper(self, backend: Any, layer: Any) -> tuple[Any, bool]:
        return self.wrappers(backend.forward_metadata)[0], False

    def entries(self, wrapper: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(wrapper, "_kv_indices_buf", None)
        return found

    def begins(self, backend: Any, wrapper: Any, rows: int | None) -> torch.Tensor | None:
        if rows is not None:
            found: torch.Tensor | None = backend.kv_indptr[: rows + 1]
        else:
            found = getattr(wrapper, "_kv_indptr_buf", None)
        return found

    def in_graphs(self, backend: Any, rows: int) -> list[Any]:
        found = backend.decode_cuda_graph_metadata.get(rows)
        return [] if found is None else [found]


ADAPTER = FlashInferMla()
