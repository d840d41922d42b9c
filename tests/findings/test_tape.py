"""What is written on a tape is read again; what was not written so is refused with words."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import random
import time
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_trap import sample_record

from g4debug.dumps.plain import to_plain
from g4debug.findings import tape
from g4debug.findings.record import Tape
from g4debug.findings.tape import Chain, Code, How, TapeError, Why
from g4debug.findings.tape_record import data, pack, shortened

pytestmark = pytest.mark.once("a tape does not import SGLang")
KEY, PAGE = bytes(32), 16
COUNTS = st.integers(0, 300)


class Writer:
    """A tape as a scheduler would have written it, and what it must be read as."""

    def __init__(self, page: int, firsts: bool) -> None:
        self.page, self.firsts = page, firsts
        self.parts: list[bytes] = []
        self.round = self.steps = 0
        self.live: dict[int, tuple[Chain, list[int]]] = {}
        self.count = 0

    def start(self, why: Why) -> None:
        rest = tape.start(self.round, self.steps, self.count, 7, 0.7, 5)
        self.parts.append(bytes((Code.START, why)) + rest)

    def request(self, rounds: int, tokens: list[int], longest: int | None, priority: int) -> int:
        chain = Chain(KEY, self.page, self.firsts)
        hashes = chain.feed(tokens)
        self.count += 1
        self.round += rounds
        head = tape.request(rounds, len(tokens), longest, tape.IGNORES_EOS, -1, priority)
        self.parts.append(head + hashes)
        self.live[self.count] = chain, tokens
        return self.count

    def end(self, whose: int, output: list[int], how: How) -> None:
        chain, tokens = self.live.pop(whose)
        hashes = chain.feed([*tokens[chain.done :], *output], len(tokens))
        self.parts.append(tape.end(whose, len(output), how, len(tokens)) + hashes)

    def step(self, checksum: int) -> None:
        self.steps += 1
        self.parts.append(bytes((Code.STEP,)) + checksum.to_bytes(2, "little"))

    def verify(self, rows: list[int], counts: list[int]) -> None:
        numbers = map(tape.number, (len(rows), *rows))
        self.parts.append(bytes((Code.ROWS,)) + b"".join(numbers))
        self.parts.append(bytes((Code.ACCEPT,)) + tape.number(len(counts)) + bytes(counts))

    @property
    def data(self) -> bytes:
        return b"".join(self.parts)


def some(seed: int, page: int = PAGE, firsts: bool = True, events: int = 60) -> tuple[Any, Any]:
    """A random tape, and its requests as (tokens, output, how, accepted) by id."""
    dice, writer, want = random.Random(seed), Writer(page, firsts), {}
    writer.start(Why.START)
    words = [dice.randrange(1000) for _ in range(300)]
    for _ in range(events):
        kind = dice.random()
        if kind < 0.3 or not writer.live:
            prompt = words[: dice.randint(0, 90)] + [dice.randrange(1000) for _ in range(9)]
            longest = dice.choice([None, 0, 5, 1 << 30])
            who = writer.request(dice.randint(0, 300), prompt, longest, dice.randint(-9, 9))
            want[who] = [prompt, [], How.RUNNING, [], longest]
        elif kind < 0.5:
            who = dice.choice(list(writer.live))
            output = [dice.randrange(1000) for _ in range(dice.randint(0, 70))]
            how = dice.choice([How.LENGTH, How.STOP, How.ABORT])
            writer.end(who, output, how)
            want[who][1:3] = output, how
        elif kind < 0.7:
            writer.step(dice.randrange(1 << 16))
        else:
            rows = dice.sample(sorted(writer.live), dice.randint(1, len(writer.live)))
            counts = [dice.randint(1, 4) for _ in rows]
            writer.verify(rows, counts)
            for who, n in zip(rows, counts, strict=True):
                want[who][3].append(n)
    return writer, want


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 8, 16, 64]), st.booleans())
def test_what_was_written_is_read(seed: int, page: int, firsts: bool) -> None:
    writer, want = some(seed, page, firsts)
    read = tape.read(writer.data, page, firsts)
    assert read.steps == writer.steps
    assert set(read.requests) == set(want)
    for who, (prompt, output, how, accepted, longest) in want.items():
        got = read.requests[who]
        assert (got.prompt, got.output, got.how) == (len(prompt), len(output), how)
        assert list(got.accepted) == accepted
        assert got.longest == (-1 if longest is None else longest)
        whole = prompt + output if how is not How.RUNNING else prompt
        assert len(got.hashes) == tape.hash_bytes(page, len(whole), 0, firsts)
        size = tape.hash_bytes(page, page, 0, firsts)
        for other, (p2, o2, h2, *_) in want.items():
            both = p2 + o2 if h2 is not How.RUNNING else p2
            for k in range(1, min(len(whole), len(both)) // page + 1):
                # equal if and only if all up to the page's end is
                same = got.hashes[: k * size] == read.requests[other].hashes[: k * size]
                assert same == (whole[: k * page] == both[: k * page])


@pytest.mark.parametrize("page", [1, 8, 16])
def test_only_who_has_the_key_can_tell_what_a_hash_is_of(page: int) -> None:
    tokens = list(range(32))
    assert Chain(KEY, page, True).feed(tokens) != Chain(bytes(31) + b"\1", page, True).feed(tokens)
    assert Chain(KEY, page, True, "tenant").feed(tokens) != Chain(KEY, page, True).feed(tokens)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("kind", "qi")
def test_a_list_and_an_array_of_the_same_tokens_have_the_same_hashes(kind: str, page: int) -> None:
    """SGLang 0.5.12.post1 has lists, later ones have arrays."""
    for count in (0, 1, 150):
        tokens = list(range(7, 7 + count))
        hashes = Chain(KEY, page, True).feed(array.array(kind, tokens))
        assert hashes == Chain(KEY, page, True).feed(tokens)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 1 << 30), st.data())
def test_a_changed_tape_is_read_or_refused_with_words(seed: int, draw: st.DataObject) -> None:
    whole = bytearray(some(seed)[0].data)
    for _ in range(draw.draw(st.integers(1, 4))):
        whole[draw.draw(st.integers(0, len(whole) - 1))] = draw.draw(st.integers(0, 255))
    cut = bytes(whole[: draw.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(TapeError):
        tape.read(cut, PAGE, True)


HEAD = bytes((Code.START, Why.START)) + tape.start(0, 0, 0, 0, 0.7, 0)
HOSTILE = {
    "nothing": (b"", "is empty"),
    "no start": (bytes((Code.STEP, 0, 0)), "does not begin with a start"),
    "a prompt of a terabyte": (HEAD + tape.request(0, 1 << 38, 1, 0, 0, 0), "at most"),
    "a number without an end": (HEAD + bytes((Code.REQUEST,)) + b"\xff" * 99, "larger than any"),
    "rows without number": (HEAD + bytes((Code.ROWS,)) + tape.number(1 << 30), "at most"),
    "an unknown event": (HEAD + b"\xee", "no event"),
    "hashes are missing": (HEAD + tape.request(0, 640, 1, 0, 0, 0), "ends within"),
    "rows that nobody named": (HEAD + bytes((Code.ACCEPT, 2, 1, 1)), "rows are verified"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tapes_are_refused_at_once(name: str) -> None:
    hostile, why = HOSTILE[name]
    begin = time.monotonic()
    with pytest.raises(TapeError, match=why):
        tape.read(hostile, PAGE, True)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "event", [bytes((Code.FLUSH, 0)), tape.request(0, 1, 1, 0, 0, 0), bytes((Code.ROWS, 0))]
)
def test_hostile_tapes_take_little_memory(monkeypatch: pytest.MonkeyPatch, event: bytes) -> None:
    monkeypatch.setattr(tape, "MAX_EVENTS", 5000)
    monkeypatch.setattr(tape, "MAX_GIVEN", 1000)
    tape.read(HEAD + 900 * event, PAGE, False)
    with pytest.raises(TapeError, match="more than 5000 events, or 1000 requests"):
        tape.read(HEAD + 6000 * event, PAGE, False)


def test_there_are_no_more_digests_than_steps() -> None:
    digest = b"".join(bytes((Code.PAGES,)) + tape.number(n) + bytes(8) for n in range(1, 100))
    steps = bytes((Code.STEP, 0, 0)) * 200
    assert len(tape.read(HEAD + digest + steps, PAGE, False).pages) <= 2


def test_a_request_ends_once() -> None:
    writer = Writer(PAGE, True)
    writer.start(Why.START)
    writer.request(1, [1] * 20, 5, 0)
    live = writer.live[1]
    writer.end(1, [2], How.LENGTH)
    writer.live[1] = live
    writer.end(1, [2], How.LENGTH)
    with pytest.raises(TapeError, match="ends twice"):
        tape.read(writer.data, PAGE, True)


def test_the_oldest_goes_if_there_is_no_room_and_what_a_flush_made_useless() -> None:
    ring = tape.Ring(1000, settled=10)
    ring.start(Why.START, 0, b"")
    ring.now += bytes(600)
    ring.start(Why.IDLE, 20, b"")
    ring.now += bytes(600)
    ring.trim(25)
    assert [chunk[1] for chunk in ring.chunks()] == [Why.IDLE]
    ring.start(Why.FLUSH, 30, b"")
    # Which pages were in use where it began was not known, so nothing is lost.
    assert [chunk[1] for chunk in ring.chunks()] == [Why.FLUSH]
    ring.start(Why.FLUSH, 40, b"")
    ring.trim(45)
    assert [chunk[1] for chunk in ring.chunks()] == [Why.FLUSH, Why.FLUSH]
    ring.trim(50)
    assert [chunk[1] for chunk in ring.chunks()] == [Why.FLUSH]


def test_a_tape_is_shortened_by_whole_chunks() -> None:
    writer = Writer(PAGE, True)
    chunks = []
    for why in (Why.START, Why.IDLE, Why.BUSY):
        writer.parts = []
        writer.start(why)
        for _ in range(5):
            writer.request(1, list(range(40)), 5, 0)
            writer.step(9)
        chunks.append(writer.data)
    limits = {"LoRA": 4, "sessions": 5, "pipeline ranks": -1}
    packed = pack(chunks, b"", PAGE, True, writer.steps, writer.count, {}, limits)
    assert packed.limits == tuple(limits)
    assert (packed.begins, packed.first, packed.steps, packed.requests) == ("start", 0, 15, 15)
    assert data(packed) == b"".join(chunks)
    part = shortened(packed, len(chunks[1]) + len(chunks[2]))
    assert part is not None
    assert (part.begins, part.first, part.steps, part.requests) == ("idle", 5, 10, 10)
    assert data(part) == chunks[1] + chunks[2]
    assert (part.limits, part.limits_at) == (("sessions", "pipeline ranks"), (5, -1))
    assert tape.read(data(part), PAGE, True).steps == 10
    last = shortened(part, len(chunks[2]) + 3)
    assert last is not None
    assert (last.begins, last.steps, last.requests, last.chunks) == ("busy", 5, 5, (0,))
    assert last.limits == ("pipeline ranks",)
    assert shortened(part, 9) is None
    older = dataclasses.replace(packed, limits_at=())  # of a g4debug that did not say it
    assert shortened(older, len(chunks[2])).limits == tuple(limits)


def test_what_is_before_the_tape_is_left_out() -> None:
    """A tape that begins while requests run: their ends and verifies are on it all the same."""
    writer = Writer(PAGE, True)
    writer.start(Why.START)
    writer.request(1, [1] * 20, 5, 0)
    writer.parts = []
    writer.start(Why.BUSY)
    writer.request(1, [2] * 20, 5, 0)
    writer.verify([1, 2], [3, 2])
    writer.end(1, [5, 6], How.LENGTH)
    read = tape.read(writer.data, PAGE, True)
    assert list(read.requests) == [2]
    assert list(read.requests[2].accepted) == [2]
    assert not read.fresh


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": 9}, "do not fill"),
        ({"size": -1}, "do not fill"),
        ({"chunks": (40,)}, "outside the tape"),
        ({"chunks": (-1,)}, "outside the tape"),
        ({"events": np.zeros((2, 2), dtype=np.int64)}, "one dimension"),
        ({"events": np.zeros(4, dtype=np.int32)}, "int32"),
    ],
)
def test_a_tape_of_another_shape_is_in_no_dump(changes: dict[str, Any], why: str) -> None:
    known = {"events": np.zeros(4, dtype=np.int64), "size": 27, "chunks": (0,)}
    hostile = Tape(
        format=1, page=16, firsts=True, begins="", first=0, steps=0, requests=0, scheduler={},
        **{**known, **changes},
    )  # fmt: skip
    with pytest.raises(ValueError, match=why):
        to_plain(dataclasses.replace(sample_record(), tape=hostile))
