"""One server of a benchmark: ``python start.py MODULE DEVICE ENGINE_JSON``.

MODULE, one of this folder, has ``answer(engine, device, question)``. It may have
``arguments(device, given)``, which returns all arguments of ``sgl.Engine``. The server says a line
about itself when it is up, and then answers each line of JSON from stdin with one on stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# This file's own folder would hide other modules by its modules' names.
sys.path[:] = [
    str(FOLDER.parent),
    str(FOLDER.parents[1] / "repro"),
    *(p for p in sys.path if p != str(FOLDER)),
]


def main(name: str, device: str, given: str) -> None:
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the server prints must not get between the answers
    module = importlib.import_module(f"served.{name}")
    import sglang
    from harness.arguments import as_named_here

    from served.gate import tracer_sites

    arguments = json.loads(given)
    if hasattr(module, "arguments"):
        arguments = module.arguments(device, arguments)
    engine = sglang.Engine(**as_named_here(arguments))
    hello = {
        "hooks": tracer_sites(),
        "device": device_name(),
        "overlap": not engine.server_args.disable_overlap_schedule,  # as SGLang has decided it
        "sglang": version("sglang"),
    }
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        found = module.answer(engine, device, json.loads(line))
        print(json.dumps(found), file=answers, flush=True)
    engine.shutdown()


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":  # spawned children import this module, too
    main(*sys.argv[1:])
