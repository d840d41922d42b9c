"""A process that a script starts: ``python child.py MODULE DEVICE RESULT.json ARGUMENTS_JSON``.

It ends with the script, and calls the module's ``main(device, result, **arguments)``, which writes
the result. MODULE: a dotted name below ``repro/``. DEVICE: cpu or cuda; on a CPU the CPU engine is
prepared first.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# The modules are below repro/. This file's own folder would hide others by its modules' names.
sys.path[:] = [str(FOLDER.parent), *(p for p in sys.path if p != str(FOLDER))]


def main(module: str, device: str, result: str, arguments: str) -> None:
    from harness.processes import end_with_the_script

    end_with_the_script()
    if device == "cpu":
        from g4debug import cpu

        cpu.prepare()
    importlib.import_module(module).main(device, Path(result), **json.loads(arguments))


if __name__ == "__main__":  # spawned grandchildren import this module, too
    main(*sys.argv[1:])
