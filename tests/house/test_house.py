"""Rules of the house that no linter knows."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    out = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if out.returncode:
        pytest.skip("not a git checkout")
    found = [ROOT / name for name in out.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert found, patterns
    return found


def test_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = re.findall(r"^make (\S+) +\S", done.stdout, re.M)
    assert sorted(listed) == sorted(phony[1].split())
    assert sorted(listed) == sorted(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))


def test_pins_are_exact_and_name_no_place():
    paths = sorted((ROOT / "requirements").glob("*.txt"))
    assert len(paths) > 2
    for path in paths:
        lines = [x for x in path.read_text().splitlines() if x and not x.startswith("#")]
        for line in lines:
            assert re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", line), f"{path.name}: {line}"
        names = [x.split("==")[0] for x in lines]
        assert names, path.name
        assert len(names) == len(set(names)), path.name


def test_no_two_test_files_share_a_name():
    """pytest imports them as modules by that name, and cannot collect the second of two."""
    names = [path.name for path in tracked("tests/**/test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_no_file_has_a_merge_that_was_never_ended():
    marks = ("<" * 7, ">" * 7)
    for path in tracked("*.py", "*.md", "*.toml", "*.yml", "*.txt", "*.j2", "Makefile"):
        lines = path.read_text().splitlines()
        found = [n for n, line in enumerate(lines, 1) if line.startswith(marks)]
        assert not found, f"{path.name}: lines {found}"


def test_no_file_names_a_registry_or_a_machine():
    """A clone works against whatever registry pip is configured for, on any machine."""
    places = re.compile(
        # Split, so that this file does not find itself.
        "|".join(("pypi" + r"\.org", "files" + r"\.pythonhosted", "download" + r"\.pytorch"))
        + "|(?<![\\w.}>~])/(?:" + "|".join(("root", "home", "work")) + ")/"
    )  # fmt: skip
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if places.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("goals", "given", "environment", "release"),
    [
        ("demo", "", ".venv", "0.5.23"),
        ("test", "", ".venv", "0.5.23"),
        ("test", "0.5.12.post1", ".venv-0.5.12.post1", "0.5.12.post1"),
        ("matrix", "", ".venv", "0.5.23"),
        ("healthy", "", ".venv", "0.5.23"),
        ("matrix", "0.5.12.post1", ".venv-0.5.12.post1", "0.5.12.post1"),
        ("healthy", "0.5.15.post1", ".venv-0.5.15.post1", "0.5.15.post1"),
    ],
)
def test_each_target_has_its_release(goals, given, environment, release):
    # `make test` runs this test, and a make inside of a make says so.
    outer = ("SGLANG", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
    environ = {k: v for k, v in os.environ.items() if k not in outer}
    command = [
        "make",
        "-n",
        *dict.fromkeys(("demo", goals)),
        *([f"SGLANG={given}"] if given else []),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    last = done.stdout.splitlines()[-1]  # of the goal, whatever the demo before it has run on
    assert last.startswith(f'exec "{environment}/bin/python" ')
    assert f'scripts/bootstrap.py "{environment}" "{release}"' in done.stdout
    assert (ROOT / "requirements" / f"sglang-{release}.txt").is_file()
