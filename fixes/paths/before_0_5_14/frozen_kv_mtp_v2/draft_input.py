"""The input of the next draft: the bonus token and hidden state of each request.

v1 runs the draft's seed forward at the end of a step and leaves its result. Here the seed forward
is the first one of the next draft, so what it starts from is left. SGLang's FutureMap relays
``topk_p``, ``topk_index``, ``bonus_tokens`` and ``hidden_states`` from step to step. ``topk_index``
carries the bonus token, too: the draft's CUDA graph has a static buffer for it, and so the seed
forward is captured with the other steps (:mod:`.worker`).

Nothing here waits for the device. While step N+1 is prepared, N still runs, and how many tokens its
verify accepts is known on the device only. So ``batch.seq_lens`` is exact and on the device, and
``batch.seq_lens_cpu`` is an *upper bound* of it: one verify more than the host knows of. On the
host SGLang and the attention backends that ``limits`` allows use it for sizes of buffers and
tables. That bounds do for them, and that pages are then allocated in whole, is from upstream's v2
(0.5.14 and later), which still waits for the exact lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.utils import get_alloc_len_per_decode
from sglang.srt.mem_cache.common import (
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    get_last_loc,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func

# SGLang ends a request this many tokens before the context is full (``max_req_len``).
SPARED = 4


def longest_start(context: int, tokens: int) -> int:
    """The longest sequence with which a step of a live request begins.

    context: of the model, in tokens. tokens: of a verify. A request that ended in the last step
    runs once more, because the host does not know it yet; it could grow out of the page tables,
    which end with the context. So its length is held at this.
    """
    return context - min(tokens, SPARED)


class OverlapDraftInput(FrozenKVMTPDraftInput):  # type: ignore[misc]
    """``batch.spec_info`` between two steps."""

    @classmethod
    def of(
        cls, tokens: torch.Tensor, hidden_states: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> OverlapDraftInput:
        """tokens: integer [requests], the last token of each. hidden_states: [requests, hidden],
        with which it was predicted. new_seq_lens: integer [requests], what the KV cache holds.
        """
        made = cls()
        made.bonus_tokens = tokens.to(torch.int64)
        made.hidden_states = hidden_states
        made.new_seq_lens = new_seq_lens
        made.topk_index = made.bonus_tokens.unsqueeze(1)
        made.topk_p = torch.ones_like(made.topk_index, dtype=torch.float32)
        made.capture_hidden_mode = CaptureHiddenMode.LAST
        made.num_tokens_per_req = made.num_tokens_for_logprob_per_req = 1
        return made

    def prepare_for_decode(self, batch: Any) -> None:
        """SGLang calls it once for each decode step, on the scheduling stream.

        Raises RuntimeError if the pools have too few pages, which ``check_decode_mem`` ensures.
        """
        batch.maybe_evict_swa()
        penalties = batch.sampling_info.penalizer_orchestrator
        if penalties.is_required:
            penalties.cumulate_output_tokens(self.bonus_tokens)
        ahead = get_alloc_len_per_decode()
        had, gets = [], []
        for request in batch.reqs:
            had.append(request.kv_allocated_len)
            gets.append(max(request.kv_allocated_len, request.kv_committed_len + 2 * ahead))
            request.decode_batch_idx += 1
        if had != gets:
            gets = self._allocate(batch, had, gets)
        bounds = []
        longest = longest_start(batch.model_config.context_len, ahead)
        for request, allocated in zip(batch.reqs, gets, strict=True):
            # As if the verify that may be under way accepts everything.
            bounds.append(min(request.kv_committed_len + ahead, longest))
            request.kv_allocated_len = allocated
            request.kv_committed_len += 1  # SGLang's resolving of the result takes it back
        batch.seq_lens_cpu = torch.tensor(bounds, dtype=torch.int64)
        batch.seq_lens_sum = sum(bounds)

    def _allocate(self, batch: Any, had: list[int], gets: list[int]) -> list[int]:
        """Allocate KV slots for these requests, in whole pages. Returns how many each has then."""
        page = batch.token_to_kv_pool_allocator.page_size
        table = batch.req_to_token_pool.req_to_token
        if page > 1:
            # The rest of a page costs nothing, and saves as many allocations.
            width = table.shape[1]
            gets = [max(n, min(-(-n // page) * page, width)) for n in gets]
        count = sum(gets) - sum(had)
        start, end = torch.tensor(had, dtype=torch.int32), torch.tensor(gets, dtype=torch.int32)
        start_there = start.to(batch.device, non_blocking=True)
        end_there = end.to(batch.device, non_blocking=True)
        if page == 1:
            slots = alloc_token_slots(batch.tree_cache, count)
        else:
            last = get_last_loc(table, batch.req_pool_indices, start_there)
            slots = alloc_paged_token_slots_extend(
                batch.tree_cache, start_there, start, end_there, end, last, count
            )
        assign_req_to_token_pool_func(
            batch.req_pool_indices, table, start_there, end_there, slots, len(gets)
        )
        return gets

    def filter_batch(self, new_indices: torch.Tensor, has_been_filtered: bool = True) -> None:
        """Keep these rows. The penalties read the bonus tokens before they are relayed."""
        self.bonus_tokens: torch.Tensor = self.bonus_tokens[new_indices]
        super().filter_batch(new_indices, has_been_filtered)

    def merge_batch(self, spec_info: Any) -> None:
        self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens])
        super().merge_batch(spec_info)
