"""Servers with tracers and without, and the load that they are sent."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

from harness.workload import without_mtp

from measuring import models
from measuring.fleet import Gated
from measuring.servers import Variant

DEFAULT = "page-table,kv-allocator,spec-lifecycle,pool-leak,flight-recorder"
# By their names: a young tracer would be among them only where it was run.
ARMED = {"G4DEBUG_TRACE": DEFAULT}
NOT_RUN = {"G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}
# The fixes that this SGLang needs are on in every variant, because only debugging is compared.
VARIANTS = {
    "off": Variant(),
    "recorder": Variant({"G4DEBUG_TRACE": "flight-recorder"}),
    "armed": Variant(ARMED),
    "kv-integrity": Variant({"G4DEBUG_TRACE": f"{DEFAULT},kv-integrity"}),
}
FOUR = tuple(VARIANTS)
WITHOUT_MTP = without_mtp()
ON_TRITON = {"prefill_attention_backend": "triton", "decode_attention_backend": "triton"}
ALONE = ("page-table", "kv-allocator", "spec-lifecycle", "pool-leak")
VARIANTS |= {
    "watch": Variant({"SGLANG_TRTLLM_MHA_DEBUG": "watch"}),
    "off-again": Variant(),  # a second server that is like the first: how far two alike differ
    **{f"{t}-alone": Variant({"G4DEBUG_TRACE": t}) for t in ALONE},
    "kv-writes": Variant({"G4DEBUG_TRACE": f"{DEFAULT},kv-writes"}),
    "ranks": Variant({"G4DEBUG_TRACE": f"{DEFAULT},rank-divergence"}),
    # On a GPU spec-lifecycle follows all values of a step only where that risk is taken, and
    # prefix-cache is armed only there. So the second has what the first has, too.
    "spec-values": Variant({**ARMED, **NOT_RUN}),
    "prefix-cache": Variant({"G4DEBUG_TRACE": f"{DEFAULT},prefix-cache", **NOT_RUN}),
    "tape": Variant({"G4DEBUG_TRACE": "flight-recorder"}),
    "no-tape": Variant({"G4DEBUG_TRACE": "flight-recorder", "G4DEBUG_TAPE": "0"}),
    "page-invariants": Variant({"SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}),
    "strict": Variant({"SGLANG_INVARIANT_CHECK": "2"}),  # InvariantCheckLevel.STRICT
    "no-mtp": Variant(engine=WITHOUT_MTP),
    "armed-no-mtp": Variant(ARMED, engine=WITHOUT_MTP),
    "watch-no-mtp": Variant({"SGLANG_TRTLLM_MHA_DEBUG": "watch"}, engine=WITHOUT_MTP),
    "kv-canary": Variant(engine={**WITHOUT_MTP, "kv_canary": "raise"}),
    "triton": Variant(engine=ON_TRITON),
    "armed-triton": Variant(ARMED, engine=ON_TRITON),
}


@dataclass(frozen=True)
class Load:
    """The requests for every server. fill: requests that fill the cache, and their tokens.

    phases: (requests at a time, requests). contexts: the prompts' tokens, one phase for each, in
    place of prompts that share beginnings. of_context: requests of each, and their tokens. vocab:
    of the model, where it is not the usual one.
    """

    fill: tuple[int, int]
    phases: tuple[tuple[int, int], ...]
    of_context: tuple[int, int]
    contexts: tuple[int, ...] = ()
    vocab: int = 0

    def turn(self) -> Load:
        """A small part of it, with no request that fills the cache: one turn with --together."""
        phases = tuple((batch, max(batch, count // 4)) for batch, count in self.phases)
        count, tokens = self.of_context
        return replace(self, fill=(0, 0), phases=phases, of_context=(max(1, count // 4), tokens))


LOADS = {
    ("cuda", False): Load((160, 4), ((1, 16), (8, 72), (64, 256)), (12, 150)),
    ("cuda", True): Load((128, 4), ((1, 4), (8, 16), (64, 128)), (3, 100)),
    ("cpu", False): Load((24, 2), ((1, 6), (4, 16)), (3, 8)),
    ("cpu", True): Load((8, 2), ((1, 2), (2, 4)), (2, 4)),
}


def engine(
    device: str, contexts: Sequence[int], ranks: int = 1, model: str = "E4B"
) -> dict[str, Any]:
    several = {"tp_size": ranks} if ranks > 1 else {}
    if device == "cpu":
        few = {"max_total_tokens": 2560, "max_running_requests": 4}
        return models.arguments("E4B", device, **few, **several)
    return models.arguments(
        model,
        device,
        **models.FOR_64,
        max_total_tokens=64 * 1600,
        chunked_prefill_size=2048,
        # Fill requests are as long as the load's longest prompt, whatever the contexts are.
        **({"context_length": max(contexts) + 3000} if contexts else {}),
        **several,
    )


def under_load(names: Iterable[str], shared: Mapping[str, Any]) -> dict[str, Variant]:
    """These of VARIANTS, as servers that wait at the gate. shared: their engine's arguments."""
    # Servers of several ranks that start at the same time see different free memory per GPU.
    more = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"} if "tp_size" in shared else {}
    return {n: replace(VARIANTS[n], engine={**shared, **VARIANTS[n].engine},
                       environment={**more, **VARIANTS[n].environment},
                       plugin="gate", answers="load") for n in names}  # fmt: skip


def loaded(args: argparse.Namespace, quick: bool) -> Load:
    """The load that a command line asks for."""
    small = args.device == "cuda" and args.model != "E4B"
    vocab = models.vocabulary(args.model) if small else 0
    return replace(LOADS[args.device, quick], contexts=args.contexts, vocab=vocab)


def put(server: Gated, load: Load, question: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the requests that a server answers."""
    more = {"vocab": load.vocab} if load.vocab else {}
    found: list[dict[str, Any]] = server.put({**question, **more})["rows"]
    return found


def fill(server: Gated, load: Load) -> None:
    """Fill the prefix cache, so that it evicts from then on."""
    count, tokens = load.fill
    put(server, load, {"serve": load.phases[-1][0], "seed": 0, "count": count, "tokens": tokens})


def ask(server: Gated, load: Load, seed: int) -> list[dict[str, Any]]:
    """Send a server everything; the rows of its requests, without those that fill the cache."""
    questions: list[dict[str, Any]]
    if load.contexts:
        count, tokens = load.of_context
        questions = [
            {
                "serve": 1,
                "seed": 1000 * seed + n,
                "count": count,
                "tokens": tokens,
                "prompt": prompt,
            }
            for n, prompt in enumerate(load.contexts)
        ]
    else:
        if load.fill[0]:
            fill(server, load)
        questions = [
            {"serve": batch, "seed": 1000 * seed + batch, "count": count}
            for batch, count in load.phases
        ]
    rows = []
    for question in questions:
        found = put(server, load, question)
        at = {"batch": question["serve"], "context": question.get("prompt", "")}
        rows += [{**at, **row} for row in found]
    return rows


def variant_names(text: str) -> tuple[str, ...]:
    """The variants of a command line. Raises ArgumentTypeError if there is no such one."""
    found = tuple(text.split(","))
    unknown = [n for n in found if n not in VARIANTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(unknown)}, expected some of: {', '.join(VARIANTS)}"
        )
    return found


def installed() -> None:
    """Raise SystemExit if SGLang would not find g4debug, and every variant would be "off"."""
    if not entry_points(group="sglang.srt.plugins", name="g4debug"):
        raise SystemExit(
            "SGLang finds no plugin g4debug in this environment, so that nothing would be armed; "
            "install it: python -m pip install --no-deps -e ."
        )


def check(variant: str, facts: Mapping[str, Any]) -> None:
    """Raise SystemExit if the scheduler has another number of tracers than the variant."""
    counts = {"watch": 3, "watch-no-mtp": 3, "recorder": 1, "tape": 1, "no-tape": 1,
              "armed": 5, "armed-no-mtp": 5, "armed-triton": 5, "kv-integrity": 6, "kv-writes": 6,
              "ranks": 6, "spec-values": 5, "prefix-cache": 6}  # fmt: skip
    expected = 1 if variant.endswith("-alone") else counts.get(variant, 0)
    found = len(facts["tracers"].split())
    if found != expected or bool(facts["sites"]) != bool(expected):
        raise SystemExit(
            f"variant {variant}: expected {expected} tracers in the scheduler, found {found} "
            f"({facts['tracers']}) at {facts['sites']} hook sites"
        )
