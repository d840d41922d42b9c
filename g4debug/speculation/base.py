"""The adapter: the file that knows one speculative worker of SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """One speculative worker.

    name: SGLang's name of the algorithm. runs: tells whether an algorithm object of SGLang is this
    one. prefix: the beginning of the names of its own classes of ``spec_info``, which end in
    DraftInput, VerifyInput or DraftExtendInput. draft_writes_kv: the draft has KV of its own, and
    writes it. overlap: SGLang runs it under overlap scheduling.

    sites: an event in its worker -> the hook sites of the event: "init" (the draft's
    worker is built), "forward", "draft", "draft_forward", "verify", "draft_extend". A worker that
    never does one of them leaves it out. ends: where a decode step has ended, and the next one
    begins with ``batch.spec_info`` as it is: a site that gets the batch as its second argument -> a
    function that tells from the first argument whether this is the end.

    run: SGLang's release -> where spec-lifecycle was run with it, as in ``targets.RUN``.
    """

    name: str
    runs: Callable[[Any], bool]
    prefix: str
    draft_writes_kv: bool
    overlap: bool
    sites: Mapping[str, tuple[str, ...]]
    ends: Mapping[str, Callable[[Any], bool]]
    run: Mapping[str, tuple[str, ...]]
