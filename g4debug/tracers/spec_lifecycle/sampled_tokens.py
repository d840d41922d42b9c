"""A sampled token goes into the request's output, and the next step begins with it, unchanged.

This holds on every server. From the sampler a token goes two ways: with the result to the host and
into the request's output; and through SGLang's FutureMap, or without it, into the ``input_ids`` of
the request's next decode. The values are brought to the host as they pass by, and are compared when
the result was processed, before its tokens leave. With speculative decoding it is so for prefills;
a verify is looked at more closely by the rest of this tracer.

Of a decode it also compares the lengths: the device's, the host's, and ``kv_committed_len``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4debug import speculation
from g4debug.findings.status import Tally
from g4debug.hooking import req_kv, targets
from g4debug.hooking.resolved import server_argument
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle.check import Violation, at_rows, check_counts
from g4debug.tracers.spec_lifecycle.check_values import SAMPLED, Rows
from g4debug.tracers.spec_lifecycle.copies import MOST, Copies, Pool
from g4debug.tracers.spec_lifecycle.future_rows import live_rows
from g4debug.tracers.spec_lifecycle.log import SpecLog

# How a server may be run with which this was not: an argument, and what it is, in words.
UNKNOWN = (
    ("enable_hisparse", "HiSparse stages requests between prefill and decode"),
    ("dllm_algorithm", "a diffusion model gives several tokens at once"),
)
# What is left out of a batch with beams, by :mod:`.forward_inputs`, too.
OF_BEAMS = (
    "of a batch with a beam search no sampled tokens, rows, lengths or positions are checked",
    "several rows of such a batch belong to one request, and this tracer was never run so",
)


@dataclass
class Sampling:
    """A step that samples one token for each request.

    lens: the lengths on the host, None of a prefill. before: of each request, the number of its
    tokens and the last of them, when the result began to be processed. stashes: SGLang stashes the
    tokens in the FutureMap, in time for them to be sent to the host.
    """

    number: int
    decode: bool
    requests: tuple[Any, ...]
    copies: Copies
    lens: list[int] | None
    stashes: bool = True
    seen: bool = False  # its sampling
    live: list[int] = field(default_factory=list)
    before: list[tuple[int, int | None]] = field(default_factory=list)
    last: list[int | None] = field(default_factory=list)  # what was sampled for each one before
    # How many tokens each request had when its last result was processed, None if not known.
    left: list[int | None] = field(default_factory=list)

    @property
    def rids(self) -> list[str]:
        return [str(r.rid) for r in self.requests]

    def begin(self, sampled: Mapping[Any, int], counts: MutableMapping[Any, int]) -> None:
        """Its result is about to be processed. sampled: the last token of each request.

        counts: how many tokens each has; they are taken out, as they change now.
        """
        self.last = [sampled.get(r) for r in self.requests]
        self.left = [counts.pop(r, None) for r in self.requests]
        self.live = live_rows(self.requests)
        outputs = [r.output_ids for r in self.requests]
        self.before = [(len(o), o[-1] if len(o) else None) for o in outputs]

    def check(self) -> Violation | None:
        """Its result was processed, and nothing has left yet."""
        values = self.copies.get()
        if not values:
            return None
        return self._check_counts() or self._check_begun(values) or self._check_given(values)

    def _check_counts(self) -> Violation | None:
        """Between two results of a decode, nobody adds a token to the output or takes one away."""
        pick = [i for i in self.live if self.left[i] is not None] if self.decode else []
        want, got = [self.left[i] or 0 for i in pick], [self.before[i][0] for i in pick]
        return at_rows(check_counts("bookkeeping", h.OUTPUT.name, want, got), pick)

    def _check_begun(self, values: dict[str, list[int]]) -> Violation | None:
        """A decode begins with the last token of each request, at its length."""
        rows, found = Rows(self.rids, self.live), None
        lens, given = values.get(h.LENS.key), values.get(h.INPUT.key)
        if lens is not None and self.lens is not None and len(lens) == len(self.lens):
            pick = self.live
            found = check_counts(
                "seq-len",
                "seq_lens on the device",
                [self.lens[i] for i in pick],
                [lens[i] for i in pick],
            )
            found = at_rows(found, pick)
        if found is None and given is not None and len(given) == len(self.before):
            # Where it is not known what was sampled, the output counts; without one, nothing does.
            last = [
                x[1] if x[1] is not None else y for x, y in zip(self.before, given, strict=True)
            ]
            made = [y if x is None else x for x, y in zip(self.last, last, strict=True)]
            source = h.SAMPLED.of_last_step
            found = rows.check(SAMPLED, (source, made), (h.INPUT, given))
            found = found or rows.check(SAMPLED, (source, made), (h.OUTPUT, last))
        return found

    def _check_given(self, values: dict[str, list[int]]) -> Violation | None:
        """Each request is given the token that was sampled for it."""
        made = values.get(h.SAMPLED.key)
        if made is None or len(made) != len(self.requests):
            return None
        rows = Rows(self.rids, self.live)
        for reading in (h.FORWARDED, h.SAMPLED_STASHED):
            taken = values.get(reading.key)
            if taken is not None:
                found = rows.check(SAMPLED, (h.SAMPLED, made), (reading, taken))
                if found is not None:
                    return found
        got = list(made)
        for row in self.live:
            request, (count, _) = self.requests[row], self.before[row]
            if len(request.output_ids) == count + 1 and not _replaced(request, made[row]):
                got[row] = request.output_ids[-1]
        return rows.check(SAMPLED, (h.SAMPLED, made), (h.OUTPUT, got))


class SampledTokens:
    """Follows each step of the scheduler from its sampling to its output."""

    def __init__(self, context: Context, log: SpecLog) -> None:
        self.context = context
        self.log = log
        self.judging = targets.counts_with_result()  # it was not run on releases before
        self.pool = Pool()
        self.skips = False  # the step that runs is of a kind that is not followed
        self._now: Sampling | None = None  # the step that runs, or waits for its sampling
        self._waiting: dict[int, tuple[weakref.ref[Any], Sampling]] = {}  # by id() of the result
        self._processing: Sampling | None = None
        self._sampled: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The token that each request's last step sampled, if it is on the host at once.
        self._next: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._judged: Tally | None = None

    def install(self) -> None:
        before, after = self.context.before, self.context.after
        before("scheduler.run_batch", self.before_run_batch)
        after("scheduler.run_batch", self.after_run_batch)
        after("forward_batch.init_new", self.after_inputs)
        after("worker.target_forward", self.after_forward)
        after("runner.sampler", self.after_sampler)
        before("runner.sample", self.before_sample)
        after("runner.sample", self.after_sample)
        before("future.stash", self.before_stash)
        before("scheduler.process_result", self.before_process)
        after("scheduler.process_result", self.after_process)
        before("scheduler.stream_output", self.before_stream_output)

    def limit(self, reasons: Sequence[str], documented: bool = False) -> None:
        """This server uses features with which the check was never run.

        documented: as of :meth:`Part.limit`.
        """
        for why in reasons:
            self.judging = False
            self.context.limit(
                "sampled tokens are not followed to the output", why, documented=documented
            )

    def before_run_batch(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._now, self.skips = None, False
        mode = batch.forward_mode
        if not self.judging or not batch.reqs or not (mode.is_decode() or mode.is_extend()):
            return
        # A batch that prefills and decodes at once, or in which rows belong to beams.
        beams = any(getattr(r, "beam_group", None) for r in batch.reqs)
        if beams:
            self.context.limit(*OF_BEAMS)
        if beams or mode.is_mixed():
            self.skips = True
            return
        decode = mode.is_decode()
        if decode and not batch.spec_algorithm.is_none():
            return
        lens = batch.seq_lens_cpu if decode else None
        self._now = step = Sampling(
            number=self.context.recorder.event_step,  # it is counted behind this hook
            decode=decode,
            requests=tuple(batch.reqs),
            copies=Copies(self.pool),
            lens=None if lens is None else lens.tolist(),
            stashes=batch.spec_algorithm.is_none() or getattr(scheduler, "enable_overlap", True),
        )
        self._check_committed(step)

    def _check_committed(self, step: Sampling) -> None:
        """The committed length equals the length of a decode, which counts this step's token."""
        if step.lens is None:
            return
        live = live_rows(step.requests)
        reqs = [step.requests[i] for i in live]
        want, got = [step.lens[i] for i in live], req_kv.column(reqs, req_kv.COMMITTED)
        if want != got:
            found = check_counts("bookkeeping", req_kv.COMMITTED, want, got)
            self.judge("scheduler.run_batch", step, at_rows(found, live))

    def after_inputs(self, made: Any, *args: Any, **kwargs: Any) -> Any:
        """A token that is no word ends the process in the first layer, so this comes before it."""
        step = self._now
        if step is None or not step.decode or made.input_ids is None or made.input_ids.is_cuda:
            return made
        given = made.input_ids.tolist()
        # A wrong number that is a token is reported when this step's result is processed, because
        # more is known about it then.
        if len(given) == len(step.requests) and any(map(no_token, step.requests, given)):
            last = [self._next.get(r, have) for r, have in zip(step.requests, given, strict=True)]
            rows = Rows(step.rids, live_rows(step.requests))
            found = rows.check(SAMPLED, (h.SAMPLED.of_last_step, last), (h.INPUT, given))
            self.judge("forward_batch.init_new", step, found)
        return made

    def _sample(self, step: Sampling, reading: h.Reading, tokens: Any) -> None:
        step.copies.start(reading.key, tokens)
        if not step.seen and not tokens.is_cuda:
            self._next.update(zip(step.requests, tokens.reshape(-1).tolist(), strict=False))
        step.seen = True

    def before_sample(self, runner: Any, logits: Any, forward_batch: Any, *args: Any) -> None:
        """Read ``forward_batch``, with which the target's forward was launched."""
        step = self._now
        if step is not None and step.decode:
            tensors = {h.INPUT.key: forward_batch.input_ids, h.LENS.key: forward_batch.seq_lens}
            step.copies.start_all({k: t for k, t in tensors.items() if t is not None})

    def after_sampler(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is not None and not step.seen:
            self._sample(step, h.SAMPLED, tokens)
        return tokens

    def after_sample(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._now
        if step is not None:
            # A server may have a sampler of its own.
            self._sample(step, h.FORWARDED if step.seen else h.SAMPLED, tokens)
        return tokens

    def after_forward(self, result: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
        step, tokens = self._now, result.next_token_ids
        if step is not None and step.seen and hasattr(tokens, "is_cuda"):
            step.copies.start(h.FORWARDED.key, tokens)
            if not step.stashes:
                step.copies.close()
        return result

    def before_stash(
        self, future_map: Any, future_indices: Any, payload: Any, *args: Any, **kwargs: Any
    ) -> None:
        step = self._now
        if step is not None and step.seen:
            step.copies.start(h.SAMPLED_STASHED.key, getattr(payload, "bonus_tokens", None))
            step.copies.close()

    def after_run_batch(
        self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step = self._now
        if step is None:
            return result
        step.number = self.context.recorder.step
        if getattr(result, "delay_sample_func", None) is None:
            self._now = None
        self._check_committed(step)
        for key, (ref, _) in list(self._waiting.items()):
            if ref() is None or len(self._waiting) >= MOST:
                del self._waiting[key]
        self._waiting[id(result)] = (weakref.ref(result), step)
        return result

    def before_process(
        self, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> None:
        ref, step = self._waiting.pop(id(result), (None, None))
        self._processing = step if ref is not None and ref() is result else None
        if self._processing is not None:
            self._processing.begin(self._sampled, self._counts)
        else:  # a step that is not followed changes them, too
            for request in batch.reqs or ():
                self._counts.pop(request, None)

    def before_stream_output(self, streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> None:
        step, self._processing = self._processing, None
        if step is None:
            return
        if step.copies.get():  # what never passed by was not looked at, and is not counted
            self.judge("scheduler.stream_output", step, step.check())
        tokens = (step.copies.get() or {}).get(h.SAMPLED.key, [])
        for row in step.live if len(tokens) == len(step.requests) else ():
            request = step.requests[row]
            self._counts[request] = len(request.output_ids)
            if len(request.output_ids) == step.before[row][0] + 1:
                self._sampled[request] = tokens[row]

    def after_process(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self._processing = None
        return result

    def judge(self, site: str, step: Sampling, violation: Violation | None) -> None:
        judged = self._judged
        if judged is None:
            judged = self._judged = self.context.status.tally("sampled tokens")
        judged.count += len(step.requests)
        judged.step = self.context.recorder.step
        if violation is not None:
            self.log.judge(site, None, violation, step.rids, step=step.number)


def no_token(request: Any, token: int) -> bool:
    """True if the vocabulary does not have it."""
    size = getattr(request, "vocab_size", None)
    return token < 0 or (size is not None and token >= size)


def _replaced(request: Any, token: int) -> bool:
    """SGLang itself replaced the token, or cut the output, when the request ended."""
    if request.finished_reason is None:
        return False
    return no_token(request, token) or getattr(request, "session", None) is not None


def unknown(server_args: Any) -> list[str]:
    """Features of this server with which the check was never run, in words."""
    return [why for name, why in UNKNOWN if server_argument(server_args, name)]


def follows(scheduler: Any) -> bool:
    """True if this server samples in a way that is known: alone, or with a known draft."""
    if not targets.counts_with_result():
        return False
    algorithm = getattr(scheduler, "spec_algorithm", None)
    plain = algorithm is None or algorithm.is_none()
    return (plain or speculation.of(scheduler) is not None) and bool(
        getattr(scheduler, "is_generation", True)
    )
