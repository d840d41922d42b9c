"""Where a benchmark's figures go: a CSV whose first line, a comment of JSON, says how they came."""

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
    """Write ``rows`` with device, versions and command, to ``out`` or ``<stem>_<device>.csv`` here.

    device: the GPU's name, or cpu. facts: what else the first line is to say.
    """
    from g4debug.trapping.describe import versions

    path = out or HERE / f"{stem}_{device.split()[-1].lower()}.csv"
    said = list(sys.argv[1:])
    for option in ("--out", "--profile"):  # where files were put is nobody's business
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
    """The first line and the rows of such a file; nothing of one that was not measured yet."""
    if not path.is_file():
        return {}, []
    with path.open(newline="") as f:
        head = json.loads(f.readline().removeprefix("# "))
        return head, list(csv.DictReader(f))
