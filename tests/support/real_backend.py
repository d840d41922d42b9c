"""A real TRTLLMHAAttnBackend on real pools, driven forward by forward, without a model.

Only the model runner is a plain namespace: it is what the backend reads its sizes from. The
pools, the allocator, the request table, the layers, the ForwardBatch, the FROZEN_KV_MTP
worker's views and the backend are SGLang's own. The shape is E4B's: sliding and full layers,
a SWA pool smaller than the full one, a draft that owns a dummy pool and reads the target's.
``PlainRig`` is a model without sliding layers: one pool, and the paged allocator alone.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from types import SimpleNamespace
from typing import Any

import releases
import torch
from releases import allocator_class

PAGE, FULL, SWA, WINDOW = 16, 640, 320, 40  # tokens
CONTEXT = 256
LAYERS = {0: True, 1: True, 2: False, 3: True, 4: False}  # layer id -> sliding?
HEADS, DIM = 2, 8
SPECULATIVE = {
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_attention_mode": "prefill",
    "speculative_algorithm": "FROZEN_KV_MTP",
}


class Rig:
    """Pools of one process, and requests with KV in them."""

    sliding = LAYERS

    def __init__(self) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        torch.manual_seed(0)
        releases.configure(**SPECULATIVE, page_size=PAGE)
        self.req_to_token = ReqToTokenPool(12, CONTEXT, "cpu", False)
        self.pool, self.allocator = self.pools()
        self.layers = [
            RadixAttention(
                HEADS, DIM, DIM**-0.5, 1, i, sliding_window_size=WINDOW - 1 if sliding else -1
            )
            for i, sliding in self.sliding.items()
        ]
        self.requests: list[Any] = []
        # The low pages of the full pool are somebody else's, who has left his window:
        # every full-pool page that a test gets lies beyond the SWA pool.
        self.admit("other", FULL - 16 * PAGE)
        assert FULL - 16 * PAGE > SWA

    def pools(self) -> tuple[Any, Any]:
        """The KV pool and its allocator."""
        pool = swa_pool(FULL, SWA)
        new = allocator_class("swa.init")
        return pool, new(FULL, SWA, PAGE, torch.float32, "cpu", pool, False)

    def admit(self, rid: str, tokens: int) -> Any:
        """A request with KV for ``tokens`` tokens, allocated by SGLang's allocator."""
        request = SimpleNamespace(rid=rid, req_pool_idx=None, tokens=tokens, **releases.no_kv())
        (request.req_pool_idx,) = self.req_to_token.alloc([request])
        begin = 0
        while begin < tokens:  # in chunks that fit into the SWA pool
            end = min(begin + CONTEXT // 2, tokens)
            before, after = torch.tensor([begin]), torch.tensor([end])
            row = self.req_to_token.req_to_token[request.req_pool_idx]
            last = torch.tensor([int(row[(begin - 1) % CONTEXT]) if begin else -1])
            found = self.allocator.alloc_extend(before, before, after, after, last, end - begin)
            assert found is not None, f"{rid}: the pool is full"
            at = torch.arange(begin, end) % CONTEXT
            row[at] = found.to(torch.int32)
            if tokens > CONTEXT and any(self.sliding.values()):  # keeps none of its SWA pages
                self.allocator.free_swa(found)
            # From 0.5.23 on a row without allocated KV counts as not taken.
            releases.kv_of(request).kv_allocated_len = end
            begin = end
        self.requests.append(request)
        return request

    def next_row(self) -> int:
        """The row of ``req_to_token`` that the next request gets. Releases begin at either end."""
        before = list(self.req_to_token.free_slots)
        request = SimpleNamespace(rid="next", req_pool_idx=None, **releases.no_kv())
        (row,) = self.req_to_token.alloc([request])
        self.req_to_token.free_slots = before
        return int(row)

    def page(self, rid: str, column: int, pool: str = "full") -> int:
        """The page of a request's tokens from ``column * PAGE`` on, by SGLang's own tables."""
        request = next(r for r in self.requests if r.rid == rid)
        token = int(self.req_to_token.req_to_token[request.req_pool_idx, column * PAGE])
        if pool == "swa":
            token = int(self.allocator.full_to_swa_index_mapping[token])
        return token // PAGE

    def runner(self, draft: bool = False) -> Any:
        """What a backend's constructor reads from its ModelRunner."""
        pool = dummy_pool() if draft else self.pool
        made = SimpleNamespace(
            model_config=SimpleNamespace(
                context_len=CONTEXT,
                hidden_size=HEADS * DIM,
                num_attention_heads=HEADS,
                head_dim=DIM,
            ),
            model=torch.nn.Module(),
            max_running_requests=12,
            prefill_attention_backend_str="trtllm_mha",
            decode_attention_backend_str="trtllm_mha",
            kv_index_translator=self.translator(pool, draft),
            kv_cache_dtype=torch.float32,
            dtype=torch.float32,
            page_size=PAGE,
            device="cpu",
            is_draft_worker=draft,
            req_to_token_pool=self.req_to_token,
            token_to_kv_pool=pool,
            token_to_kv_pool_allocator=self.allocator,  # the target's, for a draft, too
            server_args=SimpleNamespace(
                **SPECULATIVE,
                disable_overlap_schedule=True,  # as SGLang sets it for FROZEN_KV_MTP
            ),
        )
        made.spec_algorithm = SimpleNamespace(
            is_frozen_kv_mtp=lambda: made.server_args.speculative_algorithm == "FROZEN_KV_MTP"
        )
        return made

    def translator(self, pool: Any, draft: bool = False) -> Any:
        """What names a batch's slots in each pool, from 0.5.21 on; None before."""
        if not releases.has("sglang.srt.mem_cache.kv_index_translator"):
            return None
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        return KVIndexTranslator(
            req_to_token=self.req_to_token.req_to_token,
            token_to_kv_pool_allocator=self.allocator,
            token_to_kv_pool=pool,
            page_size=PAGE,
            device="cpu",
            is_draft_worker=draft,
        )

    def backend(self, draft: bool = False) -> Any:
        from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

        return TRTLLMHAAttnBackend(self.runner(draft))

    def batch(self, mode: str, requests: list[Any], backend: Any, pool: Any = None) -> Any:
        """A ForwardBatch of ``mode``: decode, target_verify (4 tokens each) or extend."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        # A verify's draft tokens are allocated already, and come on top of the sequence.
        spare = 4 if mode == "target_verify" else 0
        lengths = torch.tensor([r.tokens - spare for r in requests])
        new = {"decode": 1, "target_verify": 4, "extend": 10}[mode]
        rows = torch.tensor([r.req_pool_idx for r in requests])
        table = self.req_to_token.req_to_token
        slots = torch.cat(
            [table[r.req_pool_idx, r.tokens - new : r.tokens] for r in requests]
        ).long()
        known = {f.name for f in dataclasses.fields(ForwardBatch)}
        # From 0.5.13 on the pools are the backend's, which a view may have swapped.
        at_backend = {
            "req_to_token_pool": self.req_to_token,
            "token_to_kv_pool": pool or self.pool,
            "attn_backend": backend,
        }
        made = ForwardBatch(
            **{name: value for name, value in at_backend.items() if name in known},
            forward_mode=ForwardMode[mode.upper()],
            batch_size=len(requests),
            input_ids=torch.zeros(len(slots), dtype=torch.int64),
            req_pool_indices=rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=slots,
            extend_seq_lens=torch.full_like(lengths, new),
            extend_seq_lens_cpu=[new] * len(requests),
            extend_prefix_lens_cpu=[int(n) - new for n in lengths],
        )
        if "kv_loc_plan" in known:
            translator = getattr(backend, "kv_index_translator", None) or self.translator(self.pool)
            translator.own_plan(made).bind(made, translator)
        return made

    def forward(
        self, backend: Any, batch: Any, layers: list[Any] | None = None, save: bool = True
    ) -> list[Any]:
        """The attention of one forward, layer by layer; metadata must be ready.

        save: write this forward's KV; a FROZEN_KV_MTP draft does not.
        """
        outputs = []
        for layer in self.layers if layers is None else layers:
            q = torch.randn(len(batch.out_cache_loc), HEADS * DIM)
            k, v = (torch.randn(len(q), 1, DIM) for _ in "kv")
            call = backend.forward_extend
            if batch.forward_mode.is_decode_or_idle():
                call = backend.forward_decode
            outputs.append(call(q, k, v, layer, batch, save_kv_cache=save))
        return outputs

    def step(self, backend: Any, mode: str, requests: list[Any]) -> list[Any]:
        """Metadata and attention, as ModelRunner.forward does it."""
        batch = self.batch(mode, requests, backend)
        backend.init_forward_metadata(batch)
        return self.forward(backend, batch)


def capture_graph(backend: Any, batch: Any) -> None:
    """The metadata of a CUDA graph's capture, as its runner asks the backend for them."""
    if hasattr(backend, "init_forward_metadata_out_graph"):  # from 0.5.13 on
        batch.positions = torch.zeros(len(batch.out_cache_loc), dtype=torch.int64)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        recorded(backend, batch)
        return
    backend.init_forward_metadata_capture_cuda_graph(
        batch.batch_size, len(batch.out_cache_loc), batch.req_pool_indices, batch.seq_lens,
        None, batch.forward_mode, batch.spec_info,
    )  # fmt: skip


def recorded(backend: Any, batch: Any) -> None:
    """What the graph itself does at each replay: from 0.5.15 on it fills in the page tables."""
    if hasattr(backend, "init_forward_metadata_in_graph"):
        backend.init_forward_metadata_in_graph(batch)


def replay_graph(backend: Any, batch: Any) -> None:
    """The same before a replay."""
    if hasattr(backend, "init_forward_metadata_out_graph"):
        backend.init_forward_metadata_out_graph(batch)
        recorded(backend, batch)
        return
    backend.init_forward_metadata_replay_cuda_graph(
        batch.batch_size, batch.req_pool_indices, batch.seq_lens, int(batch.seq_lens.sum()),
        None, batch.forward_mode, batch.spec_info, batch.seq_lens_cpu,
    )  # fmt: skip


class PlainRig(Rig):
    sliding = dict.fromkeys(LAYERS, False)

    def pools(self) -> tuple[Any, Any]:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        size = 2 * FULL  # room is left
        pool = MHATokenToKVPool(size, PAGE, torch.float32, 1, DIM, len(LAYERS), "cpu", False)
        return pool, allocator_class("pool.init")(size, PAGE, torch.float32, "cpu", pool, False)


def dummy_pool() -> Any:
    """The draft's own: no SWA pool, since the assistant is no hybrid model to SGLang."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(64, PAGE, torch.float32, 1, DIM, len(LAYERS), "cpu", False)


def swa_pool(full: int, swa: int) -> Any:
    sliding = [i for i, s in LAYERS.items() if s]
    return releases.swa_pool(full, swa, PAGE, DIM, sliding, [i for i in LAYERS if i not in sliding])


def draft_worker(rig: Rig, backend: Any) -> Any:
    """The draft's worker, with what its two views and its graph metadata use."""
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPContext

    from g4debug.hooking import targets

    kind = pkgutil.resolve_name(targets.path("worker.pool_view").rpartition(".")[0])
    worker = kind.__new__(kind)
    worker.kv_context = FrozenKVMTPContext(rig.pool, {0: 3, 1: 4})
    worker.draft_attn_backend = backend
    return worker
