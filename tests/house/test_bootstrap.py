"""The set-up speaks in single lines that say what to do, and does nothing twice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYTHON = """#!/bin/sh
# Stands for an interpreter: answers the probe, and nothing else.
printf '%s\\n'
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The set-up files alone, in a path with a space, away from the real .venv."""
    root = tmp_path / "a clone"
    root.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, clone: Path):
    """environment.py of the clone, importable."""
    monkeypatch.syspath_prepend(str(clone / "scripts"))
    for name in ("environment", "bootstrap", "pip_errors"):
        sys.modules.pop(name, None)
    import environment

    yield environment
    for name in ("environment", "bootstrap", "pip_errors"):
        sys.modules.pop(name, None)


def make(clone: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", *args],
        cwd=clone,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def fake_python(tmp_path: Path, *answers: str) -> str:
    path = tmp_path / "python-fake"
    path.write_text(FAKE_PYTHON % "\\n".join(answers))
    path.chmod(0o755)
    return str(path)


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that set-up printed, after checking that it is one and no traceback."""
    lines = [x for x in result.stderr.splitlines() if not x.startswith("make")]
    assert result.returncode != 0
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("g4debug set-up: ")
    return lines[0]


def test_old_python_is_named(clone: Path, tmp_path: Path):
    old = fake_python(tmp_path, "3.8", "/opt/python3.8", "venv")
    assert "Python 3.11 or newer is needed" in refusal(make(clone, "test", PYTHON=old))


def test_missing_venv_module_names_the_package(clone: Path, tmp_path: Path):
    bare = fake_python(tmp_path, "3.12", "/opt/python3.12", "no venv")
    assert "apt install python3.12-venv" in refusal(make(clone, "test", PYTHON=bare))


def test_python_that_does_not_run(clone: Path):
    assert "PYTHON=./nowhere cannot be run" in refusal(make(clone, "demo", PYTHON="./nowhere"))


def test_unknown_sglang_lists_the_known(clone: Path):
    line = refusal(make(clone, "demo", "SGLANG=9.9", PYTHON=sys.executable))
    assert "SGLANG=9.9" in line
    assert "0.5.12.post1" in line


def test_front_door_parses_on_old_pythons():
    """ast cannot go back to 3.6 for everything, but it refuses walrus, match and the like."""
    import ast

    ast.parse((ROOT / "scripts" / "bootstrap.py").read_text(), feature_version=(3, 6))


def test_registry_that_cannot_be_reached(clone: Path):
    result = make(
        clone,
        "env",
        PYTHON=sys.executable,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_CONFIG_FILE=os.devnull,
        PIP_RETRIES="1",
        PIP_NO_CACHE_DIR="1",
    )
    line = refusal(result)
    assert "torch" in line
    assert "registry cannot be reached" in line
    log = Path(line.split("(log: ")[1].rstrip(")"))
    assert "127.0.0.1" in log.read_text()
    assert not (clone / ".venv" / "stamp").exists()


def test_disk_too_small(scripts, clone: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    usage = shutil.disk_usage(clone)._replace(free=3 * 2**30)
    monkeypatch.setattr(scripts.shutil, "disk_usage", lambda _: usage)
    assert scripts.main(".venv", "0.5.12.post1") == 1
    assert "3.0 GiB free" in capsys.readouterr().err


def test_folder_of_somebody_else_is_left_alone(scripts, clone: Path, capsys):
    (clone / ".venv").mkdir()
    (clone / ".venv" / "precious").touch()
    assert scripts.main(".venv", "0.5.12.post1") == 1
    assert "move it away" in capsys.readouterr().err
    assert (clone / ".venv" / "precious").exists()


def test_what_a_link_leads_to_is_left_alone(scripts, clone: Path, tmp_path: Path, capsys):
    """An environment of another clone has the marker, too, and others may be using it."""
    other = tmp_path / "other"
    other.mkdir()
    (other / scripts.MARKER).touch()
    (other / "theirs").touch()
    (clone / ".venv").symlink_to(other)
    assert scripts.main(".venv", "0.5.12.post1") == 1
    assert (other / "theirs").exists()
    assert f".venv is a link to {other}" in capsys.readouterr().err


ALL = 7  # venv, torch, sglang, tools, bytecode, check, the project


class Steps:
    """Stands for pip: counts the steps, and fails or is killed at the one that is asked for."""

    def __init__(self, scripts, monkeypatch: pytest.MonkeyPatch):
        self.ran: list[str] = []
        self.stop_at = ""

        def run(env, step, label, console, held):
            if self.stop_at and self.stop_at in step.title:
                raise KeyboardInterrupt
            self.ran.append(step.title)
            env.python.parent.mkdir(exist_ok=True)
            env.python.touch()

        monkeypatch.setattr(scripts.Environment, "run", run)


def test_second_run_does_nothing(scripts, clone: Path, monkeypatch: pytest.MonkeyPatch):
    steps = Steps(scripts, monkeypatch)
    assert scripts.main(".venv", "0.5.12.post1") == 0
    assert len(steps.ran) == ALL
    steps.ran.clear()
    assert scripts.main(".venv", "0.5.12.post1") == 0
    assert steps.ran == []


def test_changed_metadata_reinstalls_the_project_alone(scripts, clone: Path, monkeypatch):
    steps = Steps(scripts, monkeypatch)
    scripts.main(".venv", "0.5.12.post1")
    steps.ran.clear()
    with (clone / "pyproject.toml").open("a") as handle:
        handle.write("# changed\n")
    assert scripts.main(".venv", "0.5.12.post1") == 0
    assert steps.ran == ["g4debug itself, editable"]


def test_changed_pins_make_it_all_again(scripts, clone: Path, monkeypatch):
    steps = Steps(scripts, monkeypatch)
    scripts.main(".venv", "0.5.12.post1")
    steps.ran.clear()
    with (clone / "requirements" / "dev.txt").open("a") as handle:
        handle.write("# changed\n")
    scripts.main(".venv", "0.5.12.post1")
    assert len(steps.ran) == ALL


@pytest.mark.parametrize(
    "step", ["virtual", "torch 2", "sglang", "tools", "bytecode", "check", "itself"]
)
def test_interruption_anywhere_is_recovered(scripts, clone: Path, monkeypatch, capsys, step: str):
    steps = Steps(scripts, monkeypatch)
    steps.stop_at = step
    assert scripts.main(".venv", "0.5.12.post1") == 130
    assert "interrupted" in capsys.readouterr().err
    steps.stop_at = ""
    steps.ran.clear()
    assert scripts.main(".venv", "0.5.12.post1") == 0
    assert len(steps.ran) == (1 if step == "itself" else ALL)


def test_two_makes_wait_for_each_other(scripts, tmp_path: Path):
    lock = tmp_path / ".venv.lock"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import environment, pathlib\n"
        f"with environment.locked(pathlib.Path({str(lock)!r})): print('in', flush=True)"
    )
    with scripts.locked(lock):
        other = subprocess.Popen(
            [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert "waiting for .venv.lock" in other.stdout.readline()
    assert other.communicate(timeout=300)[0].strip() == "in"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: HTTP error 503 while getting x", "registry answered 503"),
        ("Failed to establish a new connection\nNo matching distribution found for a", "reached"),
        ("satisfies x (from versions: none)\nNo matching distribution found for x", "at all"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no ready-made torch==2.13.0"),
        ("PermissionError: Permission denied: 'x'", "the files cannot be written"),
        ("noise\nERROR: something new\nmore noise", "ERROR: something new"),
        ("", "no reason given"),
    ],
)
def test_what_pip_said_and_what_it_means(scripts, said: str, meant: str):
    assert meant in scripts.explain(said)
