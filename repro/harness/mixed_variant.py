"""One run of the mixed workload, in a process of its own.

``python repro/_mixed_variant.py RESULT.json REQUESTS WAVES ENGINE_JSON [SHAPE_JSON [DEVICE]]``:
WAVES times REQUESTS requests. Between two waves the server is idle. SHAPE_JSON: ``longest`` and
``output`` of :func:`_mixed.requests`. DEVICE: cpu (the default) or cuda. It writes what came out of
every request, and what each scheduler's tracers have checked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _checked import of_schedulers
from _mixed import engine, on_gpu, requests
from _run import end_with_the_script

IDLE_SECONDS = 0.5


def main() -> None:
    end_with_the_script()
    result, count, waves = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    overrides: dict[str, Any] = json.loads(sys.argv[4])
    shape: dict[str, Any] = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    device = sys.argv[6] if len(sys.argv) > 6 else "cpu"
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    import sglang

    arguments = engine if device == "cpu" else on_gpu
    server = sglang.Engine(**arguments(**overrides))
    print("g4debug-repro: engine up", flush=True)
    found: dict[str, Any] = {}
    accepted = []
    begin = time.perf_counter()
    try:
        for wave in range(waves):
            wanted = requests(count, seed=wave, **shape)
            outputs = server.generate(
                input_ids=[list(r.prompt) for r in wanted],
                rid=[r.rid for r in wanted],
                sampling_params=[
                    {"temperature": 0, "max_new_tokens": r.output, "ignore_eos": True}
                    for r in wanted
                ],
            )
            for request, output in zip(wanted, outputs, strict=True):
                meta = output["meta_info"]
                reason = (meta.get("finish_reason") or {}).get("type", "")
                found[request.rid] = {"tokens": output["output_ids"], "finish": reason}
                accepted.append(meta.get("spec_accept_length", 1.0))
            time.sleep(IDLE_SECONDS)  # at idle, SGLang and pool-leak count their pages
        checked = of_schedulers() if os.environ.get("G4DEBUG_TRACE") else {}
    finally:
        seconds = time.perf_counter() - begin
        server.shutdown()
    summary = {
        "outputs": found,
        "accept_length": sum(accepted) / len(accepted),
        "s": seconds,
        "checked": checked,
    }
    result.write_text(json.dumps(summary))


if __name__ == "__main__":  # spawned children import this module, too
    main()
