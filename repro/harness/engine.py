"""A child that serves one workload: it starts an engine, generates and writes the result."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.arguments import as_named_here
from harness.processes import UP
from harness.workload import Make, Workload


@contextmanager
def running(arguments: Mapping[str, Any], of: Any = None) -> Iterator[Any]:
    """``sgl.Engine``, or another class, which is shut down at the end."""
    import sglang

    engine = (of or sglang.Engine)(**as_named_here(arguments))
    print(UP, flush=True)
    try:
        yield engine
    finally:
        engine.shutdown()


def greedy(tokens: int) -> dict[str, Any]:
    """Sampling parameters: the likeliest token each time, until there are so many."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def flush(engine: Any, seconds: float = 60.0) -> None:
    """Empty the prefix cache. Raises RuntimeError if the server is not idle within that time.

    The last answer is sent before the scheduler counts itself as idle, so on a busy machine it may
    refuse, and then the caches stay full. It is asked again here; a flush that SGLang lets wait is
    something that no tape can carry.
    """
    end = time.monotonic() + seconds
    while not (done := engine.flush_cache()).success:
        if time.monotonic() > end:
            raise RuntimeError(f"the caches were not flushed in {seconds:.0f} s: {done.message}")
        time.sleep(0.1)


def made(device: str, workload: str, requests: int) -> Workload:
    """The workload ``MODULE`` or ``MODULE:NAME``, a module below ``repro/``.

    NAME (``DEVICES`` if it is not given) is a dict in that module: from the device to a function
    that takes the number of requests and returns a Workload.
    """
    module, _, name = workload.partition(":")
    devices: dict[str, Make] = getattr(importlib.import_module(module), name or "DEVICES")
    return devices[device](requests or None)


def main(device: str, result: Path, workload: str, requests: int) -> None:
    served = made(device, workload, requests)
    importlib.import_module("sglang")  # its import is no part of the engine's start
    begin = time.perf_counter()
    with running(served.engine) as engine:
        up = time.perf_counter()
        prompts, lengths = served.prompts(), served.output
        lengths = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
        sampling = [greedy(n) for n in lengths]
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        done = time.perf_counter()
    accepted = [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]
    found = {
        "tokens": [o["output_ids"] for o in outputs],
        "accept_length": sum(accepted) / len(accepted),
        "start_s": up - begin,
        "generate_s": done - up,
    }
    result.write_text(json.dumps(found))
