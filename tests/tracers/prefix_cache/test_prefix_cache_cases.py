"""Each way to break the prefix cache, and each way to lose a page, on SGLang's own classes.

drive_cases.py serves a load without a model, and breaks one thing in each fork.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from g4debug.hooking import targets

DRIVE, ROOT = Path(__file__).with_name("drive_cases.py"), Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]

# What the prefix cache holds: case -> the kind that is told when the node is used.
NODES = {
    "node_alias": "wrong-page",
    "node_swap": "wrong-page",
    "node_shifted": "wrong-page",
    "node_slots_shifted": "not-in-order",
    "node_reversed": "wrong-page",
    "node_short": "length",
    "node_live_page": "wrong-page",
    "node_free_page": "freed-page",
    "node_zero_page": "no-page",
}
# What a request hands over: told at the insert.
ROWS = {
    "row_cached": "holds-other",
    "row_free": "freed",
    "row_foreign": "foreign",
    "row_twice": "twice",
    "row_swapped": "misplaced",
    "row_slots": "not-in-order",
    "row_zero": "no-page",
    "row_outside": "no-page",
    "chunk_not_admitted": "beyond",
    "committed_too_long": "beyond",
    "key_other_token": "other-key",
    "key_other_namespace": "other-key",
    "protected_negative": "protected",
    "protected_far": "protected",
    "protected_zero": "protected",
    "protected_more": "protected",
    "protected_one_more": "protected",
}
# What the row of a request that runs has in place of what the prefix cache has.
LENT = {
    "lent_live": "overwritten after the prefix cache had lent it",
    "lent_cached": "overwritten after the prefix cache had lent it",
    "lent_exchanged": "overwritten after the prefix cache had lent it",
    "lent_free": "the page in the row is free",
    "lent_slot": "the row was overwritten inside of the page, or the node was",
}
# Pages that are lost: what a census finds.
LOST = {
    "lost_full_page": "leaked",
    "lost_swa_page": "leaked",
    "lost_protected": "leaked",
    "lost_evicted": "leaked",
    "lost_free": "leaked",
    "lost_short_node": "leaked",
    "lost_alias": "shared",
    "lost_tombstone": "leaked",
    "lock_kept": "locked",
    "row_kept": "row",
    "row_free_twice": "row-repeated",
    "row_free_while_it_runs": "leaked",
    "size_drifts": "miscounted",
}
# Those that need nodes in Python.
IN_PYTHON = {
    *NODES, "lent_cached", "lost_short_node", "lost_alias", "lost_tombstone", "size_drifts",
}  # fmt: skip
# A page that another request hands over may be in the prefix cache by then, or a cached one still
# be that request's.
SAME = {"foreign": {"foreign", "holds-other"}, "holds-other": {"foreign", "holds-other"}}


def drive(*arguments: str) -> dict:
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("G4DEBUG_", "SGLANG_"))}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(DRIVE), *arguments],
        env=environ, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    found: dict = json.loads(line.removeprefix("RESULT "))
    return found


def servers() -> dict[str, list[str]]:
    """The servers that are driven: name -> arguments of drive_cases.py."""
    if targets.path("scheduler.war_barrier") is None:  # no speculative decoding v2 in the harness
        return {"sync": [], "late": ["--late"]}
    found = {
        "python": ["--core", "python", "--overlap"],
        "late": ["--core", "python", "--late"],
    }
    # With a draft the keys of nodes in Python are pairs of tokens, which the driver cannot ask for.
    if targets.path("tree.prefix") is not None:
        found["native"] = ["--spec", "--overlap"]
    return found


LATE = pytest.mark.long("the load, the cases, and pages that come late")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=LATE if name == "late" else ()) for name in servers()],
)
def told(request):
    found = drive(*servers()[request.param])
    found["server"] = request.param
    return found


def test_the_load_is_judged_and_healthy(told):
    assert told["checked"]["pages handed over"] > 50
    assert told["checked"]["pages handed out"] > 20
    assert "kind" not in told["nothing"], told["nothing"]
    assert told["nothing"]["sglang"] == []
    assert "broken" not in told["nothing"]


@pytest.mark.parametrize("case", [*NODES, *ROWS])
def test_what_the_prefix_cache_gets_and_gives(told, case):
    if told["native"] and case in IN_PYTHON:
        pytest.skip("the nodes are not in Python")
    kind = {**NODES, **ROWS}[case]
    found = told[case]
    if case == "row_outside" and told["server"] == "late" and "died" in found:
        # On some releases SGLang itself looks the slots up before they reach the host.
        assert "IndexError" in found["died"], found
        return
    assert found.get("check") == "prefix-cache", found
    assert found["kind"] in SAME.get(kind, {kind}), found
    assert found["cause"]
    if case in NODES and kind == "wrong-page":
        assert "node " in found["headline"]
        assert "handed it over in step" in found["got"]


@pytest.mark.parametrize("case", LENT)
def test_the_row_of_a_request_that_runs(told, case):
    """Told in the next step, though the page is in the column that it was handed out for."""
    if told["native"] and case in IN_PYTHON:
        pytest.skip("the nodes are not in Python")
    found = told[case]
    assert (found.get("check"), found.get("kind")) == ("prefix-cache", "lent-row"), found
    # Nobody has locked that node, so its page may have been evicted by the time it is told.
    causes = [LENT[case], *([LENT["lent_free"]] if case == "lent_cached" else [])]
    assert any(cause in found["cause"] for cause in causes), found
    assert "by the row, and in slot" in found["got"], found


@pytest.mark.parametrize("case", LOST)
def test_a_census_finds_what_is_lost(told, case):
    if told["native"] and case in IN_PYTHON:
        pytest.skip("the nodes are not in Python")
    found = told[case]
    if case == "lost_protected" and found.get("check") == "prefix-cache":  # a release came first
        assert found["kind"] == "protected", found
        return
    assert found.get("check") == "pool-leak", found
    assert found["kind"] == LOST[case], found
    if case == "row_free_while_it_runs":  # nobody took the pages out of it
        assert "is in the list of free rows" in found["cause"], found


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.long("another load"))])
def test_whatever_sglang_finds_a_census_finds(seed):
    """With other loads, and in all kinds of cases: SGLang's own check is never alone."""
    cases = [case for case in LOST if case not in IN_PYTHON]
    found = drive("--seed", str(seed), "--cases", ",".join([*cases, "nothing"]))
    for case in cases:
        by = {"pool-leak", "prefix-cache"} if case == "lost_protected" else {"pool-leak"}
        assert found[case].get("check") in by, (case, found[case])
    assert "kind" not in found["nothing"], found["nothing"]
    assert found["nothing"]["sglang"] == []
