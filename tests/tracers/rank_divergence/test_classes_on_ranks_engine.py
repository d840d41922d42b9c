"""Corruptions of SGLang's structures on one rank of two, and on both: told by these ranks.

Servers in mode ``log`` are struck on both ranks, in the same way, or on rank 1 only. Then a wrong
row, a wrong mapping, a wrong insert and a leak leave the ranks in step, because the sum of what
they compute is the same number on both. A token that only one rank sees changed does not: the ranks
would accept different lengths, and hang at the latest when a request ends on one of them. So that
one runs in mode ``raise``, in a server of its own.

In mode ``contain`` one rank of two repairs what struck it alone, so its answers and those of the
other rank stay as they were.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_engine import ENGINE, drive

from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.long("six engines of two ranks"),
    pytest.mark.skipif(
        targets.path("result.resolve") is None, reason="the worker of SGLang 0.5.15 and later"
    ),
]
DRIVER = str(Path(__file__).parents[2] / "cpu" / "drive_tensor_parallel.py")
ARMED = {
    "G4DEBUG_TRACE": "page-table,kv-allocator,spec-lifecycle,pool-leak,prefix-cache,kv-writes,"
    "rank-divergence,flight-recorder",
    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
    "G4DEBUG_LEAK_STEPS": "4",
    "G4DEBUG_MAX_DUMPS": "60",
}
# Fault -> the action, the tracer that tells it, and the kinds.
Told = dict[str, tuple[str, str, set[str]]]
READ: Told = {
    "row-wrong-page": ("1*own", "page-table", {"misplaced-page"}),
    "swa-mapping-slot": ("1*other@at=4", "kv-writes", {"other-request", "written-twice"}),
}
KEPT: Told = {
    "lost-free": ("1*on", "pool-leak", {"leaked"}),
    "insert-wrong-page": ("1*on@at=4", "prefix-cache", {"twice", "misplaced", "wrong-page"}),
}
CONTAINED: Told = {
    "page-alias": ("1*on@mode=decode", "page-table", {"other-request", "misplaced-page", "stale"}),
    "double-free": ("1*on", "kv-allocator", {"double-free"}),
}
VERIFY: Told = {"verify-input": ("1*draft@at=2", "spec-lifecycle", {"verify-input"})}
SAMPLED: Told = {"sampled-token": ("1*on", "spec-lifecycle", {"sampled-token"})}
# Name -> faults, a selector, the mode, and the ranks that are struck.
SERVERS = {
    "read on both": (READ | VERIFY | SAMPLED, "", "log", {0, 1}),
    "kept on both": (KEPT, "", "log", {0, 1}),
    "read on one": (READ, "@rank=1", "log", {1}),
    "kept on one": (KEPT, "@rank=1", "log", {1}),
    "contained on one": (CONTAINED, "@rank=1", "contain", {1}),
    "stopped": (VERIFY, "@rank=1", "raise", {1}),
}
EACH = [(server, fault) for server, (faults, *_) in SERVERS.items() for fault in faults]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Server -> its run. Each is started when it is asked for."""
    found = {}

    def run(server: str):
        if server not in found:
            faults, rank, mode, _ = SERVERS[server]
            plan = [f"{name}={action}{rank}" for name, (action, *_) in faults.items()]
            environ = {"G4DEBUG_FAULTS": ";".join(["seed=1", *plan]), "G4DEBUG_MODE": mode}
            folder = tmp_path_factory.mktemp(server.replace(" ", "-"))
            found[server] = drive(folder, DRIVER, "mtp", "2", **environ, **ARMED)
        return found[server]

    return run


@pytest.mark.parametrize(("server", "fault"), EACH)
def test_it_is_told_on_the_ranks_that_it_struck(ran, server, fault):
    run, (faults, _, _, ranks) = ran(server), SERVERS[server]
    _, check, kinds = faults[fault]
    fired = [int(n) for n in re.findall(rf" {fault} #1: .*\[step (\d+): ", run.log)]
    assert len(fired) == len(ranks), run.log[-3000:]
    told = [r.finding for r in run.dumps if r.finding.check == check and r.finding.kind in kinds]
    assert {f.location.rank for f in told} == ranks, [f.headline for f in told]
    assert 0 <= min(f.location.step for f in told) - min(fired) <= 5


def test_what_is_the_same_on_both_ranks_is_no_difference(ran):
    for server in ("read on both", "kept on both"):
        assert "ranks-differ" not in {r.finding.kind for r in ran(server).dumps}


def test_a_row_that_only_one_rank_has_is_a_difference(ran):
    """On the CPU engine the ranks also compare what their rows name."""
    found = [r.finding for r in ran("read on one").dumps if r.finding.kind == "ranks-differ"]
    assert found
    assert all("KV locations" in f.headline for f in found)
    assert all("a row of req_to_token was overwritten on one" in f.cause for f in found)


def test_a_contained_rank_stays_in_step_and_its_answers_stay_right(ran):
    """Each prompt was asked twice, and only the first time was struck."""
    run = ran("contained on one")
    assert run.status == 0, run.log[-3000:]
    tokens = run.result["tokens"]
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]
    # A free list in which one page was dropped hands out other pages; no decision may differ.
    found = [r.finding.headline for r in run.dumps if r.finding.kind == "ranks-differ"]
    assert all("differ in out_cache_loc" in headline for headline in found), found


def test_the_other_rank_leaves_its_dump(ran):
    told = [(r.finding.location.rank, r.finding.kind) for r in ran("stopped").dumps]
    assert told == [(1, "verify-input"), (0, "other-rank")]
