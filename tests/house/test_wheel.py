"""The wheel, not the editable install: all that a user gets is in it, and works from there."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from sample_trap import sample_record

from g4debug import discovery
from g4debug.dumps import writing

pytestmark = pytest.mark.once("a wheel has no SGLang in it")

ROOT = Path(__file__).resolve().parents[2]
ALL = """
import importlib, json
from importlib.metadata import entry_points
import g4debug, g4debug.fixes
from g4debug import discovery
(plugin,) = {e.value for e in entry_points(group="sglang.srt.plugins", name="g4debug")}
print(json.dumps({
    "files": [g4debug.__file__, g4debug.fixes.__file__],
    "items": {noun: discovery.names(noun) for noun in discovery.FOLDERS},
    "loaded": [discovery.load("fix", name).id for name in discovery.names("fix")],
    "plugin": [plugin, importlib.import_module(plugin.partition(":")[0]).register.__name__],
}))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources of a wheel, so that the build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "TRIAGE.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("g4debug", "fixes"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "docs/cases", folder / "docs/cases")
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(source, tmp_path_factory.mktemp("wheel"))


def built(source: Path, out: Path) -> Path:
    pip("wheel", "--no-build-isolation", "-w", str(out), str(source))
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip("install", "--target", str(target), str(wheel))
    return target


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", args[0], "--no-deps", "--no-index", "-q", *args[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run(installed: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Python, away from the checkout, with the installed wheel before the editable install."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_source_file_is_in_it_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    package = ROOT / "g4debug"
    sources = {p.relative_to(ROOT).as_posix() for p in package.rglob("*") if p.is_file()}
    sources |= {f"g4debug/{p.relative_to(ROOT)}" for p in (ROOT / "fixes").rglob("*.*")}
    cases = (ROOT / "docs/cases").glob("*.md")
    sources |= {f"g4debug/triage/cases/{p.name}" for p in cases}  # triage N --case prints them
    assert names == {s for s in sources if "__pycache__" not in s}
    assert not any(n.startswith("fixes/") for n in names)  # not everybody's "import fixes"


def test_a_build_leaves_nothing_that_the_next_wheel_takes_up(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    assert not (source / "build").exists()
    again = shutil.copytree(source, tmp_path / "again", symlinks=True)  # as the build has left it
    (again / "g4debug" / "launching.py").rename(again / "g4debug" / "launching_renamed.py")
    (again / "build" / "lib" / "g4debug").mkdir(parents=True)  # of a build by other means
    (again / "build" / "lib" / "g4debug" / "stale.py").touch()
    before, after = (
        {n for n in zipfile.ZipFile(w).namelist() if n.endswith(".py")}
        for w in (wheel, built(again, tmp_path / "out"))
    )
    assert before - after == {"g4debug/launching.py"}
    assert after - before == {"g4debug/launching_renamed.py"}


def test_its_modules_items_templates_and_entry_point_are_found(
    installed: Path, tmp_path: Path
) -> None:
    done = run(installed, tmp_path, "-c", ALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(name.startswith(str(installed)) for name in found["files"])
    assert found["items"] == {noun: list(discovery.names(noun)) for noun in discovery.FOLDERS}
    assert found["loaded"] == found["items"]["fix"]
    assert found["plugin"] == ["g4debug.plugin:register", "register"]


def test_a_dump_is_shown_and_reported(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(writing.encode(sample_record()))
    shown = run(installed, tmp_path, "-m", "g4debug", "show", "a.pt")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert sample_record().finding.headline.partition(":")[0] in shown.stdout
    reported = run(installed, tmp_path, "-m", "g4debug", "report", "a.pt", "-o", "a.html")
    assert reported.returncode == 0, reported.stderr
    assert "<html" in (tmp_path / "a.html").read_text()


DUMP = ROOT / "tests" / "replay" / "locked-prefix-0.5.12.post1.pt"
# What is typed on a laptop, and a word that its output must have. In the folder are a.pt and log.
LAPTOP = {
    "show a.pt": "kv-allocator",
    "show --json a.pt": '"kind"',
    "list .": "a.pt",
    "report a.pt -o a.html": "a.html",
    "diff a.pt a.pt": "versions (7)",
    "trace q00000 a.pt": "q00000",
    "where 0x7f0000000000 a.pt": "it has no memory map",
    "autopsy a.pt": "no CUDA core dump",
    "triage log": "crashed with exit code -9",
    "triage 26": "26",
    "faults --json": '"double-free"',
    "fixes": "locked-prefix",
    "pools --help": "usage",
    "doctor": "this Python has no SGLang",
    "--version": "torch not installed",
}
NEEDS_SGLANG = {
    "replay a.pt": "SGLang 0.5.12.post1 is not installed here",
    "replay a.pt --pages-only": "SGLang 0.5.12.post1 is not installed here",
    "cpu-server": "this Python has no SGLang",
}


@pytest.fixture(scope="module")
def laptop(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Site-packages of g4debug and all that its wheel depends on, and nothing else: no torch."""
    site = tmp_path_factory.mktemp("laptop")
    for child in installed.iterdir():
        (site / child.name).symlink_to(child)
    known, todo = {"g4debug"}, list(distribution("g4debug", installed).requires or ())
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower() in known:
            continue
        known.add(requirement.name.lower())
        found = distribution(requirement.name)
        assert requirement.specifier.contains(found.version), requirement
        todo += found.requires or ()
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / name).symlink_to(found.locate_file(name))
    assert not {"torch", "sglang", "triton"} & known
    return site


def distribution(name: str, folder: Path | None = None) -> metadata.Distribution:
    where = {} if folder is None else {"path": [str(folder)]}
    return next(iter(metadata.distributions(name=name, **where)))


@pytest.mark.parametrize("command", [*LAPTOP, *NEEDS_SGLANG])
def test_without_torch(laptop: Path, tmp_path: Path, command: str) -> None:
    """-S: without the environment's own site-packages."""
    shutil.copy(DUMP, tmp_path / "a.pt")
    log = (ROOT / "tests" / "triage" / "excerpts" / "cascades.txt").read_text()
    (tmp_path / "log").write_text(log.split("\n=== ")[0])
    done = run(laptop, tmp_path, "-S", "-m", "g4debug", *command.split())
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "No module named" not in said
    assert (LAPTOP | NEEDS_SGLANG)[command] in said
    if command in NEEDS_SGLANG:
        assert done.returncode == 2


@pytest.mark.long("a server's start; make beside does it, too")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_doctor_loads_it_into_real_sglang(installed: Path, tmp_path: Path) -> None:
    """By SGLang's own plugin loader, on the stand-ins of cpu/site that are in the wheel."""
    done = run(installed, tmp_path, "-m", "g4debug", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ready"]
    assert {c["state"] for c in found["canary"]} == {"caught"}
