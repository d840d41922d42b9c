"""Installs the wheel in ``dist/`` beside an SGLang, and uses it there, without the checkout.

    beside.py

It is run by the Python of an environment of this Makefile, and makes another one with the same
SGLang and all that this one imports. g4debug and the tools of requirements/dev.txt are left out of
it. Files are hard links, so it takes little room. Then, in an empty folder: the wheel is installed
without an index, and may change no version; ``doctor``, which loads it by SGLang's own plugin
loader, must be ready; ``show`` and ``report`` must open a recorded dump.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DUMP = ROOT / "tests" / "replay" / "locked-prefix-0.5.12.post1.pt"
CHECKOUT = """
import sys, g4debug
from importlib.metadata import entry_points
names = [e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "g4debug"]
print(g4debug.__file__)
raise SystemExit(
    not g4debug.__file__.startswith(sys.prefix) and "imported from elsewhere"
    or names != ["g4debug.plugin:register"] and f"expected one entry point, got {names}"
    or 0
)
"""


class Bad(Exception):
    """Something did not go as it must. The text says what was got and expected."""


def main() -> int:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        print(f"expected one wheel in dist/, got {len(wheels)}; run: make dist", file=sys.stderr)
        return 2
    room = ROOT / ".g4debug"  # on the disk of the environments, for hard links
    room.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="beside-", dir=room) as made,
        tempfile.TemporaryDirectory(prefix="g4debug-beside-") as empty,
    ):
        try:
            use(twin(Path(made), wheels[0]), Path(empty))
        except Bad as e:
            print(f"BAD  {e}")
            return 1
    return 0


def twin(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment with this one's SGLang, in which the wheel is installed."""
    venv, ours = folder / "venv", Path(sysconfig.get_path("purelib"))
    base = str(getattr(sys, "_base_executable", sys.executable))
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    theirs = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    without = shutil.ignore_patterns("*g4debug*")
    shutil.copytree(
        ours, theirs, symlinks=True, ignore=without, copy_function=link, dirs_exist_ok=True
    )
    run(python, "-m", "pip", "uninstall", "-q", "-y", *dev_only())
    before = versions(python)
    if any(name.lower().startswith("g4debug") for name in before):
        raise Bad(f"the new environment has a g4debug before the wheel is installed: {before}")
    run(python, "-m", "pip", "install", "-q", "--no-index", str(wheel))
    after = versions(python)
    added = after - before
    if before - after or len(added) != 1:
        raise Bad(f"pip changed {sorted(before - after)} to {sorted(added)}: expected one more")
    sglang = next(v for v in before if v.startswith("sglang=="))
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    print(f"ok   pip install {wheel.name} beside {sglang}, Python {version}: {added.pop()}")
    return python


def link(source: str, target: str) -> str:
    """Like shutil.copy2, without a second copy on the disk where that is possible."""
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)
    return target


def dev_only() -> list[str]:
    """The packages that only the tools of this repository need, and not this SGLang."""
    dev = pins(ROOT / "requirements" / "dev.txt")
    torch = pins(ROOT / "requirements" / "torch.txt")
    return sorted(dev - torch - {"setuptools"})


def pins(path: Path) -> set[str]:
    lines = path.read_text().splitlines()
    return {line.split("==")[0].lower() for line in lines if "==" in line and line[0] != "#"}


def versions(python: Path) -> set[str]:
    """``name==version`` of all that is installed. A local file is given by its name and version."""
    found = json.loads(run(python, "-m", "pip", "list", "--format=json"))
    return {f"{package['name']}=={package['version']}" for package in found}


def use(python: Path, empty: Path) -> None:
    """What a user does beside SGLang before the first start, in the empty folder. Raises Bad."""
    g4debug = python.with_name("g4debug")
    print("ok   imported from the wheel:", run(python, "-c", CHECKOUT, cwd=empty).strip())
    found = json.loads(run(g4debug, "doctor", "--json", cwd=empty))
    canaries = {c["state"] for c in found["canary"]}
    if not found["ready"] or canaries != {"caught"}:
        raise Bad(f"doctor: ready {found['ready']}, canaries {canaries}; expected caught")
    print(f"ok   g4debug doctor: ready, {len(found['canary'])} canaries caught")
    shown = run(g4debug, "show", str(DUMP), cwd=empty)
    if "kv-allocator in extend" not in shown:
        raise Bad(f"show of {DUMP.name} names no kv-allocator:\n{shown}")
    run(g4debug, "report", str(DUMP), "-o", "report.html", cwd=empty)
    print("ok   g4debug show, g4debug report")


def environment() -> dict[str, str]:
    """This process's, without what would lead to a checkout or change what a server does."""
    without = ("PYTHON", "G4DEBUG_", "SGLANG_", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if not k.startswith(without)}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What the command printed to stdout. Raises Bad if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        name = " ".join([Path(command[0]).name, *map(str, command[1:4])])
        raise Bad(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
