"""A real ModelRunner on the CPU engine, in this process: prefills without a scheduler.

Model, pools, allocator, ScheduleBatch, ForwardBatch and the trtllm_mha backend are SGLang's own;
only the tree cache is a plain namespace, since nothing is cached. Requests keep their KV until
``Model.clear``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import releases
import torch


@contextmanager
def served(target: Path, **overrides: Any) -> Iterator[Model]:
    """A model, and at the end SGLang's process-wide state as it was."""
    from sglang.srt.distributed import parallel_state

    with releases.configuration_kept():
        try:
            with torch.random.fork_rng():
                yield Model(target, **overrides)
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


class Model:
    def __init__(self, target: Path, **overrides: Any) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.server_args import PortArgs, ServerArgs

        from g4debug.cpu.server import server_arguments

        given = server_arguments((target, target), mtp=False, disable_radix_cache=True, **overrides)
        args = ServerArgs(**given)
        releases.publish(args)
        config = ModelConfig.from_server_args(args)
        port = PortArgs.init_new(args).nccl_port
        _make_groups(args, config, port)
        one = {"tp_rank": 0, "tp_size": 1, "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0}
        share = args.mem_fraction_static
        self.runner = ModelRunner(
            model_config=config,
            mem_fraction_static=0.5 if share is None else share,
            gpu_id=0,
            nccl_port=port,
            server_args=args,
            **releases.accepted(ModelRunner, **one, pp_size=1),
        )
        _make_pools(self.runner)

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
        ids = releases.token_ids(tokens)
        request = Req(f"r{len(tokens)}", "", ids, sampling, vocab_size=512, **given)
        request.logprob_start_len = start
        return self.take(request, len(tokens))

    def take(self, request: Any, end: int) -> Any:
        """Compute up to ``end`` next, as the scheduler's chunked prefill cuts a prompt.

        What it computed before is a prefix if a forward was made of it.
        """
        row = getattr(releases.kv_of(request), "req_pool_idx", None)
        begin = 0 if row is None else request.taken_by_a_test
        request.taken_by_a_test = end
        prefix = torch.empty(0, dtype=torch.int64)
        if begin:
            prefix = self.runner.req_to_token_pool.req_to_token[row, :begin].long()
        whole = request.origin_input_ids + request.output_ids
        self.count_chunks(request, int(end < len(whole)))
        if hasattr(request, "fill_ids"):  # up to 0.5.12
            request.prefix_indices, request.fill_ids = prefix, whole[:end]
            request.set_extend_input_len(end - begin)
            return request
        refresh = getattr(request, "refresh_fill_ids", None) or request._refresh_fill_ids
        refresh()
        if hasattr(request, "extend_range"):
            request.prefix_indices = prefix
            request.set_extend_range(begin, end)
        else:
            request.prefix_len, request.extend_end = begin, end
        return request

    def count_chunks(self, request: Any, middle: int) -> None:
        """Say how many chunks of a prompt, which are not its last, are not processed yet."""
        name = "is_chunked" if hasattr(request, "is_chunked") else "inflight_middle_chunks"
        setattr(request, name, middle)

    def batch(self, requests: list[Any], algorithm: str = "NONE") -> Any:
        """What a ForwardBatch of a prefill is made of; several forwards may be made of it."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = self.runner
        batch = ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=self._tree(),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.return_logprob = any(r.return_logprob for r in requests)
        batch.prepare_for_extend()
        made = batch
        if hasattr(batch, "get_model_worker_batch"):
            made = batch.get_model_worker_batch()
        elif batch.input_ids is None:  # a copy to the device is left to the forward
            batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu, None
        made.spec_algorithm = getattr(SpeculativeAlgorithm, algorithm)
        if not hasattr(made, "capture_hidden_mode"):
            made.capture_hidden_mode = None  # an argument of ForwardBatch.init_new from 0.5.23 on
        return made

    def _tree(self) -> Any:
        runner = self.runner
        if not releases.has("sglang.srt.model_executor.forward_context"):  # up to 0.5.12
            return SimpleNamespace(
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
        return releases.prefix_cache(
            runner.req_to_token_pool, runner.token_to_kv_pool_allocator, runner.page_size,
            runner.sliding_window_size, disable=True,
        )  # fmt: skip

    def forward_batch(self, batch: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        more = releases.accepted(
            ForwardBatch.init_new,
            capture_hidden_mode=batch.capture_hidden_mode,
            return_hidden_states_before_norm=False,
        )
        kept = batch.capture_hidden_mode
        made = ForwardBatch.init_new(batch, self.runner, **more)
        batch.capture_hidden_mode = kept  # 0.5.15 takes it away
        return made

    def forward(self, forward_batch: Any) -> Any:
        """LogitsProcessorOutput of one forward."""
        with torch.no_grad():
            return self.runner.forward(forward_batch).logits_output

    def prepare(self, forward_batch: Any) -> Any:
        """What ModelRunner does before it calls the model, for tests that call it themselves."""
        pool = self.runner.token_to_kv_pool
        if hasattr(pool, "set_swa_loc"):
            pool.set_swa_loc(forward_batch.out_cache_loc_swa)
        self.backend.init_forward_metadata(forward_batch)
        return forward_batch

    def text_of(self, forward_batch: Any) -> Any:
        """The hidden states [rows, hidden] of the text model, after ``prepare``."""
        with torch.no_grad(), self.context():
            b = forward_batch
            return self.text(b.input_ids, b.positions, b)

    def context(self, backend: Any = None) -> Any:
        """The context of a forward, in which layers find the backend from 0.5.13 on."""
        if not releases.has("sglang.srt.model_executor.forward_context"):
            return nullcontext()
        from sglang.srt.model_executor import forward_context as module

        return module.forward_context(module.ForwardContext(backend or self.backend))

    def clear(self) -> None:
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()


def _make_groups(args: Any, config: Any, port: int) -> None:
    """From 0.5.23 on the scheduler makes the groups of ranks, and its runner finds them there."""
    if not releases.has("sglang.srt.distributed.bootstrap"):
        return
    from sglang.srt.distributed import bootstrap

    if hasattr(bootstrap, "init_parallel_runtime"):
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
        bootstrap.init_layer_runtime(model_config=config)


def _make_pools(runner: Any) -> None:
    """From 0.5.15 on the worker has the runner make these one after the other."""
    for step in ("alloc_memory_pool", "init_attention_backends", "init_cuda_graphs"):
        if hasattr(runner, step):
            getattr(runner, step)()
