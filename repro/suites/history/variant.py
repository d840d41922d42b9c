"""One cell of the history suite: a case's workload on one engine, in a process of its own.

``python repro/_history_variant.py CASE ARM SEED RESULT.json ENGINE_JSON DEVICE``. ENGINE_JSON has
the arguments of the engine that the tool asks for, DEVICE is cpu or cuda. What the processes print
must go to ``cell.log`` beside the result. The result has the answers so far after each of them,
because the engine may die with the next one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from _run import UP, end_with_the_script

IDLE_SECONDS = 1.0  # at the end: when nothing runs, SGLang counts and compares


def main() -> None:
    end_with_the_script()
    name, arm, seed, result = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    device = sys.argv[6]
    from _history.case import CPU

    if device == CPU:
        from g4debug import cpu

        cpu.prepare()
    from _healthy.workload import Client
    from _history.cases import case_of
    from _history.cell import arm_of

    case = case_of(name)
    side = arm_of(case, arm)
    import sglang

    more = {
        "log_level": "info",
        "decode_log_interval": 1,
        **case.engine,
        **side.engine,
        **json.loads(sys.argv[5]),
    }
    if device == CPU:
        from g4debug.cpu.server import engine_arguments

        arguments, patience = engine_arguments(mtp=case.mtp, **more), 1.0
    else:
        from _history import gpu

        arguments, patience = gpu.engine_arguments(case, side, **more), gpu.PATIENCE
    engine = sglang.Engine(**arguments)
    print(UP, flush=True)
    client = Client(engine, f"{name}-{seed}", result.parent / "cell.log", patience)
    client.outputs = Kept(result)
    try:
        engine.loop.run_until_complete(case.drive(client, seed))
        time.sleep(IDLE_SECONDS)
        client.outputs.write(completed=True)
    finally:
        engine.shutdown()


class Kept(dict[str, Any]):
    """The answers, which are in a file as soon as they are there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.write()

    def write(self, completed: bool = False) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"outputs": self, "completed": completed}))
        part.replace(self._path)


if __name__ == "__main__":  # spawned children import this module, too
    main()
