"""More than 400 excerpts, in the manner of public reports: the right entry, or rightly none.

They were written anew, with names replaced. The heading of each says what triage must answer: an
entry's number, ``elsewhere``, ``unknown``, ``nothing`` or ``foreign``, and ``line N`` where the
first cause is. ``judged.txt`` was written by somebody who had not seen the patterns; of the
excerpts in ``unseen.txt`` the answer was written down before triage had seen them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from g4debug.triage import reading, verdict

pytestmark = pytest.mark.once("a log is read without SGLang")

FOLDER = Path(__file__).parent / "excerpts"
CARRIERS = {
    "plain": "{}",
    "kubectl --timestamps": "2026-11-27T06:32:01.123456789Z {}",
    "kubectl --prefix": "[pod/llm-7d9f/server] {}",
    "compose": "server-1  | {}",
    "journald": "Nov 27 06:32:01 node7 python[123]: {}",
    "ray": "(Worker pid=912, ip=10.0.0.3) {}",
}
# More of them; each takes all excerpts in one test, because there are many.
WRAPPERS: dict[str, Callable[[int, str], str]] = {
    "stern": lambda i, x: f"llm-0 server {x}",
    "journald short-iso": lambda i, x: f"2026-11-27T06:32:01+0000 node7 python3[22]: {x}",
    "journald short-precise": lambda i, x: f"Nov 27 06:32:01.{i:06d} node7 python3[22]: {x}",
    "rsyslog": lambda i, x: f"2026-11-27T06:32:01.123456+00:00 node7 python3[22]: {x}",
    "pm2": lambda i, x: f"0|server   | {x}",
    "ts": lambda i, x: f"Nov 27 06:32:{i % 60:02d} {x}",
    "srun --label": lambda i, x: f"3: {x}",
    "a mail": lambda i, x: f"> {x}",
    "an indent": lambda i, x: f"    {x}",
    "mpirun": lambda i, x: f"[1,3]<stderr>:{x}",
    "a cloud's time in brackets": lambda i, x: f"[2026-11-27T06:32:01.48675097Z] {x}",
    "a pane of a terminal": lambda i, x: f"\u2502 {x:<120} \u2502",
    "cat -n": lambda i, x: f"{i + 1:6d}\t{x}",
    "torchrun": lambda i, x: f"[default3]:{x}",
    "Loki": lambda i, x: json.dumps({"line": x, "timestamp": "17", "fields": {}}),
    "GCP": lambda i, x: json.dumps({"insertId": str(i), "severity": "ERROR", "textPayload": x}),
    "GCP's payload": lambda i, x: json.dumps({"jsonPayload": {"message": x}, "severity": "INFO"}),
    "fluent-bit": lambda i, x: json.dumps({"stream": "stderr", "log": x + "\n"}),
    "docker": lambda i, x: json.dumps({"log": x + "\n", "stream": "stderr", "time": "x"}),
    "docker in kubectl": lambda i, x: "[pod/llm/server] " + json.dumps({"log": x + "\n"}),
}


class Excerpt(NamedTuple):
    expected: str
    line: int
    title: str
    log: str


def excerpts() -> list[Excerpt]:
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        for part in re.split(r"^=== ", path.read_text(), flags=re.M)[1:]:
            head, _, log = part.partition("\n")
            said = re.fullmatch(r"(\w+)(?: line (\d+))? (.*)", head)
            assert said, head
            found.append(Excerpt(said[1], int(said[2] or 0), said[3], log))
    return found


ALL = excerpts()


def answer(log: str) -> tuple[str, int]:
    found = verdict.of(reading.of(line.encode() for line in log.splitlines(keepends=True)))
    said = str(found.entry.number) if found.entry is not None else found.state
    return said, found.first.line if found.first is not None else 0


@pytest.mark.parametrize("one", ALL, ids=[x.title for x in ALL])
def test_the_right_entry_or_rightly_none(one: Excerpt) -> None:
    """Of all carriers in one test: a test for each would cost more than what it does."""
    found = {}
    for carrier, form in CARRIERS.items():
        said, line = answer("".join(form.format(x) + "\n" for x in one.log.splitlines()))
        found[carrier] = (said, line if one.line else 0)
    assert found == dict.fromkeys(CARRIERS, (one.expected, one.line))


def test_an_empty_line_behind_each_changes_nothing() -> None:
    """As a browser copies them."""
    wrong = []
    for one in ALL:
        said, line = answer("".join(x + "\n\n" for x in one.log.splitlines()))
        if said != one.expected or (one.line and line != 2 * one.line - 1):
            wrong.append((one.title, one.expected, one.line, said, line))
    assert wrong == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_wraps_the_lines_changes_nothing(wrapper: str) -> None:
    wrong = []
    for one in ALL:
        if one.log.startswith('"'):  # a table is not read in something else
            continue
        log = "".join(WRAPPERS[wrapper](i, x) + "\n" for i, x in enumerate(one.log.splitlines()))
        said, line = answer(log)
        if said != one.expected or (one.line and line != one.line):
            wrong.append((one.title, one.expected, one.line, said, line))
    assert wrong == []


def test_there_are_a_hundred_and_a_quarter_of_them_blames_nobody() -> None:
    assert len(ALL) >= 100
    assert sum(not x.expected.isdigit() for x in ALL) >= 25
    assert len({x.title for x in ALL}) == len(ALL)
