"""The hashes of pages on the tape, made when the host has nothing better to do.

A prompt of 8,000 tokens takes some 0.3 ms to hash. So when it comes, its event on the tape gets
room for its hashes, whose length is known. They are put there while the GPU computes: behind the
launch of the next step, or with overlap scheduling when a result was processed behind that launch.
Whoever reads the tape before that has them made at once.

Another thread may read, and so may a signal handler in the middle of anything here. So a hash that
is made twice is the same one at the same place, and what is not complete is not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from g4debug.findings import tape
from g4debug.findings.tape import How

# Of them, with copies of their tokens, are made although no step comes. So many end in one step.
MANY = 256


@dataclass
class Live:
    """A request that has not ended. prompt: its tokens. hashed: the hashes that go on, and the
    prompt's tokens that are not in them yet, as ``tape.packed`` gives them; None until they are
    made.

    Not the whole prompt: SGLang lets go of some requests without a word.
    """

    id: int
    prompt: int
    salt: str = ""
    hashed: tuple[tape.Chain, bytes] | None = None


@dataclass(eq=False)
class _Due:
    """Room for hashes: ``size`` bytes of ``chunk`` from ``at`` on. tokens: of the prompt, or, if it
    is known already, of the answer."""

    chunk: bytearray
    at: int
    size: int
    live: Live
    tokens: Sequence[int]
    ends: bool


class DueHashes:
    """key, page, firsts: of ``tape.Chain``."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.page, self.firsts = 1, False
        self._due: deque[_Due] = deque()
        self._added = 0
        self._cut = -1  # the last chunk is complete up to here; -1: all of it is

    def request(self, ring: tape.Ring, event: bytes, live: Live, tokens: Sequence[int]) -> None:
        """Put the event of a request on the tape. tokens: of its prompt."""
        self._add(ring, event, live, tokens, ends=False)

    def end(self, ring: tape.Ring, live: Live, output: Sequence[int], how: How) -> None:
        """Put the end of a request on the tape. output: the tokens that it got."""
        event = tape.end(live.id, len(output), how, live.prompt)
        self._add(ring, event, live, output, ends=True)

    def _add(
        self, ring: tape.Ring, event: bytes, live: Live, tokens: Sequence[int], ends: bool
    ) -> None:
        before = live.prompt if ends else 0
        size = tape.hash_bytes(self.page, before + len(tokens), before, self.firsts)
        now = ring.now
        self._cut = begin = len(now)
        now += event + bytes(size)
        # A copy: SGLang may shorten a prompt that is too long where it is.
        self._due.append(_Due(now, begin + len(event), size, live, tokens[:], ends))
        self._added += 1
        self._cut = -1
        if len(self._due) >= MANY:
            self.make()

    def make(self) -> None:
        """Make all that are due."""
        while self._due:
            try:
                due = self._due[0]
            except IndexError:  # another thread has made it meanwhile
                return
            hashes = self._hashes(due)
            if len(hashes) != due.size:
                raise ValueError(f"got {len(hashes)} bytes of hashes, expected {due.size}")
            due.chunk[due.at : due.at + due.size] = hashes
            try:
                self._due.remove(due)
            except ValueError:
                continue

    def _hashes(self, due: _Due) -> bytes:
        live = due.live
        if due.ends:
            return self._of_answer(live, due.tokens)
        raw = tape.packed(due.tokens)
        chain = tape.Chain(self.key, self.page, self.firsts, live.salt)
        hashes = chain.feed_packed(raw)
        live.hashed = chain, raw[4 * chain.done :]
        return hashes

    def _of_answer(self, live: Live, output: Sequence[int]) -> bytes:
        """They go on where those of the prompt end, which are made before them."""
        assert live.hashed is not None
        chain, rest = live.hashed
        return chain.copy().feed_packed(rest + tape.packed(output), live.prompt)

    def ending(self, live: Live, output: Sequence[int], how: How) -> bytes:
        """The end of a request that has not ended, for a copy of the tape. Its prompt is hashed."""
        event = tape.end(live.id, len(output), how, live.prompt)
        return event + self._of_answer(live, output)

    def chunks(self, ring: tape.Ring) -> list[bytes]:
        """The tape, chunk by chunk, with all hashes that it has room for."""
        while True:
            added = self._added
            self.make()
            chunks, cut = ring.chunks(), self._cut
            if added == self._added:  # else the copy may have room whose hashes came later
                return chunks if cut < 0 else [*chunks[:-1], chunks[-1][:cut]]
