"""The matrix goes on where it was stopped."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.once("results are kept without SGLang")


def test_a_good_result_is_not_made_again_and_a_bad_one_is(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "repro"))
    drill = importlib.import_module("suites.matrix.drill")
    runs = []

    def run(name, named=("kv-allocator",)):
        row = drill.Row("double-free", name, named, mtp=False, seen="nothing", fired=3)
        row.caught, row.kinds = {"kv-allocator": 0}, {"kv-allocator": "double-free"}

        def made():
            runs.append(name)
            return row

        kept = drill.kept(drill.Row, row.name, tmp_path, made)
        assert (kept.name, kept.verdict, kept.good) == (row.name, row.verdict, row.good)

    for _ in range(2):
        run("1*on")
        run("20*on")
        run("1*off", named=("page-table",))  # missed
    assert runs == ["1*on", "20*on", "1*off", "1*off"]
