"""Proves that the flight recorder works: it must dump when an exception looks like a CUDA error.

The tracer, the recorder, the trap and the dump are the real ones. The scheduler, its batches and
the error are stand-ins. (A real CUDA error would cost this process its CUDA context.)
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from g4debug.dumps import heads, reading
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.flight_recorder.tracer import FlightRecorder

LENGTHS = (130, 1, 512)
STEPS = 3


def fire(folder: Path, device: torch.device) -> str:
    """Raise the error, expect a dump with the steps in ``folder``. Returns what was seen."""
    context = Context.alone("flight-recorder", Settings(debug=True, debug_dir=folder))
    tracer = FlightRecorder(context)
    for step in range(STEPS):
        context.recorder.begin_step(_batch(step))
    try:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    except RuntimeError:
        tracer.on_loop_exception()
    found = sorted(folder.glob(f"*{heads.SUFFIX}"))
    if len(found) != 1:
        raise CanaryError(f"expected one dump, got {len(found)}")
    record = reading.read(found[0])
    if record.finding.kind != "cuda-error":
        raise CanaryError(f"it took a CUDA error for {record.finding.kind}")
    lengths = [step.seq_lens for step in record.steps]
    if lengths != [tuple(n + step for n in LENGTHS) for step in range(STEPS)]:
        raise CanaryError(f"the dump does not have the steps that ran: {lengths}")
    return f"a CUDA error left a dump with the last {len(lengths)} steps; dump read back"


def _batch(step: int) -> SimpleNamespace:
    requests = [SimpleNamespace(rid=f"r{i}", req_pool_idx=i) for i in range(len(LENGTHS))]
    return SimpleNamespace(
        reqs=requests,
        seq_lens_cpu=torch.tensor(LENGTHS) + step,
        forward_mode=SimpleNamespace(name="DECODE"),
        spec_info=None,
    )
