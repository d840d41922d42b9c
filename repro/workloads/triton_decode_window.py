"""A variant of triton_decode_window: an engine's answers, and what the model itself would say.

The answers are SGLang's, on the CPU engine's toy checkpoint. The reference is Hugging Face's own
Gemma-4 on the same checkpoint. It is given each answer so far and asked for the next token.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from harness.engine import greedy, running

OUTPUT = 32  # tokens of each answer
SHORTEST, LONGEST = 40, 400  # tokens of a prompt


def prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Token ids; the same for the same seed."""
    rng = random.Random(seed)
    lengths = [SHORTEST + i * (LONGEST - SHORTEST) // max(1, count - 1) for i in range(count)]
    return [[2, *(rng.randrange(4, vocab) for _ in range(n - 1))] for n in lengths]


def answers(backend: str, given: list[list[int]]) -> list[list[tuple[float, int]]]:
    """For each token of each answer: its log probability, and the token."""
    from g4debug.cpu.server import engine_arguments

    arguments = engine_arguments(mtp=False, attention_backend=backend, skip_tokenizer_init=True)
    with running(arguments) as engine:
        outputs = engine.generate(
            input_ids=given, sampling_params=greedy(OUTPUT), return_logprob=True
        )
    return [[(p, t) for p, t, _ in o["meta_info"]["output_token_logprobs"]] for o in outputs]


def reference() -> Any:
    """Hugging Face's Gemma-4 on the toy checkpoint, with a mask in plain torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from g4debug.cpu.models import tiny_models

    folder = tiny_models()[0]
    config = json.loads((folder / "config.json").read_text())
    # SGLang calls the full layers' heads head_dim, Hugging Face the sliding ones'.
    config["head_dim"] = config["swa_head_dim"]
    own = {k: v for k, v in config.items() if not k.startswith("swa_") and k != "v_head_dim"}
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=AutoConfig.for_model(**own),
        dtype=torch.float32,
        attn_implementation="eager",
    )


def compare(
    model: Any, given: list[list[int]], found: list[list[tuple[float, int]]]
) -> dict[str, Any]:
    """Per token: its position, whether the model would choose it, and by how much it is off."""
    import torch

    tokens = []
    for prompt, answer in zip(given, found, strict=True):
        ids = [*prompt, *(token for _, token in answer)]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        logprobs = logits.float().log_softmax(-1)[len(prompt) - 1 :]
        for i, (logprob, token) in enumerate(answer):
            off = abs(logprob - float(logprobs[i, token]))
            chosen = int(logprobs[i].argmax()) == token
            tokens.append(
                {"query": len(prompt) + i - 1, "decode": i > 0, "chosen": chosen, "off": off}
            )
    return {"window": int(model.config.sliding_window), "tokens": tokens}


def main(device: str, result: Path, backend: str, requests: int) -> None:
    model = reference()
    given = prompts(requests, model.config.vocab_size)
    found = answers(backend, given)
    result.write_text(json.dumps(compare(model, given, found)))
