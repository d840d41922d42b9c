"""What the autopsy of a CUDA core dump changes in the dump's finding: CAUSE, FIX and NEXT.

The finding was made before the core dump was read. What the tracers had said stays, behind what the
core dump says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from g4debug.findings.kinds import KINDS, PAGE
from g4debug.findings.record import SCHEMA, Autopsy, Finding, TrapRecord
from g4debug.tracers.flight_recorder.assert_evidence import Asserted
from g4debug.tracers.flight_recorder.report import BLOCKING, NOT_KNOWN

BY_CORE = "By the CUDA core dump"  # begins the line in CAUSE
LIKELY = "most likely"
NAMED = "CUDA core dump: "  # begins the line of the file, see coredump.core_dump
REMOVED = ". It is removed once its autopsy is in this dump (G4DEBUG_CORE=keep keeps it)"
READ = "; it was read, and AUTOPSY has what it says"


def with_autopsy(record: TrapRecord, found: Autopsy) -> TrapRecord:
    """The record with the autopsy of its CUDA core dump. Doing it again changes nothing more.

    A driver that writes a core dump reports a failed assertion as "unspecified launch failure". If
    the core dump says that it was an assertion, so does the finding. If it does not, the lookups,
    which were kept in case of one, go.
    """
    whole = replace(record, autopsy=found, schema=SCHEMA)
    finding = record.finding
    kind = KINDS.get(finding.check, {}).get(finding.kind)
    if kind is None or not kind.died:  # a tracer's finding has a cause of its own
        return whole
    if found.of_assertion:
        return _asserted(whole) if finding.kind == "cuda-error" else whole
    if finding.kind == "cuda-error":
        whole = replace(whole, lookups=())
    return replace(whole, finding=_with_cause(finding, found))


def _asserted(record: TrapRecord) -> TrapRecord:
    finding = record.finding
    said = Asserted((), record.lookups, "its error named no assertion, and the CUDA core dump did")
    known = KINDS[finding.check]["device-assert"].finding(
        site=finding.site,
        headline=": ".join([*finding.headline.split(": ", 2)[:2], said.headline()]),
        location=finding.location,
        expected=finding.expected,
        got="\n".join([finding.got, said.words()]),
        history=finding.history,
        cause="\n".join([said.cause(), *_as_read(finding.cause, record.autopsy)]),
        next_command=finding.next_command,
    )
    return replace(record, finding=replace(known, owner=finding.owner))


def _with_cause(finding: Finding, found: Autopsy) -> Finding:
    before = [
        line for line in _as_read(finding.cause, found) if not line.startswith((BY_CORE, NOT_KNOWN))
    ]
    known = KINDS[finding.check][finding.kind].reference
    reference, command = known, finding.next_command
    if found.fits:
        also = "".join(f", and so may '{heading}'" for heading in found.fits[1:])
        reference = f"{PAGE}, '{found.fits[0]}' fits the core dump{also}; else {known}"
        if command == BLOCKING:  # which would name the kernel, and that is known now
            command = f'g4debug triage "{found.fits[0]}"'
    return replace(
        finding,
        cause="\n".join([_cause(found), *before]),
        reference=reference,
        next_command=command,
    )


def _cause(found: Autopsy) -> str:
    """What the core dump says of the cause, no surer than it is. One line."""
    kernel = f"the kernel {found.kernel}" if found.kernel else "the kernel"
    if found.cause:
        return f"{BY_CORE}, {LIKELY}: {found.cause.removeprefix(f'{LIKELY}: ')}"
    if found.pages > 0:
        return f"{BY_CORE}: {found.verdict}. Why, it does not tell."
    if found.where.removeprefix(f"{LIKELY} ").startswith("not a KV page"):
        return f"{BY_CORE}: {found.verdict}. Look at {kernel}."
    return f"{BY_CORE} it is not known why {kernel} faulted. What is known: {found.verdict}"


def _as_read(cause: str, found: Autopsy | None) -> Iterator[str]:
    """The lines of a cause; the one of the core dump, which was there before that was read, says so
    now, and names no file that may be gone.
    """
    for line in cause.split("\n"):
        if not line.startswith(NAMED) or found is None or READ in line:
            yield line
        elif line.endswith(REMOVED):
            yield (
                f"{NAMED}{found.core}{READ}. A server that reads it by itself removes it "
                "(G4DEBUG_CORE=keep keeps it)"
            )
        elif line.startswith(f"{NAMED}none yet"):
            yield f"{NAMED}{found.core}{READ}"
        else:
            yield f"{line}{READ}"
