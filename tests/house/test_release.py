"""What a release says of itself is what the repository has. `make dist` builds it and checks it."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import g4debug

pytestmark = pytest.mark.once("no SGLang is imported")

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
RELEASES = sorted(
    Version(p.stem.removeprefix("sglang-")) for p in (ROOT / "requirements").glob("sglang-*.txt")
)
# Everything at the top level. A file that nobody needs there makes the first look longer.
TOP = {
    "g4debug", "fixes", "repro", "tests", "benchmarks", "docs", "scripts", "requirements",
    "TRIAGE.md", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "Dockerfile", ".dockerignore",
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml",
}  # fmt: skip


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_of_release", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def pythons() -> set[str]:
    found = (c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c)
    return set(found)


def test_the_top_level() -> None:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    assert {name.partition("/")[0] for name in done.stdout.splitlines()} <= TOP


def test_the_version_has_its_changes() -> None:
    dist = loaded("scripts/release/dist.py")
    assert dist.version_of(ROOT) == g4debug.__version__
    dist.refuse_unfinished(g4debug.__version__, f"v{g4debug.__version__}")
    with pytest.raises(dist.Refused, match="expected v1"):
        dist.refuse_unfinished("1.0.0", "v9.0.0")
    with pytest.raises(dist.Refused, match=r"no section '## 9\.9\.9"):
        dist.refuse_unfinished("9.9.9", None)


def test_the_extra_is_the_range_of_the_releases_that_are_run() -> None:
    (extra,) = PROJECT["optional-dependencies"]["sglang"]
    allowed = SpecifierSet(extra.removeprefix("sglang"))
    assert all(allowed.contains(v) for v in RELEASES)
    assert str(RELEASES[0]) in extra
    assert str(RELEASES[-1]) in extra
    assert not any(allowed.contains(v) for v in ("0.5.11", "0.5.24", "0.6.0"))


def test_torch_comes_with_sglang_only() -> None:
    assert not [d for d in PROJECT["dependencies"] if d.startswith(("torch", "sglang", "triton"))]


@pytest.mark.parametrize("name", ["torch", "dev", f"sglang-{RELEASES[-1]}"])
def test_what_is_pinned_runs_on_the_oldest_python_that_we_take(name: str) -> None:
    """Debian's 3.11 is 3.11.2: a package for 3.11.5 ended make demo there, before anything ran."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    names = re.findall(r"^([\w.-]+)(?:\[.*\])?==", text, re.M)
    assert names
    for package in names:
        with contextlib.suppress(metadata.PackageNotFoundError):  # of another machine than this
            takes = metadata.metadata(package).get("Requires-Python") or ""
            assert SpecifierSet(takes).contains(oldest), (package, takes)


def test_ruff_is_one_version() -> None:
    (pin,) = re.findall(r"^ruff==.*$", (ROOT / "requirements" / "dev.txt").read_text(), re.M)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["additional_dependencies"] for hook in hooks] == [[pin], [pin]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        for command in commands:
            assert command.startswith("make "), command
            assert command.split()[1] in targets(), command


def test_ci_runs_the_releases_and_pythons_that_are_promised() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert {Version(v) for v in matrix["sglang"]} <= set(RELEASES)
    assert {RELEASES[0], RELEASES[-1]} <= {Version(v) for v in matrix["sglang"]}
    assert {*matrix["python"], *(m["python"] for m in matrix["include"])} == pythons()
    assert set(jobs["laptop"]["strategy"]["matrix"]["python"]) == pythons()
    assert f">={min(pythons(), key=Version)}" == PROJECT["requires-python"]


def test_the_image_is_of_the_newest_release() -> None:
    assert f"sglang:v{RELEASES[-1]}\nFROM " in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.name)
def test_a_form_asks_for_the_bundle(path: Path) -> None:
    text = path.read_text()
    form = yaml.safe_load(text)
    if path.name != "config.yml":
        assert {"name", "description", "body"} <= set(form)
        assert "--bundle out.tar" in text


@pytest.mark.parametrize("source", ["", "https://forge.example/who/g4debug"])
def test_the_readme_of_an_index_has_no_link_into_nothing(source: str) -> None:
    setup = loaded("setup.py")
    readme = (ROOT / "README.md").read_text()
    made = setup.long_description(readme, source, "1.0.0")
    links = re.findall(r"\]\(([^)\s]+)\)", made)
    assert all(link.startswith(("https://", "#")) for link in links), links
    if source:
        assert f"[TRIAGE.md]({source}/blob/v1.0.0/TRIAGE.md)" in made
        assert (
            f"![g4debug show: the report of the demo's dump]({source}/raw/v1.0.0/docs/show.svg)"
            in made
        )
    code = re.compile(r"^```.*?^```", re.M | re.S)
    assert code.findall(made) == code.findall(readme)  # brackets in code are no links
    assert setup.long_description("[a](b#c) [x](https://y) [z](#w)", "", "1") == (
        "a [x](https://y) [z](#w)"
    )


def test_a_source_archive_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    """Two archives of the same files, made by others, at other times, in another order."""
    dist = loaded("scripts/release/dist.py")
    made = []
    for order, uid, mode in (((0, 1), 0, 0o600), ((1, 0), 1000, 0o664)):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name in [("x/a.py", "x/run")[i] for i in order]:
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uid, member.uname = 3, uid * 7, uid, f"u{uid}"
                member.mode = mode | (0o100 if name == "x/run" else 0)
                archive.addfile(member, io.BytesIO(b"abc"))
        made.append(dist.normalised(out.getvalue(), 1_780_000_000))
    assert made[0] == made[1]
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(made[0]))) as archive:
        assert [(m.name, oct(m.mode)) for m in archive] == [("x/a.py", "0o644"), ("x/run", "0o755")]


def test_a_release_without_a_clone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "release").mkdir(parents=True)
    (tmp_path / "g4debug").mkdir()
    for name in ("scripts/release/dist.py", "g4debug/__init__.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n")
    command = [sys.executable, tmp_path / "scripts" / "release" / "dist.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "g4debug dist: CHANGELOG.md has no section '## 1.0.0 (date)'\n"
