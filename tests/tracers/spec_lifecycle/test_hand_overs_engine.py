"""Real engines in which another plugin changes what one part of a step hands to the next.

Each server runs once, and each case in a fork of its scheduler; see tests/support/
hand_over_meddler.py. A case must be told in the step in which it struck, or in the next one where
only that one reads what was changed, before a token that is wrong leaves.
"""

from __future__ import annotations

import json
from pathlib import Path

import drive_hand_overs
import hand_over_meddler
import installed_plugin
import pytest
from real_engine import ENGINE, drive

from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(
        targets.path("result.resolve") is None, reason="the worker of SGLang 0.5.15 and later"
    ),
]
SUPPORT = Path(hand_over_meddler.__file__).parent
DRIVER = Path(drive_hand_overs.__file__)
ARMED = {
    "G4DEBUG_TRACE": "spec-lifecycle,page-table,kv-allocator,flight-recorder",
    "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
    "G4DEBUG_MAX_DUMPS": "1",
}
LAYERED = "multi-layer EAGLE"
SERVERS = {
    "mtp": {},
    "plain": {"mtp": False},
    "mtp without overlap": {"disable_overlap_schedule": True},
    "plain without overlap": {"mtp": False, "disable_overlap_schedule": True},
    LAYERED: {"model": "mimo-v2", "draft": "multi-layer-eagle"},
}
# Case -> kind, row, column (None: of whoever ends first), and how many steps after the one that ran
# it is told. With overlap the
# result on the host is that of the step before.
VERIFY = {
    "draft-bonus": ("verify-input", 1, 0, 0),
    "draft-token": ("verify-input", 1, 2, 0),
    "draft-far": ("verify-input", 1, 2, 0),
    "draft-rows": ("verify-input", 0, 0, 0),
    "positions-all": ("verify-input", 0, 0, 0),
    "positions-row": ("verify-input", 1, 0, 0),
    "positions-rows": ("verify-input", 0, 0, 0),
    "positions-one": ("verify-input", 1, 1, 0),
    "tree-child": ("verify-input", 1, 0, 0),
    "tree-index": ("verify-input", 0, 0, 0),
    "fed-bonus": ("verify-input", 1, 0, 0),
    "fed-rows": ("verify-input", 0, 0, 0),
    "fed-positions": ("verify-input", 0, 0, 0),
    "candidates": ("verify-input", 1, 1, 0),
    "kernel-lens": ("verify-result", 1, -1, 0),
    "kernel-bonus": ("verify-result", 1, 0, 0),
    "kernel-both": ("verify-result", 1, -1, 0),
    "sample-lens": ("verify-result", 1, -1, 0),
    "sample-rows": ("verify-result", 0, 0, 0),
    "sample-index": ("verify-result", 0, 0, 0),
    "result-lens-far": ("verify-result", 1, -1, 0),
    "result-lens": ("verify-result", 1, -1, 0),
    "result-lens-and-lengths": ("verify-result", 1, -1, 0),
    "result-rows": ("verify-result", 0, 0, 0),
    "result-rows-and-bonus": ("verify-result", 0, 0, 0),
    "result-bonus": ("verify-result", 1, -1, 0),
    "result-hidden": ("stale-hidden-state", 0, 0, 0),
    "seed-bonus": ("verify-result", 0, -1, 0),
    "seed-hidden": ("stale-hidden-state", 0, -1, 0),
    "left-hidden": ("stale-hidden-state", 0, -1, 0),
}
ON_THE_HOST = {
    "host-rows": ("sampled-token", 0, 0, 0),
    "host-one": ("sampled-token", 1, 0, -1),
    "host-lens": ("verify-result", 1, -1, -1),
    "kept-rows": ("sampled-token", 0, 0, -1),
    "output-one": ("sampled-token", 1, -1, 0),
    "output-end": ("sampled-token", None, None, 0),
    "output-rows": ("sampled-token", 0, -1, 0),
    "committed": ("bookkeeping", 1, -1, 0),
    "committed-after": ("bookkeeping", 1, -1, 0),
}
IN_THE_MAP = {
    "left-bonus": ("verify-result", 0, -1, 0),
    "stash-bonus": ("bonus-token", 0, -1, 1),
    "stash-one": ("bonus-token", 1, -1, 1),
    "stash-hidden": ("stale-hidden-state", 0, -1, 1),
    "map-tokens": ("bonus-token", 0, -1, 1),
    "map-one": ("bonus-token", 1, -1, 1),
    "map-hidden": ("stale-hidden-state", 0, -1, 1),
    "map-lengths": ("seq-len", 0, -1, 1),
    "map-length": ("seq-len", 1, -1, 1),
    "map-rows": ("seq-len", 0, -1, 1),
    "gathered-bonus": ("bonus-token", 0, -1, 0),
    "gathered-hidden": ("stale-hidden-state", 0, -1, 0),
    "future-indices": ("future-row", 0, -1, 0),
}
GIVEN = {
    "forward-rows": ("forward-row", 0, -1, 0),
    "forward-row-far": ("forward-row", 1, -1, 0),
    "batch-row-far": ("forward-row", 1, -1, 0),
    "batch-row-negative": ("forward-row", 1, -1, 0),
    "forward-length": ("seq-len", 1, -1, 0),
}
PLAIN = {
    "map-far": ("sampled-token", 1, -1, 1),
    "forward-position": ("position", 1, -1, 0),
    "sampled-rows": ("sampled-token", 0, -1, 0),
    "sampled-one": ("sampled-token", 1, -1, 0),
    "target-rows": ("sampled-token", 0, -1, 0),
    "target-one": ("sampled-token", 1, -1, 0),
    "input-rows": ("sampled-token", 0, -1, 0),
    "input-one": ("sampled-token", 1, -1, 0),
    "device-length": ("seq-len", 1, -1, 0),
    "stash-bonus": ("sampled-token", 0, -1, 1),
    "stash-one": ("sampled-token", 1, -1, 1),
    "map-tokens": ("sampled-token", 0, -1, 1),
    "map-one": ("sampled-token", 1, -1, 1),
    "host-one": ("sampled-token", 1, -1, -1),
    "output-one": ("sampled-token", 1, -1, 0),
    "output-end": ("sampled-token", None, None, 0),
    "output-rows": ("sampled-token", 0, -1, 0),
    "committed": ("bookkeeping", 1, -1, 0),
    "committed-after": ("bookkeeping", 1, -1, 1),
}


def at_once(cases: dict, *names: str) -> dict:
    """The same without overlap: each result is processed before the next step runs."""
    return {n: (*c[:3], c[3] + 1) if n in names else c for n, c in cases.items()}


# This worker hands no hidden states to the next step.
NO_HIDDEN = ("seed-hidden", "left-hidden", "stash-hidden", "map-hidden", "gathered-hidden")
LATE = ("host-one", "host-lens", "kept-rows", "output-one", "output-end", "output-rows")
CASES = {
    "mtp": VERIFY | ON_THE_HOST | IN_THE_MAP | GIVEN | {"map-far": ("bonus-token", 1, -1, 1)},
    "plain": PLAIN | GIVEN | {"host-rows": ("sampled-token", 0, -1, 0)},
    # There the next draft gets the tensors themselves.
    "mtp without overlap": VERIFY
    | GIVEN
    | at_once(ON_THE_HOST, *LATE, "committed-after")
    | {"left-bonus": ("bonus-token", 0, -1, 1)},
    LAYERED: {
        name: found
        for name, found in (VERIFY | ON_THE_HOST | IN_THE_MAP | GIVEN).items()
        if name not in NO_HIDDEN
    }
    # The first row with fewer than all drafts accepted.
    | {"kernel-both": ("verify-result", 0, -1, 0)},
    "plain without overlap": at_once(PLAIN, *LATE) | GIVEN,  # the result is not copied to the host
}
LONG = pytest.mark.long("an engine more for each kind of server")
NEWEST = pytest.mark.once("multi-layer EAGLE is served on the newest release only")
MARKS = {"mtp": (), LAYERED: (LONG, NEWEST)}
EACH = [
    pytest.param(server, case, marks=MARKS.get(server, (LONG,)))
    for server, cases in CASES.items()
    for case in ("sound", *cases)
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Server -> case -> what the meddler wrote of it; a server is started when it is asked for."""
    found: dict[str, dict[str, dict]] = {}

    def run(server: str) -> dict[str, dict]:
        if server not in found:
            found[server] = serve(tmp_path_factory.mktemp("server"), server)
        return found[server]

    return run


def serve(folder: Path, server: str) -> dict[str, dict]:
    names = ("sound", *CASES[server])
    plugin, reports = folder / "plugin", folder / "reports"
    plugin.mkdir()
    reports.mkdir()
    installed_plugin.install(plugin, "meddler", "hand_over_meddler:register")
    run = drive(
        folder / "run",
        str(DRIVER),
        json.dumps(SERVERS[server]),
        PYTHONPATH=installed_plugin.path(plugin, SUPPORT),
        MEDDLER_CASES=",".join(names),
        MEDDLER_FOLDER=str(reports),
        MEDDLER_WORKER=server,
        **ARMED,
    )
    assert run.status == 0, run.log[-3000:]
    assert all(len(tokens) == drive_hand_overs.OUTPUT for tokens in run.result)
    assert "of a verify only what follows" not in run.log
    return {path.stem: json.loads(path.read_text()) for path in reports.glob("*.json")}


@pytest.mark.parametrize(("server", "case"), EACH)
def test_what_is_changed_on_its_way_is_told(ran, server, case):
    report = ran(server)[case]
    assert not report["error"], report["error"]
    finding = report["finding"]
    if case == "sound":
        assert finding is None
        # The last verify may go on behind the last token that was asked for.
        assert all(len(t) >= drive_hand_overs.OUTPUT for t in report["tokens"].values())
        return
    kind, row, column, later = CASES[server][case]
    assert finding is not None, "nothing was told"
    assert (finding["check"], finding["kind"]) == ("spec-lifecycle", kind), finding["headline"]
    if row is not None:
        assert (finding["row"], finding["column"]) == (row, column), finding["headline"]
    assert finding["request"] == report["rids"][finding["row"]]
    assert finding["step"] - report["fired"] == later
    if case.endswith(("rows", "-hidden", "map-tokens", "map-lengths")) and row == 0:
        assert f"request {report['rids'][1]} (row 1)" in finding["got"] + finding["cause"]
    if kind in ("verify-input", "verify-result", "sampled-token"):
        assert finding["expected"].split()[0] == finding["got"].split()[0]  # the tensor
        assert "What did so is not known" in finding["cause"]


def test_each_case_is_in_a_test():
    assert CASES["mtp"].keys() | CASES["plain"].keys() == hand_over_meddler.OWN
