"""Lets SGLang find this clone's g4debug in folders that are on the Python path, without pip.

    python benchmarks/offline_host/register.py FOLDER ...

SGLang finds its plugins by the metadata of what is installed. A host without a network may lack
what pip needs to build g4debug, and then SGLang runs without any tracer. So the metadata are
written here: the name, the version and the entry points of pyproject.toml. The clone itself must be
on the path, too. Each folder is then looked at as SGLang will, and the exit code is 1 if g4debug is
not found there.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = "sglang.srt.plugins"


def write(folder: Path) -> Path:
    """Write the metadata into a folder, and return theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "g4debug" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    if found is None:
        raise SystemExit("g4debug/__init__.py: got no line with __version__, expected one")
    info = folder / f"{project['name']}-{found[1]}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {found[1]}\n"
    (info / "METADATA").write_text(head)
    points = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line
        for group, entries in points.items()
        for line in (f"[{group}]", *(f"{name} = {where}" for name, where in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info


def found_in(folder: Path) -> bool:
    """Whether SGLang finds g4debug's plugin where this folder is on the path."""
    there = importlib.metadata.distributions(path=[str(folder)])
    return any(p.group == PLUGINS and p.name == "g4debug" for d in there for p in d.entry_points)


def main() -> int:
    folders = [Path(given) for given in sys.argv[1:]]
    if not folders:
        print(__doc__)
        return 2
    for folder in folders:
        print(write(folder))
    missing = [str(folder) for folder in folders if not found_in(folder)]
    if missing:
        print(f"got no plugin g4debug in {', '.join(missing)}, expected one", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())
