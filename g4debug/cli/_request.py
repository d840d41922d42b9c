"""Follows one request through a running scheduler, for ``g4debug doctor --request``."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import TYPE_CHECKING

from g4debug.cli import CliError, trace
from g4debug.cli._running import look
from g4debug.cli._tape import dump_of
from g4debug.dumps import reading

if TYPE_CHECKING:
    from g4debug.findings.record import TrapRecord


def follow(pid: int, rid: str, args: argparse.Namespace) -> None:
    """Print the request's way by a dump that the schedulers below the process ``pid`` write.

    Of several schedulers that decide for themselves, the first one that knows it is shown.
    """
    from g4debug.reporters import way

    schedulers = look(pid).schedulers
    if not schedulers:
        raise CliError(f"no scheduler at or below process {pid} shows a status")
    # The tensor-parallel ranks of one data-parallel rank have the same requests.
    first_of = {p.rank.partition("dp ")[2]: p for p in reversed(schedulers)}
    records = {p.pid: _record(p.pid) for p in reversed(first_of.values())}
    known = {one: record for record in records.values() for one in way.known_requests(record)}
    source = "scheduler " + ", ".join(map(str, records))
    trace.show(known[trace.one_of(list(known), rid, source)], rid, source, args)


def _record(pid: int) -> TrapRecord:
    path = dump_of(pid)
    try:
        return reading.read(path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
