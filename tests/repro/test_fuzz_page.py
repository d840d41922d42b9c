"""repro/fuzz.py --out: the page counts each case once, in the column of what came of it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

REPRO = Path(__file__).parents[2] / "repro"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="needs sglang: what is drawn depends on its release",
)


@pytest.fixture
def page(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("suites.fuzz.page")


def row(text, begin):
    """The cells behind the first, by the names of their columns."""
    lines = [line.strip("| \n").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    at = next(n for n, line in enumerate(lines) if line[0] == begin)
    head = next(line for line in reversed(lines[:at]) if line[0] in ("server", "corrupted"))
    return dict(zip(head[1:], lines[at][1:], strict=True))


def test_a_page_of_corruptions(page, tmp_path):
    corruption = importlib.import_module("suites.fuzz.corruption")
    graded = importlib.import_module("suites.fuzz.grade")

    def case(server, what, verdict, late=-1, allowed=""):
        made = corruption.Corruption(70, what, "step", "zero", 3, "", "full", 0.0, 0.0, "first")
        return page.Case(server, made, graded.Grade(verdict, "the text", "t", late, allowed))

    cases = [
        case("mtp", "row", "told", 0),
        case("mtp", "row", "told", 1),
        case("mtp", "row", "told", 1),
        case("mtp", "row", "told", 9, "the reason"),
        case("mtp", "row", "told", 5, "the reason"),
        case("plain", "kv", "missed"),
        case("plain", "kv", "late", 12),
        case("plain", "row", "nothing"),
        *(case("plain", "row", verdict) for verdict in ("harmless", "listed", "disarmed")),
    ]
    out = tmp_path / "fuzz.md"
    page.corruptions(out, range(70, 82), cases, {"overlap": "it did not complete"})
    text = out.read_text()
    found = {k: v for k, v in row(text, "mtp").items() if v not in ("0", "")}
    assert "MTP" in found.pop("with")
    assert found == {"told in the same step": "1", "one step late": "2", "later, as allowed": "2"}
    found = {k: v for k, v in row(text, "plain").items() if k != "with" and v != "0"}
    assert found == dict.fromkeys(
        ("missed", "late", "nothing", "harmless", "listed", "disarmed"), "1"
    )
    assert row(text, "row (value)")["one step late"] == "2"
    assert row(text, "row (value)")["missed"] == "0"
    assert row(text, "kv (value)")["late"] == "1"
    assert "the seeds 70 to 81," in text
    assert "- row (step), 5, 9 steps late: the reason." in text
    assert "**overlap: it did not complete.**" in text
    assert text.count("- seed 70 (plain)") == 3  # late, missed, disarmed
    assert "- seed 70 (plain), late, 12 steps late: " in text


def test_a_page_without_anything_bad_names_nothing(page, tmp_path):
    page.corruptions(tmp_path / "x.md", range(1, 2), [], {})
    text = (tmp_path / "x.md").read_text()
    assert "Bad" not in text
    assert "later than" not in text
    assert "\n\n\n" not in text


def test_a_page_of_servers(page, tmp_path):
    found = [
        page.Server(3, "MTP, page_size=1", "good", "9 requests | no finding."),
        page.Server(4, "no MTP", "bad", "A finding."),
        page.Server(5, "no MTP", "good", "fine"),
    ]
    page.servers(tmp_path / "x.md", range(3, 6), found, "any")
    text = (tmp_path / "x.md").read_text()
    assert "Made by `repro/fuzz.py --first 3 --servers 3 --model any`: the seeds 3 to 5," in text
    assert "2 good, 1 bad." in text
    assert "| 3 | MTP, page_size=1 | good | 9 requests / no finding. |" in text
