"""On each SGLang release, its own allocators, prefix cache and requests beside our ledger.

Other tests here tell whether a hook site exists. This one tells whether it is still *the* way: a
release that hands out or takes back pages past our hooks fails here, before it meets a server.
Each release runs in a process of its own, from its unpacked wheel, with the packages of this
environment (drive_ledger.py). Nothing is installed, and there is no model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wheels
from packaging.version import Version
from test_versions import release  # noqa: F401 - a fixture

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROUNDS = 300
PLAIN = ("plain-sync", "plain-off-sync")
# Speculative decoding v2, with overlap scheduling; 0.5.14's dies on its first request.
V2 = ("plain", "plain-off", "spec", "spec-off", "spec-sync")
CORES = ("plain-python", "spec-rust")  # the two trees of the unified cache
MISSING = "ModuleNotFoundError"


def kinds_of(name: str) -> tuple[str, ...]:
    """The kinds of servers that a release is driven as."""
    version = Version(name)
    if version < Version("0.5.13"):
        return ()
    found = PLAIN if version < Version("0.5.15") else (*PLAIN, *V2)
    return (*found, *CORES) if version >= Version("0.5.21") else found


@pytest.mark.parametrize("late", [False, True], ids=["at once", "as on a GPU"])
def test_the_ledgers_held_pages_are_the_allocators_own(release, late):  # noqa: F811
    kinds = kinds_of(release)
    if not kinds:
        pytest.skip("tests/ledger drives the installed 0.5.12, in engines and without")
    root = wheels.unpacked(release)
    paths = [root, ROOT, HERE]
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("G4DEBUG_", "SGLANG_"))}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, str(HERE / "drive_ledger.py"), "--rounds", str(ROUNDS)]
    command += ["--kinds", ",".join(kinds), *(["--late"] if late else [])]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=600
    )
    told = done.stdout + done.stderr
    missing = [x for x in told.splitlines() if x.startswith(MISSING)]
    if missing:
        pytest.fail(
            f"SGLang {release} was not driven: this environment lacks a package that it imports "
            f"({missing[-1]}). Install it here, or run this with the release's own environment.",
            pytrace=False,
        )
    assert done.returncode == 0, told[-4000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["release"] == release
    assert set(result["kinds"]) == set(kinds)
    for kind, seen in result["kinds"].items():
        # It was really driven: requests ended, and pools were so small that some were retracted.
        assert seen["served"] > 10, (kind, seen)
        assert seen["extend"] > 10, (kind, seen)
        assert seen["retracted"] > 0, (kind, seen)
