"""The workload of matrix, soak and ranks: short and long requests, small pools; and its child.

Several requests share a prefix. Their outputs differ in length, so that batches shrink and grow.
The pools are so small that requests wait and are retracted, and sequences outgrow the window.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import byte_tokenizer
from harness.clients import serve
from harness.engine import flush, greedy, running
from harness.processes import Outcome, run_child
from harness.replays import keep_tape
from harness.tracers import of_schedulers

IDLE_SECONDS = 0.5
XGRAMMAR = {"grammar_backend": "xgrammar"}
# For thousands of short requests: more arguments of :func:`requests`, by device.
SHORT: dict[str, dict[str, Any]] = {
    "cpu": {"longest": 160, "output": [2, 14]},
    "cuda": {"longest": 900, "output": [2, 60]},
}
GRAMMARS: tuple[dict[str, str], ...] = (
    {"regex": r"(SWA|FULL) page [1-9][0-9]{2,4}, freed in step [0-9]{3}"},
    {"regex": r"[a-z]{3,30}"},
    {"json_schema": '{"type": "object", "properties": {"page": {"enum": [1, 22, 333]}}, '
     '"required": ["page"], "additionalProperties": false}'},
)  # fmt: skip
# Of requests that clients send: long answers, so that SGLang has to retract for want of room.
LONG: dict[str, dict[str, Any]] = {"cpu": {"output": [2, 80]}, "cuda": {"output": [2, 300]}}
# Behind a flush, which drops from the tape what is before it when 64 steps have passed.
FEW = 12


@dataclass(frozen=True)
class Request:
    rid: str
    prompt: tuple[int, ...]
    output: int  # tokens to generate


def requests(
    count: int, seed: int, longest: int = 330, output: tuple[int, int] = (3, 40)
) -> list[Request]:
    """``count`` requests, the same for the same seed; token ids of the toy model."""
    from g4debug.cpu.geometry import TINY

    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(4, TINY.vocab) for _ in range(n)]

    prefixes = [[2, *tokens(longest * 2 // 3)] for _ in range(3)]
    found = []
    for number in range(count):
        if rng.random() < 0.5:
            prefix = rng.choice(prefixes)
            prompt = prefix[: rng.randrange(2, len(prefix))] + tokens(
                rng.randrange(1, longest // 3)
            )
        else:
            prompt = [2, *tokens(rng.randrange(1, longest))]
        found.append(Request(f"r{seed}-{number}", tuple(prompt), rng.randint(*output)))
    return found


def sampled(number: int, output: int) -> dict[str, Any]:
    """Sampling parameters of a request that samples, in one of three ways."""
    ways: tuple[dict[str, Any], ...] = ({"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05})
    return {**greedy(output), "temperature": 0.8, **ways[number % len(ways)]}


def constrained(number: int, output: int) -> dict[str, Any]:
    """Sampling parameters of a request whose answer must match a grammar, one of three.

    The answer may be up to 24 tokens longer than the workload's others, so that some of them are
    whole, and some are cut.
    """
    return {**greedy(output + 24), **GRAMMARS[number % len(GRAMMARS)], "ignore_eos": False}


def parameters(number: int, output: int, sampling: bool, grammar: bool) -> dict[str, Any]:
    """The sampling parameters of a workload's request."""
    if grammar and number % 3 == 2:
        found = constrained(number // 3, output)
        return found | ({"temperature": 0.8} if sampling and number % 2 else {})
    return sampled(number // 2, output) if sampling and number % 2 else greedy(output)


def on_gpu(model: str = "", draft: str = "", **overrides: Any) -> dict[str, Any]:
    """The same on a GPU: E4B's geometry, split backends, CUDA graphs, the prefix cache on.

    model, draft: another model's shape, see ``workloads.shapes``.
    """
    from workloads import shapes
    from workloads.e4b_trtllm_mtp import cuda

    from harness.arguments import as_named_here

    if model in shapes.SHAPES:
        return as_named_here(shapes.engine(model, draft, **{"max_total_tokens": 4096, **overrides}))
    arguments = dict(cuda(int(overrides.get("max_running_requests", 12))).engine)
    for name in ("disable_radix_cache", "swa_full_tokens_ratio"):
        arguments.pop(name)
    return as_named_here(arguments | {"max_total_tokens": 4096, **overrides})


def engine(**overrides: Any) -> dict[str, Any]:
    """Arguments of ``sgl.Engine``: pools that a full batch of long requests does not fit into."""
    from g4debug.cpu.server import engine_arguments

    return engine_arguments(
        **{
            "log_level": "info",
            "decode_log_interval": 1,
            "skip_tokenizer_init": True,
            "max_total_tokens": 2048,
            "max_running_requests": 6,
            "chunked_prefill_size": 256,
            **overrides,
        }
    )


def run(
    name: str,
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
    count: int,
    overrides: Mapping[str, Any],
    *,
    waves: int = 1,
    short: bool = False,
    device: str = "cpu",
    last_words: str = "",
    tape: bool = False,
    longest: int = 0,
    sampling: bool = False,
    grammar: bool = False,
    clients: bool = False,
) -> Outcome:
    """``count`` requests, ``waves`` times, on an engine in a process of its own.

    overrides: arguments of the engine. short: thousands of short requests, see SHORT. longest:
    tokens of a prompt, in place of SHORT's. tape: leave the flight recorder's tape in ``folder``.
    sampling: every second request samples its tokens. grammar: the answer of every third one must
    match a grammar. clients: each request is sent on its own, and some clients go away, see
    ``harness.clients``; behind a flush of the caches there are only a few short ones.
    The result has the output of every request, and the checks of each scheduler's tracers.
    """
    arguments = {
        "count": count,
        "waves": waves,
        "overrides": dict(overrides),
        "shape": {
            **(SHORT[device] if short else {}),
            **(LONG[device] if clients else {}),
            **({"longest": longest} if longest else {}),
        },
        "tape": tape,
        "sampling": sampling,
        "grammar": grammar,
        "clients": clients,
    }
    return run_child(
        name, "harness.mixed", arguments, environment, folder, timeout,
        device=device, last_words=last_words,
    )  # fmt: skip


def main(
    device: str,
    result: Path,
    count: int,
    waves: int,
    overrides: Mapping[str, Any],
    shape: Mapping[str, Any],
    tape: bool,
    sampling: bool = False,
    grammar: bool = False,
    clients: bool = False,
) -> None:
    """The child. Between two waves the server is idle. shape: more arguments of `requests`."""
    arguments = (engine if device == "cpu" else on_gpu)(**overrides)
    if grammar:
        model = byte_tokenizer.beside(Path(arguments["model_path"]), result.parent)
        arguments |= {"model_path": str(model), "skip_tokenizer_init": False, **XGRAMMAR}
    found: dict[str, Any] = {}
    accepted = []
    with running(arguments) as server:
        begin = time.perf_counter()
        for wave in range(waves):
            wanted = requests(count, seed=wave, **shape)
            if clients and wave:
                wanted = requests(FEW, seed=wave, **{**shape, "output": (2, 14)})
            prompts, rids = [list(r.prompt) for r in wanted], [r.rid for r in wanted]
            ways = [parameters(n, r.output, sampling, grammar) for n, r in enumerate(wanted)]
            if clients:
                outputs = serve(server, rids, prompts, ways)
            else:
                outputs = server.generate(input_ids=prompts, rid=rids, sampling_params=ways)
            for request, output in zip(wanted, outputs, strict=True):
                meta = output["meta_info"]
                reason = (meta.get("finish_reason") or {}).get("type", "")
                found[request.rid] = {"tokens": output["output_ids"], "finish": reason}
                accepted.append(meta.get("spec_accept_length", 1.0))
            time.sleep(IDLE_SECONDS)  # at idle, SGLang and pool-leak count their pages
            if clients and wave + 1 < waves:
                flush(server)
        checked = of_schedulers() if os.environ.get("G4DEBUG_TRACE") else {}
        seconds = time.perf_counter() - begin
        if tape:
            keep_tape(result.parent)
    summary = {
        "outputs": found,
        "accept_length": sum(accepted) / len(accepted),
        "s": seconds,
        "checked": checked,
    }
    result.write_text(json.dumps(summary))
