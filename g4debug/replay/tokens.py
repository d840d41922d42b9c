"""Makes tokens of a tape's hashes: what began alike there begins alike here, and nothing else.

A token is made of the hash of its part of a page (:func:`g4debug.findings.tape.parts`). Different
hashes may give the same token, so where requests part, a token is *set*: to one that no other
request has there. To find these places, the requests are sorted by their hashes; then those that
have most in common are neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from g4debug.findings.tape import How, Recording, Request, mix, page_bytes, parts

FIRST_WORD = 4  # the tokens below are special ones
SPARE_STOP = 3  # ends a request whose own last token occurs before, too
STOPS = 8  # words that are only used to end answers
NARROW = 4  # tokens of a part; in wider ones different hashes give different tokens anyway
KEPT = 1 << 22  # tokens of requests that are kept; others are made again
_ODD = np.uint64(0x9E3779B97F4A7C15)


class TooFewWords(Exception):
    """The vocabulary is too small to tell apart what goes on differently at one place."""


class Paths:
    """The hashes of a tape's requests, as sequences of parts of pages."""

    def __init__(self, recording: Recording) -> None:
        self.requests, self.page = recording.requests, recording.page
        self.layout = parts(recording.page, recording.firsts)
        self.size = page_bytes(recording.page, recording.firsts)

    def place(self, part: int) -> tuple[int, int, int]:
        """Of a part: its first token, the place of its hash, and how many bytes that has."""
        page, second = divmod(part, len(self.layout))
        tokens, size = self.layout[0]
        token, at = page * self.page, page * self.size
        return (token + tokens, at + size, self.layout[1][1]) if second else (token, at, size)

    def covered(self, request: Request) -> int:
        """So many tokens of the request have a hash."""
        pages, rest = divmod(len(request.hashes), self.size)
        return pages * self.page + (rest > 0)

    def common(self, a: bytes, b: bytes) -> int:
        """How many parts two sequences begin with alike."""
        low, high = 0, min(len(a), len(b))
        while low < high:
            middle = (low + high + 1) // 2
            if a[low:middle] == b[low:middle]:
                low = middle
            else:
                high = middle - 1
        pages, rest = divmod(low, self.size)
        return pages * len(self.layout) + (rest >= self.layout[0][1])

    def neighbours(self) -> Iterator[tuple[Request, Request | None, int, set[int] | None]]:
        """Each request, the one before it in their order, and how many parts both begin with.

        If they go on differently, and with a narrow part: a set for this place, which is the same
        one for all requests that part there.
        """
        forks: list[tuple[int, set[int]]] = []  # where the next request may part, too
        before: Request | None = None
        # Of those with the same hashes, one that ends with a stop comes first.
        order = sorted(self.requests.values(), key=lambda r: (r.hashes, r.how is not How.STOP))
        for request in order:
            a, b = b"" if before is None else before.hashes, request.hashes
            part = self.common(a, b)
            while forks and forks[-1][0] > part:
                forks.pop()
            siblings = None
            narrow = self.layout[part % len(self.layout)][0] <= NARROW
            if narrow and self.place(part)[1] < min(len(a), len(b)):
                if not forks or forks[-1][0] < part:
                    forks.append((part, set()))
                siblings = forks[-1][1]
            yield request, before, part, siblings
            before = request


def children(recording: Recording) -> int:
    """The most tokens that are needed at one place, so that requests part there."""
    paths, most = Paths(recording), 0
    for request, before, part, siblings in paths.neighbours():
        if siblings is not None and before is not None:
            _, at, size = paths.place(part)
            siblings |= {int.from_bytes(r.hashes[at : at + size]) for r in (before, request)}
            most = max(most, len(siblings))
    return most


class Tokens:
    """words: how many tokens there are beside the special ones."""

    def __init__(self, recording: Recording, words: int) -> None:
        self.recording, self.words = recording, words
        self._paths = Paths(recording)
        self._set: dict[int, dict[int, int]] = {}  # request -> position -> token
        self._made: OrderedDict[int, Any] = OrderedDict()
        self._size = 0  # tokens of those that were made
        for request, before, part, siblings in self._paths.neighbours():
            at = self._paths.place(part)[0]
            known = {} if before is None else self._set[before.id]
            mine = {n: word for n, word in known.items() if n < at}
            self._set[request.id] = mine
            if siblings is not None and before is not None:
                siblings.add(known.get(at, self._first(before, part)))
                mine[at] = self._other(self._first(request, part), siblings)
                siblings.add(mine[at])
            self._set_stop(request, at, set() if siblings is None else siblings)

    def prompt(self, request: Request) -> list[int]:
        found: list[int] = self._of(request)[: request.prompt].tolist()
        return found

    def at(self, request: Request, position: int) -> int:
        """The token at a position of prompt and answer, also behind the recorded end."""
        known = self._of(request)
        if position < len(known):
            return int(known[position])
        return int(self._words(_of_position(request, np.array([position], dtype="u8")))[0])

    def stop(self, request: Request) -> int:
        """The token that ends the request, if one did."""
        if request.how is not How.STOP or not request.output:
            return SPARE_STOP
        return int(self._of(request)[-1])

    def _of(self, request: Request) -> Any:
        """int64 [prompt + answer]"""
        made = self._made.get(request.id)
        if made is None:
            made = self._made[request.id] = self._make(request)
            self._size += len(made)
            while self._size > KEPT and len(self._made) > 1:
                self._size -= len(self._made.popitem(last=False)[1])
        return made

    def _make(self, request: Request) -> Any:
        paths = self._paths
        # At first, all tokens are those that have no hash.
        tokens = self._words(
            _of_position(request, np.arange(request.prompt + request.output, dtype="u8"))
        )
        pages = len(request.hashes) // paths.size
        fields = [(str(n), f"<u{size}") for n, (_, size) in enumerate(paths.layout)]
        hashes = np.frombuffer(request.hashes, fields, pages)
        of_pages, at = tokens[: pages * paths.page].reshape(pages, paths.page), 0
        for n, (count, _) in enumerate(paths.layout):
            seeds = hashes[str(n)].astype("u8")[:, None] + np.arange(count, dtype="u8") * _ODD
            of_pages[:, at : at + count] = self._words(seeds)
            at += count
        if len(request.hashes) % paths.size:
            tokens[pages * paths.page] = self._first(request, pages * len(paths.layout))
        for position, word in self._set[request.id].items():
            tokens[position] = word
        if request.how is How.STOP and tokens[-1] in tokens[request.prompt : -1]:
            tokens[-1] = SPARE_STOP
        return tokens

    def _set_stop(self, request: Request, parted: int, siblings: set[int]) -> None:
        """Let the answer end with a token that it does not have before, if others go on there."""
        last = request.prompt + request.output - 1
        ends = request.how is How.STOP and request.output > 0
        if not ends or last < parted or self._paths.covered(request) <= last:
            return
        answer = self._make(request)[request.prompt :]
        if answer[-1] == SPARE_STOP:
            used = siblings | set(answer.tolist())
            free = [n for n in range(FIRST_WORD, FIRST_WORD + STOPS) if n not in used]
            if free:
                self._set[request.id][last] = free[0]
                if last == parted:
                    siblings.add(free[0])

    def _first(self, request: Request, part: int) -> int:
        """The first token of a part, if none was set."""
        _, at, size = self._paths.place(part)
        seed = int.from_bytes(request.hashes[at : at + size], "little")
        return int(self._words(np.array([seed], dtype="u8"))[0])

    def _other(self, word: int, used: set[int]) -> int:
        """``word``, or the next one that is not used."""
        begin = FIRST_WORD + STOPS
        count = self.words - STOPS
        for n in range(count):
            other = begin + (word - begin + n) % count
            if other not in used:
                return other
        raise TooFewWords(f"more than {count} ways to go on at one place")

    def _words(self, seeds: Any) -> Any:
        """Tokens of uint64."""
        found = mix(seeds) % np.uint64(self.words - STOPS) + np.uint64(FIRST_WORD + STOPS)
        return found.astype("int64")


def _of_position(request: Request, positions: Any) -> Any:
    """Seeds of tokens that have no hash."""
    return positions | np.uint64((request.id & 0xFFFFFFFF) << 32)
