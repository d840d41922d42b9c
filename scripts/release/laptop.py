"""Installs the wheel in ``dist/`` into an empty environment, and opens a recorded dump and a log.

It needs the network, for what the wheel depends on, and nothing of the clone's own environments.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DUMP = ROOT / "tests" / "replay" / "locked-prefix-0.5.12.post1.pt"
LOG = ROOT / "tests" / "triage" / "excerpts" / "cascades.txt"
# What is typed there, its exit code, and words that have to be in the answer.
COMMANDS = (
    (("show", str(DUMP)), 0, "kv-allocator"),
    (("list", str(DUMP.parent)), 0, DUMP.name),
    (("report", str(DUMP), "-o", "report.html"), 0, "report.html"),
    (("diff", str(DUMP), str(DUMP)), 0, "versions"),
    (("trace", "q00040", str(DUMP)), 0, "q00040"),
    (("autopsy", str(DUMP)), 2, "no CUDA core dump"),
    (("where", "0x7f0000000000", str(DUMP)), 2, "it has no memory map"),
    (("triage", str(LOG)), 0, "Run this"),
    (("doctor",), 1, "this Python has no SGLang"),
    (("--version",), 0, "torch not installed"),
)


def main() -> int:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        print(f"expected one wheel in dist/, got {len(wheels)}; run: make dist", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="g4debug-laptop-") as folder:
        python = Path(folder) / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", wheels[0]], check=True)
        for command, code, words in COMMANDS:
            done = subprocess.run(
                [python.with_name("g4debug"), *command],
                cwd=folder, text=True, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            ok = done.returncode == code and words in done.stdout
            print("ok  " if ok else "BAD ", "g4debug", *(Path(c).name for c in command))
            if not ok:
                print(
                    f"exit code {done.returncode}, expected {code} and {words!r} in:\n{done.stdout}"
                )
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
