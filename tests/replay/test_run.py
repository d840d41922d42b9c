"""What was found is told, whatever ends the search for something smaller."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4debug.findings.record import Finding, Location, TrapRecord
from g4debug.replay import run
from g4debug.replay.host import Outcome
from g4debug.replay.script import Script
from g4debug.replay.setting import CannotReplay, Setting
from g4debug.replay.verdict import NOTHING, OTHERWISE, REPRODUCED, States, Verdict
from g4debug.replay.workload import Workload
from g4debug.reporters.replay import Scripted

pytestmark = pytest.mark.once("it needs no SGLang")


def test_what_may_have_decided_there_is_named_where_states_differ() -> None:
    names = tuple(f"a{n:02}" for n in range(42))
    made: Any = SimpleNamespace(left_out=names)
    on: Any = SimpleNamespace(ended=("grammars", "sessions"))
    before, arguments = run._not_carried(made, on)
    assert before.endswith("what no tape carries: grammars, sessions.")
    assert "these are not set here: a00, a01" in arguments
    assert arguments.endswith("a39 and 2 more.")
    assert not [*run._not_carried(SimpleNamespace(left_out=()), SimpleNamespace(ended=()))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "target", "why"),
    [
        (KeyboardInterrupt(), "a.py", "stopped by Ctrl-C"),
        (CannotReplay("SGLang 9 is not installed here"), "a.py", "SGLang 9 is not installed here"),
        (None, "no/a.py", "No such file or directory"),
    ],
)
def test_no_script_is_no_reason_to_lose_the_verdict(
    ends: BaseException | None,
    target: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(*_: Any) -> Script:
        if ends is not None:
            raise ends
        return Script("text", "it", tells=True)

    monkeypatch.setattr(run.script, "made", made)
    shown = SimpleNamespace(record=object(), reached=())
    best = Workload((0,))
    search: Any = SimpleNamespace(best=best, shown=shown, trail=[(best, shown)], recording=None)
    found = run._script(search, SimpleNamespace(), tmp_path, tmp_path / target, 0.0)  # type: ignore[arg-type]
    assert found.file == ""
    assert why in found.text


def finding(kind: str = "stale") -> Finding:
    return Finding("page-table", kind, "attn.x", f"g4debug: {kind}", Location(step=9), "", "")


LIKE, OTHER = finding(), finding("free")
EQUAL, DIFFERENT = States(9, 9, 2), States(4, 9, 1, differs=5)


def patched(monkeypatch: pytest.MonkeyPatch, judged: Verdict) -> None:
    """Any dump can be replayed, and comes to this verdict."""
    recording = SimpleNamespace(steps=9, requests={})
    on = SimpleNamespace(first=0, steps=9, begins="start", ended=())
    made = Setting("0.5.23", False, {}, SimpleNamespace(), {})  # type: ignore[arg-type]
    ran = Outcome("tape", "", None, {}, (), None, 0, 1.0)
    server = SimpleNamespace(run=lambda *_, **__: ran, without=(), drives=())
    started = lambda *_: contextlib.nullcontext(server)  # noqa: E731
    monkeypatch.setattr(run.setting, "recording_of", lambda _: (on, recording))
    monkeypatch.setattr(run.setting, "setting_of", lambda *_: made)
    monkeypatch.setattr(run.host, "started", started)
    monkeypatch.setattr(run.host, "made", lambda _: None)
    monkeypatch.setattr(run.verdict, "judge", lambda *_: judged)
    monkeypatch.setattr(run, "_with_it", lambda *_: "it does not come")


@pytest.mark.parametrize("why", ["stopped by Ctrl-C", "there was no time to try all"])
def test_ctrl_c_in_the_search_for_fewer_requests_ends_what_is_behind_it_too(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, Verdict(REPRODUCED, "reproduced", (), EQUAL, LIKE))
    shrunk, made = object(), []
    search = SimpleNamespace(why=why)

    def script(*_: Any) -> Scripted:
        made.append(1)
        return Scripted("a.py", "it")

    monkeypatch.setattr(run, "_shrink", lambda *_: (shrunk, search))
    monkeypatch.setattr(run, "_script", script)
    result = run.replayed(
        tmp_path, TrapRecord(LIKE, "2026"), (), 9.0, tmp_path, lambda *_: None,
        fixes={"locked-prefix": True}, plain=tmp_path / "a.py",
    )  # fmt: skip
    assert (result.code, result.shrunk) == (0, shrunk)
    stopped = why == "stopped by Ctrl-C"
    assert bool(made) != stopped
    assert result.script == (Scripted("", why) if stopped else Scripted("a.py", "it"))
    assert bool(result.tried) != stopped
    assert (result.untried == "this replay was stopped") == stopped


@pytest.mark.parametrize(
    ("judged", "rows", "table_of", "untried"),
    [
        (Verdict(REPRODUCED, "reproduced", (), EQUAL, LIKE), 1, "", ""),
        (Verdict(OTHERWISE, "another finding", (), EQUAL, LIKE), 1, "", ""),
        (Verdict(REPRODUCED, "explained", (), EQUAL, OTHER), 1, "g4debug: free", ""),
        (Verdict(OTHERWISE, "found here", (), EQUAL, OTHER), 1, "g4debug: free", ""),
        (Verdict(OTHERWISE, "states equal", (), EQUAL), 0, "", "nothing was found here"),
        (Verdict(NOTHING, "states differ", (), DIFFERENT, LIKE), 0, "", "the states differ"),
    ],
    ids=["the same", "alike", "explained", "found here", "nothing", "differs"],
)
def test_a_fix_is_tried_against_a_finding_that_is_named_and_none_where_states_differ(
    judged: Verdict,
    rows: int,
    table_of: str,
    untried: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another finding than the dump's, the rows are of that one, and say so."""
    patched(monkeypatch, judged)
    there = TrapRecord(LIKE, "2026")

    def told(fixes: dict[str, bool]) -> Any:
        return run.replayed(
            tmp_path, there, (), 9.0, tmp_path, lambda *_: None, fixes=fixes
        )  # fmt: skip

    result = told({"locked-prefix": True})
    assert result.tried == (("fix locked-prefix on", "it does not come"),) * rows
    assert result.table_of == table_of
    assert result.untried.startswith(untried)
    assert bool(result.untried) == bool(untried)
    assert told({}).untried == ""
