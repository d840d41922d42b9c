"""README says what the code says."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path

import pytest

from g4debug import cli, discovery, targets
from g4debug.settings import DUMP_DIR, FIX_PREFIX, Settings, ours

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TRIAGE = (ROOT / "TRIAGE.md").read_text()


def default(value: object) -> str:
    if isinstance(value, Path):
        assert value == ours(DUMP_DIR)
        return f"`/tmp/{DUMP_DIR.relative_to(tempfile.gettempdir())}`"
    if value in ("", ()):
        return "none"
    return f"`{int(value)}`" if isinstance(value, bool) else f"`{value}`"


def settings_table() -> list[str]:
    """The rows that README must have, from the dataclass."""
    rows = [
        f"| `{f.metadata['env']}` | {default(f.default)} | {f.metadata['help']} |"
        for f in dataclasses.fields(Settings)
        if f.metadata
    ]
    switch = "0 keeps a fix off; 1 puts it on where it was written for this SGLang"
    return [*rows, f"| `{FIX_PREFIX}<FIX>` | by need | {switch} |"]


def test_the_environment_table_is_the_dataclass() -> None:
    table = README.partition("<!-- settings:")[2].partition("<!-- /settings -->")[0]
    assert [x for x in table.splitlines() if x.startswith("| `")] == settings_table()


def test_every_command_is_there_and_no_other() -> None:
    real = {cli._load(name).NAME for name in cli.command_names()}
    assert set(re.findall(r"^\| `g4debug ([a-z-]+)", README, re.M)) == real
    called = set(re.findall(r"(?:^|bin/|`)g4debug ([a-z][a-z-]+)", README + TRIAGE, re.M))
    assert called <= real


def test_every_fault_is_there() -> None:
    faults = set(discovery.names("g4debug.faults"))
    section = README.partition("## Faults")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`", section, re.M)) == faults


def test_every_repro_script_is_there() -> None:
    scripts = {path.name for path in (ROOT / "repro").glob("[a-z]*.py")}
    assert {name for name in scripts if name not in README} <= {"matrix.py", "soak.py"}  # make's
    assert not [n for n in re.findall(r"repro/(\w+\.py)", README + TRIAGE) if n not in scripts]


def test_ci_runs_the_readmes_test_command() -> None:
    command = README.partition("## Tests\n\n```\n")[2].partition("\n```")[0]
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == f"exec {command}"


def test_verified_releases() -> None:
    line = re.search(r"^- \*\*Verified\*\*: ([^,]*(?:, [0-9][^,]*)*),", README, re.M)
    assert line
    assert tuple(line[1].split(", ")) == targets.VERIFIED


@pytest.mark.parametrize("text", [README, TRIAGE], ids=["README", "TRIAGE"])
def test_links_lead_somewhere(text: str) -> None:
    anchors = {
        re.sub(r"[^a-z0-9_ -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_the_picture_fetches_nothing() -> None:
    picture = (ROOT / "docs" / "show.svg").read_text()
    urls = set(re.findall(r"https?://[^\s\"'<>)]+", picture))
    assert urls <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "g4debug:" in picture.replace("&#160;", " ")
