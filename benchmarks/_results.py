"""Writes and reads a benchmark's CSV, whose first line, a comment of JSON, says how it was made."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def write(
    stem: str, rows: Sequence[Mapping[str, Any]], device: str, out: Path | None, **facts: Any
) -> None:
    """Write ``rows`` to ``out``, or to ``<stem>_<device>.csv`` in this folder.

    The first line has the device, the versions and the command. device: the GPU's name, or cpu.
    facts: what else the first line is to say.
    """
    from g4debug.trapping.describe import versions

    path = out or HERE / f"{stem}_{device.split()[-1].lower()}.csv"
    said = list(sys.argv[1:])
    for option in ("--out", "--profile"):  # where the files were put does not matter
        if option in said:
            at = said.index(option)
            del said[at : at + 2]
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *said])
    head = {**versions(), "device": device, "command": command, **facts}
    with path.open("w", newline="") as f:
        f.write(f"# {json.dumps(head)}\n")
        writer = csv.DictWriter(f, fieldnames=[*dict.fromkeys(k for r in rows for k in r)])
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path.name}")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The first line and the rows of such a file, both empty if there is no such file yet."""
    if not path.is_file():
        return {}, []
    with path.open(newline="") as f:
        head = json.loads(f.readline().removeprefix("# "))
        return head, list(csv.DictReader(f))
