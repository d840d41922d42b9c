"""frozen-kv-mtp-v2: what it refuses, where a request ends, and what a draft input relays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2 import ends, limits

pytestmark = pytest.mark.written_for("frozen-kv-mtp-v2")
FITS = {
    "speculative_algorithm": "FROZEN_KV_MTP",
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
    "page_size": 64,
    "attention_backend": None,
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "trtllm_mha",
    "speculative_draft_attention_backend": None,
    "disaggregation_mode": "null",
    "pp_size": 1,
}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"page_size": 1}, ""),
        (
            {"speculative_eagle_topk": 2},
            "--speculative-eagle-topk 2, and its allocation knows none",
        ),
        ({"speculative_eagle_topk": 2, "page_size": 1}, "got --speculative-eagle-topk 2"),
        ({"speculative_num_draft_tokens": 3}, "--speculative-num-draft-tokens 3"),
        ({"disaggregation_mode": "decode"}, "disaggregated"),
        ({"pp_size": 2}, "pipeline"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_custom_logit_processor": True}, "custom logit processor"),
        ({"enable_return_hidden_states": True}, "hidden states"),
        ({"decode_attention_backend": "flashinfer"}, "flashinfer plans with exact lengths"),
        ({"speculative_draft_attention_backend": "flashinfer"}, "flashinfer plans"),
        # SGLang's own default, on which nothing runs.
        ({"attention_backend": "flashinfer"}, ""),
        ({"attention_backend": "flashinfer", "prefill_attention_backend": None}, "flashinfer"),
    ],
)
def test_what_a_server_is_refused_for(given, why):
    found = limits.server_limit(SimpleNamespace(**FITS | given))
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_a_request_with_a_grammar_is_refused(sglang, name):
    from sglang.srt.sampling.sampling_params import SamplingParams

    served = SimpleNamespace(sampling_params=SamplingParams())
    assert limits.request_limit(served) == ""
    refused = SimpleNamespace(sampling_params=SamplingParams(**{name: "x"}))
    assert name in limits.request_limit(refused)


class Letters:
    """A tokenizer in which token n is the n-th letter."""

    eos_token_id = 26
    additional_stop_token_ids = None

    def encode(self, text, **kwargs):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids, **kwargs):
        return "".join(chr(ord("a") + i) for i in ids)


def request(given, output, **params):
    """A real Req that has these output tokens."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(**{"max_new_tokens": 20, **params})
    sampling.normalize(Letters())
    made = Req("r", "", [1, 2, 3], sampling, vocab_size=100, **given)
    made.tokenizer = Letters()
    made.output_ids = list(output)
    made.kv_committed_len = 50
    return made


@pytest.mark.parametrize(
    ("params", "tokens", "kept"),
    [
        ({}, [4, 5, 6, 7], 4),
        ({}, [4, 26, 6, 7], 2),
        ({}, [26, 5, 6, 7], 1),
        ({}, [4, 5, 6, 26], 4),
        ({"ignore_eos": True}, [4, 26, 6, 7], 4),
        ({"stop_token_ids": [6]}, [4, 5, 6, 7], 3),
        ({"max_new_tokens": 4}, [4, 5, 6, 7], 2),
        ({"max_new_tokens": 4}, [26, 5, 6, 7], 1),  # v2 alone calls this a length
        ({"stop": ["ef"]}, [4, 5, 6, 7], 2),
        ({"stop": ["ce"]}, [4, 5, 6, 7], 1),  # begins in a token that it had before
        ({"stop": ["fgh"]}, [4, 5, 6, 7], 4),
        ({"stop": ["zz"]}, [4, 5, 6, 7], 4),
        ({"stop_regex": "[f-g]"}, [4, 5, 6, 7], 2),
    ],
)
def test_a_request_gets_the_tokens_up_to_its_end(sglang, params, tokens, kept):
    made = request({}, [0, 2], **params)
    before = dict(vars(made), output_ids=list(made.output_ids))
    assert ends.ends_after(made, tokens) == kept
    assert dict(vars(made)) == before
    rows = ends.after_resolve([tokens], None, None, SimpleNamespace(reqs=[made]))
    assert rows == [tokens[:kept]]
    assert made.kv_committed_len == 50 - len(tokens) + kept


def test_an_abort_ends_with_one_token_and_is_kept_for_the_processing(sglang):
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    made = request({}, [0])
    made.to_finish = reason = FINISH_ABORT("gone")
    assert ends.ends_after(made, [4, 5, 6]) == 1
    assert made.to_finish is reason
    assert made.finished_reason is None


def test_a_request_that_has_ended_is_left_alone(sglang):
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    made = request({}, [0, 26], max_new_tokens=2)
    made.finished_reason = FINISH_LENGTH(2)
    rows = ends.after_resolve([[4, 5]], None, None, SimpleNamespace(reqs=[made]))
    assert rows == [[4, 5]]
    assert made.kv_committed_len == 50


def draft_input(*tokens):
    from sglang.srt.managers.overlap_utils import FutureIndices

    from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2.draft_input import OverlapDraftInput

    bonus = torch.tensor(tokens, dtype=torch.int32)
    made = OverlapDraftInput.of(bonus, torch.rand(len(tokens), 8), torch.tensor(tokens) + 9)
    made.future_indices = FutureIndices(indices=torch.tensor(tokens) * 10)
    return made


def test_the_bonus_tokens_go_with_the_rows_of_the_future_map(sglang):
    made = draft_input(5, 6, 7)
    assert made.topk_index.tolist() == [[5], [6], [7]]
    assert made.bonus_tokens.dtype == made.topk_index.dtype == torch.int64
    made.filter_batch(torch.tensor([0, 2]))
    made.merge_batch(draft_input(9))
    assert made.bonus_tokens.tolist() == [5, 7, 9]
    assert made.future_indices.indices.tolist() == [50, 70, 90]


@pytest.mark.parametrize(
    ("context", "tokens", "longest"), [(512, 4, 508), (512, 2, 510), (512, 8, 508)]
)
def test_a_step_begins_within_the_context(sglang, context, tokens, longest):
    from g4debug.fixes.paths.before_0_5_14.frozen_kv_mtp_v2.draft_input import longest_start

    assert longest_start(context, tokens) == longest
