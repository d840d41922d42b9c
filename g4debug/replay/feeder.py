"""Gives a scheduler the requests, tokens and accept lengths of a tape, in its own event loop.

Its hooks are the innermost ones, where the faults are. So every tracer sees these values as if
SGLang had made them.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from g4debug.findings import tape
from g4debug.findings.tape import Abort, Flush, How, Recording, Request
from g4debug.hooking.arguments import argument
from g4debug.hooking.hooks import Hooks, Order
from g4debug.replay.tokens import FIRST_WORD, Tokens
from g4debug.replay.workload import BEHIND, IDLE, After, Event, Workload
from g4debug.tracers.flight_recorder.taping import REFRESHES, Rounds

OWNER = "replay"
SLOWER = 4  # times as many steps: requests wait for each other, or fewer tokens are accepted
MORE = 1000  # steps for requests that had not ended where the tape ends
MANY = 64  # requests: with more nobody asks yet what each of them had reached
STUCK = 20_000  # rounds in a row without a step
STANDS = 12.0  # seconds in which the flight recorder has to tell that this scheduler hangs, too
NAP = 0.002  # seconds of a round meanwhile
HEALTH = "HEALTH_CHECK"  # begins the ids of SGLang's own requests
PREFIX = "r"  # begins all others


class TapeEnd(BaseException):
    """All that is on the tape was given. No Exception: SGLang must not catch it."""


class Stuck(TapeEnd):
    """The scheduler does not run on, although it did so there."""


class Feeder:
    """Gives all that is on the tape, if it is not told to give another workload."""

    def __init__(self, recording: Recording, tokens: Tokens) -> None:
        self.recording, self.tokens = recording, tokens
        self.requests = recording.requests
        self.queue: deque[tuple[Event, After | None]] = deque((e, None) for e in recording.given)
        self.lag = self.accepted = 0  # accepted: by each verify; 0 for as many as there
        self.reached: list[dict[int, int]] = []  # at each event: see ``Outcome.reached``
        self._reqs: dict[int, Any] = {}  # SGLang's, by their ids
        self._gone: set[int] = set()  # aborted
        self._shift = 0  # rounds that events come later than there
        self._met: int | None = None  # the round in which what the next event waits for was there
        self.rounds = Rounds()
        self.rounds.count = recording.begins.round
        self.until = 0  # the last step that is wanted; 0 for all
        self.given: dict[str, Request] = {}  # by rid
        self.current: list[Request | None] = []  # of the rows of the batch that runs
        self.lens: list[int] = []
        self.nth: dict[int, int] = {}  # verifies of each request, up to now
        self.steps = self.forced = self.lacking = 0
        self._since_step = self.at_end = 0
        self.most_idle, self.most_steps = IDLE, recording.steps + BEHIND
        if not recording.fresh:  # what ran before its beginning is lacking, so batches are others
            self.to_the_end()
        self.hangs: Callable[[], tuple[bool, bool]] | None = None  # see ``_may_hang``
        self._hangs_until = 0.0
        self._on = self._partly = False
        self._of_parent: Any = None  # an NgramCorpus

    def give(self, workload: Workload) -> None:
        """Give this in place of the whole tape."""
        self.queue = deque(workload.events(self.recording))
        self.requests = {e.id: e for e, _ in self.queue if isinstance(e, Request)}
        made = dataclasses.replace(self.recording, requests=self.requests)
        self.tokens = Tokens(made, self.tokens.words)
        self.lag, self._partly = workload.lag, True
        self.accepted = next(iter(workload.accepted), 0)
        if workload.after or workload.accepted:
            self.most_steps *= SLOWER

    def to_the_end(self) -> None:
        """Go on until all requests have ended: this scheduler may decide otherwise than that one,
        and what came in the last step there may come many steps later here."""
        steps = self.recording.steps
        self.most_steps = max(SLOWER * steps, steps + MORE)

    def install(self, hooks: Hooks) -> None:
        order = Order.FAULT
        hooks.around("scheduler.recv_requests", order, OWNER, self.receive)
        hooks.before("scheduler.on_idle", order, OWNER, self.idle)
        hooks.before("scheduler.run_batch", order, OWNER, self.run)
        hooks.around("req.stops", order, OWNER, self.stops)
        hooks.before("runner.sample", order, OWNER, self.sample)
        hooks.around("runner.sampler", order, OWNER, self.sampler)
        hooks.before("worker.verify", order, OWNER, self.verify)
        hooks.before("layered.verify", order, OWNER, self.verify, optional=True)
        hooks.around("draft.tree", order, OWNER, self.tree, optional=True)
        hooks.around("ngram.draft", order, OWNER, self.chain, optional=True)
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
        if hasattr(getattr(scheduler, "policy", None), REFRESHES):
            setattr(scheduler.policy, REFRESHES, self.recording.refreshes)
        worker = getattr(scheduler, "draft_worker", None)
        if hasattr(worker, "ngram_corpus"):
            self._renew_corpus(worker)
        self._on = True

    def _renew_corpus(self, worker: Any) -> None:
        """NGRAM's corpus inserts in a thread of its own. A fork has no such thread, and SGLang
        would wait for it for ever. What a new corpus finds does not matter, see ``chain``."""
        self._of_parent = worker.ngram_corpus  # kept: its end would wait for that thread, too
        worker.ngram_corpus = type(worker.ngram_corpus)(
            max_trie_depth=worker.max_trie_depth, draft_token_num=worker.draft_token_num
        )

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
        if queue and queue[0][1] is None and self._round(queue[0][0]) > at and idle >= 2:
            at = self._round(queue[0][0])  # nothing happens before, and idle rounds do not count
            rounds.count = at - 1
        messages: list[Any] = []
        while queue and self._due(*queue[0], at, bool(messages), idle >= 2):
            event, after = queue.popleft()
            if after is not None:
                self._shift, self._met, self.at_end = at - event.round, None, 0
            if self._partly:
                self.reached.append(self._state() if len(self.given) < MANY else {})
            message = self._message(event)
            if message is not None:
                messages.append(message)
        rounds.begin(bool(messages))
        self._since_step += 1
        if not queue or (queue[0][1] is not None and self._met is None):
            self.at_end += idle > 0
            done = not queue and self.steps >= self.most_steps
            if done or (self.at_end > self.most_idle and not self._may_hang()):
                raise TapeEnd
        if self.until and self.steps >= self.until + BEHIND:
            raise TapeEnd
        if self._since_step > STUCK and not self._hangs_until:
            raise Stuck
        return messages

    def _may_hang(self) -> bool:
        """Whether to let the event loop turn, although all was given and no step comes any more.

        Where the dump says that the server hung, the flight recorder looks whether this one hangs,
        too. ``hangs`` says whether it has told so, and whether there is work.
        """
        if self.hangs is None:
            return False
        told, work = self.hangs()
        if told or not work:
            return False
        now = time.monotonic()
        self._hangs_until = self._hangs_until or now + STANDS
        time.sleep(NAP)
        return now < self._hangs_until

    def _round(self, event: Event) -> int:
        return event.round + self._shift

    def _due(self, event: Event, after: After | None, at: int, behind: bool, idle: bool) -> bool:
        """Whether it is this event's turn. behind: another one came in this round."""
        if after is None:
            return self._round(event) <= at
        if after.tokens == After.TOGETHER:
            return not behind or not self.lag
        if self._met is None and self._happened(after):
            self._met = at
        return self._met is not None and (at >= self._met + self.lag or idle)

    def _happened(self, after: After) -> bool:
        state = self._state()
        if not after.whose:
            return all(tokens == After.ENDED for tokens in state.values())
        tokens = state.get(after.whose, 0)
        return tokens == After.ENDED or 0 <= after.tokens <= tokens

    def _state(self) -> dict[int, int]:
        """How many tokens each request has that was given, ``After.ENDED`` if it has ended."""
        found = {}
        for request in self.given.values():
            req = self._reqs.get(request.id)
            ended = request.id in self._gone if req is None else req.finished()
            found[request.id] = After.ENDED if ended else 0 if req is None else len(req.output_ids)
        return found

    def _message(self, event: Request | Abort | Flush) -> Any:
        module = importlib.import_module("sglang.srt.managers.io_struct")
        if isinstance(event, Request):
            return self._request(module.TokenizedGenerateReqInput, event)
        if isinstance(event, Flush):
            return _build(module.FlushCacheReqInput)
        if event.whose == -1:
            self._gone.update(request.id for request in self.given.values())
            return _build(module.AbortReq, rid="", abort_all=True)
        self._gone.add(event.whose)
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
        if "array" in str(cls.__annotations__["input_ids"]):  # 0.5.12.post1 has a list
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
            priority=request.asked_priority,
            bootstrap_host=tape.UNCACHED_HOST if request.options & tape.UNCACHED else None,
        )

    # --- tokens and accept lengths ---------------------------------------------------------------

    def run(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.steps += 1
        self._since_step, self._hangs_until = 0, 0.0
        self.current = [self.given.get(r.rid) for r in batch.reqs]
        if self._partly:
            self._reqs |= {x.id: r for x, r in zip(self.current, batch.reqs, strict=True) if x}

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

    def stops(self, call_next: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        """A stop string also ends a request that ignores stop tokens. A token stands for it."""
        params, request = req.sampling_params, self.given.get(req.rid)
        ignores = params.ignore_eos
        if request is not None and request.how is How.STOP:
            params.ignore_eos = False
        try:
            return call_next(req, *args, **kwargs)
        finally:
            params.ignore_eos = ignores

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

    def chain(
        self, call_next: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The same for NGRAM, which looks its drafts up. Where it finds too few, its tree has no
        path of the whole width, so it gets one."""
        result = call_next(worker, batch, *args, **kwargs)
        if not self._on or not batch.forward_mode.is_target_verify():
            return result
        spec, self.lens = batch.spec_info, batch.seq_lens.tolist()
        rows, width = len(self.lens), int(spec.draft_token_num)
        self._draft(spec.draft_token.view(rows, width), self.lens)
        places = torch.arange(width)
        spec.positions.copy_((batch.seq_lens[:, None] + places).flatten())
        spec.retrieve_next_token.copy_(torch.where(places + 1 < width, places + 1, -1))
        spec.retrieve_next_sibling.fill_(-1)
        # A row of the mask has the drafts, or before them all tokens of the request.
        mask, sizes = spec.custom_mask, [width] * rows
        if mask.numel() != rows * width * width:
            sizes = [n + width for n in self.lens]
        for block, size in zip(mask.split([width * size for size in sizes]), sizes, strict=True):
            block.view(width, size)[:, -width:] = places <= places[:, None]
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
        if self.accepted:
            return self.accepted
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
