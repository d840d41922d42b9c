"""Gemma-4 with its MTP assistant: the model that `cpu-server` serves unless it is told another."""

from dataclasses import replace
from pathlib import Path

from g4debug.cpu import models
from g4debug.cpu.geometry import TINY
from g4debug.cpu.toy import Size, Toy


def sized(size: Size) -> tuple[Path, ...]:
    shape = replace(TINY, vocab=size.vocab, window=size.window, max_position=size.context)
    name = f"toy-{size.vocab}-{size.window}-{size.context}"
    return models.write(shape, models.kept() / name)


TOY = Toy(
    id="gemma-4",
    about="Gemma-4 and its MTP assistant: hybrid SWA pool, layers that share KV",
    pool="swa",
    models=models.tiny_models,
    sized=sized,
    served="g4debug-tiny",
    # SGLang turns NEXTN into FROZEN_KV_MTP when the draft is a Gemma-4 assistant.
    draft={
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
)
