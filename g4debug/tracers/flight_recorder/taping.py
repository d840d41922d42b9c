"""Records the tape (:mod:`g4debug.findings.tape`) while the scheduler works.

Each hook takes a few microseconds and reads only what SGLang has in host memory. A request's
tokens are hashed while the device works, once after it has arrived and once after it has ended
(:mod:`g4debug.tracers.flight_recorder.due_hashes`).
"""

from __future__ import annotations

import os
import secrets
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from g4debug.findings import decisive, decisive_arguments, tape
from g4debug.findings.record import Plain, Tape
from g4debug.findings.status import TAPE
from g4debug.findings.steps import pool_sizes
from g4debug.findings.tape import Code, How, Why
from g4debug.findings.tape_record import pack
from g4debug.hooking.hooks import Isolated
from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import work
from g4debug.tracers.flight_recorder.due_hashes import DueHashes, Live
from g4debug.tracers.flight_recorder.page_digests import EVERY, PageDigests

LOST = "it cannot carry this"
LASTS = -1  # of a limit, in place of a step
REMEMBERED = 256  # requests that have ended, and may still be in a result on its way
UNBOUNDED = 1 << 30  # max_new_tokens: SGLang takes it for none, and cuts it to what there may be
MANY = 64  # requests more than SGLang has: then those are looked for that it has no more

_STEP = struct.Struct("<BH").pack
_FREE = itemgetter(2)  # of a pool's sizes
# How many pools there are -> packs what the checksum of a step is of. As written since format 1.
_KNOWN = {pools: struct.Struct(f"<{4 + pools}q").pack for pools in range(3)}

# Settings by which the scheduler decides, beside the requests; SGLang's names. Read at start.
SCHEDULER = (
    "page_size", "max_running_requests", "max_total_num_tokens", "max_prefill_tokens",
    "max_req_len", "max_req_input_len", "chunked_prefill_size", "is_mixed_chunk",
    "enable_overlap", "schedule_policy", "enable_priority_scheduling",
    "schedule_low_priority_values_first", "priority_scheduling_preemption_threshold",
    "sliding_window_size", "truncation_align_size",
)  # fmt: skip
STATES = "linear"  # a pool for layers that attend, and another one for states
POOLS = ("size", "size_full", "size_swa")  # of its allocator, in tokens
RATIOS = ("init", "min", "decay")  # of the share of their longest output that requests may take
SPECULATION = (
    "speculative_algorithm", "speculative_num_draft_tokens", "speculative_eagle_topk"
)  # fmt: skip

POLICIES = ("fcfs", "lof", "dfs-weight", "lpm")
# Numbers of SGLang's module of policies; it reads them from variables when it is imported. With lpm
# it counts whether waiting requests have so many tokens in common as the last one says, whatever a
# page is, unless the one before it is negative.
POLICY = ("CLIP_MAX_NEW_TOKENS", decisive.LPM_CHECK, decisive.LPM_TOKENS)
REFRESHES = "_waiting_prefix_refresh_calls"  # SGLang's, from 0.5.23 on

# Messages that do not change where pages go, by the beginning of their names.
HARMLESS = (
    "CheckWeights", "ConfigureLogging", "Dumper", "ExpertDistribution", "FreezeGC", "Get",
    "HealthCheck", "ListExternal", "Profile", "Shutdown", "UpdateWeightVersion",
)  # fmt: skip
# Messages that are not on the tape, and of which nothing is left in a server without requests. A
# pause ends by a message of its own. All others may have changed the server for good.
PASSING = (
    "BatchTokenizedEmbedding", "BeginWeight", "CloseSession", "ContinueGeneration", "EndWeight",
    "LoadLoRA", "OpenSession", "PauseGeneration", "TokenizedEmbedding", "UnloadLoRA",
    "UpdateWeight",
)  # fmt: skip
# Features of a request that are not on the tape: SGLang's field, and the feature in words.
FIELDS = {
    "mm_inputs": "images, video or sound",
    "input_embeds": "embeddings in place of tokens",
    "session_params": "sessions",
    "session_id": "sessions",
    "lora_id": "LoRA adapters",
    "bootstrap_room": "disaggregation",
    "positional_embed_overrides": "embeddings at positions",
    "multi_item_delimiter_indices": "several items in a prompt",
    "custom_logit_processor": "logit processors of its own",
}
SAMPLING = {
    "json_schema": "grammars",
    "regex": "grammars",
    "ebnf": "grammars",
    "structural_tag": "grammars",
    "beam_width": "beam search",
}


class Rounds:
    """Counts rounds of the event loop. Of those in a row that were idle only two count."""

    def __init__(self) -> None:
        self.count = self.idle = 0
        self.idled = False  # the round that runs is idle

    @property
    def idle_now(self) -> int:
        """The idle rounds in a row before the next one."""
        return self.idle + 1 if self.idled else 0

    def begin(self, busy: bool) -> None:
        """A round begins. busy: it brings messages."""
        self.idle = self.idle + 1 if self.idled else 0  # idle_now, in each round of a busy server
        self.idled = False
        if busy or self.idle < 2:
            self.count += 1


current: Taping | None = None  # of this process


class Taping:
    def __init__(self, context: Context) -> None:
        self.context, self.recorder = context, context.recorder
        self.part = context.recorder.status.part(TAPE)
        self.ring = tape.Ring(context.settings.tape << 20)
        self.hashes = DueHashes(secrets.token_bytes(32))
        self.rounds = Rounds()
        self.format = tape.FORMAT
        self.digests = PageDigests()
        self.scheduler: Any = None
        self.facts: dict[str, Plain] = {}
        self.variables: dict[str, str] = {}
        self.limits: dict[str, int] = {}  # in their order; as ``Tape.limits_at``
        self._asked_by: dict[str, int] = {}  # of each limit, the last request up to its cause
        self.ended_limits: tuple[str, ...] = ()  # where the tape begins
        self._told: set[str] = set()  # a server may do the same again and again
        self.live: dict[str, Live] = {}
        self.ended: dict[str, int] = {}
        self._missed: set[str] = set()  # live requests that SGLang did not have at the last look
        self._looked = -1  # the round of that look
        self._many = MANY  # so many live requests are a reason to look
        self._room = 0  # bytes of the last chunk that are a reason to trim
        self.on = self.speculates = self.flushed = self.overlaps = False
        self.steps = self.requests = self.checksum = 0
        self._before = 0  # of a replay: the steps of the server before its tape
        self._asked = 0  # the requests before this round
        self._round = 0  # of the last event that has one
        self._rows: list[Any] = []
        self._modes: dict[Any, tuple[int, bool]] = {}
        self._hooks: list[Isolated] = []

    def install(self) -> None:
        global current
        current = self
        for site, hook in (
            ("scheduler.run_event_loop", self.begin),
            ("scheduler.process_inputs", self.round),
            ("scheduler.on_idle", self.idle),
            ("scheduler.run_batch", self.step),
            ("cache.release", self.released),
        ):
            self.context.before(site, self.unless_failed(hook))
        self.context.after("scheduler.run_batch", self.unless_failed(self.launched))
        self.context.after("scheduler.process_result", self.unless_failed(self.result))

    def unless_failed(self, hook: Callable[..., Any]) -> Isolated:
        """``hook``, until one of them fails: a tape with a gap would be replayed to wrong words.

        Whatever the reason, for example an accept length that no verify can have, the flight
        recorder goes on without a tape. After a failure the first argument is returned.
        """

        def failed(error: Exception) -> None:
            self._give_up(getattr(hook, "__name__", "a hook"), error)

        isolated = Isolated(hook, failed, keeps=True)
        self._hooks.append(isolated)
        return isolated

    def _give_up(self, name: str, error: Exception) -> None:
        self.on = False
        for each in self._hooks:
            each.on = False
        self.part.off(f"{name} failed: {type(error).__name__}: {error}", error)

    def limit(self, what: str, lasts: bool = False) -> None:
        """Note something that is not on the tape. Nobody can replay a tape that has it.

        lasts: the server stays so. All other limits end where the tape begins anew, and when the
        part of it with their cause is gone.
        """
        if what not in self.limits:
            self.part.limit(LOST, what, quiet=what in self._told)
            self._told.add(what)
        lasts = lasts or self.limits.get(what, 0) == LASTS
        self.limits[what] = LASTS if lasts else self.steps
        self._asked_by[what] = self.requests + 1

    def _limits_end(self) -> bool:
        """True if a limit ends where the tape begins anew: not while a session holds pages."""
        return any(at != LASTS for at in self.limits.values()) and not open_sessions(self.scheduler)

    def _end_limits(self) -> None:
        """The tape begins anew, without a request that runs."""
        if self._limits_end():
            self.ring.forget()  # nobody can replay what is before
            self.ended_limits = tuple(what for what, at in self.limits.items() if at != LASTS)
            self._lift(self.steps + 1, "it has begun anew")

    def _go_on_limits(self) -> None:
        """A part of the tape begins. A limit goes on in it while its cause may still be there."""
        oldest = min((one.id for one in self.live.values()), default=self.requests + 2)
        sessions = open_sessions(self.scheduler)
        for what, at in self.limits.items():
            if at != LASTS and (sessions or oldest <= self._asked_by[what]):
                self.limits[what] = self.steps

    def _trim(self) -> None:
        """Drop the chunks that have no room any more, and the limits that were only in them."""
        self.ring.trim(self.steps)
        self._room = len(self.ring.now) + self.ring.part
        first = self.ring.first
        if any(LASTS < at < first for at in self.limits.values()):
            self._lift(first, "the part of it that had this is gone")

    def _lift(self, first: int, why: str) -> None:
        """End the limits that came last before this step."""
        self.limits = {what: at for what, at in self.limits.items() if at == LASTS or at >= first}
        self.part.lift(LOST, why, quiet=why in self._told)
        self._told.add(why)
        for what in self.limits:
            self.part.limit(LOST, what, quiet=True)

    # --- the scheduler ---------------------------------------------------------------------------

    def begin(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """The event loop is about to run."""
        self.scheduler = scheduler
        self.facts, self.variables = facts(scheduler), decisive.variables(os.environ)
        self.speculates = self.facts["speculative_algorithm"] is not None
        self.overlaps = bool(self.facts["enable_overlap"])
        self.hashes.page, self.hashes.firsts = int(scheduler.page_size), self.speculates
        for why in unsupported(scheduler, self.facts):
            self.limit(why, lasts=True)
        self.on = True
        self._start(Why.START)

    def _start(self, why: Why) -> None:
        scheduler = self.scheduler
        self._forget()
        self._rows = []
        self._round = self.rounds.count
        rest = tape.start(
            self._round,
            self.steps,
            self.requests,
            int(scheduler.forward_ct),
            ratio(scheduler),
            self.checksum,
        )
        refreshes = getattr(getattr(scheduler, "policy", None), REFRESHES, 0)
        if refreshes:
            rest += bytes((Code.REFRESHES,)) + tape.number(refreshes)
        self.ring.start(why, self.steps, rest)
        if why in (Why.FLUSH, Why.IDLE):
            self._end_limits()
        self._go_on_limits()
        self._trim()

    def go_on(self, begins: tape.Start, format: int, compared: bool = True) -> None:
        """Start a tape without a limit that begins like the replayed one: for a replay.

        Its steps count from 0, as all of a replay's dump does. format: of that tape. compared: make
        digests in the steps in which that tape has some.
        """
        self.format, self.digests = format, PageDigests(format)
        self.ring = tape.Ring(1 << 40, settled=1 << 40)
        self.steps, self.checksum = 0, begins.checksum
        self._before = begins.steps if compared else 0
        self._start(begins.why)

    def idle(self, *args: Any, **kwargs: Any) -> None:
        """The event loop has nothing to do in this round."""
        first = not self.rounds.idle
        self.rounds.idled = True
        self.hashes.make()
        if not first and self.rounds.idle == 1 and self.on and self.scheduler.is_fully_idle():
            for rid in list(self.live):  # ended while they waited
                self._end(rid, (), How.ABORT)
            self._rows = []
            if len(self.ring.now) > self.ring.part or self._limits_end():
                self._start(Why.IDLE)

    def round(self, scheduler: Any, messages: Any, *args: Any, **kwargs: Any) -> None:
        """A round of the event loop begins."""
        if self.flushed:
            self.flushed = False
            unused = all(size == free for _, size, free in pool_sizes(scheduler))
            if scheduler.is_fully_idle() and unused:
                self._start(Why.FLUSH)
        if messages and self.on and len(self.ring.now) > self._room:
            self._make_room()  # also where no step comes: a server that hangs is still asked
        self.rounds.begin(bool(messages))
        if messages and self.on:
            self._asked = self.requests
            for message in messages:
                for one in getattr(message, "batch", None) or (message,):
                    self._message(one)

    def step(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """A step begins."""
        if not self.on:
            return
        mode = batch.forward_mode
        code, extends = self._modes.get(mode) or self._mode(mode)
        pools = self.recorder.read_pools(scheduler)
        known = _KNOWN[len(pools)](
            code,
            len(batch.reqs),
            *map(_FREE, pools),
            len(scheduler.waiting_queue),
            (extends and batch.extend_num_tokens) or 0,
        )
        self.checksum = checksum = zlib.crc32(known, self.checksum)
        self.steps += 1
        now = self.ring.now
        now += _STEP(Code.STEP, checksum & 0xFFFF)
        step = self.steps + self._before
        if step % EVERY == 0 or step & (step - 1) == 0:
            self._every()

    def launched(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """A step was launched, and the device works.

        A scheduler that overlaps processes the result of the step before next, and sends its tokens
        out. So there the hashes wait until that was done. The device still works then.
        """
        if not self.overlaps:
            self.hashes.make()
        return result

    def _mode(self, mode: Any) -> tuple[int, bool]:
        """The number of a forward mode, and whether it extends. Kept: SGLang compares six modes."""
        known = self._modes[mode] = zlib.crc32(mode.name.encode()), bool(mode.is_extend())
        return known

    def _every(self) -> None:
        self._take_digest()
        self.digests.look(self.scheduler.token_to_kv_pool_allocator, self.steps)
        if len(self.live) > self._many:
            self._forget()
        self._make_room()

    def _make_room(self) -> None:
        if len(self.ring.now) > 4 * self.ring.part:
            self._start(Why.BUSY)
        else:
            self._trim()

    def _forget(self) -> None:
        """Let go of requests that SGLang has let go of: it refuses some when they come, and takes
        others out of its queue, and calls no function of ours.

        Only of those that it lacked in an earlier round, too: one may be on its way between two of
        its lists.
        """
        if self._looked == self.rounds.count:
            return
        self._looked = self.rounds.count
        here = {request.rid for request, _ in work.held(self.scheduler)}
        gone = [rid for rid in self.live if rid not in here]
        for rid in gone:
            if rid in self._missed:
                self._end(rid, (), How.ABORT)
        self._missed = {rid for rid in gone if rid in self.live}
        self._many = len(self.live) + len(here) + MANY

    def _take_digest(self) -> None:
        taken = self.digests.take()
        if taken is not None:
            step, digest = taken
            now = self.ring.now
            now += bytes((Code.PAGES,)) + tape.number(step) + digest.to_bytes(8, "little")

    def result(
        self, returned: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A step's result was processed."""
        mode = batch.forward_mode
        if self.speculates and self.on and not (self._modes.get(mode) or self._mode(mode))[1]:
            counts = accepted(result)
            if counts:
                reqs = batch.reqs
                if reqs != self._rows:
                    self._rows = list(reqs)
                    self._row_ids(reqs)
                now = self.ring.now
                now += b"\x07" + tape.number(len(counts)) + bytes(counts)
        if self.overlaps:
            self.hashes.make()
        return returned

    def _row_ids(self, reqs: Iterable[Any]) -> None:
        ids = []
        for r in reqs:
            live = self.live.get(r.rid)
            ids.append(self.ended.get(r.rid, tape.UNKNOWN) if live is None else live.id)
        now = self.ring.now
        now += bytes((Code.ROWS,)) + tape.number(len(ids)) + b"".join(map(tape.number, ids))

    # --- messages --------------------------------------------------------------------------------

    def _since(self) -> int:
        """Rounds since the last event that has one."""
        rounds, self._round = self.rounds.count - self._round, self.rounds.count
        return rounds

    def _message(self, message: Any) -> None:
        kind = type(message).__name__
        now = self.ring.now
        if kind == "TokenizedGenerateReqInput":
            self._request(message)
        elif kind == "AbortReq":
            # SGLang aborts each request whose id begins so.
            ids = [one.id for rid, one in self.live.items() if rid.startswith(message.rid or "")]
            for whose in (-1,) if message.abort_all else ids or (tape.UNKNOWN,):
                now += bytes((Code.ABORT,)) + tape.number(self._since()) + tape.number(whose + 1)
        elif kind == "FlushCacheReqInput":
            now += bytes((Code.FLUSH,)) + tape.number(self._since())
            idle = self.scheduler.is_fully_idle()
            # SGLang refuses where a request runs, and one that came before it in this round does.
            self.flushed = idle and self.requests == self._asked
            if getattr(message, "timeout_s", None) and not idle:
                self.limit("a flush that waits until the server is idle")
        elif not kind.startswith(HARMLESS):
            self.limit(f"the message {kind}", lasts=not kind.startswith(PASSING))

    def _request(self, message: Any) -> None:
        params = message.sampling_params
        for fields, holder in ((FIELDS, message), (SAMPLING, params)):
            for name, what in fields.items():
                value = getattr(holder, name, None)
                # One beam is none. Some are tensors, which do not compare to one truth.
                if value is not None and not (isinstance(value, int) and value in (0, 1)):
                    self.limit(what)
        tokens = message.input_ids
        salt = getattr(message, "extra_key", None), getattr(message, "cache_salt", None)
        live = Live(self.requests + 1, len(tokens), repr(salt) if any(salt) else "")
        options = (
            tape.IGNORES_EOS * bool(params.ignore_eos)
            | tape.LOGPROBS * bool(message.return_logprob)
            | tape.HEALTH * str(message.rid).startswith("HEALTH_CHECK")
            | tape.UNCACHED * (getattr(message, "bootstrap_host", None) == tape.UNCACHED_HOST)
        )
        priority = getattr(message, "priority", None)
        if priority is not None:
            options |= tape.PRIORITY
            if abs(priority) > tape.MOST_PRIORITY:
                self.limit(f"priorities beyond {tape.MOST_PRIORITY}")
                priority = 0
        longest = params.max_new_tokens
        start = message.logprob_start_len
        event = tape.request(
            self._since(),
            len(tokens),
            None if longest is None else min(longest, UNBOUNDED),
            options,
            -1 if start is None else max(-1, start),
            priority or 0,
        )
        self.hashes.request(self.ring, event, live, tokens)
        self.requests += 1
        self.live[message.rid] = live

    # --- the ends --------------------------------------------------------------------------------

    def released(self, req: Any, *args: Any, **kwargs: Any) -> None:
        """A request gives its pages back: it has ended, or is retracted."""
        if req.rid in self.live and req.finished():
            self._end(req.rid, outputs(req), how(req))

    def _end(self, rid: str, output: Any, how: How) -> None:
        live = self.live.pop(rid)
        self.hashes.end(self.ring, live, output, how)
        self.ended[rid] = live.id
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]

    def tape(self) -> Tape | None:
        """The tape up to now, None if there is none. Another thread may ask."""
        if not self.on or not self.ring.now:
            return None
        self._take_digest()
        limits = self.limits.copy()  # before and after: they may end in between, or begin
        live = self.live.copy()
        running = {r.rid: r for r in unfinished(self.scheduler)}
        try:
            chunks = self.hashes.chunks(self.ring)
        except Exception as e:  # of a prompt that cannot be on a tape
            self._give_up("the reading of the tape", e)
            return None
        closing = []
        for rid, one in live.items():
            if rid not in self.live:  # it has just ended, and nothing ends twice on a tape
                continue
            req = running.get(rid)
            output = () if req is None else outputs(req)
            closing.append(self.hashes.ending(one, output, How.RUNNING))
        return pack(
            chunks,
            b"".join(closing),
            self.hashes.page,
            self.speculates,
            self.steps,
            self.requests,
            self.facts,
            limits | self.limits,
            self.variables,
            self.ended_limits,
            self.format,
        )


def open_sessions(scheduler: Any) -> bool:
    """True while a session is open: a server without requests may still hold its pages."""
    return bool(getattr(getattr(scheduler, "session_controller", None), "sessions", None))


def outputs(req: Any) -> Any:
    """The tokens that a request got."""
    size = getattr(req, "finished_len", None)
    return req.output_ids[:size] if size else req.output_ids


_ENDS = {"FINISH_LENGTH": How.LENGTH, "FINISH_ABORT": How.ABORT}


def how(req: Any) -> How:
    return _ENDS.get(type(req.finished_reason).__name__, How.STOP)


def unfinished(scheduler: Any) -> Iterator[Any]:
    """The requests that run or wait."""
    for name in ("running_batch", "last_batch", "cur_batch"):
        yield from getattr(getattr(scheduler, name, None), "reqs", ())
    yield from getattr(scheduler, "waiting_queue", ())
    chunked = getattr(scheduler, "chunked_req", None)
    if chunked is not None:
        yield chunked


def accepted(result: Any) -> list[int] | None:
    """The tokens that each row of a verify got; None if it was no verify."""
    lens = getattr(result, "accept_lens", None)
    if lens is not None:
        if lens.is_cuda:  # SGLang has copied it by now, wherever this was run
            raise RuntimeError("accept_lens is on the device, and reading it there would wait")
        counts: list[int] = lens.tolist()
        return counts
    drafts = getattr(result, "num_correct_drafts_per_req_cpu", None)
    return None if drafts is None else [n + 1 for n in drafts]


def ratio(scheduler: Any) -> float:
    """The share of their longest output that SGLang expects requests to take now."""
    tracker = getattr(scheduler, "new_token_ratio_tracker", None)
    return float(scheduler.new_token_ratio if tracker is None else tracker.current)


def facts(scheduler: Any) -> dict[str, Plain]:
    """The numbers and settings by which a scheduler decides, beside the requests."""
    found: dict[str, Any] = {name: getattr(scheduler, name, None) for name in SCHEDULER}
    allocator = scheduler.token_to_kv_pool_allocator
    found |= {name: getattr(allocator, name, None) for name in POOLS}
    tracker = getattr(scheduler, "new_token_ratio_tracker", None)
    for name in RATIOS:
        here = getattr(scheduler, f"{name}_new_token_ratio", None)
        if name == "decay" and tracker is None:
            here = getattr(scheduler, "new_token_ratio_decay", None)
        found[f"{name}_new_token_ratio"] = here if tracker is None else getattr(tracker, name)
    asked = (*SPECULATION, *decisive_arguments.AGAIN)
    found |= {name: server_argument(scheduler.server_args, name) for name in asked}
    policies = sys.modules.get(type(getattr(scheduler, "policy", None)).__module__)
    found |= {name: getattr(policies, name, None) for name in POLICY}
    found["prefix_cache"] = type(scheduler.tree_cache).__name__
    found["kv_pool"] = pool_kind(allocator)
    return {k: v for k, v in found.items() if v is None or isinstance(v, (bool, int, float, str))}


def pool_kind(allocator: Any) -> str:
    """What its KV pool keeps of a token: K and V ("MHA"), or MLA's vector; or also states."""
    pool = allocator.get_kvcache()
    names = [kind.__name__ for kind in type(pool).__mro__]
    if names[0].startswith("HybridLinear"):
        return STATES
    return "MLA" if "MLATokenToKVPool" in names else "MHA"


def unsupported(scheduler: Any, facts: Mapping[str, Any]) -> Iterator[str]:
    """Features of this server that a tape cannot carry, in words."""
    args = scheduler.server_args
    if facts["kv_pool"] == STATES:
        yield "states of linear layers, which have a pool of their own"
    if (facts["speculative_eagle_topk"] or 1) > 1:
        yield "several draft paths (speculative_eagle_topk)"
    asked = (*decisive_arguments.LIMITS, *decisive_arguments.RANKS)
    yield from decisive_arguments.not_carried({name: server_argument(args, name) for name in asked})
    if dp_attention(args):
        yield "data-parallel attention"
    yield from decisive.not_carried(os.environ, hasattr(scheduler, "_poll_timeout_aborts"))
    policy = scheduler.schedule_policy
    _, check, tokens = (facts[name] for name in POLICY)
    if policy == "lpm" and (check is None or (check >= 0 and tokens % scheduler.page_size)):
        yield f"the schedule policy lpm with pages of {scheduler.page_size} tokens"
    elif policy not in POLICIES:
        yield f"the schedule policy {policy}"
