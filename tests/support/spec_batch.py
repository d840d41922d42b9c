"""Real ScheduleBatches of FROZEN_KV_MTP with draft state, without an engine.

Requests, batches, sampling state, draft inputs and ServerArgs are SGLang's own.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.cpu.models import tiny_models
from g4debug.cpu.server import server_arguments

TOPK = 1


def server_args() -> Any:
    """ServerArgs of the toy models, in force for this process until ``monkeypatch`` undoes it."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**server_arguments(tiny_models(), skip_tokenizer_init=True))


def request(rid: str, last: int, done: bool = False) -> Any:
    """A request with the last token ``last``; finished, or not."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=8, temperature=0)
    params.normalize(None)
    made = Req(rid, "", [2, 5, 6], params, vocab_size=512)
    made.output_ids = [9, last]
    made.finished_reason = FINISH_LENGTH(2) if done else None
    return made


def batch(args: Any, requests: list[Any], rows: Any = "one each", mode: str = "DECODE") -> Any:
    """A ScheduleBatch of ``requests``; ``rows`` is its spec_info, or "one each"."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    count = len(requests)
    made = ScheduleBatch(
        reqs=list(requests),
        model_config=args.get_model_config(),
        forward_mode=ForwardMode[mode],
        device="cpu",
        spec_algorithm=SpeculativeAlgorithm.from_string(args.speculative_algorithm),
        req_pool_indices=torch.arange(count),
        seq_lens=torch.full((count,), 4),
        seq_lens_cpu=torch.full((count,), 4),
        orig_seq_lens=torch.full((count,), 4),
        seq_lens_sum=4 * count,
    )
    made.req_pool_indices_cpu = made.req_pool_indices.clone()  # read from 0.5.13 on
    made.sampling_info = SamplingBatchInfo.from_schedule_batch(made, 512)
    made.spec_info = draft_input(requests) if isinstance(rows, str) else rows
    return made


def draft_input(requests: list[Any], hidden: int = 64) -> Any:
    """One row per request; the numbers in it name the request's last token."""
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput

    last = torch.tensor([r.output_ids[-1] for r in requests], dtype=torch.int64)
    return FrozenKVMTPDraftInput(
        bonus_tokens=last,
        hidden_states=last[:, None].float().repeat(1, hidden),
        topk_p=torch.full((len(last), TOPK), 0.5),
        topk_index=last[:, None].repeat(1, TOPK) + 100,
    )


def verify_input(rows: int = 1) -> Any:
    """What a worker leaves on ``spec_info`` if nothing replaces it."""
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPVerifyInput

    empty = torch.empty(0, dtype=torch.int64)
    return FrozenKVMTPVerifyInput(
        draft_token=torch.zeros(4 * rows, dtype=torch.int64),
        custom_mask=empty,
        positions=empty,
        retrieve_index=empty.view(0, 4),
        retrieve_next_token=empty.view(0, 4),
        retrieve_next_sibling=empty.view(0, 4),
        retrieve_cum_len=None,
        spec_steps=3,
        topk=TOPK,
        draft_token_num=4,
        capture_hidden_mode=None,
        seq_lens_sum=4,
        seq_lens_cpu=empty,
    )


def extend_input() -> Any:
    """A draft-extend input of no rows: every request finished."""
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftExtendInput

    return FrozenKVMTPDraftExtendInput.create_idle_input("cpu", 64, torch.float32)
