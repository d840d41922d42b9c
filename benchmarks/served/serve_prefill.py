"""One server: ``python _serve_prefill.py DEVICE ENGINE_JSON``; the JSON has all of its arguments.

It reads [lengths of the prompts, tokens to make, seed, together?] from stdin. It sends all prompts
in one call, or one after the other, and answers with the seconds and the tokens.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any


def serve(device: str, arguments: dict[str, Any]) -> None:
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    from _servers import device_name, start

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the server prints must not get between the answers
    engine = start(arguments)
    print(json.dumps({"device": device_name()}), file=answers, flush=True)
    for line in sys.stdin:
        lengths, tokens, seed, together = json.loads(line)
        rng = random.Random(seed)
        prompts = [[2, *(rng.randrange(4, 500) for _ in range(n - 1))] for n in lengths]
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        calls = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [o for c in calls for o in engine.generate(input_ids=c, sampling_params=sampling)]
        seconds = time.perf_counter() - begin
        made = [o["output_ids"] for o in outputs]
        print(json.dumps({"seconds": seconds, "tokens": made}), file=answers, flush=True)
    engine.shutdown()


if __name__ == "__main__":  # spawned children import this module, too
    serve(sys.argv[1], json.loads(sys.argv[2]))
