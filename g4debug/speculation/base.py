"""The adapter: the file that knows one speculative worker of SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from g4debug.hooking import targets
from g4debug.settings import Settings


def _primary_pool(worker: Any) -> tuple[Any, ...]:
    pool = getattr(worker, "primary_draft_kv_pool", None)
    if pool is None:  # up to 0.5.15 a worker does not say which one that is
        runner = getattr(getattr(worker, "draft_worker", None), "draft_runner", None)
        pool = getattr(runner, "token_to_kv_pool", None)
    return () if pool is None else (pool,)


def _drafts_and_bonus(worker: Any) -> int:
    return int(worker.speculative_num_steps) + 1


@dataclass(frozen=True)
class Adapter:
    """One speculative worker.

    name: SGLang's name of the algorithm. runs: tells whether an algorithm object of SGLang is this
    one. prefix: the beginning of the names of its own classes of ``spec_info``, which end in
    DraftInput, VerifyInput or DraftExtendInput. draft_writes_kv: the draft has KV of its own, and
    writes it; None if there is no draft model. pools: from the worker, the KV pools of such a
    draft, one for each of its models. overlap: SGLang runs it under overlap scheduling.

    sites: an event in its worker -> the hook sites of the event: "init" (the draft's
    worker is built), "forward", "draft", "draft_forward", "verify", "draft_extend". A worker that
    never does one of them leaves it out; without "verify", its forward verifies itself. ends: where
    a decode step has ended, and the next one begins with ``batch.spec_info`` as it is: a site that
    gets the batch as its second argument -> a function that tells from the first argument whether
    this is the end.

    run: SGLang's release -> where spec-lifecycle was run with it, as in ``targets.RUN``. releases:
    which ones have this worker, as a version specifier; on others it is not known. replayed:
    those on which ``g4debug replay`` was run with it, None if on none.

    hidden: its draft reads hidden states. hands_hidden: what it hands on to the next step has a row
    of them for each request. seeds: the next draft begins with the target's
    hidden state of the last accepted token, and not with one of the draft's own. fields: what its
    draft input has for each request; first: what it also needs where it did not come through the
    FutureMap. bonus: from a draft input, or what is
    stashed of it, the last token of each request, with which the next draft begins. verifies: tells
    a verify input from a draft input, where one class is both. depth: the most tokens that one
    verify of a worker can accept. chains: with a topk of 1 its drafts are one path.
    """

    name: str
    runs: Callable[[Any], bool]
    prefix: str
    draft_writes_kv: bool | None
    overlap: bool
    sites: Mapping[str, tuple[str, ...]]
    ends: Mapping[str, Callable[[Any], bool]]
    run: Mapping[str, tuple[str, ...]]
    releases: str = ""
    hidden: bool = True
    hands_hidden: bool = True
    seeds: bool = True
    replayed: str | None = None
    fields: tuple[str, ...] = ("bonus_tokens",)
    first: tuple[str, ...] = ("topk_p", "topk_index")
    bonus: Callable[[Any], Any] = attrgetter("bonus_tokens")
    verifies: Callable[[Any], bool] | None = None
    depth: Callable[[Any], int] = _drafts_and_bonus
    chains: bool = True
    pools: Callable[[Any], tuple[Any, ...]] = _primary_pool

    def is_judged(self, settings: Settings, on_cpu: bool) -> bool:
        """True if this worker's steps are judged here, as of ``backends.Adapter``.

        on_cpu: SGLang runs on the CPU engine.
        """
        places = self.run.get(str(targets.sglang_version()), ())
        return settings.takes_the_risk or targets.ran_on(places, on_cpu)
