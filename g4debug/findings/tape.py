"""The tape: a record of a scheduler's requests and accept lengths, for giving them to it again.

The host decides where each KV page goes: by the order of the requests, their lengths, the prefixes
that they share, and how many tokens each verify accepts. The tape holds these facts, and checksums
to compare a replay with. It is made of bytes, one *event* after the other. There is no text, no
token and no id on it. Keyed hashes (:class:`Chain`) stand for the tokens of a prompt; they show how
many pages two requests share. The key is drawn in each process and is never written.

An event is a code and numbers, each in as few bytes as it needs (LEB128):

| code | what follows |
|---|---|
| ``START`` | why a tape may begin here; rounds, steps, requests, forwards, ratio, checksum so far |
| ``REQUEST`` | the round, lengths, options, priority, and the hashes of the prompt's pages |
| ``ABORT`` | the round, and the request, or all requests |
| ``FLUSH`` | the round |
| ``END`` | the request, its lengths, how it ended, and the hashes of its output's pages |
| ``ROWS`` | the requests of the verifies that follow, row by row |
| ``ACCEPT`` | for one verify, how many tokens each row got |
| ``STEP`` | a running checksum of the host's numbers at the beginning of each step |
| ``PAGES`` | every so many steps: the step, and a digest of the places of all pages |
| ``REFRESHES`` | behind a ``START``: a count of SGLang's, see ``Recording`` |

A *round* is one pass of the event loop; of idle rounds in a row only two count. A tape is cut into
*chunks*, each beginning with a ``START``. If there is no room, the oldest chunk is dropped. This
module imports neither torch nor sglang.

A page has one *part*, or two: its first token and the rest. Each part has a hash, which depends on
all tokens before it, too (``parts``). So requests have as many bytes of hashes in common as parts.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

FORMAT = 3
# That are read. In format 1 no page had fewer than SMALL tokens; before 3 a digest of PAGES had
# other weights, see page_digests.py.
FORMATS = (1, 2, 3)
SMALL = 16  # tokens: smaller pages are hashed together, block by block
BLOCK = 64  # tokens of a block, or a little less, so that it has whole pages
HASH, SHORT = 8, 4  # bytes: of a page's hash, and of a smaller page's or its first token's
LARGEST = 1 << 40  # no number on a tape is larger
MAX_TOKENS = 1 << 22  # of a request
MAX_PAGE = 1 << 12
MAX_ROWS = 1 << 16
MAX_EVENTS = 1 << 23  # of a tape that is read: it takes up to half a minute
MAX_GIVEN = 1 << 19  # requests, aborts and flushes; some 300 bytes each when they were read
MAX_START = 2 + 4 * 7 + 12  # bytes of a START
UNKNOWN = 0  # the request of a row that is not on the tape; the others count from 1


class TapeError(ValueError):
    """A tape cannot be read. The text names the error, and in most cases its place."""


class Code(IntEnum):
    START = 1
    REQUEST = 2
    ABORT = 3
    FLUSH = 4
    END = 5
    ROWS = 6
    ACCEPT = 7
    STEP = 8
    PAGES = 9
    REFRESHES = 10


class Why(IntEnum):
    """Why a tape may begin at a place. After the first two, the pages are as in a new server."""

    START = 1  # the server had just started
    FLUSH = 2  # its cache was flushed, and it had nothing to do
    IDLE = 3  # it had nothing to do; its prefix cache had pages
    BUSY = 4  # there was no better place


class How(IntEnum):
    """How a request ended."""

    RUNNING = 0  # it had not
    LENGTH = 1
    STOP = 2
    ABORT = 3


IGNORES_EOS, LOGPROBS, HEALTH, UNCACHED = 1, 2, 4, 8  # the options of a request
PRIORITY = 16  # it was given one, if only 0: SGLang puts one without any behind all others
MOST_PRIORITY = 1 << 38  # and -MOST_PRIORITY: its absolute value on a tape
UNCACHED_HOST = "2.2.2.2"  # bootstrap_host: SGLang keeps such a request out of the prefix cache


_BYTES = tuple(bytes((n,)) for n in range(128))  # most numbers are small


def number(n: int) -> bytes:
    """A number that is not negative, in LEB128."""
    if 0 <= n < 128:
        return _BYTES[n]
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def parts(page: int, firsts: bool) -> tuple[tuple[int, int], ...]:
    """The parts of a page: of each, how many tokens it has, and how many bytes its hash.

    firsts: whether the first token is told apart from the rest. With EAGLE's keys, which are pairs
    of tokens, the last key of a page has the first token of the next one.
    """
    size = HASH if page >= SMALL else SHORT
    return ((1, SHORT), (page - 1, size)) if firsts and page > 1 else ((page, size),)


class Chain:
    """Hashes a growing sequence of tokens page by page. Each hash is of all that is before, too.

    firsts: see ``parts``.
    """

    __slots__ = ("_block", "_firsts", "_hashing", "_key", "_page", "_state", "done")

    def __init__(self, key: bytes, page: int, firsts: bool, salt: str = "") -> None:
        self._key, self._page, self._firsts = key, page, firsts
        self._block = page if page >= SMALL else BLOCK // page * page
        self._hashing = _keyed(key, HASH)  # of large pages: has taken in all whole ones
        self._state = b""  # of small pages: the secret of the last whole block
        # The salt keeps requests of other tenants apart, as it does in SGLang's prefix cache.
        if salt or page < SMALL:
            self._state = self._hash(salt.encode("utf-8", "surrogatepass"), _SECRET)
        if page >= SMALL:
            self._hashing = self._hashing.copy()
            if salt:
                self._hashing.update(self._state)
        self.done = 0  # tokens of the blocks that were hashed; what is behind is needed again

    def _hash(self, data: bytes, size: int) -> bytes:
        hashing = _keyed(self._key, size).copy()
        hashing.update(data)
        return hashing.digest()

    def feed(self, rest: Sequence[int], known: int = 0) -> bytes:
        """``feed_packed`` of tokens."""
        return self.feed_packed(packed(rest), known)

    def feed_packed(self, raw: bytes, known: int = 0) -> bytes:
        """The hashes of the pages from the one on in which the first ``known`` tokens end.

        raw: the tokens behind the first ``done``, as ``packed`` gives them. The last page may be
        full or not; the chain can go on in it.
        """
        hashes = self._large(raw) if self._page >= SMALL else self._small(raw, known)
        self.done += len(raw) // (4 * self._block) * self._block
        return hashes

    def _large(self, raw: bytes) -> bytes:
        """One hash takes in all tokens, and is asked at the end of each part.

        To ask it does not end it. A hash of its own for each part takes twice as long.
        """
        out, size = [], 4 * self._page
        full = len(raw) // size * size
        update, digest = self._hashing.update, self._hashing.digest
        for at in range(0, full, size):
            if self._firsts:
                update(raw[at : at + 4])
                out.append(digest()[:SHORT])
                update(raw[at + 4 : at + size])
            else:
                update(raw[at : at + size])
            out.append(digest())
        if self._firsts and full < len(raw):
            begun = self._hashing.copy()
            begun.update(raw[full : full + 4])
            out.append(begun.digest()[:SHORT])
        return b"".join(out)

    def _small(self, raw: bytes, known: int) -> bytes:
        """A hash of BLAKE2b for each token takes too long: it takes one for each block.

        That is a secret, from which numpy makes the hash of each part in the next block. It is
        written nowhere, and depends on the key and on all tokens before the block.
        """
        block, size = self._block, 4 * self._block
        secrets = [self._state]
        for at in range(0, len(raw) - size + 1, size):
            secrets.append(self._hash(secrets[-1] + raw[at : at + size], _SECRET))
        self._state = secrets[-1]
        tokens = np.frombuffer(raw, dtype="<u4")
        keys = np.frombuffer(b"".join(secrets), dtype="<u8").reshape(-1, 1, _SECRET // 8)
        mixed = np.zeros(len(secrets) * block, dtype="u8")
        mixed[: len(tokens)] = tokens
        mixed = mixed.reshape(-1, block) | np.arange(block, dtype="u8") << np.uint64(32)
        mixed = np.cumsum(mix(mixed ^ keys[..., 0]) ^ keys[..., 1], axis=1, dtype="u8")
        for n in range(2, 5):
            mixed = mix(mixed ^ keys[..., n])
        begin = known // self._page * self._page - self.done
        places = np.arange(begin, len(tokens)) % self._page
        kept = (places == self._page - 1) | (self._firsts & (places == 0))
        hashes = mixed.reshape(-1)[begin : len(tokens)] >> np.uint64(32)
        return bytes(hashes[kept].astype("<u4").tobytes())

    def copy(self) -> Chain:
        other = Chain(self._key, self._page, self._firsts)
        other._hashing, other._state = self._hashing.copy(), self._state
        other.done = self.done
        return other


_SECRET = 64  # bytes


# Shifts and factors of SplitMix64's finalizer, and its last shift.
MIXED, LAST_SHIFT = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31


def mix(numbers: Any) -> Any:
    """Mix the bits of each number, uint64: the finalizer of SplitMix64, which is one-to-one."""
    for shift, factor in MIXED:
        numbers = (numbers ^ numbers >> np.uint64(shift)) * np.uint64(factor)
    return numbers ^ numbers >> np.uint64(LAST_SHIFT)


@lru_cache(maxsize=8)
def _keyed(key: bytes, size: int) -> hashlib.blake2b:
    """A hash to copy: taking in the key is half of the work for a page."""
    return hashlib.blake2b(key=key, digest_size=size)


_SIZED = {size: np.dtype(f"i{size}") for size in (4, 8)}


def packed(tokens: Sequence[int]) -> bytes:
    """Four bytes for each token, in the same order on every machine."""
    if isinstance(tokens, array.array) and tokens:  # SGLang 0.5.15 has these
        return np.frombuffer(tokens, dtype=_SIZED[tokens.itemsize]).astype("<i4").tobytes()
    four = array.array("i", tokens)
    if sys.byteorder != "little":
        four.byteswap()
    return four.tobytes()


def page_bytes(page: int, firsts: bool) -> int:
    """How long the hashes of one page are."""
    return sum(size for _, size in parts(page, firsts))


def hash_bytes(page: int, tokens: int, before: int, firsts: bool) -> int:
    """How long the hashes of a request's pages are, from the page in which ``before`` ends on."""
    full = tokens // page - before // page
    return full * page_bytes(page, firsts) + SHORT * (firsts and tokens % page > 0)


class Ring:
    """The chunks of a tape, at most ``limit`` bytes together. Add to ``now``; it is the last one.

    settled: so many steps after a start or a flush, the chunks before it are of no use any more.
    """

    def __init__(self, limit: int, settled: int = 64) -> None:
        self.limit, self.settled = limit, settled
        self._chunks: deque[tuple[bytearray, Why, int]] = deque()
        self.now = bytearray()

    def start(self, why: Why, step: int, rest: bytes) -> None:
        """Begin a chunk. rest: what follows the step in its ``START``.

        At a flush the chunks before it are dropped if the first of them begins in a server whose
        pages are not known: no step of it could be compared.
        """
        if why == Why.FLUSH and self._chunks and self._chunks[0][1] > Why.FLUSH:
            self._chunks.clear()
        self.now = bytearray(bytes((Code.START, why)) + rest)
        self._chunks.append((self.now, why, step))

    def trim(self, step: int) -> None:
        """Drop chunks that are of no use, then the oldest ones that do not fit. step: the last."""
        chunks = self._chunks
        for index in range(len(chunks) - 1, 0, -1):
            _, why, begun = chunks[index]
            if why <= Why.FLUSH and step - begun >= self.settled:
                for _ in range(index):
                    chunks.popleft()
                break
        size = sum(len(chunk) for chunk, _, _ in chunks)
        while size > self.limit and len(chunks) > 1:
            size -= len(chunks.popleft()[0])

    def forget(self) -> None:
        """Drop all chunks but the last one."""
        while len(self._chunks) > 1:
            self._chunks.popleft()

    @property
    def first(self) -> int:
        """The step that its first chunk was given."""
        return self._chunks[0][2] if self._chunks else 0

    @property
    def part(self) -> int:
        """So many bytes are enough for a chunk."""
        return self.limit // 8

    def chunks(self) -> list[bytes]:
        """All of it, chunk by chunk. Another thread may ask."""
        return [bytes(chunk) for chunk, _, _ in tuple(self._chunks)]


@dataclass(frozen=True)
class Start:
    """A place where a tape may begin. requests, steps, round: those before it.

    forwards: SGLang's own count of them. ratio: the share of their longest output that it expects
    requests to take. checksum: of the steps before.
    """

    why: Why
    round: int
    steps: int
    requests: int
    forwards: int
    ratio: float
    checksum: int


@dataclass
class Request:
    """A request: ``id`` counts from 1. hashes: of the parts of its pages, one after the other.

    logprobs_from: see SGLang's ``logprob_start_len``. accepted: the tokens of each of its verifies.
    """

    id: int
    round: int
    prompt: int
    longest: int  # max_new_tokens, -1 for none
    options: int
    logprobs_from: int
    priority: int
    hashes: bytes
    output: int = 0
    how: How = How.RUNNING
    accepted: bytearray = field(default_factory=bytearray)

    @property
    def asked_priority(self) -> int | None:
        """The priority that it came with, None for none. Older tapes do not tell 0 from none."""
        return self.priority if self.priority or self.options & PRIORITY else None


@dataclass(frozen=True)
class Abort:
    """whose: the request's id, ``UNKNOWN`` if it is not on the tape, or -1 for all requests."""

    round: int
    whose: int


@dataclass(frozen=True)
class Flush:
    round: int


@dataclass(frozen=True)
class _End:
    id: int
    output: int
    how: How
    hashes: bytes


@dataclass(frozen=True)
class _Rows:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class _Accept:
    counts: bytes


@dataclass(frozen=True)
class _Step:
    checksum: int


@dataclass(frozen=True)
class _Pages:
    step: int
    digest: int


@dataclass(frozen=True)
class _Refreshes:
    count: int


@dataclass(frozen=True)
class Recording:
    """A tape that was read. given: what the scheduler got, in its order.

    begins: where it begins. checksums: of each step. pages: the digests, by the number of the step,
    which counts from 1. refreshes: how often SGLang had looked for what waiting requests find in
    the prefix cache; each so many times it marks that as used.
    """

    begins: Start
    requests: dict[int, Request]
    given: list[Request | Abort | Flush]
    checksums: array.array[int]
    pages: dict[int, int]
    page: int  # tokens of a page
    firsts: bool
    refreshes: int = 0

    @property
    def steps(self) -> int:
        return len(self.checksums)

    @property
    def fresh(self) -> bool:
        """True if the pages were as in a new server when it began."""
        return self.begins.why <= Why.FLUSH


def read(data: bytes, page: int, firsts: bool) -> Recording:
    """Read a tape from anywhere. Raises TapeError for whatever g4debug does not write."""
    if not 1 <= page <= MAX_PAGE:
        raise TapeError(f"its pages have {page} tokens, expected 1 to {MAX_PAGE}")
    begins: Start | None = None
    requests: dict[int, Request] = {}
    given: list[Request | Abort | Flush] = []
    checksums = array.array("H")
    pages: dict[int, int] = {}
    rows: tuple[int, ...] = ()
    refreshes = 0
    for count, (at, event) in enumerate(_Reader(data, page, firsts).events()):
        if count >= MAX_EVENTS or len(given) >= MAX_GIVEN:
            raise TapeError(f"it has more than {MAX_EVENTS} events, or {MAX_GIVEN} requests")
        if begins is None:
            if type(event) is not Start:
                raise TapeError("it does not begin with a start")
            begins = event
        if type(event) is _Step:
            checksums.append(event.checksum)
        elif type(event) is _Accept:
            if len(event.counts) != len(rows):
                raise TapeError(
                    f"{len(event.counts)} rows are verified at byte {at}, not {len(rows)}"
                )
            for whose, count in zip(rows, event.counts, strict=True):
                if whose in requests:
                    requests[whose].accepted.append(count)
        elif type(event) is _Rows:
            rows = event.ids
        elif type(event) is Request:
            requests[event.id] = event
            given.append(event)
        elif type(event) is _End:
            _end(requests.get(event.id), event, page, firsts)
        elif type(event) is _Pages and len(pages) <= len(checksums) + 1:
            pages[event.step - begins.steps] = event.digest
        elif type(event) is _Refreshes and not checksums:
            refreshes = event.count
        elif type(event) is Start:
            if event.steps != begins.steps + len(checksums):
                raise TapeError(f"the steps do not count up to the start at byte {at}")
        elif isinstance(event, (Abort, Flush)):
            given.append(event)
    if begins is None:
        raise TapeError("it is empty")
    pages = {step: digest for step, digest in pages.items() if 1 <= step <= len(checksums)}
    return Recording(begins, requests, given, checksums, pages, page, firsts, refreshes)


def _end(request: Request | None, end: _End, page: int, firsts: bool) -> None:
    """Add to a request how it ended. One that began before the tape is not on it."""
    if request is None:
        return
    if request.how is not How.RUNNING or request.output:
        raise TapeError(f"request {request.id} ends twice")
    request.output, request.how = end.output, end.how
    begun = hash_bytes(page, request.prompt // page * page, 0, firsts)
    request.hashes = request.hashes[:begun] + end.hashes


def start_at(data: bytes, at: int) -> Start:
    """The start of the chunk that begins at this byte. Raises TapeError if none does."""
    event = next(_Reader(data[at : at + MAX_START], 1, False).events(), (0, None))[1]
    if type(event) is not Start:
        raise TapeError(f"no chunk begins at byte {at}")
    return event


class _Reader:
    """Reads event after event. Everything is checked, because a tape may come from a stranger."""

    def __init__(self, data: bytes, page: int, firsts: bool) -> None:
        self.data, self.page, self.firsts = data, page, firsts
        self.at = 0
        self.round = self.requests = 0
        self.prompts: dict[int, int] = {}  # of the requests that have not ended

    def events(self) -> Iterator[tuple[int, object]]:
        """(position, event) of each one. Raises TapeError."""
        try:
            while self.at < len(self.data):
                at = self.at
                yield at, self._event()
        except IndexError:
            raise TapeError("it ends within an event") from None

    def _event(self) -> object:
        at, code = self.at, self.data[self.at]
        self.at += 1
        if code == Code.STEP:
            return _Step(int.from_bytes(self._take(2), "little"))
        if code == Code.ACCEPT:
            return _Accept(self._take(self._up_to(MAX_ROWS)))
        if code == Code.PAGES:
            return _Pages(self._number(), int.from_bytes(self._take(8), "little"))
        if code == Code.ROWS:
            return _Rows(tuple(self._number() for _ in range(self._up_to(MAX_ROWS))))
        if code == Code.REQUEST:
            return self._request()
        if code == Code.END:
            return self._ended()
        if code == Code.ABORT:
            return Abort(self._next_round(), self._number() - 1)
        if code == Code.FLUSH:
            return Flush(self._next_round())
        if code == Code.START:
            return self._start()
        if code == Code.REFRESHES:
            return _Refreshes(self._number())
        raise TapeError(f"byte {at} begins no event that this g4debug knows ({code})")

    def _start(self) -> Start:
        why = self._take(1)[0]
        if why not in set(Why):
            raise TapeError(f"it begins for an unknown reason ({why})")
        self.round, steps = self._number(), self._number()
        self.requests, forwards = self._number(), self._number()
        ratio, checksum = struct.unpack("<dI", self._take(12))
        return Start(Why(why), self.round, steps, self.requests, forwards, ratio, checksum)

    def _request(self) -> Request:
        at, self.requests = self._next_round(), self.requests + 1
        prompt, longest = self._up_to(MAX_TOKENS), self._number() - 1
        options, start, priority = self._number(), self._number() - 1, self._number()
        hashes = self._take(hash_bytes(self.page, prompt, 0, self.firsts))
        self.prompts[self.requests] = prompt
        return Request(
            id=self.requests,
            round=at,
            prompt=prompt,
            longest=longest,
            options=options,
            logprobs_from=start,
            priority=priority >> 1 if not priority & 1 else -(priority >> 1) - 1,
            hashes=hashes,
        )

    def _ended(self) -> _End:
        whose, output, how = self._number(), self._up_to(MAX_TOKENS), self._number()
        if how not in set(How):
            raise TapeError(f"request {whose} ends in an unknown way ({how})")
        prompt = self._number()
        if self.prompts.pop(whose, prompt) != prompt:
            raise TapeError(f"request {whose} ends with another prompt than it began with")
        if prompt > MAX_TOKENS:
            raise TapeError(f"request {whose} has {prompt} tokens, more than any")
        size = hash_bytes(self.page, prompt + output, prompt, self.firsts)
        return _End(whose, output, How(how), self._take(size))

    def _next_round(self) -> int:
        self.round += self._number()
        if self.round > LARGEST:
            raise TapeError("it has more rounds than any tape")
        return self.round

    def _number(self) -> int:
        value, data = 0, self.data
        for shift in range(0, 49, 7):
            byte = data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                if value > LARGEST:
                    break
                return value
        raise TapeError(f"the number at byte {self.at} is larger than any on a tape")

    def _up_to(self, most: int) -> int:
        value = self._number()
        if value > most:
            raise TapeError(f"the number at byte {self.at} is {value}, at most {most} is possible")
        return value

    def _take(self, size: int) -> bytes:
        part = self.data[self.at : self.at + size]
        if len(part) != size:
            raise TapeError("it ends within an event")
        self.at += size
        return part


def request(
    rounds: int, prompt: int, longest: int | None, options: int, start: int, priority: int
) -> bytes:
    """The first part of a ``REQUEST``, without the hashes. rounds: since the last event."""
    signed = 2 * priority if priority >= 0 else -2 * priority - 1
    numbers = (rounds, prompt, 0 if longest is None else longest + 1, options, start + 1, signed)
    return bytes((Code.REQUEST,)) + b"".join(map(number, numbers))


def end(whose: int, output: int, how: How, prompt: int) -> bytes:
    """The first part of an ``END``, without the hashes of the pages behind the prompt's."""
    return bytes((Code.END,)) + b"".join(map(number, (whose, output, how, prompt)))


def start(
    round: int, steps: int, requests: int, forwards: int, ratio: float, checksum: int
) -> bytes:
    """The part of a ``START`` behind the reason."""
    numbers = b"".join(map(number, (round, steps, requests, forwards)))
    return numbers + struct.pack("<dI", ratio, checksum)
