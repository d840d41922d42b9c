"""Gives a scheduler the requests, tokens and accept lengths of a tape, in its own event loop.

Its hooks are the innermost ones, where the faults are. So every tracer sees these values as if
SGLang had made them.
"""

from __future__ import annotations

import dataclasses
import importlib
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from g4debug.findings import tape
from g4debug.findings.tape import Abort, Flush, Recording, Request
from g4debug.hooking.arguments import argument
from g4debug.hooking.hooks import Hooks, Order
from g4debug.replay.tokens import FIRST_WORD, Tokens
from g4debug.tracers.flight_recorder.taping import Rounds

OWNER = "replay"
BEHIND = 3  # steps behind the last recorded one: a finding may be told later than it was made
IDLE = 200  # idle rounds at the end: a server counts its pages while it has nothing to do
STUCK = 20_000  # rounds in a row without a step
HEALTH = "HEALTH_CHECK"  # begins the ids of SGLang's own requests
PREFIX = "r"  # begins all others


class TapeEnd(BaseException):
    """All that is on the tape was given. No Exception: SGLang must not catch it."""


class Stuck(TapeEnd):
    """The scheduler does not run on, although it did so there."""


class Feeder:
    """keep: the requests to give, by their ids; None for all."""

    def __init__(
        self, recording: Recording, tokens: Tokens, keep: frozenset[int] | None = None
    ) -> None:
        self.recording, self.tokens = recording, tokens
        self.requests = recording.requests
        self.keep(keep)
        self.rounds = Rounds()
        self.rounds.count = recording.begins.round
        self.until = 0  # the last step that is wanted; 0 for all
        self.given: dict[str, Request] = {}  # by rid
        self.current: list[Request | None] = []  # of the rows of the batch that runs
        self.lens: list[int] = []
        self.nth: dict[int, int] = {}  # verifies of each request, up to now
        self.steps = self.forced = self.lacking = 0
        self._since_step = self._at_end = 0
        self._on = False
        self._idle = False

    def keep(self, keep: frozenset[int] | None) -> None:
        """Give only these requests."""
        self.queue = deque(x for x in self.recording.given if _kept(x, keep))

    def install(self, hooks: Hooks) -> None:
        order = Order.FAULT
        hooks.around("scheduler.recv_requests", order, OWNER, self.receive)
        hooks.before("scheduler.on_idle", order, OWNER, self.idle)
        hooks.before("scheduler.run_batch", order, OWNER, self.run)
        hooks.before("runner.sample", order, OWNER, self.sample)
        hooks.around("runner.sampler", order, OWNER, self.sampler)
        hooks.before("worker.verify", order, OWNER, self.verify)
        hooks.around("draft.tree", order, OWNER, self.tree, optional=True)
        for site in ("verify.kernel", "verify.kernel.v1"):
            hooks.around(site, order, OWNER, self.kernel, optional=True)

    def begin(self, scheduler: Any) -> None:
        """Give the scheduler the state that is not in its requests. From now on it is fed."""
        begins = self.recording.begins
        scheduler.forward_ct = begins.forwards
        tracker = getattr(scheduler, "new_token_ratio_tracker", None)
        if tracker is None:
            scheduler.new_token_ratio = begins.ratio
        else:
            tracker.current = begins.ratio
        self._on = True

    # --- requests --------------------------------------------------------------------------------

    def idle(self, *args: Any, **kwargs: Any) -> None:
        self.rounds.idled = True

    def receive(self, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of SGLang's function: the messages of this round."""
        if not self._on:
            return call_next(*args, **kwargs)
        rounds, queue = self.rounds, self.queue
        idle = rounds.idle_now
        at = rounds.count + 1
        if queue and queue[0].round > at and idle >= 2:
            at = queue[0].round  # nothing happens before, and idle rounds do not count
            rounds.count = at - 1
        messages = []
        while queue and queue[0].round <= at:
            message = self._message(queue.popleft())
            if message is not None:
                messages.append(message)
        rounds.begin(bool(messages))
        self._since_step += 1
        if not queue:
            self._at_end += idle > 0
            if self.steps >= self.recording.steps + BEHIND or self._at_end > IDLE:
                raise TapeEnd
        if self.until and self.steps >= self.until + BEHIND:
            raise TapeEnd
        if self._since_step > STUCK:
            raise Stuck
        return messages

    def _message(self, event: Request | Abort | Flush) -> Any:
        module = importlib.import_module("sglang.srt.managers.io_struct")
        if isinstance(event, Request):
            return self._request(module.TokenizedGenerateReqInput, event)
        if isinstance(event, Flush):
            return _build(module.FlushCacheReqInput)
        if event.whose == -1:
            return _build(module.AbortReq, rid="", abort_all=True)
        request = self.requests.get(event.whose)
        rid = "" if request is None else _rid(request)
        return _build(module.AbortReq, rid=rid, abort_all=False) if rid in self.given else None

    def _request(self, cls: Any, request: Request) -> Any:
        module = importlib.import_module("sglang.srt.sampling.sampling_params")
        params = module.SamplingParams(
            max_new_tokens=None if request.longest < 0 else request.longest,
            temperature=0.0,
            ignore_eos=bool(request.options & tape.IGNORES_EOS),
            stop_token_ids=[self.tokens.stop(request)],
        )
        params.normalize(None)
        rid = _rid(request)
        self.given[rid] = request
        words: Any = self.tokens.prompt(request)
        if hasattr(cls, "__struct_fields__"):  # of msgspec, which wants an array
            words = array("q", words)
        return _build(
            cls,
            rid=rid,
            input_ids=words,
            input_text="",
            sampling_params=params,
            return_logprob=bool(request.options & tape.LOGPROBS),
            logprob_start_len=request.logprobs_from,
            top_logprobs_num=0,
            stream=False,
            priority=request.priority or None,
            bootstrap_host=tape.UNCACHED_HOST if request.options & tape.UNCACHED else None,
        )

    # --- tokens and accept lengths ---------------------------------------------------------------

    def run(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.steps += 1
        self._since_step = 0
        self.current = [self.given.get(r.rid) for r in batch.reqs]

    def sample(self, runner: Any, logits: Any, forward_batch: Any, *args: Any) -> None:
        draft = getattr(runner, "is_draft_worker", False)
        self.lens = [] if draft or not self._on else forward_batch.seq_lens.tolist()

    def sampler(self, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The next token of each row is the one of the tape."""
        tokens, lens, self.lens = call_next(*args, **kwargs), self.lens, []
        if not lens:
            return tokens
        words = tokens.tolist()
        for row, (request, n) in enumerate(zip(self.current, lens, strict=False)):
            if request is not None and row < len(words):
                words[row] = self.tokens.at(request, n)
        return tokens.copy_(tokens.new_tensor(words))

    def verify(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if self._on and not batch.forward_mode.is_idle():
            self.lens = batch.seq_lens.tolist()

    def tree(self, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The draft's tokens: the next ones, as many as will be accepted, and then another one."""
        result = call_next(*args, **kwargs)
        if self._on:
            lens = argument(args, kwargs, 4, "seq_lens").tolist()
            drafted = result[-1].view(len(lens), -1)
            self._draft(drafted, lens)
        return result

    def _draft(self, drafted: torch.Tensor, lens: list[int]) -> None:
        """drafted: [rows, W], the first of each row is a token that is sure already."""
        for row, (request, n) in enumerate(zip(self.current, lens, strict=False)):
            if request is None:
                continue
            width = drafted.shape[1]
            words = [self.tokens.at(request, n + k) for k in range(width)]
            taken = self._accepted(request)
            if taken < width:
                words[taken] = FIRST_WORD + (words[taken] - FIRST_WORD + 1) % self.tokens.words
            drafted[row, 1:] = drafted.new_tensor(words[1:])

    def kernel(self, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let the target want the tape's next token at each place of a verify."""
        lens, self.lens = self.lens, []
        if lens and self._on:
            candidates, wanted = kwargs["candidates"], kwargs["target_predict"]
            self._draft(candidates, lens)
            for row, (request, n) in enumerate(zip(self.current, lens, strict=False)):
                if request is not None:
                    width = candidates.shape[1]
                    words = [self.tokens.at(request, n + 1 + k) for k in range(width)]
                    wanted.view(-1, width)[row] = wanted.new_tensor(words)
                    self._next(request)
        return call_next(*args, **kwargs)

    def _accepted(self, request: Request) -> int:
        nth = self.nth.get(request.id, 0)
        return request.accepted[nth] if nth < len(request.accepted) else 1

    def _next(self, request: Request) -> None:
        nth = self.nth.get(request.id, 0)
        known = nth < len(request.accepted)
        self.forced += known
        self.lacking += not known
        self.nth[request.id] = nth + 1


def _rid(request: Request) -> str:
    return f"{HEALTH if request.options & tape.HEALTH else PREFIX}{request.id:06}"


def _kept(event: Request | Abort | Flush, keep: frozenset[int] | None) -> bool:
    if keep is None or isinstance(event, Flush):
        return True
    if isinstance(event, Request):
        return event.id in keep
    return event.whose in keep or event.whose == -1


def _build(cls: Any, **given: Any) -> Any:
    """A message of SGLang's. Required fields that are not given are None."""
    if dataclasses.is_dataclass(cls):
        none = dataclasses.MISSING
        fields = {
            f.name: f.default is none and f.default_factory is none for f in dataclasses.fields(cls)
        }
    else:
        structs = importlib.import_module("msgspec").structs
        fields = {f.name: f.required for f in structs.fields(cls)}
    needed = [name for name, required in fields.items() if required]
    known = {name: value for name, value in given.items() if name in fields}
    return cls(**(dict.fromkeys(needed) | known))


def mute(scheduler: Any) -> None:
    """Nobody listens to this scheduler, and the sockets of a fork are its parent's."""
    for holder in (scheduler, getattr(scheduler, "ipc_channels", None)):
        for channel in ("send_to_detokenizer", "send_to_tokenizer"):
            sender = getattr(holder, channel, None)
            if sender is not None:
                type(sender).send_output = lambda *args, **kwargs: None
