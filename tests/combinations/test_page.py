"""docs/supported.md shows the table of g4debug/combinations/run.py, and what it leaves out.

UPDATE_SNAPSHOTS=1 pytest tests/combinations/test_page.py; git diff docs
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import combination_table
import pytest

from g4debug.combinations.run import RUNS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "supported.md"
TABLES = {"combinations": combination_table.lines, "families": combination_table.families}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_combinations(name: str) -> None:
    text = PAGE.read_text()
    rows = "\n".join(TABLES[name]())
    wanted = re.sub(
        rf"(<!-- {name}[^\n]*\n).*?(<!-- /{name} -->)",
        lambda found: f"{found[1]}{rows}\n{found[2]}",
        text,
        flags=re.S,
    )
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        PAGE.write_text(wanted)
        return
    assert f"<!-- {name}" in text
    assert text == wanted, f"run UPDATE_SNAPSHOTS=1 pytest {Path(__file__).name}"


@pytest.mark.parametrize("command", sorted({command for run in RUNS for command in run.by}))
def test_each_command_is_there(command: str) -> None:
    first, *words = shlex.split(command)
    if first == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        assert first in ("python", "pytest")
        assert (ROOT / next(word for word in words if word.endswith(".py"))).is_file()
    assert " and " not in command  # as the table would break it
