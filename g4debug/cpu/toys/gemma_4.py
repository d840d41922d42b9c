"""Gemma-4 with its MTP assistant: the model that `cpu-server` serves unless it is told another."""

from g4debug.cpu.models import tiny_models
from g4debug.cpu.toy import Toy

TOY = Toy(
    id="gemma-4",
    about="Gemma-4 and its MTP assistant: hybrid SWA pool, layers that share KV",
    pool="swa",
    models=tiny_models,
    served="g4debug-tiny",
    # SGLang turns NEXTN into FROZEN_KV_MTP when the draft is a Gemma-4 assistant.
    draft={
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
)
