"""What was found is told, whatever ends the search for something smaller."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4debug.replay import run
from g4debug.replay.script import Script
from g4debug.replay.setting import CannotReplay
from g4debug.replay.workload import Workload

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
