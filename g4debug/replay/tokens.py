"""Makes tokens of a tape's hashes: pages with equal hashes get equal tokens, and others do not."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, defaultdict

from g4debug.findings.tape import How, Recording, Request

FIRST_WORD = 4  # the tokens below are special ones
SPARE_STOP = 3  # ends a request whose own last token occurs before, too
KEPT = 256  # requests whose tokens are kept; others are made again


class TooFewWords(Exception):
    """The vocabulary is too small to tell pages with one beginning apart."""


def children(recording: Recording) -> int:
    """The most pages with different first tokens behind one page."""
    found: defaultdict[bytes, set[bytes]] = defaultdict(set)
    for request in recording.requests.values():
        parent = b""
        for first, page in request.pages:
            if first and parent is not None:
                found[parent].add(first)
            parent = page
    return max(map(len, found.values()), default=0)


class Tokens:
    """words: how many tokens there are beside the special ones."""

    def __init__(self, recording: Recording, page: int, words: int) -> None:
        self.recording, self.page, self.words = recording, page, words
        self._firsts: dict[bytes, dict[bytes, int]] = {}  # page -> first token's hash -> token
        self._made: OrderedDict[int, list[int]] = OrderedDict()
        for request in recording.requests.values():  # in one order, whatever is asked for
            parent = b""
            for first, page_hash in request.pages:
                if first:
                    self._first(parent, first)
                parent = page_hash or b"?%d" % request.id

    def prompt(self, request: Request) -> list[int]:
        return self._of(request)[: request.prompt]

    def at(self, request: Request, position: int) -> int:
        """The token at a position of prompt and answer, also behind the recorded end."""
        known = self._of(request)
        if position < len(known):
            return known[position]
        return self._random(b"behind %d %d" % (request.id, position), 1)[0]

    def stop(self, request: Request) -> int:
        """The token that ends the request, if one did."""
        if request.how is not How.STOP or not request.output:
            return SPARE_STOP
        return self._of(request)[-1]

    def _of(self, request: Request) -> list[int]:
        made = self._made.get(request.id)
        if made is None:
            made = self._made[request.id] = self._make(request)
            if len(self._made) > KEPT:
                self._made.popitem(last=False)
        return made

    def _make(self, request: Request) -> list[int]:
        total = request.prompt + request.output
        tokens: list[int] = []
        parent = b""
        for number, (first, page_hash) in enumerate(request.pages):
            seed = page_hash or b"rest of %d %d" % (request.id, number)
            words = self._random(seed, min(self.page, total - len(tokens)))
            if first and words:
                words[0] = self._first(parent, first)
            tokens += words
            parent = page_hash or b"?%d" % request.id
        # A request that has not ended has no hashes for its answer.
        tokens += self._random(b"answer %d" % request.id, total - len(tokens))
        if request.how is How.STOP and tokens[-1] in tokens[request.prompt : -1]:
            tokens[-1] = SPARE_STOP
        return tokens

    def _first(self, parent: bytes, first: bytes) -> int:
        taken = self._firsts.setdefault(parent, {})
        if first not in taken:
            used = set(taken.values())
            if len(used) >= self.words:
                raise TooFewWords(f"more than {self.words} pages behind one")
            word = self._random(b"first" + first, 1)[0]
            while word in used:
                word = FIRST_WORD + (word - FIRST_WORD + 1) % self.words
            taken[first] = word
        return taken[first]

    def _random(self, seed: bytes, count: int) -> list[int]:
        if count <= 0:
            return []
        raw = hashlib.shake_128(seed).digest(4 * count)
        return [FIRST_WORD + n % self.words for n in struct.unpack(f"<{count}I", raw)]
