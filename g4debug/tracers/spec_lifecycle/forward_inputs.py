"""Checks what a forward is given: each request's row of ``req_to_token``, length and positions.

All of these follow from numbers that SGLang has on the host, on every server. A row that the table
does not have ends the process with SIGSEGV where it is read, and a place for KV that the pool does
not have ends it with an IndexError where its SWA slot is looked up. So both are looked at before
anybody uses them: when a step reads the FutureMap, and right before and after each ``ForwardBatch``
is made. On a CPU the values are there at once. On a GPU they are brought to the host as the forward
is launched, and are compared before its tokens leave; a row that does not exist has done its harm
by then.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from g4debug.hooking import req_kv, targets
from g4debug.hooking.arguments import of_init_new
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.check import (
    Violation,
    at_rows,
    check_batch_rows,
    check_cells,
    check_counts,
    check_positions,
    check_slots,
    check_tokens,
)
from g4debug.tracers.spec_lifecycle.copies import MOST, Copies, Pool
from g4debug.tracers.spec_lifecycle.future_rows import live_rows
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.tracers.spec_lifecycle.request_books import RequestBooks

SITE = "forward_batch.init_new"
# The rules from which positions follow.
PREFILL = "the end of the prefix and the place in the prompt"
DECODE = "the host's length, which counts the token that is computed"
ROWS, LENS, POSITIONS = "req_pool_indices", "seq_lens", "positions"
PLACES = "out_cache_loc"
TOKENS = "input_ids"
BOOKS = "the host's lists of prefixes and new tokens"
ON_HOST = "seq_lens_cpu"
BEGINS, COUNTS, STARTS = "extend_prefix_lens", "extend_seq_lens", "extend_start_loc"
# Requests of which a forward may be given something else than tokens.
OTHER_INPUTS = ("multimodal_inputs", "input_embeds", "positional_embed_overrides")


@dataclass
class Forward:
    """One forward, and what it must be given.

    rows: of ``req_to_token``, which has ``size`` of them; -1 of a request that does not go on.
    slots: of the pool in which the KV of new tokens is written, where they are looked up in another
    one. lens: how long each sequence is, None if the host does not know that yet. spans: the first
    position of each request and how many follow. rule: how these are computed, in words. tokens:
    those that a prefill computes of each request, None where that is not known. committed: how long
    each sequence is by ``kv_committed_len``, None if it cannot be told from that.
    """

    step: int
    rids: list[str]
    live: list[int]
    rows: list[int]
    size: int
    slots: int
    copies: Copies
    lens: list[int] | None = None
    spans: list[tuple[int, int]] | None = None
    rule: str = ""
    tokens: list[Sequence[int] | None] | None = None
    committed: list[int] | None = None

    def check(self, values: Mapping[str, Sequence[int]]) -> Violation | None:
        found = None
        if ROWS in values:
            found = check_batch_rows(self.rids, self.rows, values[ROWS], self.size)
        if found is None and PLACES in values:
            found = check_slots(values[PLACES], self.slots, len(self.rows))
        if found is None and self.lens is not None:
            found = self._check_lens(self.lens, values)
        if found is None and self.rule == PREFILL:
            found = self._check_prefill(values)
        if found is None and POSITIONS in values and self.spans is not None:
            found = check_positions(self.spans, values[POSITIONS], self.live, self.rule)
        if found is None and TOKENS in values and self.tokens is not None:
            counts = [count for _, count in self.spans or ()]
            found = check_tokens(self.tokens, values[TOKENS], self.live, counts)
        return found

    def _check_lens(
        self, lens: Sequence[int], values: Mapping[str, Sequence[int]]
    ) -> Violation | None:
        """The device has the same lengths as the host. If not, a third one tells which is wrong."""
        found = self._check_numbers(LENS, lens, values)
        if found is None or self.rule == PREFILL:
            return found if found is None else replace(found, rule=BOOKS)
        if self.committed is None or found.row < 0 or lens[found.row] == self.committed[found.row]:
            return found
        if values[LENS][found.row] != self.committed[found.row]:
            return replace(found, rule=ON_HOST)
        return self._check_numbers(ON_HOST, self.committed, {ON_HOST: lens})

    def _check_numbers(
        self, name: str, want: Sequence[int], values: Mapping[str, Sequence[int]]
    ) -> Violation | None:
        """A list with one number for each request, of those that go on."""
        got, pick = values.get(name), self.live
        if got is None or len(got) != len(want):
            return None
        mine = [want[i] for i in pick], [got[i] for i in pick]
        return at_rows(check_counts("seq-len", name, *mine), pick)

    def _check_prefill(self, values: Mapping[str, Sequence[int]]) -> Violation | None:
        """The device has the same prefixes and numbers of new tokens as the host."""
        begins, counts = zip(*self.spans, strict=True) if self.spans else ((), ())
        starts = list(accumulate(counts, initial=0))[:-1]
        for name, want in ((BEGINS, begins), (COUNTS, counts), (STARTS, starts)):
            found = self._check_numbers(name, want, values)
            if found is not None:
                return replace(found, ends=("the host's list of it", "the target's forward"))
        return None


class ForwardInputs:
    """Looks at each forward of a step of the scheduler, the target's and the draft's."""

    def __init__(self, context: Context, log: SpecLog) -> None:
        self.context = context
        self.log = log
        self.judging = targets.counts_with_result()  # it was not run on releases before
        self.pool = Pool()
        self.books = RequestBooks(context, log, lambda: self.judging)
        self._batch: Any = None  # of the step that runs
        self._late: deque[Forward] = deque(maxlen=MOST)  # on their way to the host

    def install(self) -> None:
        before, after = self.context.before, self.context.after
        before("scheduler.run_batch", self.before_run_batch)
        after("scheduler.run_batch", self.after_run_batch)
        before("future.inputs", self.before_inputs)
        before("future.resolve_lens", self.before_resolve_lens)
        before(SITE, self.before_forward)
        after(SITE, self.after_forward)
        before("scheduler.process_result", self.before_process)
        self.books.install()

    def limit(self, reasons: Sequence[str], documented: bool = False) -> None:
        """This server uses features with which the check was never run.

        documented: as of :meth:`Part.limit`.
        """
        for why in reasons:
            self.judging = False
            self.context.limit(
                "the rows, lengths and positions that a forward is given are not checked",
                why,
                documented=documented,
            )

    def before_run_batch(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        beams = any(getattr(r, "beam_group", None) for r in batch.reqs or ())
        self._batch = batch if self.judging and batch.reqs and not beams else None
        self._judge_books("scheduler.run_batch")

    def after_run_batch(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch = None
        return result

    def _judge_books(self, site: str) -> None:
        """The requests' own numbers, before anything is compared with them."""
        if self._batch is not None:
            self.books.judge(site, self._batch.reqs)

    def before_resolve_lens(self, future_map: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._judge_rows("future.resolve_lens", batch)

    def before_inputs(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self._judge_rows("future.inputs", batch)

    def before_forward(self, *args: Any, **kwargs: Any) -> None:
        batch, _ = of_init_new(args, kwargs)
        self._judge_books(SITE)
        if self._batch is not None:
            self._judge_now(SITE, {ROWS: batch.req_pool_indices, PLACES: batch.out_cache_loc})

    def after_forward(self, made: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self._batch
        if batch is None:
            return made
        self._judge_books(SITE)
        given, runner = of_init_new(args, kwargs)
        forward = self._forward(batch)
        read = {ROWS: made.req_pool_indices, LENS: made.seq_lens, PLACES: made.out_cache_loc}
        if not getattr(runner, "is_draft_worker", False):
            read[POSITIONS] = made.positions
            _expect(forward, made, batch)
            if forward.rule == PREFILL:
                read[TOKENS] = made.input_ids
                read |= {name: getattr(made, name, None) for name in (BEGINS, COUNTS, STARTS)}
        if forward.lens is None and not given.seq_lens.is_cuda:
            forward.lens = given.seq_lens.tolist()
        self._judge_cells(forward, batch)
        forward.copies.start_all({key: t for key, t in read.items() if t is not None})
        forward.copies.close()
        if not self._judge(SITE, forward):
            self._late.append(forward)
        return made

    def before_process(self, *args: Any, **kwargs: Any) -> None:
        """SGLang processes a result, so it has waited for that step: judge what has arrived."""
        while self._late and self._judge(SITE, self._late[0]):
            self._late.popleft()

    def _forward(self, batch: Any) -> Forward:
        live, rows = live_rows(batch.reqs), [-1] * len(batch.reqs)
        known = req_kv.column(batch.reqs, req_kv.ROW)
        for i in live:
            rows[i] = self.books.row(batch.reqs[i], known[i])
        table = getattr(batch.req_to_token_pool, "req_to_token", None)
        allocator = getattr(batch, "token_to_kv_pool_allocator", None)
        mapping = getattr(allocator, "full_to_swa_index_mapping", None)
        return Forward(
            step=self.context.recorder.step,
            rids=[str(r.rid) for r in batch.reqs],
            live=live,
            rows=rows,
            size=sys.maxsize if table is None else int(table.shape[0]),
            slots=sys.maxsize if mapping is None else len(mapping),
            copies=Copies(self.pool),
        )

    def _judge_rows(self, site: str, batch: Any) -> None:
        if batch is self._batch:
            self._judge_books(site)
            self._judge_now(site, {ROWS: batch.req_pool_indices})

    def _judge_now(self, site: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Before they are used, where reading them waits for nobody."""
        read = {key: t for key, t in tensors.items() if t is not None and not t.is_cuda}
        if read:
            forward = self._forward(self._batch)
            forward.copies.start_all(read)
            self._judge(site, forward)

    def _judge_cells(self, forward: Forward, batch: Any) -> None:
        """Where the rows are on the host, before SGLang looks up the SWA slots of their tokens."""
        table = getattr(batch.req_to_token_pool, "req_to_token", None)
        if table is not None and not table.is_cuda and forward.lens is not None:
            found = check_cells(table, forward.rows, forward.lens, forward.slots)
            self.log.judge(SITE, None, found, forward.rids, step=forward.step)

    def _judge(self, site: str, forward: Forward) -> bool:
        """False if the values are not here yet."""
        values = forward.copies.get()
        if values is None:
            return False
        self.log.judge(site, None, forward.check(values), forward.rids, step=forward.step)
        return True


def _expect(forward: Forward, made: Any, batch: Any) -> None:
    """Note the numbers that the target must be given, if this kind of forward is known."""
    if getattr(made, "encoder_lens", None) is not None:
        return  # a sequence has another length there than in the KV pool
    mode = made.forward_mode.name
    if mode == "EXTEND":
        begins, counts = made.extend_prefix_lens_cpu, made.extend_seq_lens_cpu
        if begins is not None and counts is not None:
            forward.spans = list(zip(begins, counts, strict=True))
            forward.lens = [begin + count for begin, count in forward.spans]
            forward.rule = PREFILL
            if len(forward.spans) == len(batch.reqs):
                forward.tokens = list(map(_tokens, batch.reqs, forward.spans))
    elif mode == "DECODE" and batch.spec_algorithm.is_none():
        lens = batch.seq_lens_cpu  # another check compares kv_committed_len with these
        forward.committed = req_kv.column(batch.reqs, req_kv.COMMITTED)
        known = forward.committed if lens is None else lens.tolist()
        forward.lens, forward.spans = known, [(n - 1, 1) for n in known]
        forward.rule = DECODE


def _tokens(request: Any, span: tuple[int, int]) -> Sequence[int] | None:
    """The tokens of a request that a prefill computes; None if it may be given something else."""
    if any(getattr(request, name, None) is not None for name in OTHER_INPUTS):
        return None
    # Not of its fill_ids, from which SGLang makes the batch: that list may be wrong itself.
    begin, end, prompt = span[0], sum(span), request.origin_input_ids
    count = len(prompt)
    found: list[int] = [
        *prompt[begin:end],
        *request.output_ids[max(0, begin - count) : max(0, end - count)],
    ]
    return found
