"""A variant of triton_decode_window: an engine's answers, and the model's own choices.

The answers are SGLang's, on the CPU engine's toy checkpoint. The reference is Hugging Face's own
Gemma-4 on the same checkpoint. It is given each answer so far and asked for the next token.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from harness.engine import greedy, made, running
from harness.workload import Workload, each


class Lengths(Workload):
    """Prompts with lengths that grow evenly from the shortest to the longest."""

    def prompts(self, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        (low, high), last = self.prompt, max(1, self.requests - 1)
        lengths = [low + i * (high - low) // last for i in range(self.requests)]
        return [[2, *(rng.randrange(4, self.vocab) for _ in range(n - 1))] for n in lengths]


def cpu(requests: int | None) -> Workload:
    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.server import engine_arguments

    engine = engine_arguments(mtp=False, skip_tokenizer_init=True)
    return Lengths(requests or 64, (40, 400), 32, TINY.vocab, engine, timeout=900)


DEVICES = {"cpu": cpu}
TRITON = each(DEVICES, attention_backend="triton")


def answers(served: Workload, given: list[list[int]]) -> list[list[tuple[float, int]]]:
    """For each token of each answer: its log probability, and the token."""
    assert isinstance(served.output, int)
    sampling = greedy(served.output)
    with running(served.engine) as engine:
        outputs = engine.generate(input_ids=given, sampling_params=sampling, return_logprob=True)
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


def behind(found: dict[str, Any], decode: bool = True) -> list[dict[str, Any]]:
    """The tokens that a decode step (or a prefill) made for queries with a full window.

    The query at position p has p + 1 keys before it or at it.
    """
    full = found["window"] - 1
    return [t for t in found["tokens"] if t["decode"] is decode and t["query"] >= full]


def figures(tokens: list[dict[str, Any]]) -> tuple[int, float]:
    """How many tokens the model would not choose, and the largest difference."""
    return sum(not t["chosen"] for t in tokens), max((t["off"] for t in tokens), default=0.0)


def main(device: str, result: Path, workload: str, requests: int) -> None:
    served, model = made(device, workload, requests), reference()
    given = served.prompts()
    found = compare(model, given, answers(served, given))
    wrong, off = figures(behind(found))
    result.write_text(
        json.dumps({**found, "behind": len(behind(found)), "wrong": wrong, "off": off})
    )
