"""A real ModelRunner on the CPU engine, in this process: prefills without a scheduler.

Model, pools, allocator, ScheduleBatch, ForwardBatch and the trtllm_mha backend are SGLang's own;
only the tree cache is a plain namespace, since nothing is cached. Requests keep their KV until
``Model.clear``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Model:
    def __init__(self, target: Path, **overrides: Any) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.server_args import (
            PortArgs,
            ServerArgs,
            set_global_server_args_for_scheduler,
        )

        from g4debug.cpu.server import server_arguments

        given = server_arguments((target, target), mtp=False, disable_radix_cache=True, **overrides)
        args = ServerArgs(**given)
        set_global_server_args_for_scheduler(args)
        self.runner = ModelRunner(
            model_config=ModelConfig.from_server_args(args),
            mem_fraction_static=args.mem_fraction_static,
            gpu_id=0,
            tp_rank=0,
            tp_size=1,
            moe_ep_rank=0,
            moe_ep_size=1,
            pp_rank=0,
            pp_size=1,
            nccl_port=PortArgs.init_new(args).nccl_port,
            server_args=args,
        )

    @property
    def text(self) -> Any:
        return self.runner.model.model

    @property
    def backend(self) -> Any:
        return self.runner.attn_backend

    def request(self, tokens: list[int], **given: Any) -> Any:
        """A request with a whole prompt to compute; see ``take`` for less."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        start = given.pop("logprob_start", -1)
        sampling = SamplingParams(temperature=0, max_new_tokens=1)
        request = Req(f"r{len(tokens)}", "", list(tokens), sampling, **given)
        request.logprob_start_len = start
        request.prefix_indices = torch.empty(0, dtype=torch.int64)
        return self.take(request, len(tokens))

    def take(self, request: Any, end: int) -> Any:
        """Compute up to ``end`` next, as the scheduler's chunked prefill cuts a prompt."""
        whole = request.origin_input_ids + request.output_ids
        begin = len(request.fill_ids)
        if begin:
            table = self.runner.req_to_token_pool.req_to_token
            request.prefix_indices = table[request.req_pool_idx, :begin].long()
        request.fill_ids = whole[:end]
        request.is_chunked = int(end < len(whole))
        request.set_extend_input_len(end - begin)
        return request

    def batch(self, requests: list[Any], algorithm: str = "NONE") -> Any:
        """A ModelWorkerBatch of a prefill; several forwards may be made of it."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = self.runner
        tree = SimpleNamespace(
            page_size=runner.server_args.page_size,
            device="cpu",
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            is_chunk_cache=lambda: True,
            is_tree_cache=lambda: False,
            supports_swa=lambda: False,
            supports_mamba=lambda: False,
            sliding_window_size=None,
            evict=lambda *args: None,
        )
        batch = ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=tree,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.return_logprob = any(r.return_logprob for r in requests)
        batch.prepare_for_extend()
        made = batch.get_model_worker_batch()
        made.spec_algorithm = SpeculativeAlgorithm[algorithm]
        return made

    def forward_batch(self, batch: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        return ForwardBatch.init_new(batch, self.runner)

    def forward(self, forward_batch: Any) -> Any:
        """LogitsProcessorOutput of one forward."""
        with torch.no_grad():
            return self.runner.forward(forward_batch).logits_output

    def prepare(self, forward_batch: Any) -> Any:
        """What ModelRunner does before it calls the model, for tests that call it themselves."""
        self.runner.token_to_kv_pool.set_swa_loc(forward_batch.out_cache_loc_swa)
        self.backend.init_forward_metadata(forward_batch)
        return forward_batch

    def clear(self) -> None:
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
