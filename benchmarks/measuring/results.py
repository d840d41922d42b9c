"""Writes and reads a benchmark's CSV. Its first line, a comment of JSON, says how it was made."""

from __future__ import annotations

import csv
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "results"
Row = Mapping[str, Any]


def write(stem: str, rows: Sequence[Row], device: str, out: Path | None, **facts: Any) -> None:
    """Write ``rows`` to ``out``, or to the file that :func:`default` names.

    device: the GPU's name, or cpu. facts: more for the first line.
    """
    growing = Growing(out or default(stem, device), **facts)
    growing.add(rows, device)
    print(f"wrote {growing.path.name}")


def default(stem: str, device: str) -> Path:
    """``<stem>_<release of SGLang>_<GPU>.csv``. Figures of two releases are never one file's."""
    parts = (stem, installed(), short(device))
    return FOLDER / f"{'_'.join(filter(None, parts))}.csv"


def installed() -> str:
    """The release of SGLang in this environment, '' if there is none."""
    from g4debug.trapping.describe import versions

    return versions().get("sglang", "")


def short(device: str) -> str:
    """``h100`` for ``NVIDIA H100 80GB HBM3``; ``cpu`` for ``cpu``."""
    model = re.search(r"\b[A-Z]{1,2}\d{2,}[A-Za-z]*\b", device)
    return (model[0] if model else device.split()[-1]).lower()


class Growing:
    """A CSV to which rows are appended as they come, so that a run that is cut short leaves them.

    Its first line has the device, the versions, the command and ``facts``. The first rows
    decide the fields. A file of another release is left as it is; ``path`` is then another one.
    """

    def __init__(self, path: Path, **facts: Any) -> None:
        self.path, self._facts = path, facts
        self._fields: list[str] = []

    def add(self, rows: Sequence[Row], device: str) -> None:
        if self._fields:
            with self.path.open("a", newline="") as f:
                csv.DictWriter(f, self._fields).writerows(rows)
        elif rows:
            self.path = _unless_of_another_release(self.path)
            self._fields = _write(self.path, made(device) | self._facts, rows)


def _unless_of_another_release(path: Path) -> Path:
    """``path``, or if it has figures of another release of SGLang, one with this one's name."""
    if not path.is_file() or not path.stat().st_size:
        return path
    mine = installed()
    try:
        theirs = read(path)[0].get("sglang", "")
    except ValueError:  # not a file of ours, or of a time before they had a first line
        theirs = "?"
    if theirs == mine:
        return path
    free = path.with_name(f"{path.stem}_{mine or 'without_sglang'}{path.suffix}")
    print(f"{path.name} has figures of SGLang {theirs or 'none'}, so these go to {free.name}")
    return free


def _write(path: Path, head: Row, rows: Sequence[Row]) -> list[str]:
    """The fields of the rows that were written."""
    fields = [*dict.fromkeys(k for row in rows for k in row)]
    with path.open("w", newline="") as f:
        f.write(f"# {json.dumps(head)}\n")
        writer = csv.DictWriter(f, fields)
        writer.writeheader()
        writer.writerows(rows)
    return fields


def made(device: str) -> dict[str, Any]:
    """The versions of this environment, the device, and the command of this process."""
    from g4debug.trapping.describe import versions

    said = list(sys.argv[1:])
    # Where the files were put, and where another environment is, does not matter.
    for option in ("--out", "--profile", "--timeline", "--upstream-python", "--also"):
        if option in said:
            at = said.index(option)
            del said[at : at + 2]
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *said])
    return {**versions(), "device": device, "command": command}


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
    head = alike[0] | {"command": "; ".join(h["command"] for h, _ in found)}
    _write(out, head, [row for _, rows in found for row in rows])
    print(f"wrote {out.name}")


def by_round(rows: Iterable[Row], key: str, figure: str) -> list[dict[str, float]]:
    """The figure of each variant (the value of ``key``), round by round."""
    found: dict[Any, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["round"], {})[row[key]] = float(row[figure])
    return list(found.values())


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The median, and the least and the greatest value in brackets."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} .. {high:{form}})"
