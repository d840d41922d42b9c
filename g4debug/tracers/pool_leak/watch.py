"""What ``SGLANG_TRTLLM_MHA_DEBUG=watch`` arms of pool-leak: SGLang's own counts, when it is idle.

Each pool says how many of its tokens are free, and the prefix cache how many it may evict and how
many are locked. On an idle server these add up to the pool, nothing is locked, and every row of
``req_to_token`` is free. So this asks for six numbers after the server became idle, reads no page
and waits for no device. It does not know which pages are wrong, nor whose they were: the tape
does, if ``g4debug replay`` runs it again with every tracer.

SGLang compares the same numbers in ``on_idle``, and its default is to end the server there. Here
they are compared before, so that the finding and its dump come first; and also where SGLang was
told only to warn (``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0``).

A difference is reported when two looks in a row have the same one, or when SGLang's own check
fails behind the first. Where the numbers do not add up on a server that has not run any step, they
mean something else there, and nothing is judged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import pool_sizes
from g4debug.hooking import prefix_tree
from g4debug.hooking.resolved import server_argument
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.pool_leak.servers import has_sessions, is_counted, unusable

WHY = (
    "SGLANG_TRTLLM_MHA_DEBUG=watch compares SGLang's own counts and keeps no books, so it does not "
    "know which pages are lost or whose they were, and it counts nothing while the server is busy; "
    "=1 does"
)
ROWS = "rows"


class Count(NamedTuple):
    """Of one pool, in tokens; or of the rows, with ``evictable`` and ``locked`` 0."""

    name: str
    total: int
    free: int
    evictable: int
    locked: int

    @property
    def missing(self) -> int:
        """How many are neither free nor cached; below 0, how many are so more than once."""
        return self.total - self.free - self.evictable - self.locked

    @property
    def sound(self) -> bool:
        return not self.missing and not self.locked


class IdleCounts:
    """Compares the counts once after each time the server became idle."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._done = -1  # the step behind which the counts were judged
        self._doubted: tuple[int, tuple[Count, ...]] = (-1, ())  # seen once, and in which step
        self._told: set[tuple[str, str]] = set()  # (kind, pool or rows)
        self._usable: bool | None = None

    def install(self) -> None:
        self.context.after("scheduler.init", self.after_scheduler_init)
        self.context.before("scheduler.on_idle", self.before_idle)
        self.context.on_exception("scheduler.on_idle", self.at_idle_error)
        self.context.status.limit("counts at idle only", WHY, quiet=True)
        # A server may be busy for as long as it lives.
        self.context.status.rests = lambda mode: "it counts only when the server is idle"

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_usable(scheduler)  # it says so at start, and not at its first count
        return result

    def before_idle(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        step = self.context.recorder.step
        if step == self._done or not scheduler.is_fully_idle():
            return
        if not self._is_usable(scheduler) or self.context.status.is_off:
            self._done = step
            return
        if has_sessions(scheduler.tree_cache):
            self._done = step  # a session holds pages and rows between its turns
            return
        found = counts(scheduler)
        wrong = tuple(count for count in found if not count.sound)
        if not wrong:
            self._done = step
            self.context.checked(len(found), "counts")
        elif step == 0:
            self.context.off(
                "SGLang's counts do not add up before the first step, so they mean something else "
                f"on this server: {'; '.join(map(_words, wrong))}"
            )
        elif self._doubted == (step, wrong):
            self._judge(wrong, len(found))
        else:
            self._doubted = step, wrong

    def at_idle_error(self) -> None:
        """SGLang's own check of the idle server failed: it says the same."""
        step, wrong = self._doubted
        if wrong and step == self.context.recorder.step != self._done:
            self._judge(wrong, len(wrong))

    def _judge(self, wrong: tuple[Count, ...], counted: int) -> None:
        self._done = self.context.recorder.step
        self.context.checked(counted, "counts")
        for count in wrong:
            kind = kind_of(count)
            if (kind, count.name) not in self._told:
                self._told.add((kind, count.name))
                self.context.trap.report(finding(kind, count, self._done))

    def _is_usable(self, scheduler: Any) -> bool:
        if self._usable is None:
            why = unusable(scheduler)
            mode = server_argument(scheduler.server_args, "disaggregation_mode", "null")
            if not why and mode != "null":
                why = "prefill and decode are disaggregated, and the counts were never read so"
            self._usable = is_counted(self.context, scheduler, why)
        return self._usable


def counts(scheduler: Any) -> tuple[Count, ...]:
    """What SGLang says of each pool, and of the rows of ``req_to_token``. Waits for no device."""
    tree, page = prefix_tree.innermost(scheduler.tree_cache), int(scheduler.page_size)
    pools = pool_sizes(scheduler)
    found = []
    for name, tokens, free in pools:
        sizes = prefix_tree.sizes(tree, name, len(pools) > 1) or prefix_tree.Sizes(0, 0)
        found.append(Count(name, tokens // page * page, free, *sizes))
    rows = scheduler.req_to_token_pool
    return (*found, Count(ROWS, int(rows.size), len(rows.free_slots), 0, 0))


def kind_of(count: Count) -> str:
    """The kind of pool-leak's finding that a wrong count is."""
    if count.name == ROWS:
        return "row" if count.missing > 0 else "row-repeated"
    if count.missing:
        return "leaked" if count.missing > 0 else "double"
    return "locked"


def finding(kind: str, count: Count, step: int) -> Finding:
    """The finding about a count that does not add up."""
    if count.name == ROWS:
        what = f"{abs(count.missing)} of {count.total} rows of req_to_token are "
        what += "neither free nor held by a request" if kind == "row" else "free more than once"
        expected = "all rows are free when the server is idle"
    elif kind == "locked":
        what = f"the prefix cache has {count.locked} tokens locked in the {count.name} pool, and "
        what += "no request runs"
        expected = "nothing is locked when the server is idle"
    else:
        what = f"{abs(count.missing)} tokens of the {count.name} pool are "
        what += "neither free nor cached" if kind == "leaked" else "counted as free or cached twice"
        expected = f"free and cached tokens add up to the {count.total} of the pool"
    return KINDS["pool-leak"][kind].finding(
        site="scheduler.on_idle",
        headline=f"g4debug: pool-leak at idle: {what}",
        location=Location(process="scheduler", step=step),
        expected=expected,
        got=_words(count),
        cause="not known: watch compares SGLang's own counts and has no books. g4debug replay of "
        "this dump runs its tape again with every tracer, which names pages and owners; or start "
        "the server with SGLANG_TRTLLM_MHA_DEBUG=1",
    )


def _words(count: Count) -> str:
    if count.name == ROWS:
        return f"{count.free} of {count.total} rows are free"
    return (
        f"of {count.total} tokens of the {count.name} pool {count.free} are free, "
        f"{count.evictable} can be evicted and {count.locked} are locked"
    )


WATCH = Tracer(
    id="pool-leak",
    title="SGLang's own counts of its pools and rows add up when the server is idle",
    install=lambda context: IdleCounts(context).install(),
    judges=True,
)
