"""Shared by the faults of speculative decoding: the sites of a worker, and which requests go on.

In the order of hooks the faults come after the fixes and before the tracers, so a fix inside the
worker's forward does not undo them. Only a step in which a request goes on is an opportunity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug import speculation
from g4debug.faults.base import Hook, Injection, Put
from g4debug.faults.grammar import Action

if TYPE_CHECKING:
    import torch

CAUGHT_BY = ("spec-lifecycle",)
UNSEEN = 8  # tokens of two verifies, with the 4 draft tokens that Gemma-4's servers here use
AtEnd = Callable[[Any, list[int], Action], None]  # batch, rows of requests that go on, action


def put(how: Callable[..., Put], what: str) -> Put:
    """Put a fault's hook where something happens in a speculative worker.

    how: ``before``, ``after`` or ``around`` of the Injection. what: a key of ``Adapter.sites``.
    """

    def everywhere(hook: Hook) -> Hook:
        for site in speculation.sites(what):
            how(site)(hook)
        return hook

    return everywhere


def after_step(injection: Injection, act: Callable[[Any], None]) -> None:
    """Call ``act(batch)`` where a step of a speculative worker ends."""

    def after(site: str, result: Any, owner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if speculation.has_ended(site, owner, batch):
            act(batch)
        return result

    for site in speculation.ends():
        injection.after(site)(functools.partial(after, site))


def at_end_of_decode(injection: Injection, act: AtEnd) -> None:
    """Call ``act`` at the end of a decode step if the chain fires."""

    def at_end(batch: Any) -> None:
        rows = survivors(batch)
        action = injection.fire() if rows and decodes(batch) else None
        if action is not None:
            act(batch, rows, action)

    after_step(injection, at_end)


def asks_for(injection: Injection, task: str) -> bool:
    """True if the next action of the chain is ``task``.

    An opportunity that does not suit a task must not use it up.
    """
    chain = injection.chain
    return chain.index < len(chain.actions) and chain.actions[chain.index].task == task


def survivors(batch: Any) -> list[int]:
    """The rows of a ScheduleBatch with requests that go on.

    With overlap scheduling SGLang has not seen the results of up to two verifies yet. A request
    that ends in one of them is in the next batch all the same, and a fault that strikes it there
    has no effect. So a request must have more tokens left than these verifies can give it.
    """
    live = [i for i, r in enumerate(batch.reqs) if not (r.finished() or r.is_retracted)]
    # A batch that a worker is given need not say.
    adapter = speculation.of(batch)
    ahead = getattr(batch, "enable_overlap", True) or (adapter is not None and adapter.overlap)
    return [i for i in live if _left(batch.reqs[i]) > UNSEEN] if ahead else live


def _left(request: Any) -> int:
    """How many tokens a request may still get, by the results that SGLang has seen."""
    return int(request.sampling_params.max_new_tokens) - len(request.output_ids)


def decodes(batch: Any) -> bool:
    """True for a decode of a known worker. Other servers and steps are no opportunities."""
    mode = batch.forward_mode
    idle = mode.is_idle() or mode.is_extend() or batch.is_extend_in_batch
    return not idle and speculation.of(batch) is not None


def is_decode(batch: Any) -> bool:
    """True for a decode on any server, with a draft or without."""
    return batch.forward_mode is not None and bool(batch.forward_mode.is_decode())


def one_of(injection: Injection, batch: Any, rows: list[int]) -> tuple[int, Any, str]:
    """A request that is drawn from these rows: (row, request, ``request RID (row N)``)."""
    row = injection.random.choice(rows)
    request = batch.reqs[row]
    return row, request, f"request {request.rid} (row {row})"


def other_token(token: int) -> int:
    """Another token of the vocabulary."""
    return token - 1 if token else 1


def changed(numbers: torch.Tensor, row: int, value: int) -> torch.Tensor:
    """A copy of an integer tensor [requests] with another number in one row."""
    copy = numbers.clone()
    copy[row] = value
    return copy


def another(tokens: torch.Tensor, at: int) -> torch.Tensor:
    """A copy with another token at one place."""
    return changed(tokens, at, other_token(int(tokens[at])))
