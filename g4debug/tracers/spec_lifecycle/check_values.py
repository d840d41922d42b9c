"""Whether values arrive as they were handed on, on plain lists of numbers.

All lists have the rows of the batch one behind the other. ``live`` are the rows of the requests
that go on. Values in other rows harm nobody, and are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from g4debug.tracers.spec_lifecycle import handed_on as h
from g4debug.tracers.spec_lifecycle.check import Violation
from g4debug.tracers.spec_lifecycle.handed_on import Reading

INPUT = "verify-input"
RESULT = "verify-result"
SAMPLED = "sampled-token"
BONUS = "bonus-token"
STALE = "stale-hidden-state"
IN_WORDS = (BONUS, STALE)  # kinds with a headline of their own, which says what was found only
Values = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Rows:
    """The batch of a step. rids: of all its requests. live: the rows that are judged."""

    rids: Sequence[str]
    live: Sequence[int]

    def check(
        self,
        kind: str,
        made: tuple[Reading, Sequence[int]],
        taken: tuple[Reading, Sequence[int]],
        width: int = 1,
        columns: Sequence[int] | None = None,
    ) -> Violation | None:
        """Each row must arrive as it was made; ``columns``: so many numbers of each row.

        Nothing is said where the two have not the same number of rows: that is another check's.
        """
        (source, want), (end, have) = made, taken
        if want == have or len(want) != len(have) or len(want) != width * len(self.rids):
            return None
        for row in self.live:
            at, count = row * width, width if columns is None else columns[row]
            for column in range(count):
                if want[at + column] != have[at + column]:
                    return self._differs(kind, source, end, want, have, row, column, width)
        return None

    def _differs(
        self,
        kind: str,
        source: Reading,
        end: Reading,
        want: Sequence[int],
        have: Sequence[int],
        row: int,
        column: int,
        width: int,
    ) -> Violation:
        at = row * width + column
        name = end.name + (f"[{column}]" if width > 1 else "")
        whose = _whose(self.rids, want, have[at], row, column, width)
        thing = end.thing or source.thing
        derived = not source.key
        off = 0
        if not thing:
            off = have[at] - want[at]
            expected = f"{name} = {want[at]}, {'by' if derived else 'as of'} {source.end}"
            got = f"{name} = {have[at]} ({off:+d}) at {end.end}"
        elif kind in IN_WORDS:
            got = f"the {thing} of {whose}" if whose else f"another {thing}"
            expected = f"the {thing} as of {source.end}"
        else:
            found = f"the {thing} of {whose}" if whose else f"another {thing}"
            got = f"{name} is {found} at {end.end}"
            expected = f"{name} {'by' if derived else 'as of'} {source.end}"
        return Violation(
            kind,
            expected,
            got,
            row,
            end.name,
            off,
            column if width > 1 else -1,
            ("" if derived else source.end, end.end),
            source.end if derived else "",
            whose,
        )


def _whose(
    rids: Sequence[str], want: Sequence[int], got: int, row: int, column: int, width: int
) -> str:
    """The request or column to which the value ``got`` belongs, '' if it is nobody's."""
    for other, rid in enumerate(rids):
        if other != row and want[other * width + column] == got:
            return f"request {rid} (row {other})"
    for other in range(width):
        if other != column and want[row * width + other] == got:
            return f"column {other}"
    return ""


@dataclass(frozen=True)
class Verify:
    """One verify. width: the tokens of each row, W. depth: the most that can be accepted.

    chain: there is one draft path. simulated: SGLang makes up the accepted tokens. local: this rank
    sampled the tokens itself, and did not get them from another one. seeds: the next draft begins
    with the target's hidden state, and not with one of the draft's own.
    """

    width: int
    depth: int
    chain: bool
    simulated: bool = False
    local: bool = True
    seeds: bool = True


def check_verify_input(rows: Rows, verify: Verify, values: Values) -> Violation | None:
    """The target gets the draft's tokens, which follow from the bonus tokens and the lengths."""
    width, chain = verify.width, verify.chain
    first = [width * row for row in range(len(rows.rids))]
    drafted, positions = values.get(h.DRAFTED.key), values.get(h.POSITIONS.key)
    bonus, lens = values.get(h.BONUS.key), values.get(h.LENS.key)
    found = None
    if drafted is not None and bonus is not None:
        made = Reading("-", h.BONUS.name, "the beginning of the draft", h.TOKEN)
        begun = list(drafted)
        if len(drafted) == width * len(bonus):
            begun[::width] = bonus
        found = rows.check(INPUT, (made, begun), (h.DRAFTED, drafted), width)
    if found is None and positions is not None and lens is not None:
        rule = Reading("", h.LENS.name, "seq_lens and the place in the row")
        each = width if chain else 1
        follows = [n + k for n in lens for k in range(each)]
        got = positions if chain else [positions[i] for i in first if i < len(positions)]
        found = rows.check(INPUT, (rule, follows), (h.POSITIONS, got), each)
    if found is None and chain:
        found = _check_tree(rows, width, values)
    return found or _compare(
        rows,
        values,
        INPUT,
        (h.TREE_TOKENS, h.DRAFTED, width),
        (h.DRAFTED, h.FED, width),
        (h.POSITIONS, h.FED_POSITIONS, width),
        (h.DRAFTED, h.CANDIDATES, width),
    )


def _check_tree(rows: Rows, width: int, values: Values) -> Violation | None:
    """With one draft path each token's child is the next one, and it has no sibling."""
    count = len(rows.rids)
    chain = (
        list(range(count * width)),
        [*range(1, width), -1] * count,
        [-1] * (count * width),
    )
    begun = Reading("", "", "one draft path, in its order")
    for reading, want in zip(h.TREE, chain, strict=True):
        have = values.get(reading.key)
        if have is not None and have != want:
            found = rows.check(INPUT, (begun, want), (reading, have), width)
            if found is not None:
                return found
    return None


def check_verify_result(rows: Rows, verify: Verify, values: Values) -> Violation | None:
    """A verify hands on its kernel's result, and that result follows from the tokens.

    In a greedy verify with one draft path, draft tokens are accepted as long as they are the tokens
    that the target chooses, and the target's next token is the bonus token. A sampled verify can be
    checked for less: as many tokens are accepted as there are accepted indices, and each accepted
    draft token is the output for the token before it. Made-up accept lengths (``simulated``) only
    have to arrive unchanged.
    """
    width, depth = verify.width, verify.depth
    found = None
    if not verify.simulated:
        found = _check_kernel(rows, verify, values)
        found = found or _compare(
            rows,
            values,
            RESULT,
            (h.KERNEL_TOKENS, h.SAMPLE_TOKENS, width),
            (h.KERNEL_INDEX, h.SAMPLE_INDEX, depth),
        )
        correct, lens = values.get(h.KERNEL_CORRECT.key), values.get(h.SAMPLE_LENS.key)
        if found is None and correct is not None and lens is not None:
            made = Reading("-", h.SAMPLE_LENS.name, h.KERNEL_CORRECT.end)
            taken = (h.SAMPLE_LENS, lens)
            found = rows.check(RESULT, (made, [n + 1 for n in correct]), taken)
        found = found or _check_accepted(rows, verify, values)
    moved = (h.SAMPLE_LENS, h.RESULT_LENS, 1)
    tokens = (h.SAMPLE_TOKENS, h.RESULT_TOKENS, width)  # several draft paths are put in order
    found = found or _compare(rows, values, RESULT, moved, *((tokens,) if verify.chain else ()))
    return found or _check_left(rows, verify, values)


def _check_kernel(rows: Rows, verify: Verify, values: Values) -> Violation | None:
    """A greedy kernel accepts the draft tokens that the target chooses, and no others."""
    wanted, drafted = values.get(h.WANTED.key), values.get(h.DRAFTED.key)
    names = (h.KERNEL_CORRECT, h.KERNEL_TOKENS, h.KERNEL_INDEX)
    got = [values.get(reading.key) for reading in names]
    if not verify.chain or wanted is None or drafted is None or None in got:
        return None
    width, count = verify.width, len(rows.rids)
    if not len(wanted) == len(drafted) == count * width:
        return None
    correct = []
    for at in range(0, count * width, width):
        n = 0
        while n < width - 1 and drafted[at + n + 1] == wanted[at + n]:
            n += 1
        correct.append(n)
    path = [n + 1 for n in correct]
    index = [
        row * width + k if k < n else -1 for row, n in enumerate(path) for k in range(verify.depth)
    ]
    begun = Reading("", "", "the target's choice and the draft's tokens")
    wants = Reading("", "", "the target's choice", h.TOKEN)
    lens, tokens, chosen = ((reading, values[reading.key]) for reading in names)
    return (
        rows.check(RESULT, (begun, correct), lens)
        or rows.check(RESULT, (wants, wanted), tokens, width, path)
        or rows.check(RESULT, (begun, index), chosen, verify.depth)
    )


def _check_accepted(rows: Rows, verify: Verify, values: Values) -> Violation | None:
    """As many tokens are accepted as there are indices, and they are the draft's."""
    index, lens = values.get(h.SAMPLE_INDEX.key), values.get(h.SAMPLE_LENS.key)
    depth, width, count = verify.depth, verify.width, len(rows.rids)
    if lens is None:
        lens = values.get(h.RESULT_LENS.key)
    if lens is None or len(lens) != count:
        return None
    found = None
    if index is not None and len(index) == count * depth:
        had = [sum(i >= 0 for i in index[at : at + depth]) for at in range(0, count * depth, depth)]
        begun = Reading("", "", "the accepted indices")
        found = rows.check(RESULT, (begun, had), (h.SAMPLE_LENS, lens))
    tokens, drafted = values.get(h.SAMPLE_TOKENS.key), values.get(h.DRAFTED.key)
    source = h.SAMPLE_TOKENS
    if tokens is None:
        tokens, source = values.get(h.RESULT_TOKENS.key), h.RESULT_TOKENS
    if found is not None or not verify.chain or not verify.local:
        return found
    if tokens is None or drafted is None or not len(tokens) == len(drafted) == count * width:
        return found
    # The output for a token is the draft's next token, if that one is accepted.
    want = [*drafted[1:], -1]
    accepted = [max(0, min(n, width) - 1) for n in lens]
    return rows.check(RESULT, (h.DRAFTED, want), (source, tokens), width, accepted)


def _check_left(rows: Rows, verify: Verify, values: Values) -> Violation | None:
    """The values for the next step belong to each request's last accepted token."""
    width, count = verify.width, len(rows.rids)
    lens, tokens = values.get(h.RESULT_LENS.key), values.get(h.RESULT_TOKENS.key)
    bonus, hidden = values.get(h.RESULT_BONUS.key), values.get(h.RESULT_HIDDEN.key)
    left = values.get(h.LEFT_HIDDEN.key)
    found = None
    if verify.chain:  # of several draft paths the accepted one is put in order
        found = _compare(rows, values, STALE, (h.TARGET_HIDDEN, h.RESULT_HIDDEN, width))
    if lens is not None and len(lens) == count and all(0 < n <= width for n in lens):
        last = [row * width + n - 1 for row, n in enumerate(lens)]
        if tokens is not None and bonus is not None and len(tokens) == count * width:
            made = Reading("", "", "the last accepted token", h.TOKEN)
            taken = (h.RESULT_BONUS, bonus)
            ends = rows.check(RESULT, (made, [tokens[i] for i in last]), taken)
            found = ends or found  # the answer counts for more than how well is guessed
        if not verify.seeds or hidden is None or left is None:
            pass
        elif len(hidden) == count * width:
            made = Reading("-", h.HIDDEN.name, "the last accepted token", h.STATE)
            selected = [hidden[i] for i in last]
            found = found or rows.check(STALE, (made, selected), (h.LEFT_HIDDEN, left))
    return found or _compare(
        rows,
        values,
        RESULT,
        (h.RESULT_BONUS, h.LEFT_BONUS, 1),
        (h.LEFT_BONUS, h.STASHED, 1),
    )


def check_host(rows: Rows, verify: Verify, values: Values) -> Violation | None:
    """The verify's result is the same on the host as it was on the device."""
    found = _compare(rows, values, RESULT, (h.RESULT_LENS, h.HOST_LENS, 1))
    made, taken = values.get(h.RESULT_TOKENS.key), values.get(h.HOST_TOKENS.key)
    if found is None and made is not None and taken is not None:
        lens = [max(0, min(n, verify.width)) for n in values[h.HOST_LENS.key]]
        pair = ((h.RESULT_TOKENS, made), (h.HOST_TOKENS, taken))
        found = rows.check(SAMPLED, *pair, verify.width, lens)
    return found


def check_from_last(
    rows: Rows, kind: str, made: Reading, taken: Reading, left: Sequence[int | None], values: Values
) -> Violation | None:
    """A request reads the values that its own last step left. None in ``left``: not known."""
    got = values.get(taken.key)
    if got is None or len(got) != len(left):
        return None
    want = [have if was is None else was for was, have in zip(left, got, strict=True)]
    return rows.check(kind, (made.of_last_step, want), (taken, got))


def _compare(
    rows: Rows, values: Values, kind: str, *pairs: tuple[Reading, Reading, int]
) -> Violation | None:
    """The first pair of readings that differ. The last of each: numbers of a row."""
    for made, taken, width in pairs:
        want, have = values.get(made.key), values.get(taken.key)
        if want is not None and have is not None and want != have:
            found = rows.check(kind, (made, want), (taken, have), width)
            if found is not None:
                return found
    return None
