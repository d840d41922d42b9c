"""A child that serves one workload for a limited time: a server that serves nobody ends by nothing.

Its result has ``tokens``, the answers that came (None for a request without one), and ``unserved``,
how many did not come within ``PATIENCE`` seconds. Then ``turns`` says whether the scheduler still
answers what the server asks it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from harness.engine import greedy, made, running
from harness.workload import Workload

PATIENCE = 40.0  # seconds from the first request on; where nothing is wrong, it takes two
ASKED = 10.0  # seconds until the scheduler must have said how it is


async def serve(engine: Any, served: Workload) -> dict[str, Any]:
    assert isinstance(served.output, int)
    sampling = greedy(served.output)
    waiting: list[asyncio.Future[Any]] = []
    for ids in served.prompts():
        if waiting and served.in_turns:
            await asyncio.wait(waiting, timeout=PATIENCE)
        one = engine.async_generate(input_ids=ids, sampling_params=sampling)
        waiting.append(asyncio.ensure_future(one))
    done, late = await asyncio.wait(waiting, timeout=PATIENCE)
    found: dict[str, Any] = {
        "tokens": [f.result()["output_ids"] if f in done else None for f in waiting],
        "unserved": len(late),
        "accept_length": 1.0,
    }
    if late:
        asked = asyncio.ensure_future(engine.tokenizer_manager.get_internal_state())
        found["turns"] = asked in (await asyncio.wait([asked], timeout=ASKED))[0]
        for one in (*late, asked):
            one.cancel()
    return found


def main(device: str, result: Path, workload: str, requests: int) -> None:
    served = made(device, workload, requests)
    with running(served.engine) as engine:
        result.write_text(json.dumps(engine.loop.run_until_complete(serve(engine, served))))
