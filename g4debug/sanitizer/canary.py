"""Shared by the canaries of the tracers with a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from g4debug.dumps import reading
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Chain, parse
from g4debug.findings.record import TrapRecord
from g4debug.sanitizer.device_check import DeviceCheck
from g4debug.tracers.base import CanaryError
from g4debug.trapping.trap import TrapError


def caught(
    tracer: DeviceCheck[Any, Any],
    check: Callable[[], object],
    corrupt: Callable[[Injection], object],
    fault: Fault,
    kind: str,
) -> TrapRecord:
    """Check a forward before and after the fault. Returns the dump of its finding.

    Raises CanaryError if the fault is not found, or as another kind.
    """

    def error() -> TrapError | None:
        try:
            check()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            tracer.poll()
        except TrapError as e:
            return e
        return None

    if error() is not None:
        raise CanaryError("a sound forward was reported as broken")
    name = fault.id
    injection = Injection(fault, Chain(parse(f"{name}=1*on").chains[name], 0, name), 0)
    corrupt(injection)
    if not injection.schedule:
        raise CanaryError(f"the fault {name} did not fire")
    found = error()
    if found is None:
        raise CanaryError(f"the fault {name} was not found")
    if found.finding.kind != kind:
        raise CanaryError(f"the fault {name} was found as {found.finding.kind}, not {kind}")
    if found.path is None:
        raise CanaryError(f"the fault {name} was found, but not dumped: {found.problem}")
    return reading.read(found.path)
