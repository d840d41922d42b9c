"""docs/upstream: each path that is in force on 0.5.23 is described for SGLang, and wins there.

A path that SGLang takes over is one that need not be carried here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from g4debug import discovery
from g4debug.fixes.source import source
from g4debug.hooking import targets

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import test_goals
from measuring import results

ROOT = results.FOLDER.parents[1]
PAGES = ROOT / "docs" / "upstream"
TODAY = "0.5.23"
PARTS = ("What", "Figures", "How it was tested", "What it does not fit")
WHERE = f"Where (lines of {TODAY})"
FIXES = [discovery.load("fix", name) for name in discovery.names("fix")]
PATHS = [
    f.id
    for f in FIXES
    if f.eligible and f.purpose == "performance" and targets.matches(f.needs, Version(TODAY))
]
pytestmark = pytest.mark.once("the pages are the same on every release")


def page(path: str) -> str:
    return (PAGES / f"path-{path}.md").read_text()


def test_there_is_a_page_for_each_path_and_no_other() -> None:
    assert PATHS
    found = {p.stem.removeprefix("path-") for p in PAGES.glob("path-*.md")}
    assert found == set(PATHS)
    linked = re.findall(
        r"\(upstream/path-([a-z-]+)\.md\)", (ROOT / "docs" / "fixes.md").read_text()
    )
    assert sorted(linked) == sorted(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_it_has_its_parts_and_figures_of_this_release(path: str) -> None:
    headings = re.findall(r"^## (.*)$", page(path), re.M)
    assert headings == ["What", "Figures", WHERE, "What SGLang would change", *PARTS[2:]]
    files = re.findall(r"\(\.\./\.\./benchmarks/results/([^)]+)\)", page(path))
    heads = {file: results.read(results.FOLDER / file)[0] for file in files if TODAY in file}
    assert heads
    assert all(head["sglang"] == TODAY for head in heads.values())


@pytest.mark.parametrize("path", PATHS)
def test_the_lines_of_sglang_are_there(path: str) -> None:
    """Each file is one of SGLang's, and near each line stands a name that the page has."""
    if str(targets.sglang_version()) != TODAY:
        pytest.skip(f"the lines are those of {TODAY}")
    text = page(path)
    named = set(re.findall(r"`([a-z_/0-9]+)\.py(?::(\d+))?`", text))
    assert named
    words = set(re.findall(r"[A-Za-z_]{6,}", " ".join(re.findall(r"`([^`]+)`", text))))
    for file, line in named:
        module = f"sglang.srt.{file.replace('/', '.')}"
        lines = source(module).splitlines()
        if line:
            near = " ".join(lines[int(line) - 3 : int(line) + 12])
            assert words & set(re.findall(r"[A-Za-z_]{6,}", near)), f"{file}:{line}"


def test_each_of_them_wins() -> None:
    """Faster than SGLang by the median of every size that its page shows."""
    decode = test_goals.decode(test_goals.DECODE_TODAY)
    assert test_goals.at_most(1, *decode, every=True) == "met"
    for variant in ("verify", "on"):
        assert test_goals.at_most(0.75, *test_goals.mtp(variant), every=True) == "met"
    for file in (test_goals.E2B_TODAY, test_goals.E4B):
        assert min(test_goals.yoco(file, "off", "on")) > 1.5
    for model in test_goals.MODELS:
        file = test_goals.MM_TODAY.format(model)
        for way in ("together", "fused"):
            assert min(test_goals.ratios(file, "way", "encoder_s", "alone", way)) > 1.3
