"""Launch-blocking regressions that the seeds' base had: no release has them.

TRIAGE.md, 'Launch-blocking regressions of source builds'.
"""

from __future__ import annotations

import re

from test_versions import release  # noqa: F401 - a fixture

from g4debug.fixes.source import exists, source

MODELS = "sglang.srt.models"
SELECT = "sglang.srt.speculative.frozen_kv_mtp_utils.select_last_verified_seed"
PLACES = (
    "sglang.srt.server_args",
    "sglang.srt.arg_groups.overrides",
    "sglang.srt.arg_groups.model_overrides.gemma4",
)
# 0.5.12's branch: from its Gemma-4 test to the next one.
BRANCH = re.compile(r'elif model_arch == "Gemma4\w+":(.*?)\n        elif ', re.S)


def test_the_assistant_has_the_pp_group_that_its_base_uses(release):  # noqa: F811
    """#26026: tie_weights of the base asks for self.pp_group, the assistant skips its __init__."""
    tie_weights = f"{MODELS}.gemma4_causal.Gemma4ForCausalLM.tie_weights"
    asked = exists(tie_weights) and "self.pp_group" in source(tie_weights)
    init = source(f"{MODELS}.gemma4_mtp.Gemma4AssistantForCausalLM.__init__")
    assert not asked or "self.pp_group =" in init


def test_the_last_verified_token_is_read_where_it_is_set(release):  # noqa: F811
    """#24912, #25204: the v1 worker read bonus_tokens, which nobody set."""
    assert not exists(SELECT) or "bonus_tokens" not in source(SELECT)


def test_bf16_experts_are_not_sent_to_trtllm_by_themselves(release):  # noqa: F811
    """On SM100 only modelopt_fp4 checkpoints get flashinfer_trtllm without being asked."""
    chosen = 0
    for place in PLACES:
        text = source(place) if exists(place) else ""
        for found in re.finditer(r"for Gemma-4 \((\w+)\)", text):
            assert found[1] == "modelopt_fp4"
            chosen += 1
        # The branch of 0.5.12: from its Gemma-4 test to the next one.
        for branch in re.findall(
            r'elif model_arch == "Gemma4\w+":(.*?)\n        elif ', text, re.S
        ):
            assert "moe_runner_backend" not in branch
            chosen += 1
    assert chosen
