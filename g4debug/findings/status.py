"""The live status of this process: what each tracer can judge now, and how much it has checked.

There is one :class:`Status` in a process, at ``recorder.status``. A tracer reaches its own part of
it through its ``Context``: ``limit``, ``off`` and ``checked``. A change is logged once, in one
line. Every dump holds the status.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# A bug of ours must not fill the memory or the log with limits that are made anew in every step.
MAX_LIMITS = 32
MAX_TEXT = 500  # characters of a reason
LEDGER = "ledger"
STEPS = "step-recorder"
TAPE = "tape"
_CALLED = {LEDGER: "the page ledger", STEPS: "the step recorder", TAPE: "the tape"}
logger = logging.getLogger("g4debug")


@dataclass(frozen=True)
class Limit:
    """The checks that are left to a tracer, or those that it lacks, and since which step."""

    what: str
    why: str
    step: int = -1  # 0: since the start, before the first step
    documented: bool = False  # it is so on every server of this kind, and nothing has failed


@dataclass(frozen=True)
class Checked:
    """How many things of one sort a tracer has checked, and in which step the last one was."""

    what: str  # a plural: "tables"
    count: int
    step: int = -1


@dataclass(frozen=True)
class TracerStatus:
    """The status of a tracer, the page ledger or the step recorder when the dump was written."""

    name: str
    mode: str = ""  # of a tracer that is armed; '' for the ledger and the step recorder
    limits: tuple[Limit, ...] = ()
    off: str = ""  # why it is off, '' if it is not
    off_step: int = -1
    audited: int = -1  # the step in which its hooks were last looked at, -1 for never
    dead: tuple[str, ...] = ()  # "site: why" of each of its hooks that did not run then
    checked: tuple[Checked, ...] = ()
    findings: dict[str, int] = field(default_factory=dict)  # kind -> how many
    silent: tuple[str, ...] = ()  # where it judges nothing, and nobody knows why
    nothing: str = ""  # what it could judge besides, and why this server has none of it
    declined: bool = False  # it is off on every server of this kind, and nothing has failed

    def plain(self) -> dict[str, Any]:
        """What ``dataclasses.asdict`` gives, in a tenth of its time: a scheduler waits for it."""
        limits, checked = ([dict(vars(one)) for one in of] for of in (self.limits, self.checked))
        return {**vars(self), "limits": limits, "checked": checked, "findings": {**self.findings}}

    @property
    def sound(self) -> bool:
        """True if it judges what it can on a server of this kind, and no hook is known to be dead.

        The server may have nothing of that. One that judges nothing of what there is, is not sound,
        even if that is documented.
        """
        off = self.off and not self.idle
        limited = any(not x.documented for x in self.limits)
        return not (off or limited or self.dead or self.silent)

    @property
    def whole(self) -> bool:
        """True if it judges all that this server has for it."""
        return self.sound and not self.limits

    @property
    def idle(self) -> bool:
        """True if it is off for no other reason than that this server has nothing for it."""
        return bool(self.off) and self.off == self.nothing

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it does not judge, or all that is left to it, without the reasons."""
        hooks = (f"nothing of {x.partition(': ')[0]}" for x in self.dead)
        return (*(x.what for x in self.limits), *hooks, *self.silent)

    @property
    def state(self) -> str:
        """In words, without the counts of checks: ``armed: raise; limited: ranges only (why)``."""
        if self.idle:
            return f"nothing to judge: {self.nothing}"
        if self.off:
            return f"off{_how(self.declined, self.off_step)}: {self.off}"
        said = [f"armed: {self.mode}" if self.mode else "on"]
        said += [f"limited{_how(x.documented, x.step)}: {x.what} ({x.why})" for x in self.limits]
        said += [f"its hook does not run at {x}" for x in self.dead]
        said += [f"judges nothing {x}" for x in self.silent]
        said += [f"nothing to judge: {self.nothing}"] if self.nothing else []
        return "; ".join(said)


def _how(documented: bool, step: int) -> str:
    return (", as documented" if documented else "") + _since(step)


def _since(step: int) -> str:
    return f" since step {step}" if step > 0 else ""


class Clock(Protocol):
    """Knows the number of the step that has begun last: the recorder of the steps."""

    step: int


class Tally:
    """How many things of one sort were checked, and in which step the last one was.

    Add to the fields directly where a call would cost too much.
    """

    __slots__ = ("count", "step")

    def __init__(self) -> None:
        self.count = 0
        self.step = -1


class Part:
    """The status of one tracer, of the page ledger, or of the step recorder.

    mode: what a finding does, for a tracer that is armed. '' for the two that make no findings.
    tallies: what was checked -> how often.
    """

    def __init__(self, name: str, status: Status) -> None:
        self.name = name
        self.mode = ""
        self.tallies: dict[str, Tally] = {}
        self.captured: set[str] = set()  # modes of the forwards with a check in their CUDA graphs
        self._status = status
        self._limits: dict[str, Limit] = {}
        self._off: Limit | None = None
        self._nothing = ""
        self._audited = -1
        self._dead: dict[str, str] = {}  # site -> why our hook does not run there
        self._dependents: list[tuple[Part, str]] = []
        # (what of it, mode of a batch) -> the first step without a check
        self._silent: dict[tuple[str, str], int] = {}
        # Gives the reason if it is right that nothing is judged now in steps of this mode, '' if it
        # is not. Set by a tracer that may rest.
        self.rests: Callable[[str], str] = lambda mode: ""

    @property
    def is_off(self) -> bool:
        return self._off is not None

    def checked(self, n: int = 1, what: str = "checks") -> None:
        """Count ``n`` things that were checked. ``what``: a plural, for example "tables"."""
        tally = self.tallies.get(what) or self.tally(what)
        tally.count += n
        tally.step = self._status.clock.step

    def tally(self, what: str) -> Tally:
        """The count of the things that are called ``what``."""
        return self.tallies.setdefault(what, Tally())

    def limit(
        self,
        what: str,
        why: str,
        error: BaseException | None = None,
        *,
        quiet: bool = False,
        documented: bool = False,
    ) -> None:
        """Something is not judged any more, or was never judged here.

        what: the checks that are left, or those that are missing ("ranges only"). why: the reason.
        error: the failure of ours that it comes from; it is logged with its traceback. quiet: do
        not log it, because the caller says it for several parts at once. documented: it is so on
        every server of this kind, and the documentation says it.
        """
        what, why = what[:MAX_TEXT], why[:MAX_TEXT]
        if self._limited(what, why, documented) and not self.is_off and not quiet:
            self._tell(f"is limited{_since(self._status.clock.step)}: {what}: {why}", error)

    def lift(self, what: str, why: str, *, quiet: bool = False) -> None:
        """A limit is over. quiet: do not log it."""
        if self._limits.pop(what, None) is not None:
            self._status.changes += 1
            if not quiet:
                self._tell(f"is not limited any more{_since(self._status.clock.step)}: {why}")

    def off(
        self, why: str, error: BaseException | None = None, *, documented: bool = False
    ) -> None:
        """Nothing is judged any more. Only the first reason counts, later ones follow from it.

        documented: as of :meth:`limit`.
        """
        if self._off is not None:
            return
        why = why[:MAX_TEXT]
        self._switch_off(why, documented)
        affected = [part._lose(self, remains, why) for part, remains in self._dependents]
        also = f"; so {', '.join(affected)}" if affected else ""
        self._tell(f"is off{_since(self._status.clock.step)}: {why}{also}", error)

    def nothing(self, why: str, off: bool = False) -> None:
        """This server has nothing of what it judges, or of a part of that: no draft, one rank.

        That is no limit: whatever is there is judged. off: it judges nothing at all.
        """
        if not self._nothing:
            self._nothing = why[:MAX_TEXT]
            self._status.changes += 1
            if off and not self.is_off:
                self._switch_off(self._nothing)

    def depends_on(self, other: Part, remains: str) -> None:
        """If ``other`` is switched off, this part is limited to ``remains``, or off if it is ''."""
        other._dependents.append((self, remains))

    def audited(self, dead: Mapping[str, str]) -> None:
        """The hooks were looked at. ``dead``: site -> why our hook does not run there.

        This logs nothing: whoever looks says it once for all parts.
        """
        self._audited = self._status.clock.step
        shown = {site: why[:MAX_TEXT] for site, why in dead.items()}
        if shown != self._dead:
            self._dead = shown
            self._status.changes += 1

    def silent(self, mode: str, step: int, steps: int, what: str = "") -> None:
        """It has judged nothing in so many steps of a mode, beginning with ``step``. Told once.

        mode: of SGLang's batches, '' for all of them. what: of which things, '' for all of them.
        """
        if (what, mode) not in self._silent:
            self._silent[what, mode] = step
            said, had = f"judges nothing: it is armed, and in {steps} steps", "nothing"
            if what:
                said, had = f"judges no {what}: it is armed, and in {steps} steps", "none"
            self._tell(
                f"{said}{_of(mode)} since step {step} it had {had} to check, so it does not see "
                "what runs here; please report it with the launch command"
            )

    def heard(self, mode: str, what: str = "") -> None:
        """It judges again."""
        if self._silent.pop((what, mode), None) is not None:
            self._tell(f"judges {what + ' ' if what else ''}again{_of(mode)}")

    def record(self) -> TracerStatus:
        """This part, as a dump keeps it."""
        return TracerStatus(
            name=self.name,
            mode=self.mode,
            limits=tuple(self._limits.values()),
            off=self._off.why if self._off else "",
            off_step=self._off.step if self._off else -1,
            audited=self._audited,
            dead=tuple(f"{site}: {why}" for site, why in self._dead.items()),
            checked=tuple(
                Checked(what, t.count, t.step)
                for what, t in self.tallies.items()
                if t.count or not self.mode  # some tallies of a tracer may never be counted
            ),
            findings=self._status.findings_of(self.name),
            silent=tuple(
                f"{f'of {what} ' if what else ''}since step {step}{_of(mode)}"
                for (what, mode), step in self._silent.copy().items()
            ),
            nothing=self._nothing,
            declined=bool(self._off and self._off.documented),
        )

    def _limited(self, what: str, why: str, documented: bool = False) -> bool:
        """Enter a limit. False if it is known already."""
        before = self._limits.get(what)
        if before is None:
            if len(self._limits) >= MAX_LIMITS:
                return False
            self._limits[what] = Limit(what, why, self._status.clock.step, documented)
        elif why in before.why or before.why.count("; ") >= MAX_LIMITS:
            return False
        else:
            both = before.documented and documented
            self._limits[what] = Limit(what, f"{before.why}; {why}", before.step, both)
        self._status.changes += 1
        return True

    def _switch_off(self, why: str, documented: bool = False) -> None:
        self._off = Limit("", why, self._status.clock.step, documented)
        self._status.changes += 1

    def _lose(self, other: Part, remains: str, why: str) -> str:
        """A part that this one depends on is off. Returns what that means, in words."""
        why = f"{_CALLED.get(other.name, other.name)} is off: {why}"
        if remains:
            self._limited(remains, why)
            return f"{self.name} is limited: {remains}"
        if not self.is_off:
            self._switch_off(why)
        return f"{self.name} is off"

    def _tell(self, text: str, error: BaseException | None = None) -> None:
        self._status.changes += 1
        line = f"g4debug: {_CALLED.get(self.name, self.name)} {text}"
        if error is None:
            logger.warning("%s", line)
        else:
            logger.error(
                "%s. This is a failure of g4debug: serving goes on, please report it.",
                line,
                exc_info=error,
            )


def _of(mode: str) -> str:
    return f" of {mode} batches" if mode else ""


class Status:
    """The parts of this process.

    changes: grows with every change other than a count. findings: how often, by (check, kind).
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.parts: dict[str, Part] = {}
        self.findings: Counter[tuple[str, str]] = Counter()
        self.changes = 0
        self.watch = False  # the server was started with SGLANG_TRTLLM_MHA_DEBUG=watch
        self.serves = ""  # the model, attention backends and draft of this server, in words
        # Copies what a dump has, for whoever asks, and gives what writes it: that gives its path,
        # and why there is none, and may run in another thread. None: nobody can do so.
        self.snapshot: Callable[[], Callable[[], tuple[str, str]]] | None = None
        # Says that the server stands, '' if not; and which requests wait, since when and why.
        self.waits: Callable[[], tuple[str, list[str]]] = lambda: ("", [])

    def part(self, name: str) -> Part:
        """The part of a tracer, of the ledger or of the step recorder."""
        found = self.parts.get(name)
        if found is None:
            found = self.parts[name] = Part(name, self)
        return found

    def found(self, check: str, kind: str) -> None:
        """Count a finding, whether or not it is dumped."""
        self.findings[check, kind] += 1
        self.changes += 1

    def findings_of(self, check: str) -> dict[str, int]:
        """Kind -> how many findings of this tracer."""
        # A copy, because a thread may ask while the scheduler adds.
        return {kind: n for (name, kind), n in self.findings.copy().items() if name == check}

    def judged(self) -> str:
        """What is judged in this server, by tracer, in one line: ``Judged: page-table. …``."""
        armed = [r for r in self.records() if r.mode]
        full = [r for r in armed if r.whole and not r.idle]
        whole = ", ".join(r.name + (f" ({r.nothing})" if r.nothing else "") for r in full)
        told = [f"Judged: {whole or 'nothing in full'}"]
        partly = (r for r in armed if not (r.whole or r.off))
        told += [f"In part: {r.name} ({'; '.join(r.lacks)})" for r in partly]
        told += [f"Not judged: {r.name} ({r.off})" for r in armed if r.off and not r.idle]
        told += [f"Nothing to judge: {r.name} ({r.nothing})" for r in armed if r.idle]
        return ". ".join(told)

    def records(self) -> tuple[TracerStatus, ...]:
        """The parts, as a dump keeps them: the tracers in the order of arming, then the others.

        The ledger and the step recorder are left out as long as there is nothing to say about them.
        """
        parts = sorted(self.parts.values(), key=lambda p: not p.mode)
        found = (p.record() for p in parts)
        return tuple(r for r in found if r.mode or r.checked or r.off or r.limits or r.dead)
