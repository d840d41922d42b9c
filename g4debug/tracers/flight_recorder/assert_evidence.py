"""The evidence about an assertion that failed in a kernel: CUDA's words, and the suspected lookup.

From host memory alone, as everything here. ``g4debug show --log`` makes one of a dump and a log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from g4debug.findings.record import DeviceAssert, Evidence, Lookup, TrapRecord
from g4debug.tracers.flight_recorder import device_asserts as words
from g4debug.tracers.flight_recorder import lookups

SOME = 3  # assertions that are named in the finding; ASSERTS has all


@dataclass(frozen=True)
class Asserted:
    """asserts: the different ones that were printed. why: why there are none, if there are none.

    shared: other processes print to the same file. judged: what ``lookups.judge`` says.
    """

    asserts: tuple[DeviceAssert, ...]
    judged: tuple[Lookup, ...]
    why: str = ""
    shared: bool = False

    @property
    def evidence(self) -> Evidence:
        return Evidence(asserts=self.asserts, lookups=self.judged)

    @property
    def about_an_index(self) -> bool:
        """True if one of them is about the index of a lookup, or if there are none."""
        return not self.asserts or any(words.sorts(one) for one in self.asserts)

    def headline(self) -> str:
        """The end of the finding's first line."""
        if not self.asserts:
            return "an assertion failed in a kernel (device-side assert)"
        first = self.asserts[0]
        index = words.about_an_index(first)
        what = "an index was out of range" if index else "an assertion failed"
        return f"{what} in a kernel (device-side assert `{first.expression}`, {words.place(first)})"

    def words(self) -> str:
        """The assertions that were printed, or why they are not here, for GOT. One line."""
        if not self.asserts:
            return (
                f"What CUDA printed about the assertion is not here, because {self.why}. The "
                "server's log may have it: g4debug show <dump> --log <the log>"
            )
        n = words.total(self.asserts)
        named = ", ".join(f"`{x.expression}` ({words.place(x)})" for x in self.asserts[:SOME])
        more = len(self.asserts) - SOME
        said = f"{n:,} thread{'s' * (n != 1)} printed: {named}"
        if more > 0:
            said += f" and {more} more"
        if self.shared:
            said += ". Other ranks print to the same file, so some of it may be theirs"
        return said

    def cause(self) -> str:
        """The lookup that the evidence singles out, or that it does not. One line."""
        if not self.about_an_index:
            return "The assertion is not about the index of a lookup. Its text says what it checks."
        return lookups.sentence(self.judged)


def with_log(record: TrapRecord, log: str) -> TrapRecord:
    """The record of a device assert, with the assertions from its server's log.

    The lookups are judged again, and the finding's words follow. Raises ValueError, which says
    why, if the log has no assertion.
    """
    finding = record.finding
    found = words.parse(log)
    if not found:
        raise ValueError("no line of it reads `file:line: kernel: block: […] … Assertion … failed`")
    before = Asserted(record.asserts, record.lookups)
    known = {**record.defaults, **record.arguments}
    sizes = (known.get(name, 1) for name in ("tp_size", "dp_size", "pp_size"))
    shared = any(isinstance(size, int) and size > 1 for size in sizes)
    after = Asserted(found, lookups.judge(record.lookups, found), shared=shared)
    return replace(
        record,
        asserts=found,
        lookups=after.judged,
        finding=replace(
            finding,
            headline=finding.headline.replace(before.headline(), after.headline()),
            got="\n".join([finding.got.partition("\n")[0], after.words()]),
            cause=finding.cause.replace(before.cause(), after.cause()),
        ),
    )
