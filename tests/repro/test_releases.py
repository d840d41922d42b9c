"""A repro script on a release of SGLang without the bug that it shows: it says where to go."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from g4debug.hooking import targets

pytestmark = pytest.mark.once("it runs on releases of its own")

ROOT = Path(__file__).parents[2]
REPRO = ROOT / "repro"
NAMES = sorted(p.stem for p in REPRO.glob("[a-z]*.py") if "\nREPRO = Repro(" in p.read_text())


@pytest.mark.skipif(targets.sglang_version() is None, reason="needs sglang")
@pytest.mark.parametrize("name", NAMES)
def test_it_refuses_and_names_an_environment_in_which_it_runs(name, monkeypatch):
    monkeypatch.syspath_prepend(str(REPRO))
    repro = importlib.import_module(name).REPRO
    if not repro.releases or targets.matches(repro.releases):
        pytest.skip("it runs on this release")
    done = subprocess.run(
        [sys.executable, str(REPRO / f"{name}.py"), "--device", next(iter(repro.devices))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"this environment has SGLang {targets.sglang_version()}" in " ".join(
        done.stdout.split()
    )
    make, script = (line.strip() for line in done.stdout.splitlines() if line.startswith("    "))
    release = make.removeprefix("make env SGLANG=")
    assert (ROOT / "requirements" / f"sglang-{release}.txt").is_file()
    assert script.endswith(f"/bin/python repro/{name}.py")
    # Where make puts it.
    told = subprocess.run(
        ["make", "-n", "demo", f"SGLANG={release}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f'"{script.split("/")[0]}/bin/python" ' in told.stdout
