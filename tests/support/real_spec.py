"""Real ScheduleBatch, Req and FROZEN_KV_MTP inputs, without a model or a pool behind them.

Stand-ins: the sampling state, which merge and filter only pass their rows to, and the worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

HIDDEN, STEPS = 8, 3
TOKENS = STEPS + 1


def request(rid: str, tokens: int, done: bool = False) -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    found = Req(rid, "", list(range(4, 4 + tokens)), SamplingParams(max_new_tokens=99))
    found.output_ids.append(7)
    found.kv_committed_len = tokens
    if done:
        found.finished_reason = FINISH_LENGTH(1)
    return found


def batch(*requests: Any, spec: Any = None) -> Any:
    """A running batch; ``spec`` defaults to a sound draft input."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    lens = torch.tensor([r.kv_committed_len for r in requests])
    live = sum(not r.finished() for r in requests)
    made = ScheduleBatch(
        reqs=list(requests),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        forward_mode=ForwardMode.DECODE,
        enable_overlap=False,
        is_extend_in_batch=False,
        device="cpu",
        spec_algorithm=SpeculativeAlgorithm.FROZEN_KV_MTP,
        spec_info=draft_input(live) if spec is None else spec,
        sampling_info=SimpleNamespace(merge_batch=lambda o: None, filter_batch=lambda *a: None),
        req_pool_indices=torch.arange(len(requests)),
        seq_lens=lens.clone(),
        seq_lens_cpu=lens,
        orig_seq_lens=lens.clone(),
        seq_lens_sum=int(lens.sum()),
    )
    made.req_pool_indices_cpu = made.req_pool_indices.clone()  # read from 0.5.13 on
    return made


def draft_input(rows: int) -> Any:
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput

    return FrozenKVMTPDraftInput(
        topk_p=torch.rand(rows, 1),
        topk_index=torch.zeros(rows, 1, dtype=torch.int64),
        hidden_states=torch.rand(rows, HIDDEN),
        bonus_tokens=torch.zeros(rows, dtype=torch.int64),
    )


def verify_input(rows: int) -> Any:
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPVerifyInput

    return FrozenKVMTPVerifyInput(
        draft_token=torch.zeros(rows * TOKENS, dtype=torch.int64),
        custom_mask=None,
        positions=torch.zeros(rows * TOKENS, dtype=torch.int64),
        retrieve_index=torch.zeros(rows, TOKENS, dtype=torch.int64),
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=STEPS,
        topk=1,
        draft_token_num=TOKENS,
        capture_hidden_mode=None,
        seq_lens_sum=0,
        seq_lens_cpu=None,
    )


def extend_input(of: Any, accepted: list[int]) -> Any:
    """For the requests of batch ``of``, all of which go on."""
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftExtendInput

    return FrozenKVMTPDraftExtendInput(
        hidden_states=torch.rand(sum(accepted), HIDDEN),
        num_correct_drafts=torch.tensor(accepted) - 1,
        num_accept_tokens=torch.tensor(accepted),
        num_accept_tokens_cpu=list(accepted),
        input_ids=torch.zeros(sum(accepted), dtype=torch.int64),
        seq_lens=of.seq_lens,
        seq_lens_cpu=of.seq_lens_cpu,
        req_pool_indices=of.req_pool_indices,
    )
