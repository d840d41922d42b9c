"""`python -m g4debug.cpu <python arguments>` runs any Python command line on the CPU engine.

python -m g4debug.cpu -m sglang.launch_server --model-path ... --device cpu
python -m g4debug.cpu script.py --flag
"""

from __future__ import annotations

import os
import sys

from g4debug.cpu import CpuEngineError, environment, refuse_cuda


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        refuse_cuda("python -m g4debug.cpu")
    except CpuEngineError as error:
        print(error, file=sys.stderr)
        return 2
    os.execve(sys.executable, [sys.executable, *arguments], environment(os.environ))


if __name__ == "__main__":
    raise SystemExit(main())
