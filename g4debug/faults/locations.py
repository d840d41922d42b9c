"""Shared by the faults of write locations: where they act, and on which tokens.

They act on the ForwardBatch of a forward of the target, as soon as SGLang has made it. In eager
mode the KV is written where that batch says. Before the replay of a CUDA graph SGLang copies it
into the graph's static buffer. So one fault is there in both. The ScheduleBatch, from which pages
are given back later, stays as it is.

The full layers get the location. What the sliding layers of a SWA pool get depends on where SGLang
translates: up to 0.5.13 with the batch, which is done here again; later in the attention backend,
or from a plan that was made before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Fault, Injection, Install
from g4debug.hooking import req_kv
from g4debug.hooking.arguments import of_init_new

if TYPE_CHECKING:
    import torch

TASKS = {"on": "spoil one location", "full": "only the full layers get the wrong location"}


@dataclass(frozen=True)
class Token:
    """One token that a forward writes.

    index: in ``out_cache_loc``. row: in the batch. position: of the token in its request. request:
    the row of ``req_to_token``. protected: how many of the request's tokens are the prefix cache's.
    """

    index: int
    row: int
    position: int
    request: int
    protected: int


@dataclass(frozen=True)
class Forward:
    """The tokens that a forward writes. ``slots``: KV slots of the full pool, with page 0."""

    tokens: list[Token]
    loc: torch.Tensor
    req_to_token: torch.Tensor
    page_size: int
    slots: int


# (the forward, the injection) -> (index of the token, the wrong location, what is wrong), or None
Spoil = Callable[[Forward, Injection], tuple[int, int, str] | None]


def _install(able: Callable[[Forward], bool], spoil: Spoil, injection: Injection) -> None:
    """Let ``spoil`` choose a location, where ``able`` says that it can."""

    @injection.after("forward_batch.init_new")
    def after_new(result: Any, *args: Any, **kwargs: Any) -> Any:
        batch, runner = of_init_new(args, kwargs)
        if getattr(runner, "is_draft_worker", False) or result.out_cache_loc is None:
            return result
        forward = _forward(result, batch, runner)
        if not forward.tokens or not able(forward):
            return result
        mode = result.forward_mode.name.lower()
        action = injection.fire(mode=mode)
        chosen = spoil(forward, injection) if action is not None else None
        if action is None or chosen is None:
            return result
        index, wrong, what = chosen
        result.out_cache_loc = result.out_cache_loc.clone()
        result.out_cache_loc[index] = wrong
        if action.task != "full" and getattr(result, "out_cache_loc_swa", None) is not None:
            import torch

            mapping = runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
            result.out_cache_loc_swa = result.out_cache_loc_swa.clone()
            result.out_cache_loc_swa[index] = mapping[wrong].to(torch.int32)
        token = next(t for t in forward.tokens if t.index == index)
        who = f"token {token.position} of row {token.row}"
        injection.log(f"target {mode}: {who} is written to slot {wrong}, {what}")
        return result


def _forward(made: Any, batch: Any, runner: Any) -> Forward:
    mode, count = made.forward_mode, len(made.out_cache_loc)
    places: list[tuple[int, int]] = []
    if mode.is_decode():
        places = [(row, n - 1) for row, n in enumerate(made.seq_lens.tolist())]
    elif mode.is_target_verify() and made.batch_size:
        each = count // made.batch_size
        lengths = enumerate(made.seq_lens.tolist())
        places = [(row, n + j) for row, n in lengths for j in range(each)]
    elif mode.name in ("EXTEND", "MIXED") and made.extend_prefix_lens is not None:
        begins = made.extend_prefix_lens.tolist()
        each_row = enumerate(zip(begins, made.extend_seq_lens.tolist(), strict=True))
        places = [(row, begin + j) for row, (begin, n) in each_row for j in range(n)]
    requests = made.req_pool_indices.tolist()
    protected = [req_kv.protected(r) or 0 for r in getattr(batch, "reqs", None) or ()]
    protected += [0] * (len(requests) - len(protected))
    allocator = runner.token_to_kv_pool_allocator
    size = int(allocator.page_size)
    full = getattr(allocator, "full_attn_allocator", allocator)
    tokens = [
        Token(i, row, position, requests[row], protected[row])
        for i, (row, position) in enumerate(places[:count])
        if requests[row] > 0
    ]
    table = runner.req_to_token_pool.req_to_token
    return Forward(tokens, made.out_cache_loc, table, size, int(full.size) + size)


def declare(
    name: str, title: str, able: Callable[[Forward], bool], spoil: Spoil, drills: tuple[str, ...]
) -> tuple[Fault, Install]:
    """Declare a fault of write locations: its FAULT, and its install."""
    declared = Fault(
        id=name,
        title=title,
        tasks=TASKS,
        caught_by=("kv-writes",),
        selectors=("mode",),
        drills=drills,
    )
    return declared, partial(_install, able, spoil)
