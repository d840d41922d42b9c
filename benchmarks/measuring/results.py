"""Writes and reads a benchmark's CSV, whose first line, a comment of JSON, says how it was made."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent


def write(
    stem: str, rows: Sequence[Mapping[str, Any]], device: str, out: Path | None, **facts: Any
) -> None:
    """Write ``rows`` to ``out``, or to ``<stem>_<device>.csv`` in this folder.

    The first line has the device, the versions and the command. device: the GPU's name, or cpu.
    facts: what else the first line is to say.
    """
    path = out or HERE / f"{stem}_{device.split()[-1].lower()}.csv"
    with path.open("w", newline="") as f:
        _write_head(f, device, facts)
        writer = csv.DictWriter(f, fieldnames=[*dict.fromkeys(k for r in rows for k in r)])
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path.name}")


class Growing:
    """A CSV to which rows are appended as they come, so that a run that is cut short leaves them.

    The fields are those of the first row.
    """

    def __init__(self, path: Path, device: str, **facts: Any) -> None:
        self.path, self._file = path, path.open("w", newline="")
        self._writer: csv.DictWriter[str] | None = None
        _write_head(self._file, device, facts)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows and self._writer is None:
            self._writer = csv.DictWriter(self._file, fieldnames=list(rows[0]))
            self._writer.writeheader()
        if self._writer is not None:
            self._writer.writerows(rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _write_head(f: TextIO, device: str, facts: Mapping[str, Any]) -> None:
    from g4debug.trapping.describe import versions

    said = list(sys.argv[1:])
    # Where the files were put, and where another environment is, does not matter.
    for option in ("--out", "--profile", "--timeline", "--upstream-python"):
        if option in said:
            at = said.index(option)
            del said[at : at + 2]
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *said])
    head = {**versions(), "device": device, "command": command, **facts}
    f.write(f"# {json.dumps(head)}\n")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The first line and the rows of such a file, both empty if there is no such file yet."""
    if not path.is_file():
        return {}, []
    with path.open(newline="") as f:
        head = json.loads(f.readline().removeprefix("# "))
        return head, list(csv.DictReader(f))


def merge(paths: Sequence[Path], out: Path) -> None:
    """Put the rows of several files of one kind into one. Its first line has all their commands.

    Raises ValueError if two were measured with other versions or on other devices.
    """
    found = [read(path) for path in paths]
    alike = [{k: v for k, v in head.items() if k != "command"} for head, _ in found]
    if any(head != alike[0] for head in alike):
        raise ValueError(f"these were not measured alike: {', '.join(map(str, alike))}")
    rows = [row for _, rows in found for row in rows]
    head = alike[0] | {"command": "; ".join(h["command"] for h, _ in found)}
    with out.open("w", newline="") as f:
        f.write(f"# {json.dumps(head)}\n")
        writer = csv.DictWriter(f, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {out.name}")
