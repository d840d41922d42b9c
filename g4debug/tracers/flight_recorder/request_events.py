"""Keeps what happens to each request: its arrival, its chunks, retractions, an abort, its end.

Nothing is read in a step that only decodes, and only what SGLang has in host memory. There is no
token, no text and no hash. ``g4debug trace`` shows it.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from g4debug.findings.names import LONGEST_ID
from g4debug.findings.record import RequestEvent
from g4debug.hooking import req_kv
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import work
from g4debug.tracers.flight_recorder.taping import outputs
from g4debug.tracers.flight_recorder.work import Place
from g4debug.trapping.describe import Describer

KEPT = 2048  # events of all requests together: some 100 ms to write into a dump
ARRIVALS = ("TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput")
NUMBERED = ARRIVALS[0]  # those that are on the tape
# Why a request was aborted may quote what the user has sent. That stands behind one of these.
QUOTED = re.compile(r"[\\'\"`:={}\[\]<>]")
LONGEST = 120
LARGEST = 1 << 40  # whatever the user asks for
STOPS = {
    "FINISH_LENGTH": "length",
    "FINISH_MATCHED_TOKEN": "stop: a token",
    "FINISH_MATCHED_STR": "stop: a text",
    "FINISHED_MATCHED_REGEX": "stop: a pattern",
}


class RequestEvents:
    def __init__(self, context: Context) -> None:
        self.context, self.recorder = context, context.recorder
        # They become RequestEvents only if somebody reads them.
        self.kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self.count = 0  # all, with those that were dropped
        self.arrived = 0
        self.also: Callable[[tuple[Any, ...]], None] | None = None  # gets each event

    def install(self) -> None:
        context = self.context
        context.before("scheduler.process_inputs", self.messages)
        context.after("batch.prepare_for_extend", self.chunks)
        context.before("cache.release", self.released)
        describer = context.trap.describe
        if isinstance(describer, Describer):
            describer.request_events = self.events

    def messages(self, scheduler: Any, messages: Any, *args: Any, **kwargs: Any) -> None:
        for message in messages or ():
            for one in getattr(message, "batch", None) or (message,):
                kind = type(one).__name__
                if kind in ARRIVALS:
                    self._arrives(one, kind)
                elif kind == "AbortReq":
                    whose = "" if one.abort_all else str(one.rid or "")
                    self._keep(whose, "abort", note=public(getattr(one, "abort_message", None)))

    def _arrives(self, message: Any, kind: str) -> None:
        self.arrived += kind == NUMBERED
        longest = getattr(message.sampling_params, "max_new_tokens", None)
        prompt = message.input_ids  # None where embeddings stand in their place
        self._keep(
            str(message.rid),
            "arrives",
            tokens=-1 if prompt is None else len(prompt),
            longest=-1 if longest is None else min(int(longest), LARGEST),
            number=self.arrived if kind == NUMBERED else -1,
        )

    def chunks(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A batch was prepared that computes a chunk of each of its requests."""
        found = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=False)
        for req, begin, length in found:
            got = len(req.output_ids)
            self._keep(
                str(req.rid),
                "chunk",
                begin=int(begin),
                end=int(begin + length),
                tokens=len(req.origin_input_ids) + got,
                output=got,
            )
        return result

    def released(self, req: Any, *args: Any, **kwargs: Any) -> None:
        """A request gives its pages back: it has ended, or is retracted."""
        ended = req.finished()
        note = how(req.finished_reason) if ended else ""
        self._keep(str(req.rid), "ends" if ended else "retracted", **facts(req), note=note)

    def _keep(
        self,
        rid: str,
        kind: str,
        begin: int = -1,
        end: int = -1,
        tokens: int = -1,
        output: int = -1,
        longest: int = -1,
        number: int = -1,
        allocated: int = -1,
        evicted: int = -1,
        note: str = "",
    ) -> None:
        self.count += 1
        rid = rid[:LONGEST_ID]
        at = self.recorder.event_step, time.time_ns()
        more = begin, end, tokens, output, longest, number, allocated, evicted, note
        event = *at, rid, kind, *more
        self.kept.append(event)
        if self.also is not None:
            self.also(event)

    def events(self) -> tuple[tuple[RequestEvent, ...], int]:
        """The last events, oldest first, then where each request is now; and how many were lost.

        Another thread may ask.
        """
        kept = [RequestEvent(*event) for event in self.kept.copy()]
        return (*kept, *self._now()), self.count - len(kept)

    def _now(self) -> list[RequestEvent]:
        found: dict[str, RequestEvent] = {}
        for req, queue in work.held(self.recorder.scheduler):
            rid = str(getattr(req, "rid", ""))
            if rid and rid not in found and not req.finished():
                kind = "runs" if queue.place in (Place.RUNS, Place.CHUNK) else "waits"
                at, short = (self.recorder.step, time.time_ns()), rid[:LONGEST_ID]
                found[rid] = RequestEvent(*at, short, kind, **facts(req), note=queue.name)
        return list(found.values())


def facts(req: Any) -> dict[str, int]:
    """How far a request has come, and how much room it has in the pools."""
    got = len(outputs(req))
    try:
        evicted = req_kv.evicted(req)
    except AttributeError:
        evicted = -1
    return {
        "tokens": len(req.origin_input_ids) + got,
        "output": got,
        "allocated": req_kv.allocated(req),
        "evicted": evicted,
    }


def how(reason: Any) -> str:
    """How a request ended, without what SGLang quotes: the token or text that ended it."""
    kind = type(reason).__name__
    if kind != "FINISH_ABORT":
        return STOPS.get(kind, "stop")
    code = getattr(reason, "status_code", None)
    said = public(getattr(reason, "message", None)).rstrip(".")
    why = f": {said}" if said not in ("", "Aborted") else ""
    return f"abort{why}" + (f", HTTP {int(code)}" if code else "")


def public(message: Any) -> str:
    """The words of SGLang's own in front of the first thing that it may quote."""
    return QUOTED.split(str(message or ""), maxsplit=1)[0].strip()[:LONGEST]
