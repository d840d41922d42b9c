"""The likely cause of a wrong hand-over, from what is wrong, by how much, and where it was seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from g4debug.tracers.spec_lifecycle.check import Kind, Violation

if TYPE_CHECKING:
    from g4debug.tracers.spec_lifecycle.hand_over import HandOver

_HISTORY = "; the history of spec_info ends where it went wrong"


def cause(violation: Violation, at: HandOver) -> str:
    """The likely cause, in words."""
    return _CAUSES[violation.kind](violation, at)


def _left(violation: Violation, at: HandOver) -> str:
    left = at.left
    if left is None:
        return (
            "not known: no forward of the worker was seen that left this verify input behind, so "
            "it was put on the batch by something else" + _HISTORY
        )
    if left.live == 0:
        return (
            f"every request of the batch ({left.requests}) finished in the verify of step "
            f"{left.step}; the worker replaces the verify input by a draft input only if a "
            "request goes on, and the batch was not filtered since then, because a waiting request "
            "was prefilled first. SGLang's next line would be an AttributeError in merge_batch"
        )
    return (
        f"the worker's forward of step {left.step} ended with its verify input still on the batch, "
        f"although {left.live} of {left.requests} requests go on: the seed step did not run, or "
        "its draft input was overwritten; which of the two is not known" + _HISTORY
    )


def _dropped(violation: Violation, at: HandOver) -> str:
    then = ". SGLang's next line would be an assertion in draft"
    if at.site.startswith("worker."):
        return (
            "spec_info was lost inside the worker's step, between the last hand-over in the "
            "history and this one" + then
        )
    return (
        "spec_info was lost between two steps. Only SGLang's worker sets it on a running batch, so "
        "a fix, a plugin or an error path replaced it by None; which of them is not known" + then
    )


def _type(violation: Violation, at: HandOver) -> str:
    if violation.got.startswith("another"):
        return (
            "the object is of the right type, but is not the one that the stage before left: it "
            "was copied, built anew, or belongs to another batch; which of them is not known"
            + _HISTORY
        )
    return (
        f"an object of another stage, {violation.got}, is in the place of the one that belongs "
        "here: a stage was left out, or ran twice; which of the two is not known" + _HISTORY
    )


def _shape(violation: Violation, at: HandOver) -> str:
    then = (
        "; filter_batch and merge_batch work by position, so a request would go on from another "
        "one's token"
    )
    if violation.off > 0:
        return (
            f"{violation.what} has {violation.off} rows too many: rows of requests that are gone "
            "were left over, or rows were merged twice; which of the two is not known" + then
        )
    if violation.off < 0:
        return (
            f"{violation.what} lacks {-violation.off} rows: rows were filtered out that belong to "
            "requests that go on, or were not merged; which of the two is not known" + then
        )
    return (
        f"{violation.what} was never set, or was dropped; which of the two is not known" + _HISTORY
    )


def _accepted(violation: Violation, at: HandOver) -> str:
    if violation.off < 0:
        return (
            "the verify counted too few tokens: the bonus token is always accepted, and was left "
            "out, or tokens were taken back"
        )
    if violation.off > 0:
        return (
            "the verify counted too many tokens: more than the target accepted, and never can it "
            "be more draft tokens than there are draft steps"
        )
    return (
        "the verify counted for another number of requests than the batch has: the batch was "
        "filtered or merged between the verify and this place"
    )


def _length(violation: Violation, at: HandOver) -> str:
    then = "; the next allocation, the positions and the page table are built from it"
    if violation.off > 0:
        return f"{violation.what} counts {violation.off} tokens whose KV is not committed" + then
    if violation.off < 0:
        return (
            f"{violation.what} leaves out {-violation.off} tokens whose KV is committed: the next "
            "tokens overwrite it" + then
        )
    return (
        "the lengths are of another number of requests than the batch has: they were filtered or "
        "merged at another time than the batch" + then
    )


def _counted(violation: Violation, at: HandOver) -> str:
    both = (
        "the v1 verify (eagle_info.py) and the v2 result processing "
        "(scheduler_output_processor_mixin.py)"
    )
    must = "; exactly one of them must do so, once in each step"
    if violation.off > 0:
        return f"{violation.what} was advanced more than once: both {both} can advance it{must}"
    if violation.off < 0:
        return (
            f"{violation.what} was advanced too little: neither of {both} counted all accepted "
            f"tokens{must}"
        )
    return f"not known: {violation.what} can be advanced by {both}{must}"


def _stale(violation: Violation, at: HandOver) -> str:
    then = (
        "; the output stays right, because the verify decides on each token, but the accept length "
        "falls"
    )
    if violation.got == "a tensor that was written to since then":
        return "the hidden states were overwritten in place after they were made" + then
    if violation.got == "None":
        return "the hidden states were dropped on the way to the draft" + then
    if violation.got == "those of the step before":
        return (
            "the forward returned the tensor of the step before, so it made none of its own" + then
        )
    return (
        f"another tensor is in the place of {violation.expected}: the draft would go on from "
        "another step's or another batch's; which of the two is not known" + then
    )


_CAUSES: dict[Kind, Callable[[Violation, HandOver], str]] = {
    "verify-input-left": _left,
    "spec-info-dropped": _dropped,
    "wrong-type": _type,
    "wrong-shape": _shape,
    "accept-length": _accepted,
    "seq-len": _length,
    "bookkeeping": _counted,
    "stale-hidden-state": _stale,
}
