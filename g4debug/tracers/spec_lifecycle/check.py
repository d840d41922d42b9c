"""The rules for the hand-overs of speculative decoding, as checks of plain values.

``batch.spec_info`` goes through these states: nothing, draft input, verify input, draft-extend
input, and draft input again. A verify accepts for each request at least the bonus token, and at
most one token more than there are draft steps. Everything that counts tokens must go forward by
exactly that many, once.

With v2, and overlap scheduling, a step hands over to the next one through SGLang's FutureMap, which
has one row for each row of ``req_to_token``: a step publishes the new lengths there after its
verify, and stashes the bonus tokens and hidden states. The next step reads them before the host
knows which tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, eq, ge
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CELLS = "req_to_token"

IDLE, DRAFT, VERIFY, EXTEND = "idle", "draft-input", "verify-input", "draft-extend-input"


@dataclass(frozen=True)
class Violation:
    """A broken rule.

    row: the position in the batch, -1 if the whole batch is concerned. what: the name of the wrong
    field, '' if no single field is wrong. off: how much too high its number is (below 0: too low),
    0 if it is no number, or if the error is not known. column: which of the row's numbers is wrong,
    -1 if the row has only one.

    ends: the two places between which the value changed, in words. If it has no first place,
    ``rule`` names the values from which it must follow. whose: the request or column to which the
    value that was found belongs, in words.
    """

    kind: str
    expected: str
    got: str
    row: int = -1
    what: str = ""
    off: int = 0
    column: int = -1
    ends: tuple[str, str] = ("", "")
    rule: str = ""
    whose: str = ""


def check_state(state: str, type_name: str, allowed: Sequence[str]) -> Violation | None:
    """A ``spec_info`` must be in one of the ``allowed`` states. ``type_name``: its type."""
    if state in allowed:
        return None
    kinds: dict[str, str] = {IDLE: "spec-info-dropped", VERIFY: "verify-input-left"}
    kind = kinds.get(state, "wrong-type")
    if kind == "verify-input-left" and DRAFT not in allowed:
        kind = "wrong-type"
    got = "None" if state == IDLE else f"{state} ({type_name})"
    return Violation(kind, " or ".join(allowed), got, what="spec_info")


def check_rows(rows: Mapping[str, int], wanted: Mapping[str, int]) -> Violation | None:
    """Each field must have as many rows as wanted. -1 stands for a field that is None."""
    for name, want in wanted.items():
        have = rows.get(name, want)
        if have != want:
            got = f"{name} has {have} rows" if have >= 0 else f"{name} is None"
            off = have - want if have >= 0 else 0
            return Violation("wrong-shape", f"{want} rows", got, what=name, off=off)
    return None


def check_accepted(correct: Sequence[int], requests: int, steps: int) -> Violation | None:
    """Each request must have 0..``steps`` accepted drafts; the bonus token is not among them."""
    if len(correct) != requests:
        got = f"accept lengths of {len(correct)} requests"
        return Violation("accept-length", f"accept lengths of {requests} requests", got)
    if correct and (min(correct) < 0 or max(correct) > steps):
        row = next(i for i, n in enumerate(correct) if not 0 <= n <= steps)
        return Violation(
            "accept-length",
            f"an accept length of 1..{steps + 1}",
            f"accept length {correct[row] + 1}",
            row,
            "num_correct_drafts",
            correct[row] - (steps if correct[row] > steps else 0),
        )
    return None


def check_counts(
    kind: str, what: str, expected: Sequence[int], got: Sequence[int]
) -> Violation | None:
    """Two lists with one number for each request must be equal."""
    if expected == got or list(expected) == list(got):
        return None
    if len(expected) != len(got):
        return _other_number(kind, what, what, expected, got)
    row = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    off = got[row] - expected[row]
    return Violation(
        kind, f"{what} = {expected[row]}", f"{what} = {got[row]} ({off:+d})", row, what, off
    )


def _other_number(
    kind: str, what: str, words: str, expected: Sequence[int], got: Sequence[int], off: int = 0
) -> Violation:
    """The violation of a list that has not one number for each request. words: what it has."""
    wanted, found = (f"{words} of {len(numbers)} requests" for numbers in (expected, got))
    return Violation(kind, wanted, found, what=what, off=off)


def check_bound(what: str, bounds: Sequence[int], got: Sequence[int]) -> Violation | None:
    """No number may be above its bound. Both have one number for each request."""
    for row, (bound, have) in enumerate(zip(bounds, got, strict=True)):
        if have > bound:
            off = have - bound
            return Violation(
                "seq-len",
                f"{what} = at most {bound}",
                f"{what} = {have} ({off:+d})",
                row,
                what,
                off,
            )
    return None


def check_advance(
    kind: str, what: str, before: Sequence[int], after: Sequence[int], by: Sequence[int]
) -> Violation | None:
    """``after`` must be ``before`` plus ``by``, for each request."""
    if len(before) != len(by):
        return check_counts(kind, what, before, after)
    return check_counts(kind, what, list(map(add, before, by)), after)


def at_rows(violation: Violation | None, rows: Sequence[int]) -> Violation | None:
    """A violation of a check that got only ``rows`` of the batch, with its row in the batch."""
    if violation is None or violation.row < 0:
        return violation
    return replace(violation, row=rows[violation.row])


def check_same_rows(rows: Sequence[int], indices: Sequence[int]) -> Violation | None:
    """``indices``, by which the FutureMap is read, must be the requests' rows, in their order."""
    if rows == indices:
        return None
    if len(rows) != len(indices):
        name, off = "future_indices", len(indices) - len(rows)
        return _other_number("future-row", name, name, rows, indices, off)
    row = next((i for i, (a, b) in enumerate(zip(rows, indices, strict=True)) if a != b), -1)
    if row < 0:
        return None
    return Violation(
        "future-row",
        f"future_indices = {rows[row]}, the row of the request",
        f"future_indices = {indices[row]}",
        row,
        "future_indices",
    )


def check_batch_rows(
    rids: Sequence[str], rows: Sequence[int], got: Sequence[int], size: int
) -> Violation | None:
    """A forward is given the row of ``req_to_token`` of each of its requests.

    rows: of the requests, -1 of one that does not go on, which may have any row. size: how many
    rows there are. If there are not as many indices as requests, only that is looked at.
    """
    each = len(got) == len(rows)
    for i, have in enumerate(got):
        want = rows[i] if each else -1
        outside = min(have, 0) + max(have - size + 1, 0)
        if not outside and want in (-1, have):
            continue
        other = rows.index(have) if have in rows and have >= 0 else -1
        whose = f"request {rids[other]} (row {other})" if other >= 0 else ""
        expected = f"{want}, the row of the request" if want >= 0 else f"0..{size - 1}, a row"
        if outside:
            found = f"and req_to_token has {size} rows,"
        else:
            found = f"the row of {whose}" if whose else "the row of no request of the batch"
        return Violation(
            "forward-row",
            f"req_pool_indices = {expected}",
            f"req_pool_indices = {have}, {found}",
            i,
            "req_pool_indices",
            outside,
            whose=whose,
        )
    return None


def check_slots(got: Sequence[int], slots: int, requests: int) -> Violation | None:
    """KV is written where the pool has a slot. Below 0 and within it, kv-writes judges that."""
    if not got or max(got) < slots:
        return None
    at = next(i for i, have in enumerate(got) if have >= slots)
    return Violation(
        "forward-place",
        f"out_cache_loc[{at}] = 0..{slots - 1}, a slot of the pool",
        f"out_cache_loc[{at}] = {got[at]}",
        at if len(got) == requests else -1,
        "out_cache_loc",
        got[at] - slots + 1,
        at,
    )


def check_cells(
    table: torch.Tensor, rows: Sequence[int], lens: Sequence[int], slots: int
) -> Violation | None:
    """Each token of a sequence is in a slot of the pool.

    table: ``req_to_token``, int32 [rows, tokens], on the host. rows, lens: of each request, -1 for
    the row of one that does not go on.
    """
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        cells = table[row, : max(length, 0)] if 0 <= row < len(table) else table[:0, 0]
        if not len(cells) or (int(cells.max()) < slots and int(cells.min()) >= -slots):
            continue
        at = int(((cells >= slots) | (cells < -slots)).nonzero()[0])
        where, got = f"req_to_token[{row}, {at}]", int(cells[at])
        off = got - slots + 1 if got > 0 else got
        expected = f"{where} = 0..{slots - 1}, a slot of the pool"
        return Violation("forward-place", expected, f"{where} = {got}", i, CELLS, off, at)
    return None


def check_positions(
    spans: Sequence[tuple[int, int]], got: Sequence[int], live: Sequence[int], rule: str
) -> Violation | None:
    """The tokens of a forward have the positions of their places.

    spans: the first position of each request, and how many follow. rule: how they are computed, in
    words. A forward with another number of positions is not judged.
    """
    if sum(count for _, count in spans) != len(got):
        return None
    at, judged = 0, set(live)
    for row, (first, count) in enumerate(spans):
        part, want = got[at : at + count], range(first, first + count)
        at += count
        if row not in judged or all(map(eq, part, want)):
            continue
        column = next(i for i, (a, b) in enumerate(zip(part, want, strict=True)) if a != b)
        name, off = "positions" + (f"[{column}]" if count > 1 else ""), part[column] - want[column]
        return Violation(
            "position",
            f"{name} = {want[column]}, by {rule}",
            f"{name} = {part[column]} ({off:+d})",
            row,
            "positions",
            off,
            column if count > 1 else -1,
            ("", "the target's forward"),
            rule,
        )
    return None


def check_tokens(
    tokens: Sequence[Sequence[int] | None],
    got: Sequence[int],
    live: Sequence[int],
    counts: Sequence[int],
) -> Violation | None:
    """A prefill begins with the requests' own tokens.

    tokens: of each request, those that the forward computes; None where that is not known. counts:
    how many these are. A forward with another number of tokens is not judged.
    """
    if sum(counts) != len(got):
        return None
    at, judged = 0, set(live)
    for row, (want, count) in enumerate(zip(tokens, counts, strict=True)):
        part = list(got[at : at + count])
        at += count
        if row not in judged or want is None or len(want) != count or part == list(want):
            continue
        column = next(i for i, (a, b) in enumerate(zip(part, want, strict=True)) if a != b)
        name = "input_ids" + (f"[{column}]" if count > 1 else "")
        return Violation(
            "sampled-token",
            f"{name} as of the request",
            f"{name} is another token at the target's forward",
            row,
            "input_ids",
            0,
            column if count > 1 else -1,
            ("the request", "the target's forward"),
        )
    return None


def check_owners(
    rows: Sequence[int], rids: Sequence[str], owners: Sequence[str | None]
) -> Violation | None:
    """No two requests write into one row. owners: for each row, its live request so far."""
    if len(set(rows)) == len(rows) and not any(owners):
        return None
    seen: dict[int, str] = {}
    for i, (row, rid, owner) in enumerate(zip(rows, rids, owners, strict=True)):
        other = seen.setdefault(row, rid) if owner in (None, rid) else owner
        if other != rid:
            got = f"row {row} of the FutureMap written for two requests"
            return Violation("future-row", f"row {row} written for {other} only", got, i, "owner")
    return None


def check_written(
    what: str, row: int, rid: str, by: tuple[str, int] | None, position: int = -1
) -> Violation | None:
    """A request reads values that were written for it, in the last step that ran it.

    what: "lengths" or "bonus token and hidden state". by: the request for which the row was last
    written, and the number of that step; None if nobody wrote. position: the request's, in the
    batch.
    """
    if by is not None and by[0] == rid:
        return None
    got = "never written" if by is None else f"written for request {by[0]} in step {by[1]}"
    expected = f"{what} in row {row} of the FutureMap, written in the request's last step"
    return Violation("future-row", expected, got, position, what)


def check_publish(
    decode: bool, verified: bool, times: int, own_lengths: bool, own_rows: bool
) -> Violation | None:
    """The lengths are published once in a step, after its verify, for its own requests.

    times: how often they were published before in this step. own_lengths: the verify made these
    lengths (in a prefill: they are the batch's lengths). own_rows: they go into the batch's rows.
    """
    expected = _published(decode)
    if decode and not verified:
        return Violation("publish-order", expected, "published before the verify", what="early")
    if times:
        return Violation(
            "publish-order", expected, f"published {times + 1} times", what="twice", off=times
        )
    if not own_lengths:
        return Violation("publish-order", expected, "published other lengths", what="lengths")
    if not own_rows:
        got = "other rows than those of the batch"
        return Violation("future-row", "the rows of the batch published", got, what="published")
    return None


def check_published(decode: bool) -> Violation:
    """The violation of a step that ended without it."""
    return Violation("publish-order", _published(decode), "not published", what="never", off=-1)


def _published(decode: bool) -> str:
    return f"new lengths published once, after the {'verify' if decode else 'prefill'}"


def check_bonus(
    rids: Sequence[str],
    expected: Sequence[int],
    got: Sequence[int],
    earlier: Callable[[int], Sequence[int]],
) -> Violation | None:
    """The token that the draft goes on from is the last one that the request was given.

    earlier: the tokens of a request before that one. Tokens are compared, and not told.
    """
    if expected == got:
        return None
    if len(expected) != len(got):
        return _other_number("bonus-token", "bonus_tokens", "bonus tokens", expected, got)
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want == have:
            continue
        others = [rid for j, rid in enumerate(rids) if j != i and expected[j] == have]
        if others:
            found = f"the last token of request {others[0]}"
        elif have in earlier(i):
            found = "an earlier token of the request"
        else:
            found = "another token"
        return Violation("bonus-token", "the last token of the request", found, i, "bonus_tokens")
    return None


def check_allocated(needs: Sequence[int], allocated: Sequence[int], why: str) -> Violation | None:
    """There must be room for the committed tokens and for those that the next verifies write.

    needs: how many tokens need room. why: what for, in words.
    """
    if len(needs) == len(allocated) and all(map(ge, allocated, needs)):
        return None
    if len(needs) != len(allocated):
        return check_counts("allocated-len", "kv_allocated_len", needs, allocated)
    for i, (need, have) in enumerate(zip(needs, allocated, strict=True)):
        if have < need:
            return Violation(
                "allocated-len",
                f"kv_allocated_len of at least {need}, {why}",
                f"kv_allocated_len = {have}",
                i,
                "kv_allocated_len",
                have - need,
            )
    return None


def check_embedding(
    rows: int, first: int, table: int, vocabulary: int, rank: int, ranks: int
) -> Violation | None:
    """The table in which the draft looks token ids up has a row for each token.

    rows: of that table. first: which row of the target's table is its first one, -1 if it is no
    part of it. table: the rows of the target's embedding, on all ranks together. A table with more
    rows than tokens is padded. A vocabulary that is larger than the target's own table is a number
    that nobody looks up: both must say that rows are missing. rank, ranks: tensor-parallel, -1 and
    1 if not known.
    """
    if rows >= min(vocabulary, table):
        return None
    where = [f"rows {first} to {first + rows - 1} of the target's"] if first >= 0 else []
    where += [f"rank {rank} of {ranks}"] if rank >= 0 else []
    return Violation(
        "draft-embedding",
        f"an embedding table of at least {vocabulary} rows, one for each token",
        f"an embedding table of {rows} rows" + (f" ({'; '.join(where)})" if where else ""),
        what="target_embed_weight",
        off=rows - vocabulary,
    )


def check_places(places: int, tokens: int, cleared: bool) -> Violation | None:
    """A draft writes no KV, so its forward has no places to write to, or one for each token.

    places: how many ``out_cache_loc`` has, -1 if it is None. cleared: SGLang sets it to None.
    """
    if places in (-1, tokens):
        return None
    return Violation(
        "draft-places",
        "None, to which SGLang has set it" if cleared else f"None, or {tokens}: one for each token",
        f"{places} places in out_cache_loc",
        what="out_cache_loc",
        off=places - tokens,
    )


def check_pool(
    right: bool, backend: str, which: str, wanted: int | None, got: int | None
) -> Violation | None:
    """The backend that computes the draft's attention does so on the pool that it was shown.

    which: the pool that it has instead: "its own" or "another". wanted, got: how many tokens the
    target's pool and that one have, None if they do not say.
    """
    if right:
        return None
    of_target = f" of {wanted} tokens" if wanted is not None else ""
    of_other = f" of {got} tokens" if got is not None else ""
    return Violation(
        "draft-pool",
        f"the target's KV pool{of_target}",
        f"{which} KV pool{of_other}",
        what=backend,
    )
