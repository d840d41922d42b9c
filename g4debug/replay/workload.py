"""A part of what is on a tape, and when each event of it comes: what shrinking makes smaller."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from g4debug.findings.tape import (
    HASH,
    IGNORES_EOS,
    Abort,
    Flush,
    How,
    Recording,
    Request,
    page_bytes,
)

Event = Request | Abort | Flush
BEHIND = 3  # steps behind the last recorded one: a finding may be told later than it was made
IDLE = 200  # idle rounds at the end: a server counts its pages while it has nothing to do
LAGS = (0, 1, 3)  # rounds by which a server may see a request later than it was sent


@dataclass(frozen=True)
class After:
    """Let an event come when another one has happened.

    whose: a request's id, 0 for each request before it. tokens: that it has got, ENDED for its end,
    TOGETHER if the event comes with the one before it, whoever that is.
    """

    whose: int
    tokens: int

    ENDED = -1
    TOGETHER = -2

    @property
    def text(self) -> str:
        if self.tokens == self.TOGETHER:
            return "with the one before it"
        whose = f"request {self.whose} has" if self.whose else "all before it have"
        if self.tokens == self.ENDED:
            return f"when {whose} ended"
        return f"when {whose} {self.tokens} token{'s' * (self.tokens != 1)}"


@dataclass(frozen=True)
class Workload:
    """keep: the events, as indices of ``Recording.given``. cut: the names of pages left out.

    A page is left out of all requests that have it, so that they still have the same pages in
    common. rest: so many tokens of a prompt are behind its last full page, by the request's id.
    longest: a request ends after so many tokens and by nothing else. after: when an event comes,
    by its index; if it is not here, it comes as many rounds behind the event before it as it did
    there. accepted: what each verify accepts, () for what is recorded; several numbers are tried
    one after the other. lag: so many rounds later than ``after`` says.
    """

    keep: tuple[int, ...]
    cut: frozenset[bytes] = frozenset()
    rest: Mapping[int, int] = field(default_factory=dict)
    longest: Mapping[int, int] = field(default_factory=dict)
    after: Mapping[int, After] = field(default_factory=dict)
    accepted: tuple[int, ...] = ()
    lag: int = 0

    def ways(self) -> Iterator[Workload]:
        """How it may go on a server, where rounds and numbers of accepted tokens are not forced."""
        for lag in LAGS if self.after else LAGS[:1]:
            for accepted in self.accepted or (None,):
                forced = () if accepted is None else (accepted,)
                yield dataclasses.replace(self, lag=lag, accepted=forced)

    @classmethod
    def whole(cls, recording: Recording) -> Workload:
        return cls(tuple(range(len(recording.given))))

    def requests(self, recording: Recording) -> Iterator[tuple[int, Request]]:
        """The requests as they are in this workload, each with its index."""
        for index in self.keep:
            event = recording.given[index]
            if isinstance(event, Request):
                yield index, self._request(event, recording)

    def events(self, recording: Recording) -> list[tuple[Event, After | None]]:
        """The events as they are in this workload, in their order; None is for a round."""
        requests = dict(self.requests(recording))
        return [
            (requests.get(index, recording.given[index]), self.after.get(index))
            for index in self.keep
        ]

    def _request(self, request: Request, recording: Recording) -> Request:
        page, made = recording.page, _without(request, self.cut, recording)
        rest = self.rest.get(request.id)
        if rest is not None:
            full = made.prompt // page
            made = dataclasses.replace(
                made,
                prompt=max(1, full * page + rest),
                hashes=made.hashes[: full * page_bytes(page, recording.firsts)],
            )
        longest = self.longest.get(request.id)
        if longest is not None:
            options = made.options | IGNORES_EOS
            made = dataclasses.replace(
                made, output=longest, longest=longest, how=How.LENGTH, options=options
            )
        return made

    # --- as JSON ---------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        return {
            "keep": self.keep,
            "cut": sorted(page.hex() for page in self.cut),
            "rest": self.rest,
            "longest": self.longest,
            "after": {index: dataclasses.astuple(after) for index, after in self.after.items()},
            "accepted": self.accepted,
            "lag": self.lag,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Workload:
        def numbered(name: str) -> dict[int, Any]:
            return {int(key): value for key, value in plain[name].items()}

        return cls(
            tuple(plain["keep"]),
            frozenset(map(bytes.fromhex, plain["cut"])),
            numbered("rest"),
            numbered("longest"),
            {index: After(*after) for index, after in numbered("after").items()},
            tuple(plain["accepted"]),
            plain["lag"],
        )


def pages_of(request: Request, recording: Recording) -> Iterator[tuple[bytes, bytes]]:
    """Of each page with hashes: what names it on this tape, and its hashes.

    What names it hangs on all that is before it, too, as a small page's own hashes do not.
    """
    size, before = page_bytes(recording.page, recording.firsts), blake2b(digest_size=HASH)
    for at in range(0, len(request.hashes) - size + 1, size):
        hashes = request.hashes[at : at + size]
        before.update(hashes)
        yield before.digest(), hashes


def _without(request: Request, cut: frozenset[bytes], recording: Recording) -> Request:
    """The request without these pages. Something is left of its prompt, and of its answer."""
    page, prompt, output = recording.page, request.prompt, request.output
    kept, known = [], 0  # known: the bytes of full pages' hashes
    for number, (name, hashes) in enumerate(pages_of(request, recording)):
        known += len(hashes)
        if name not in cut:
            kept.append(hashes)
            continue
        mine = min(page, max(0, request.prompt - number * page))  # of the prompt, not the answer
        prompt, output = prompt - mine, output - (page - mine)
    if sum(map(len, kept)) == known:
        return request
    kept.append(request.hashes[known:])  # of the first token of a page that is not full
    output = max(output, min(1, request.output))
    longest = request.longest
    return dataclasses.replace(
        request,
        hashes=b"".join(kept),
        prompt=max(1, prompt),
        output=output,
        longest=longest if longest < 0 else max(1, longest - (request.output - output)),
    )
