"""The alert rules of docs/production, by Prometheus' own promtool, where that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES, CASES = "docs/production/alerts.yml", "tests/house/alerts_test.yml"
PROMTOOL = shutil.which("promtool")
pytestmark = [
    pytest.mark.once("no SGLang has a part in it"),
    pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus"),
]


def promtool(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROMTOOL), *arguments], cwd=root, capture_output=True, text=True, check=False
    )


def copied(root: Path) -> Path:
    """The rules and their cases below another folder. Returns the rules."""
    for name in (RULES, CASES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root / RULES


def test_prometheus_takes_the_rules_and_they_fire_when_they_should():
    for arguments in (("check", "rules", RULES), ("test", "rules", CASES)):
        run = promtool(ROOT, *arguments)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(g4debug_findings_total unless g4debug_findings_total offset 15m)\n          or ", ""),
        ("g4debug_armed == 0", "g4debug_armed > 1"),
        (" unless g4debug_declined == 1", ""),
        ("unless g4debug_declined == 1", "unless g4debug_declined"),
        ("unless on (instance) g4debug_armed", "unless g4debug_armed"),
        ("== 0\n          and on (instance) sum", "> 0\n          and on (instance) sum"),
    ],
)
def test_the_cases_notice_a_rule_that_is_wrong(tmp_path, right, wrong):
    rules = copied(tmp_path)
    text = rules.read_text()
    assert right in text
    rules.write_text(text.replace(right, wrong))
    assert promtool(tmp_path, "test", "rules", CASES).returncode == 1
