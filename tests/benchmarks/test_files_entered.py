"""The script that counts the files of each way runs, whatever the files are called by now."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "files_entered.py"

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
    pytest.mark.once("it takes ten seconds and is about our own files"),
]


@pytest.mark.long("a script that measures")
def test_every_way_enters_files_of_ours(tmp_path):
    found = tmp_path / "found.json"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--list", "--json", str(found)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    ways = {k: v for k, v in json.loads(found.read_text()).items() if isinstance(v, dict)}
    assert len(ways) == 7
    for name, way in ways.items():
        assert f"{name:<32} {way['files']:>4}" in run.stdout
        assert way["files"] == len(way["entered"]) > 0
        for file, functions in way["entered"].items():
            assert (ROOT / file).is_file()
            assert functions
            assert f"  {file}: " in run.stdout
    for bad in ("a bad page table", "a double free"):
        assert set(ways[f"{bad}, to its record"]["entered"]) < set(
            ways[f"{bad}, to the dump"]["entered"]
        )
