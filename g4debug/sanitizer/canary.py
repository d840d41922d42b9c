"""Shared by the canaries of the tracers with a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from g4debug.faults.base import Fault, Injection
from g4debug.findings.record import TrapRecord
from g4debug.sanitizer.device_check import DeviceCheck
from g4debug.tracers.base import CanaryError
from g4debug.tracers.canary import found, must_have_fired, once, sound


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

    def checked() -> None:
        check()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        tracer.poll()

    with sound("a sound forward"):
        checked()
    injection = once(fault)
    corrupt(injection)
    must_have_fired(injection)
    record = found(checked, f"the fault {fault.id}")
    if record.finding.kind != kind:
        raise CanaryError(f"the fault {fault.id} was found as {record.finding.kind}, not {kind}")
    return record
