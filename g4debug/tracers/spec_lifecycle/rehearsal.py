"""Steps of speculative decoding v2 with SGLang's own classes, without a model.

Requests, batches, inputs, results, the FutureMap, the draft extend and the processing of a result
are SGLang's. The forwards and the scheduler's loop are stand-ins: the calls come in the order in
which ``Scheduler.run_batch`` makes them with overlap scheduling. The canary rehearses a step, and
so do the tests.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.hooking import req_kv
from g4debug.speculation import frozen_kv_mtp

STEPS, HIDDEN, ROWS, WIDTH = 3, 8, 16, 1024
TOKENS = STEPS + 1
TREE = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
Site = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class Classes:
    """The classes of SGLang that a rehearsal uses. Raises ImportError if one is missing."""

    def __init__(self) -> None:
        of = importlib.import_module
        batch = of("sglang.srt.managers.schedule_batch")
        info = of("sglang.srt.speculative.frozen_kv_mtp_info")
        worker = of("sglang.srt.speculative.frozen_kv_mtp_worker_v2")
        overlap = of("sglang.srt.managers.overlap_utils")
        processor = of("sglang.srt.managers.scheduler_components.batch_result_processor")
        algorithm = of("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
        self.Req, self.ScheduleBatch = batch.Req, batch.ScheduleBatch
        self.Params = of("sglang.srt.sampling.sampling_params").SamplingParams
        self.Mode = of("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self.Result = of("sglang.srt.managers.utils").GenerationBatchResult
        self.DraftInput, self.VerifyInput = info.FrozenKVMTPDraftInput, info.FrozenKVMTPVerifyInput
        self.MadeByVerify = of("sglang.srt.speculative.eagle_info").EagleDraftInput
        self.DraftWorker = worker.FrozenKVMTPDraftWorker
        self.FutureMap = overlap.FutureMap
        # 0.5.14 stashes the draft input itself.
        payload = getattr(overlap, "RelayPayload", None)
        self.payload_of = payload.from_draft_input if payload is not None else lambda draft: draft
        self.Processor = processor.SchedulerBatchResultProcessor
        self.algorithm = algorithm.from_string(frozen_kv_mtp.ADAPTER.name)
        self.spec_utils: Any = of("sglang.srt.speculative.spec_utils")


class Rehearsal:
    """``site(name, function)`` returns the function with the site's hooks around it."""

    def __init__(self, site: Site, classes: Classes, device: torch.device) -> None:
        self.site = site
        self.classes = classes
        self.device = device
        self.reserve = 2 * TOKENS  # what SGLang allocates ahead of kv_committed_len
        table = SimpleNamespace(req_to_token=torch.zeros(ROWS, WIDTH), req_generation=None)
        self.future_map = self.classes.FutureMap(
            device, self.classes.algorithm, table, needs_cpu_seq_lens=True
        )
        self.worker = SimpleNamespace(
            speculative_num_steps=STEPS, speculative_num_draft_tokens=TOKENS, topk=1
        )
        draft = SimpleNamespace(device=device, topk=1, speculative_num_draft_tokens=TOKENS)
        draft._build_seed_draft_input = functools.partial(
            self.classes.DraftWorker._build_seed_draft_input, draft
        )
        self.draft_worker = draft
        nothing = lambda *a, **k: None  # noqa: E731
        self.processor = SimpleNamespace(
            model_worker=SimpleNamespace(on_verify_complete_cpu=nothing),
            metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=nothing),
            advance_grammar_fsm=nothing,
        )
        self._next_token = 100
        self.places: torch.Tensor | None = None  # out_cache_loc of the next draft's forward
        self.accepted: Sequence[int] = ()

    def request(self, rid: str, row: int, tokens: int) -> Any:
        """A request with a prompt of ``tokens`` tokens, about to be prefilled."""
        from array import array

        made = self.classes.Req(
            rid, "", array("q", range(4, 4 + tokens)), self.classes.Params(max_new_tokens=99)
        )
        for name, value in (
            ("req_pool_idx", row),
            ("kv_committed_len", tokens),
            ("kv_allocated_len", tokens),
        ):
            setattr(req_kv.holder(made, name), name, value)
        return made

    def batch(self, *requests: Any) -> Any:
        """These requests, about to be prefilled."""
        lens = torch.tensor([req_kv.committed(r) for r in requests])
        rows = torch.tensor([req_kv.row(r) for r in requests])
        state = SimpleNamespace(
            merge_batch=lambda other: None, filter_batch=lambda *a, **k: None, grammars=None
        )
        made = self.classes.ScheduleBatch(
            reqs=list(requests),
            model_config=SimpleNamespace(is_encoder_decoder=False),
            forward_mode=self.classes.Mode.EXTEND,
            enable_overlap=True,
            is_extend_in_batch=False,
            device=self.device,
            spec_algorithm=self.classes.algorithm,
            sampling_info=state,
            req_pool_indices=rows.to(self.device),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            orig_seq_lens=lens.to(self.device),
        )
        made.req_pool_indices_cpu = rows
        return made

    def prefill(self, batch: Any) -> None:
        """Run a prefill and process its result."""
        self.run(batch)
        for request in batch.reqs:
            request.output_ids.append(self._token())
        batch.forward_mode = self.classes.Mode.DECODE

    def run(self, batch: Any, accepted: Sequence[int] = ()) -> tuple[Any, Any]:
        """One step; its batch as the processing gets it, and its result.

        accepted: how many tokens the verify will accept for each request.
        """
        self.accepted = accepted
        if batch.forward_mode.is_decode():
            self.site("batch.prepare_for_decode", self._prepare)(batch)
        result = self.site("scheduler.run_batch", self._run_batch)(None, batch)
        return batch.copy(), result

    def process(self, batch: Any, result: Any, finished: Sequence[Any] = ()) -> None:
        """Process the result of a verify. ``finished``: requests that end with it."""

        def process(scheduler: Any, batch: Any, result: Any) -> None:
            self._process(batch, result, finished)

        self.site("scheduler.process_result", process)(None, batch, result)

    def _process(self, batch: Any, result: Any, finished: Sequence[Any]) -> None:
        resolve = self.classes.Processor._resolve_spec_v2_tokens
        kept = self.site("result.resolve", resolve)(self.processor, result, batch)
        for request, tokens in zip(batch.reqs, kept, strict=True):
            if request.finished() or request.is_retracted:
                continue
            request.output_ids.extend(tokens)
            if request in finished:
                self.finish(request)
        self.site("scheduler.stream_output", lambda *a, **k: None)(None, batch.reqs, False)

    def finish(self, request: Any) -> None:
        """The request has all its tokens, and gives its row back."""
        req_kv.holder(request, req_kv.ROW).req_pool_idx = None
        finish = importlib.import_module("sglang.srt.managers.schedule_batch").FINISH_LENGTH
        request.finished_reason = finish(1)

    def _prepare(self, batch: Any) -> None:
        for request in batch.reqs:
            kv = req_kv.holder(request, "kv_allocated_len")
            ahead = req_kv.committed(request) + self.reserve
            kv.kv_allocated_len = max(kv.kv_allocated_len, ahead)

    def _run_batch(self, scheduler: Any, batch: Any) -> Any:
        future_map = self.future_map
        self.site("future.resolve_lens", self.classes.FutureMap.resolve_seq_lens_cpu)(
            future_map, batch
        )
        gather = self.classes.FutureMap._resolve_spec_extras
        self.site("future.gather", gather)(future_map, batch)
        indices, kept = batch.req_pool_indices, batch.forward_mode
        publish = self.site("future.publish", self.classes.FutureMap.publish)
        on_publish = functools.partial(lambda *a: publish(future_map, *a), indices)
        result = self.site("worker.forward", self._forward)(
            self.worker, batch, on_publish=on_publish
        )
        self.site("scheduler.relay", self._relay)(None, indices, result)
        batch.forward_mode = kept
        batch.spec_info = result.next_draft_input
        batch.spec_info.future_indices = indices
        return result

    def _relay(self, scheduler: Any, indices: torch.Tensor, result: Any) -> None:
        utils = self.classes.spec_utils
        asked, utils.spec_need_hidden_states = utils.spec_need_hidden_states, lambda *a: True
        try:
            self.site("future.stash", self.classes.FutureMap.stash)(
                self.future_map, indices, self.classes.payload_of(result.next_draft_input)
            )
        finally:
            utils.spec_need_hidden_states = asked

    def _forward(self, worker: Any, batch: Any, on_publish: Any = None) -> Any:
        count = len(batch.reqs)
        if batch.forward_mode.is_extend():
            result = self.classes.Result(new_seq_lens=batch.seq_lens)
            on_publish(batch.seq_lens)
            # The token that the request will be given when the result is processed.
            result.next_draft_input = self.draft_worker._build_seed_draft_input(
                self._tensor(range(self._next_token, self._next_token + count)),
                torch.rand(count, HIDDEN, device=self.device),
            )
            return result
        verify_input = self.site("worker.draft", self._draft)(self.draft_worker, batch)
        batch.spec_info = verify_input
        result = self.site("worker.verify", self._verify)(worker, batch)
        on_publish(result.new_seq_lens)
        self.site("worker.draft_extend", self.classes.DraftWorker._draft_extend_for_decode)(
            self.draft_worker, batch, result
        )
        result.next_token_ids, result.accept_lens = (
            result.next_token_ids.cpu(),
            result.accept_lens.cpu(),
        )
        return result

    def _draft(self, draft_worker: Any, batch: Any) -> Any:
        count = len(batch.reqs)
        forward = self.site("worker.draft_forward", lambda *a: None)
        forward(draft_worker, SimpleNamespace(out_cache_loc=self.places, batch_size=count))
        _, positions, *tree, tokens = self.site("draft.tree", self._tree)(batch)
        return self.classes.VerifyInput(
            draft_token=tokens,
            custom_mask=None,
            positions=positions,
            **dict(zip(TREE, tree, strict=True)),
            retrieve_cum_len=None,
            spec_steps=STEPS,
            topk=1,
            draft_token_num=TOKENS,
            capture_hidden_mode=None,
            seq_lens_sum=0,
            seq_lens_cpu=batch.seq_lens_cpu,
        )

    def _tree(self, batch: Any) -> tuple[Any, ...]:
        """A tree with one draft path: no mask, positions, the tree's three tensors, the tokens."""
        count = len(batch.reqs)
        rows = torch.arange(count * TOKENS, device=self.device).view(count, TOKENS)
        places = torch.arange(TOKENS, device=self.device)
        tokens = self._tensor([self._token() for _ in range(count * TOKENS)]).view(count, TOKENS)
        tokens[:, 0] = batch.spec_info.bonus_tokens
        positions = (batch.seq_lens[:, None] + places).flatten()
        child = torch.where(places + 1 < TOKENS, places + 1, -1).repeat(count, 1)
        return None, positions, rows, child, torch.full_like(rows, -1), tokens.flatten()

    def _verify(self, worker: Any, batch: Any) -> Any:
        count = len(batch.reqs)
        sample = self.site("verify.sample", self._sample)
        tokens, accept, _ = sample(batch.spec_info, batch, None)
        last = torch.arange(count, device=self.device) * TOKENS + accept - 1
        return self.classes.Result(
            logits_output=SimpleNamespace(
                hidden_states=torch.rand(count * TOKENS, HIDDEN, device=self.device)
            ),
            next_token_ids=tokens,
            speculative_num_draft_tokens=TOKENS,
            next_draft_input=self.classes.MadeByVerify(bonus_tokens=tokens[last]),
            accept_lens=accept,
            new_seq_lens=batch.seq_lens + accept,
        )

    def _sample(self, verify_input: Any, batch: Any, logits: Any) -> tuple[Any, Any, Any]:
        """Tokens, accept lengths and accepted indices: so many drafts, and a bonus token."""
        drafted = verify_input.draft_token.view(-1, TOKENS)
        tokens, index = torch.zeros_like(drafted), torch.full_like(drafted, -1)
        for i, n in enumerate(self.accepted):
            tokens[i, : n - 1] = drafted[i, 1:n]
            tokens[i, n - 1] = self._token()
            index[i, :n] = torch.arange(i * TOKENS, i * TOKENS + n, device=self.device)
        return tokens.flatten(), self._tensor(self.accepted), index

    def _tensor(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self.device)

    def _token(self) -> int:
        token, self._next_token = self._next_token, self._next_token + 1
        return token
