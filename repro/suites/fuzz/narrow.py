"""Servers whose pools are small: whoever stands there must be told.

Such a server may stand: SGLang's scheduler goes round, and no request gets on. Half of the servers
run without the fixes. A request without an answer, while nobody else gets one either, must be told
by the flight recorder, as ``hang`` or ``starved``; and a server on which each request got its
answer must not have been accused. Both are checks of the same thing from its two sides. With the
fixes nobody may stand. If only a few stood, the run proves nothing of those who tell it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import render
from harness.processes import Outcome
from harness.render import Block
from harness.tracers import RECORDS, says_it_stands
from harness.verdicts import not_completed
from rich.console import Console

from g4debug.dumps import reading
from g4debug.findings.record import Finding
from suites.fuzz import page
from suites.fuzz.narrow_draw import fixed, words
from suites.fuzz.narrow_variant import STANDS
from suites.healthy.run import launch

MODULE = "suites.fuzz.narrow_variant"
TIMEOUT = 400.0  # seconds of one server
HANG = 5  # seconds; G4DEBUG_HANG_SECONDS
ONE_IN = 5  # servers; of so many one must have stood, so 10 of 50


@dataclass(frozen=True)
class Seen:
    """What came of a server. told: seconds from its last batch to the finding that it stands, if
    that is known. reason: what that finding says of the first request.
    """

    seed: int
    good: bool
    text: str
    seconds: float
    requests: int = 0
    refused: int = 0
    stood: int = 0
    told: float | None = None
    reason: str = ""

    @property
    def words(self) -> str:
        return words(self.seed)

    @property
    def fixed(self) -> bool:
        return fixed(self.seed)


def run(console: Console, first: int, servers: int, folder: Path, out: Path | None = None) -> bool:
    """True if nothing is bad, and enough of them stood. out: where the page is written."""
    seeds, found = range(first, first + servers), list[Seen]()
    for seed in seeds:
        seen = one(seed, folder / str(seed))
        found.append(seen)
        render.block(console, Block(str(seed), seen.good, seen.text, seen.words, seen.seconds))
    short = too_few(found)
    total = f"{said(found)} {short}".rstrip()
    render.say(console, total, style="bold red" if short else "")
    if out is not None:
        page.narrow(out, seeds, found, total, HANG, STANDS)
        render.for_copying(console, "The page is in:", str(out))
    return not short and all(seen.good for seen in found)


def said(found: Sequence[Seen]) -> str:
    """The whole run, in sentences."""
    bare, mended = [s for s in found if not s.fixed], [s for s in found if s.fixed]
    stood = [s for s in bare if s.stood]
    bad = [str(s.seed) for s in found if not s.good]
    times = sorted(s.told for s in stood if s.told is not None)
    text = f"Of {len(bare)} servers without the fixes {len(stood)} stood"
    text += f", of {len(mended)} with them {sum(s.stood > 0 for s in mended)}."
    if times:
        text += f" It was told {times[0]:.1f} to {times[-1]:.1f} s after the last batch."
    return text + (f" Bad: {', '.join(bad)}." if bad else " Nothing is bad.")


def too_few(found: Sequence[Seen]) -> str:
    """That the run proves nothing; '' if enough servers without the fixes stood."""
    stood = sum(s.stood > 0 for s in found if not s.fixed)
    needed = max(1, len(found) // ONE_IN)
    if stood >= needed:
        return ""
    return (
        f"It proves nothing: {stood} of {len(found)} servers stood, and at least {needed} must, "
        "or nobody knows whether a stand-still would be told."
    )


def one(seed: int, folder: Path) -> Seen:
    """Run the server of a seed."""
    environ = {"G4DEBUG_HANG_SECONDS": str(HANG), "G4DEBUG_STARVED_STEPS": "300"}
    if not fixed(seed):
        environ["G4DEBUG_FIXES"] = "none"
    ran = launch(MODULE, {"seed": seed}, environ, True, folder, TIMEOUT, warm=True)
    return judge(seed, ran, folder)


def judge(seed: int, ran: Outcome, folder: Path) -> Seen:
    records = [reading.read(path) for path in sorted((folder / "dumps").glob("*.pt"))]
    findings = [r.finding for r in records]
    told = [f for f in findings if says_it_stands(f)]
    other = [f for f in findings if f.check != RECORDS]
    if other:
        return Seen(seed, False, f"A finding: {other[0].headline}", ran.seconds)
    if not ran.completed:
        # SGLang has errors of its own in such pools; the flight recorder's dump tells of them. Only
        # of a server that never ends it tells enough that it stands.
        why = findings if ran.status is None else [f for f in findings if f not in told]
        text = f"{not_completed(ran)} {why[0].headline if why else 'Nothing told it.'}"
        return Seen(seed, bool(why), text, ran.seconds)
    result, good = ran.result, True
    asked, stood, refused = result["requests"], result["stood"], len(result["refused"])
    text = f"{asked} requests, {refused} refused, {stood} stood"
    if stood and not told:
        good, text = False, f"{text}: that was not told."
    elif told and not stood:
        good, text = False, f"{text}, but it was told: {told[0].headline}"
    elif stood and fixed(seed):
        good, text = False, f"{text}, with the fixes: {told[0].headline}"
    else:
        text += f": {told[0].headline}." if told else "."
    why_it_stands = reason(told[0]) if told else ""
    return Seen(seed, good, text, ran.seconds, asked, refused, stood, result["told"], why_it_stands)


def reason(finding: Finding) -> str:
    """What a finding says of the cause, without names and figures, so that equal ones are equal."""
    known = re.search(r"as sglang #\d+", finding.cause)
    lacks = re.search(r"(?:of|free enough:) the ([\w ]+? pool)", finding.cause)
    fix = re.search(r"the fix ([\w-]+) is for such a request", finding.cause)
    text = "a deadlock" if "A deadlock." in finding.cause else "no reason"
    text += f" in the {lacks[1]}" if lacks else ""
    text += f", {known[0]}" if known else ""
    return text + (f", for which there is {fix[1]}" if fix else "")
