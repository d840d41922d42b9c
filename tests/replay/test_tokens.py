"""Tokens that are made of a tape have the prefixes in common that the real ones had."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.findings import tape
from g4debug.findings.tape import Chain, Code, How, Why
from g4debug.replay.tokens import FIRST_WORD, STOPS, Tokens, TooFewWords, children

pytestmark = pytest.mark.once("tokens are made without SGLang")


def recorded(requests: list[tuple[list[int], list[int], How]], page: int, firsts: bool) -> bytes:
    parts = [bytes((Code.START, Why.START)) + tape.start(0, 0, 0, 0, 0.7, 0)]
    for number, (prompt, output, how) in enumerate(requests, 1):
        chain = Chain(bytes(32), page, firsts)
        parts.append(tape.request(1, len(prompt), 99, 0, -1, 0) + chain.feed(prompt))
        hashes = chain.feed([*prompt[chain.done :], *output], len(prompt))
        parts.append(tape.end(number, len(output), how, len(prompt)) + hashes)
    return b"".join(parts)


def drawn(seed: int) -> list[tuple[list[int], list[int], How]]:
    """Strangers, shared beginnings, and conversations that go on with an earlier answer."""
    dice = random.Random(seed)

    def words(most: int) -> list[int]:
        return [dice.randrange(4, 5000) for _ in range(dice.randint(1, most))]

    shared, found = [words(90) for _ in range(3)], []
    for _ in range(12):
        begin = dice.choice([[], *shared, *(p + o for p, o, _ in found)])
        begin = begin[: dice.choice([len(begin), dice.randint(0, len(begin))])]
        how = dice.choice([How.LENGTH, How.STOP, How.ABORT])
        found.append((begin + words(40), words(50), how))
    return found


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two begin with alike."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def keys(tokens: int, page: int, firsts: bool) -> int:
    """Pages of a prefix cache's keys. EAGLE's keys are pairs of neighbours."""
    return max(0, tokens - firsts) // page


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64]), st.booleans())
def test_what_was_shared_is_shared(seed: int, page: int, firsts: bool) -> None:
    real = drawn(seed)
    recording = tape.read(recorded(real, page, firsts), page, firsts)
    tokens = Tokens(recording, 508)
    made = {}
    for who, request in recording.requests.items():
        whole = [tokens.at(request, n) for n in range(request.prompt + request.output)]
        assert tokens.prompt(request) == whole[: request.prompt]
        assert min(whole) >= FIRST_WORD - 1
        made[who] = whole
    for (i, (p1, o1, _)), (k, (p2, o2, _)) in itertools.combinations(enumerate(real, 1), 2):
        want, got = common(p1 + o1, p2 + o2), common(made[i], made[k])
        assert got // page == want // page
        assert keys(got, page, firsts) == keys(want, page, firsts)
        if page == 1:
            assert got == want


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 8]), st.booleans(), st.integers(0, 150))
def test_a_prompt_that_was_hashed_in_two_pieces_has_the_same_hashes(
    seed: int, page: int, firsts: bool, first: int
) -> None:
    dice = random.Random(seed)
    tokens = [dice.randrange(5000) for _ in range(200)]
    whole = Chain(bytes(32), page, firsts).feed(tokens)
    chain = Chain(bytes(32), page, firsts)
    begin = chain.feed(tokens[:first])
    rest = chain.feed(tokens[chain.done :], first)
    full = tape.hash_bytes(page, first // page * page, 0, firsts)
    assert begin[:full] + rest == whole
    assert len(whole) == tape.hash_bytes(page, 200, 0, firsts)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("firsts", [True, False])
def test_a_stop_comes_at_its_place_and_not_before(page: int, firsts: bool) -> None:
    real = drawn(7)
    recording = tape.read(recorded(real, page, firsts), page, firsts)
    tokens = Tokens(recording, 60)  # so few that each comes several times
    for request in recording.requests.values():
        answer = [tokens.at(request, request.prompt + n) for n in range(request.output)]
        if request.how is How.STOP:
            assert answer.index(tokens.stop(request)) == request.output - 1
        else:
            assert tokens.stop(request) not in answer


def test_too_small_a_vocabulary_is_told() -> None:
    many = [([n] * 16, [], How.LENGTH) for n in range(40)]
    recording = tape.read(recorded(many, 16, True), 16, True)
    assert children(recording) == 40
    Tokens(recording, 40 + STOPS)
    with pytest.raises(TooFewWords):
        Tokens(recording, 39 + STOPS)


def test_tokens_of_large_tapes_are_made_fast() -> None:
    """300 prompts of 8,000 tokens that have much in common, in pages of one token."""
    shared = list(range(7000))
    many = [(shared[: 20 * n] + [n] * 1000, [5] * 20, How.STOP) for n in range(300)]
    recording = tape.read(recorded(many, 1, True), 1, True)
    begin = time.monotonic()
    tokens = Tokens(recording, 508 + children(recording))
    for request in recording.requests.values():
        tokens.at(request, 1)
    assert time.monotonic() - begin < 60
