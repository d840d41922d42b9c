"""Says why a request makes no progress: the check, who holds what it lacks, and who could free it.

It is asked only for a finding, and for ``doctor --pid`` about requests that have waited for
seconds. Nothing of it changes the scheduler.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from g4debug.fixes import parked_chunk
from g4debug.fixes.base import state_of
from g4debug.hooking.resolved import server_argument
from g4debug.tracers.flight_recorder import admission, preallocation, shares
from g4debug.tracers.flight_recorder.admission import Refusal
from g4debug.tracers.flight_recorder.work import Place, Work, frees_without_steps, name

logger = logging.getLogger("g4debug")
PARKED = (
    "as sglang #36458: SGLang frees what is behind the window only after it has admitted the "
    "next chunk"
)
OWN_PREFIX = (
    "as sglang #32379: SGLang locks the cached prefix of the request, and then lacks it for the "
    "rest of the same request"
)


@dataclass(frozen=True)
class Reason:
    """words: the check, one line. holders: who holds what it lacks, each in words. verdict: whether
    a step could free it, '' if that is not known. like: a known bug that looks the same. fix: the
    id of the fix for that, '' if there is none. never: the whole pool is too small, and no fix
    that is in force will admit it all the same.
    """

    words: str
    holders: tuple[str, ...] = ()
    verdict: str = ""
    like: str = ""
    fix: str = ""
    deadlock: bool = False
    never: bool = False

    @property
    def line(self) -> str:
        return "; ".join((self.words, *self.holders))


def of(scheduler: Any, item: Work, items: list[Work], steps: bool) -> Reason:
    """items: all work of the scheduler. steps: whether it makes steps."""
    try:
        return _of(scheduler, item, items, steps)
    except Exception as e:  # a release or feature that it was not run with
        logger.debug("g4debug: a reason could not be read", exc_info=e)
        return Reason(f"not known: SGLang's figures cannot be read ({type(e).__name__}: {e})"[:200])


def _of(scheduler: Any, item: Work, items: list[Work], steps: bool) -> Reason:
    if item.place is Place.QUEUE:
        before = admission.position(scheduler, item.request)
        if before:
            first = scheduler.waiting_queue[0]
            lora = getattr(scheduler, "enable_lora", False)
            passes = " (but passes over one whose LoRA adapter has no place)" if lora else ""
            return Reason(
                f"it is number {before + 1} of the queue, as the policy "
                f"{scheduler.schedule_policy} sorts it, and SGLang stops at the first that does "
                f"not fit{passes}. The first is {name(first)}: "
                + admission.refusal(scheduler, Work(first, item.place)).words
            )
    if item.place is Place.ROOM:
        refused = preallocation.refusal(scheduler, item.request)
    else:
        refused = admission.refusal(scheduler, item)
    runs = [w for w in items if w.place is Place.RUNS and w.request is not item.request]
    if refused.pool not in admission.NAMES:
        verdict = ""
        if runs and steps and refused.pool == admission.ROWS:
            verdict = "Each of the running requests gives its row back when it ends."
        return Reason(refused.words, verdict=verdict)
    held = shares.shares(scheduler, refused.pool, items)
    mine = next((s for s in held.requests if s.work.request is item.request), None)
    like = fix = ""
    if refused.pool == admission.SWA:
        behind = 0 if mine is None else mine.behind + mine.lock_behind
        if item.place is Place.CHUNK and mine is not None and behind >= refused.lacks:
            like = PARKED
            if mine.behind >= refused.lacks or parked_chunk.lock_shrinks(scheduler.tree_cache):
                fix = "parked-chunk" if _is_alone(scheduler) else ""
        elif refused.by_lock:
            like, fix = OWN_PREFIX, _where_it_acts("idle-admission", scheduler)
        elif refused.never and item.place is Place.QUEUE:
            fix = _where_it_acts("idle-admission", scheduler)  # it asks for a shorter chunk
    elif refused.by_page:
        fix = _where_it_acts("ignore-eos-admission", scheduler)
    # A step may free some also where no request decodes: that of a prompt that goes on.
    stands = not (steps or runs or _others(scheduler, items))
    back = held.may_give_back(refused.lacks)
    admits = refused.never and not stands and fix and state_of(fix) == "applied"
    never = refused.never and not admits
    deadlock = never or (stands and not back)
    if admits:
        verdict = (
            f"The {admission.NAMES[refused.pool]} never has so much. The fix {fix} admits the "
            "request all the same, once nothing else runs."
        )
    else:
        verdict = _verdict(refused, deadlock, bool(runs) and steps, back if stands else "")
    return Reason(
        refused.words, tuple(held.words(item.request)), verdict, like, fix, deadlock, never
    )


def _where_it_acts(fix: str, scheduler: Any) -> str:
    """The id of the fix, '' on a server where it leaves everything as it is."""
    delayed = getattr(scheduler, "prefill_delayer", None) is not None
    stands_aside = not _is_alone(scheduler) or delayed or frees_without_steps(scheduler)
    return "" if stands_aside else fix


def _is_alone(scheduler: Any) -> bool:
    """False with disaggregation and with pipeline ranks, where no fix for admissions acts."""
    args = getattr(scheduler, "server_args", None)
    disaggregated = server_argument(args, "disaggregation_mode", "null") != "null"
    return not disaggregated and int(server_argument(args, "pp_size", 1)) == 1


def _others(scheduler: Any, items: list[Work]) -> bool:
    """True if memory may become free without a step: by a transfer, or a copy to the host."""
    return any(w.place is Place.PEER for w in items) or frees_without_steps(scheduler)


def _verdict(refused: Refusal, deadlock: bool, runs: bool, back: str) -> str:
    """runs: requests run that may free it. back: who else may give it back."""
    name = admission.NAMES[refused.pool]
    lacks = f"It lacks {refused.lacks} token{'s' * (refused.lacks != 1)} of the {name}"
    if refused.never:
        return (
            f"A deadlock. No step can free enough: the {name} has {refused.most} tokens in all, "
            f"and at least {refused.at_least} would have to be available."
        )
    if deadlock:
        those = "those that hold it wait themselves"
        if refused.by_lock:
            those = "what it lacks is its own cached prefix"
        return (
            f"A deadlock. {lacks}, no request runs that could give any back, and {those}. No step "
            "of the scheduler frees it; an abort of the request may."
        )
    if back:
        return f"{lacks}, and no request runs that could give any back. {back}"
    return f"{lacks}; requests run that may free it." if runs else ""
