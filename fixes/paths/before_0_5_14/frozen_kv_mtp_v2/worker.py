"""FROZEN_KV_MTP's worker for speculative decoding v2: SGLang's v2 verify, and v1's draft model.

One step of v2, all of it launched without waiting for the device:

    draft:   seed forward (bonus token, hidden state), then the steps -- one CUDA graph
    verify:  SGLang's ``EAGLEWorkerV2.verify``
    stash:   the bonus token and its hidden state, for the next draft (:mod:`.draft_input`)

v1 runs the seed forward at the end of a step, when the host knows what was accepted. Here it is the
first forward of the next draft, which has the lengths after the verify on the device anyway. The
fork's attempt (seed PR #24) ran it eagerly, with the lengths before the verify, and was slower than
v1 and accepted less.

Only the scheduler counts (``_resolve_spec_overlap_tokens``) and prepares a step
(``prepare_for_decode``): v1's ``draft`` and ``verify`` do both themselves, so neither is used.
That the seed forward opens the draft is upstream's idea (0.5.14, ``FrozenKVMTPWorkerV2``).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.eagle_utils import build_tree_kernel_efficient
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPVerifyInput
from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2.draft_input import (
    OverlapDraftInput,
    longest_start,
)


class DraftWorker(FrozenKVMTPWorker):  # type: ignore[misc]
    """The draft model, its attention backend and its CUDA graphs are v1's."""

    speculative_num_steps: int  # v1 sets it

    @property
    def draft_runner(self) -> Any:
        """The draft's ModelRunner, by the name that ``EAGLEWorkerV2`` uses."""
        return self.draft_model_runner

    def init_cuda_graphs(self) -> None:
        """Capture the draft. With one step there is the seed forward, which v1 does not capture."""
        steps = self.speculative_num_steps
        self.speculative_num_steps = max(steps, 2)  # only read by v1's condition
        try:
            super().init_cuda_graphs()
        finally:
            self.speculative_num_steps = steps

    def draft(self, batch: Any) -> Any:
        """The verify input of a ``ModelWorkerBatch`` that decodes.

        Its ``spec_info`` has what the last step stashed, as SGLang's FutureMap relayed it.
        """
        spec = batch.spec_info
        spec.capture_hidden_mode = batch.capture_hidden_mode = CaptureHiddenMode.LAST
        spec.num_tokens_per_req = spec.num_tokens_for_logprob_per_req = 1
        spec.positions = torch.clamp(batch.seq_lens - 1, min=0).to(torch.int64)
        batch.input_ids, batch.out_cache_loc = spec.bonus_tokens, None
        forward_batch = ForwardBatch.init_new(batch, self.draft_model_runner)
        forward_batch.return_logprob = False
        self._set_positions(forward_batch)
        if self.cuda_graph_runner is not None and self.cuda_graph_runner.can_run(forward_batch):
            parents, scores, tokens = self.cuda_graph_runner.replay(forward_batch)
        else:
            parents, scores, tokens = self.draft_forward(forward_batch)
        mask, positions, index, next_token, next_sibling, tokens = build_tree_kernel_efficient(
            spec.bonus_tokens,
            parents,
            scores,
            tokens,
            batch.seq_lens,
            batch.seq_lens_sum,
            self.topk,
            self.speculative_num_steps,
            self.speculative_num_draft_tokens,
        )
        return FrozenKVMTPVerifyInput(
            draft_token=tokens,
            custom_mask=mask,
            positions=positions,
            retrieve_index=index,
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.speculative_num_steps,
            topk=self.topk,
            draft_token_num=self.speculative_num_draft_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=batch.seq_lens_cpu,
        )

    def draft_forward(self, forward_batch: Any, skip_attn_backend_init: bool = False) -> Any:
        """The seed forward, then v1's steps. Captured as it is, and also run eagerly.

        ``spec_info.topk_index`` int64 [requests, 1] has the bonus tokens. All forwards attend to
        the same KV, so they share one set of attention metadata.
        """
        spec = forward_batch.spec_info
        if not skip_attn_backend_init:
            self._init_frozen_kv_metadata(forward_batch)
        stashed = spec.topk_p, spec.topk_index, spec.hidden_states
        forward_batch.input_ids = spec.topk_index.reshape(-1)
        self._set_positions(forward_batch)
        try:
            with self._target_kv_pool_view(forward_batch):
                seed = self.draft_model_runner.forward(forward_batch, skip_attn_backend_init=True)
            self._capture_for_decode(seed.logits_output, spec)
            return super().draft_forward(forward_batch, skip_attn_backend_init=True)
        finally:
            # While a graph is captured these are its static buffers, and it is run three times.
            spec.topk_p, spec.topk_index, spec.hidden_states = stashed

    def _draft_extend_for_prefill(
        self, batch: Any, hidden_states: torch.Tensor, tokens: torch.Tensor, *args: Any
    ) -> OverlapDraftInput:
        """Stash after a prefill. hidden_states: [tokens or requests, hidden]; tokens: [requests].

        No forward: ``EAGLEWorkerV2`` calls it where a draft with a KV cache of its own has one.
        """
        if hidden_states.shape[0] != len(batch.seq_lens):
            lens = torch.tensor(batch.extend_seq_lens)
            last = (torch.cumsum(lens, 0) - 1).to(hidden_states.device, non_blocking=True)
            hidden_states = hidden_states[last]
        return OverlapDraftInput.of(tokens, hidden_states, batch.seq_lens)

    def _draft_extend_for_decode(self, batch: Any, result: Any) -> None:
        """Stash after a verify: the hidden state at the last accepted token of each request."""
        made = result.next_draft_input
        rows = torch.arange(len(batch.seq_lens), device=self.device)
        last = rows * self.speculative_num_draft_tokens + result.accept_lens - 1
        hidden_states = result.logits_output.hidden_states[last]
        context = self.target_worker.model_runner.model_config.context_len
        longest = longest_start(context, self.speculative_num_draft_tokens)
        # Nothing waits for the verify on the host, so its event (verify_done) is not handed on.
        result.next_draft_input = OverlapDraftInput.of(
            made.bonus_tokens, hidden_states, torch.clamp(made.new_seq_lens, max=longest)
        )


class Worker(EAGLEWorkerV2):  # type: ignore[misc]
    """``forward_batch_generation``, ``verify`` and the updates of weights are SGLang's."""

    def __init__(self, server_args: Any, target_worker: Any, **place: Any) -> None:
        """place: the GPU, the port and the ranks of this process, as v1's worker takes them."""
        # SGLang's own would build an EAGLE draft, so its attributes are set here.
        self.server_args = server_args
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.tp_rank, self.gpu_id = place["tp_rank"], place["gpu_id"]
        self.device = server_args.device
        self.page_size = server_args.page_size
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(
            server_args.speculative_algorithm
        )
        self._target_worker = target_worker
        pools = target_worker.get_memory_pool()
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pools
        self.adaptive_controller = None
        # SGLANG_ENABLE_OVERLAP_PLAN_STREAM would plan a verify while its draft still runs.
        self.plan_stream, self.plan_stream_ctx = None, contextlib.nullcontext()
        self._draft_worker = DraftWorker(server_args, target_worker=target_worker, **place)
