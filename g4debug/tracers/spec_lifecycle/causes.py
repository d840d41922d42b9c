"""The likely cause of a wrong hand-over, from the wrong field, its error, and where it was seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from g4debug.hooking import req_kv
from g4debug.tracers.spec_lifecycle.check import CELLS, Violation

if TYPE_CHECKING:
    from g4debug.tracers.spec_lifecycle.hand_over import HandOver

HISTORY = "; the history of spec_info ends where it went wrong"
NOBODY_LEFT_IT = (
    "not known: no forward of the worker was seen that left this verify input behind, so it was "
    "put on the batch by something else" + HISTORY
)


def cause(violation: Violation, at: HandOver) -> str:
    """The likely cause, in words."""
    return _CAUSES[violation.kind](violation, at)


def _left(violation: Violation, at: HandOver) -> str:
    if at.site == "scheduler.run_batch":
        return (
            "the batch has the verify input of its own step: SGLang puts the next draft input "
            "there after it has restored the batch, so that was left out or came first; which of "
            "the two is not known" + HISTORY
        )
    return NOBODY_LEFT_IT


def _dropped(violation: Violation, at: HandOver) -> str:
    then = ". SGLang would go on with a draft for no request"
    if at.site == "scheduler.run_batch":
        return (
            "spec_info was lost when the step ended: SGLang puts the draft input that the worker "
            "made on the batch there" + then
        )
    return lost(at) + then


def lost(at: HandOver) -> str:
    """Where in a step spec_info was lost."""
    if at.site.startswith("worker."):
        return (
            "spec_info was lost inside the worker's step, between the last hand-over in the "
            "history and this one"
        )
    return (
        "spec_info was lost between two steps. Only SGLang's worker sets it on a running batch, so "
        "a fix, a plugin or an error path replaced it by None; which of them is not known"
    )


def _type(violation: Violation, at: HandOver) -> str:
    if violation.got.startswith("another"):
        return (
            "the object is of the right type, but is not the one that the stage before left: it "
            "was copied, built anew, or belongs to another batch; which of them is not known"
            + HISTORY
        )
    return (
        f"an object of another stage, {violation.got}, is in the place of the one that belongs "
        "here: a stage was left out, or ran twice; which of the two is not known" + HISTORY
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
        f"{violation.what} was never set, or was dropped; which of the two is not known" + HISTORY
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


def _between(violation: Violation) -> str:
    """Where a value was changed that was compared at two ends, in words."""
    made, taken = violation.ends
    if violation.rule:
        way = (
            f"{violation.what} at {taken} does not follow from {violation.rule}: it was computed "
            "wrong, or was changed before that"
        )
    else:
        way = f"{violation.what} was changed between {made} and {taken}"
    if violation.whose.startswith("request"):
        way += f"; it is that of {violation.whose}, so if that is no accident, rows were exchanged"
    return way + ". What did so is not known"


def _on_its_way(violation: Violation, at: HandOver) -> str:
    return f"{_between(violation)}; the answer may be wrong from here on"


def _length(violation: Violation, at: HandOver) -> str:
    then = "; the next allocation, the positions and the page table are built from it"
    if violation.ends[1]:
        return _between(violation) + then
    if violation.rule:
        return (
            f"{violation.what} does not agree with {violation.rule}: one of them was computed "
            "wrong, or was changed; which of them is not known" + then
        )
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


_BOOKS = {
    req_kv.ROW: "the request's own number of its row was overwritten since SGLang prepared its "
    "batch: a request gets its row there and loses it with its release. By whom is not known. What "
    "is read, written and freed for it would be another row's",
    req_kv.ALLOCATED: "kv_allocated_len was overwritten since SGLang prepared the request's batch, "
    "which alone makes it longer, and a release ends it. By whom is not known. The release would "
    "free by it what lies behind the request's end, or leave the rest",
    req_kv.COMMITTED: "kv_committed_len was overwritten since SGLang counted the request's tokens "
    "last, when it prepared its batch or processed its last result. By whom is not known. The next "
    "allocation begins there, and the release gives the prefix cache as many tokens",
    req_kv.EVICTED: "swa_evicted_seqlen, up to which a request has given back its SWA pages, was "
    "overwritten: SGLang begins with 0 and never goes below it. By whom is not known. The prefix "
    "cache is given it next; where that is written in Rust, the server ends with an OverflowError",
}


def _counted(violation: Violation, at: HandOver) -> str:
    if violation.what == req_kv.ROW and violation.whose:
        return (
            "the list of free rows had a row that a request still has: it was given back too "
            "early, or the list was overwritten; which of the two is not known. Each of the two "
            "requests reads and overwrites what the other one wrote into that row"
        )
    if violation.what in _BOOKS and violation.ends[0]:
        return _BOOKS[violation.what]
    where = "the processing of the verify's result (_resolve_spec_v2_tokens)"
    if at.site == "scheduler.run_batch":
        where = "the allocation for a decode (alloc_for_decode), which counts one token"
    elif at.site != "result.resolve":
        where = "putting the tokens out (process_batch_result_decode)"
    must = "; exactly one place must count, once for each result"
    if violation.off > 0:
        return (
            f"{violation.what} was counted again, by {where} or since the result before it, or was "
            f"replaced; which of them is not known{must}"
        )
    if violation.off < 0:
        return (
            f"{violation.what} counts too little, or was set back, by {where}, or was replaced; "
            f"which of them is not known{must}"
        )
    return f"not known: {violation.what} is counted by {where}{must}"


def _row(violation: Violation, at: HandOver) -> str:
    then = "; the next step would go on with another request's length, token or hidden state"
    if violation.what == "not stashed":
        return (
            "the step ended without a stash: the scheduler did not relay what the worker made, so "
            "the next step would gather what an earlier one left there"
        )
    if violation.what == "owner":
        return "one row of req_to_token was given to two requests that both live" + then
    if violation.what in ("published", "stashed"):
        return (
            f"the rows by which the worker's step was {violation.what} are not those of its batch: "
            "the indices were replaced between its start and this place" + then
        )
    if violation.what == "future_indices":
        return (
            "future_indices and the requests were filtered, merged or put in order at different "
            "times, or future_indices was replaced; which of them is not known" + then
        )
    if violation.got == "never written":
        return f"nothing wrote the {violation.what} of this request: its last step left that out"
    return (
        "the row was written for another request in between: its owner gave it back too early, or "
        "kept running without it; which of the two is not known" + then
    )


def _given_row(violation: Violation, at: HandOver) -> str:
    then = "; the forward reads and writes the KV of the row that it is given"
    if violation.off:
        return (
            "the index was overwritten, or was never set; which of the two is not known. Whoever "
            "looks it up reads other memory: an IndexError, a device-side assert or SIGSEGV"
        )
    if violation.whose:
        return (
            f"req_pool_indices has the row of {violation.whose} there: rows were exchanged, or "
            "were filtered, merged or put in order at another time than the requests; which of "
            "them is not known" + then
        )
    return (
        "not known: no request of the batch has that row. It may be one that was given back" + then
    )


def _given_place(violation: Violation, at: HandOver) -> str:
    if violation.what == CELLS:
        return (
            "the row of req_to_token was overwritten, or was given a slot that its allocator does "
            "not have; which of the two is not known. SGLang looks up its SWA slot, or reads "
            "there: an IndexError, a device-side assert or an illegal memory access"
        )
    return (
        "out_cache_loc was overwritten since its allocation, or was allocated wrongly; which of "
        "the two is not known. SGLang looks up its SWA slot, or writes there: an IndexError, a "
        "device-side assert or an illegal memory access"
    )


def _published(violation: Violation, at: HandOver) -> str:
    then = "; the next step's positions, page table and verify are built from these lengths"
    if violation.what == "early":
        return (
            "the worker called on_publish before its verify had counted what it accepts, so the "
            "lengths are those of the step before" + then
        )
    if violation.what == "twice":
        return (
            "both the worker and somebody else published, or the worker did so twice; which of the "
            "two is not known. What comes last counts" + then
        )
    if violation.what == "never":
        return (
            "the worker was given on_publish and did not call it: the next step would wait for the "
            "event of the step before, and read its lengths" + then
        )
    return (
        "the tensor that was published is not the one that the verify made: it was copied, or is "
        "that of another step; which of the two is not known" + then
    )


def _bonus(violation: Violation, at: HandOver) -> str:
    then = "; the verify begins with this token, so the answer is wrong from here on"
    if violation.ends[1]:
        return _between(violation) + then
    if violation.got.startswith("the last token of"):
        return (
            f"the token is {violation.got}: if that is no accident, their rows were exchanged on "
            "the way through the FutureMap, or requests and rows are not in the same order" + then
        )
    if violation.got == "an earlier token of the request":
        return (
            "the request had this token before: if that is no accident, that of its last step was "
            "not stashed, or was stashed after it was gathered; which of the two is not known"
            + then
        )
    return "not known: no request of the batch was given this token last" + HISTORY + then


def _room(violation: Violation, at: HandOver) -> str:
    then = "; the verify writes KV where the request owns no page"
    if at.site == "batch.prepare_for_decode":
        return (
            "the allocation for this step was left out, or kv_allocated_len was set back after it; "
            "which of the two is not known" + then
        )
    return (
        "the request's length on the device went further than was allocated ahead: the length is "
        "too long, or its allocation was given back since; which of the two is not known" + then
    )


def _stale(violation: Violation, at: HandOver) -> str:
    then = (
        "; if nothing but the hidden states is wrong, the output stays right, because the verify "
        "decides on each token, and only the accept length falls"
    )
    if violation.ends[1]:
        return _between(violation) + then
    if violation.whose:
        return (
            "the rows of the hidden states were exchanged: "
            f"row {violation.row} has that of {violation.whose}" + then
        )
    if violation.got.startswith("a tensor that was written to since then"):
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


def _embedding(violation: Violation, at: HandOver) -> str:
    then = (
        "; the draft looks whole token ids up in it, and one that is beyond its end is an "
        "IndexError on a CPU and a device-side assert on a GPU, in the draft's first forward or "
        "while its CUDA graphs are captured"
    )
    if "of the target's" not in violation.got:
        return "not known: the table is no part of the target's" + then
    if "(rows 0 to " not in violation.got:
        then += (
            ". An id that is in it gets the embedding of another token on this rank, so the rank "
            "drafts other tokens than rank 0"
        )
    return (
        "the target gave the draft the rows of one tensor-parallel rank, as it does for an EAGLE3 "
        "draft, whose embedding knows which rows it has" + then
    )


def _shown_pool(violation: Violation, at: HandOver) -> str:
    then = (
        "; the draft asks for the target's layers: where the pool has no such number it is an "
        "IndexError, and where it has one the draft reads the wrong KV, and only the accept length "
        "falls"
    )
    if violation.got.startswith("its own"):
        return (
            "HybridAttnBackend was given the target's pool and did not hand it on to the backend "
            "inside it that computes (layers/attention/hybrid_attn_backend.py)" + then
        )
    return "not known: that pool is neither the target's nor the draft's" + then


def _places(violation: Violation, at: HandOver) -> str:
    then = (
        ". SGLang's next line that copies them by the number of tokens is a RuntimeError about "
        "shapes"
    )
    if violation.expected.endswith("has set it"):
        return (
            "not known: in this release FrozenKVMTPDraftWorker.draft sets out_cache_loc to None "
            "before its forward, so a plugin or a changed worker put places there after that" + then
        )
    return (
        "the batch still has the places to which its prefill, or another earlier forward, wrote: "
        "FrozenKVMTPDraftWorker.draft (speculative/frozen_kv_mtp_worker_v2.py) has to set them to "
        "None before its forward, and in this release it does not" + then
    )


_CAUSES: dict[str, Callable[[Violation, HandOver], str]] = {
    "verify-input-left": _left,
    "spec-info-dropped": _dropped,
    "wrong-type": _type,
    "wrong-shape": _shape,
    "accept-length": _accepted,
    "seq-len": _length,
    "bookkeeping": _counted,
    "stale-hidden-state": _stale,
    "future-row": _row,
    "publish-order": _published,
    "bonus-token": _bonus,
    "verify-input": _on_its_way,
    "verify-result": _on_its_way,
    "sampled-token": _on_its_way,
    "forward-row": _given_row,
    "forward-place": _given_place,
    "position": _on_its_way,
    "allocated-len": _room,
    "draft-embedding": _embedding,
    "draft-pool": _shown_pool,
    "draft-places": _places,
}
