"""What each mode does about a corruption of each of SGLang's structures, on real engines.

An engine for each mode; each case runs in a fork of its scheduler (tests/support/
class_meddler.py). ``raise`` stops before a wrong token leaves. ``log`` and ``contain`` report, and
serving goes on; what ``contain`` mends gives the tokens of a run in which nothing was corrupted.
"""

from __future__ import annotations

import json
from pathlib import Path

import class_meddler
import drive_hand_overs
import installed_plugin
import pytest
from real_engine import ENGINE, drive

from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(
        targets.path("tree.unified.prefix") is None, reason="the places of SGLang 0.5.23"
    ),
]
SUPPORT = Path(class_meddler.__file__).parent
MODES = ["raise", "contain", pytest.param("log", marks=pytest.mark.long("the third mode"))]
ARMED = {
    "G4DEBUG_TRACE": "page-table,kv-allocator,spec-lifecycle,pool-leak,prefix-cache,kv-writes,"
    "flight-recorder",
    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
    "G4DEBUG_LEAK_STEPS": "2",
    "G4DEBUG_MAX_DUMPS": "40",
}
# Case -> the tracer and the kinds of which one is told, and within how many steps.
CASES = {
    "table": ("page-table", {"other-request"}, 0),
    "row-twice": ("page-table", {"misplaced-page"}, 0),
    "row-foreign": ("page-table", {"foreign-page"}, 0),
    "mapping-slot": ("kv-writes", {"other-request", "mismatch", "written-twice"}, 1),
    "mapping-page": ("page-table", {"other-request"}, 0),
    "rows": ("spec-lifecycle", {"forward-row"}, 0),
    "map-length": ("spec-lifecycle", {"seq-len"}, 1),
    "insert-twice": ("prefix-cache", {"wrong-page"}, 0),
    "match-rolled": ("prefix-cache", {"wrong-page"}, 1),
    "draft-bonus": ("spec-lifecycle", {"verify-input"}, 0),
    "result-lens": ("spec-lifecycle", {"verify-result"}, 0),
    "output-one": ("spec-lifecycle", {"sampled-token"}, 0),
    "leak-full": ("pool-leak", {"leaked"}, 2),
    "leak-swa": ("pool-leak", {"leaked"}, 2),
    "freed": ("kv-allocator", {"freed-while-read"}, 0),
}
MENDED = ("table", "mapping-slot", "mapping-page")  # `contain` leaves the tokens as they are


@pytest.fixture(scope="module", params=MODES)
def served(request, tmp_path_factory):
    """(mode, case -> what came of it, the folder of the dumps)."""
    folder = tmp_path_factory.mktemp(request.param)
    plugin, reports = folder / "plugin", folder / "reports"
    plugin.mkdir()
    reports.mkdir()
    installed_plugin.install(plugin, "meddler", "class_meddler:register")
    run = drive(
        folder / "run",
        str(Path(drive_hand_overs.__file__)),
        "{}",
        PYTHONPATH=installed_plugin.path(plugin, SUPPORT),
        MEDDLER_CASES=",".join(("sound", *CASES)),
        MEDDLER_FOLDER=str(reports),
        G4DEBUG_MODE=request.param,
        **ARMED,
    )
    assert run.status == 0, run.log[-3000:]
    found = {path.stem: json.loads(path.read_text()) for path in reports.glob("*.json")}
    return request.param, found, {(r.finding.check, r.finding.kind) for r in run.dumps}


def test_nothing_is_told_where_nothing_is_wrong(served):
    _, found, _ = served
    sound = found["sound"]
    assert not sound["error"]
    assert not sound["told"]
    assert all(len(t) >= drive_hand_overs.OUTPUT for t in sound["tokens"].values())


@pytest.mark.parametrize("case", CASES)
def test_each_mode_does_what_it_says(served, case):
    mode, found, dumped = served
    report, sound = found[case], found["sound"]["tokens"]
    check, kinds, late = CASES[case]
    assert report["fired"], "the case did not strike"
    told = {kind for by, kind in map(tuple, report["told"]) if by == check}
    assert told & kinds, (report["told"], report["error"][-1500:])
    assert any((check, kind) in dumped for kind in told & kinds)
    # The first request, asked again, gives the same tokens. With another prompt it gives none.
    again = [] if case == "insert-twice" else sound[found["sound"]["rids"][0]]
    right = {rid: sound.get(rid, again) for rid in report["tokens"]}
    if mode == "raise":
        assert not report["error"], report["error"][-1500:]
        finding = report["finding"]
        assert (finding["check"], finding["kind"]) in {(check, kind) for kind in kinds}
        assert 0 <= finding["step"] - report["fired"] <= late
        for rid, tokens in report["sent"].items():
            assert tokens == right[rid][: len(tokens)], "a wrong token has left"
        return
    assert report["finding"] is None
    if mode == "contain":
        assert not report["error"], report["error"][-1500:]
        if case in MENDED:
            shown = {rid: t[: drive_hand_overs.OUTPUT] for rid, t in report["tokens"].items()}
            assert shown == {rid: right[rid][: drive_hand_overs.OUTPUT] for rid in shown}


def test_each_case_is_in_a_test():
    assert CASES.keys() == class_meddler.NAMES
