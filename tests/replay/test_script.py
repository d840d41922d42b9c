"""A script says a workload in SGLang's own API, and nothing of g4debug's is in it."""

from __future__ import annotations

import ast
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_shrink import ENDED, PAGE, TOGETHER, recording

from g4debug.findings.record import Finding, Location
from g4debug.findings.tape import UNCACHED
from g4debug.replay import script
from g4debug.replay.model import Model
from g4debug.replay.setting import Setting
from g4debug.replay.tokens import FIRST_WORD, Tokens
from g4debug.replay.workload import After, Workload

pytestmark = pytest.mark.once("it needs no SGLang")
FINDING = Finding(
    check="kv-allocator", kind="freed-while-read", site="pool.free", location=Location(),
    headline='g4debug: kv-allocator in extend: page 1 is freed while "r000002" reads it',
    expected="pages that nobody reads", got="page 1", cause="_insert_helper freed it \\ 1",
)  # fmt: skip


def setting(mtp: bool = False, **environ: str) -> Setting:
    arguments = {"page_size": PAGE, "max_total_tokens": 512, "enable_mixed_chunk": False}
    return Setting("0.5.23", mtp, arguments, Model("gemma-4", "", 512, 128, 4096), environ)


def text(workload: Workload, compares: bool = False, **environ: str) -> str:
    made = recording()
    events, _ = script.in_words_of_the_api(workload.events(made), ())
    tokens = Tokens(made, 512 - FIRST_WORD)
    return script.text(FINDING, setting(**environ), events, tokens, "it hangs", compares)


def names(source: str) -> dict[str, object]:
    """What the lines before the first class make, without SGLang."""
    found: dict[str, object] = {}
    exec(source.partition("class Run")[0].replace("import sglang", ""), found)
    return found


@pytest.mark.parametrize("compares", [False, True])
def test_it_is_python_and_imports_nothing_of_g4debug(compares: bool) -> None:
    after = {0: ENDED, 1: TOGETHER, 4: After(1, 3), 8: After(2, After.ENDED)}
    source = text(Workload((0, 1, 4, 8), after=after), compares, SGLANG_SOME_SWITCH="1")
    tree = ast.parse(source)
    imported = [
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    ]
    assert sorted(imported) == ["asyncio", "os", "sglang", "sys"]
    assert (ast.get_docstring(tree) or "").startswith("kv-allocator in extend: page 1 is freed")
    lines = [line.strip() for line in source.splitlines()]
    begin = lines.index("async def workload(run):")
    assert lines[begin + 1 : begin + 8] == [
        "run.ask(1, 50)", "run.ask(2, 50)", "await run.tokens(1, 3)", "run.ask(5, 50)",
        "await run.ended(2)", "run.abort(3)", "await run.ended()",
    ]  # fmt: skip
    assert ("ANOTHER ANSWER" in source) == compares
    assert names(source)["ARGUMENTS"] == {
        "page_size": PAGE, "max_total_tokens": 512, "disable_cuda_graph": True,
        "skip_server_warmup": True,
    }  # fmt: skip


def test_a_request_that_stays_out_of_the_prefix_cache_does_so_in_a_script() -> None:
    made = recording()
    made.requests[1].options |= UNCACHED
    events, _ = script.in_words_of_the_api(Workload((0,)).events(made), ())
    tokens = Tokens(made, 512 - FIRST_WORD)
    source = script.text(FINDING, setting(), events, tokens, "it hangs", False)
    assert "class Engine" not in source
    assert 'run.ask(1, 50, bootstrap_host="2.2.2.2")' in source


def looking() -> str:
    made = recording()
    events, _ = script.in_words_of_the_api(Workload((0,)).events(made), ())
    tokens = Tokens(made, 512 - FIRST_WORD)
    return script.text(FINDING, setting(), events, tokens, "it", False, looks=True)


def test_a_script_that_looks_tells_pages_that_are_free_twice_or_free_and_read() -> None:
    source = looking()
    assert "engine = Engine(**ARGUMENTS" in source
    found: dict[str, Any] = {}
    exec(source[source.index("def wrong") : source.index("def watched_scheduler")], found)

    def pool(*pages: int, later: torch.Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(free_pages=torch.tensor(pages), release_pages=later)

    def told(full: SimpleNamespace, swa: SimpleNamespace, finished: bool = False) -> list[str]:
        rows = torch.tensor([[64, 65, 192, 193]])
        scheduler = SimpleNamespace(
            page_size=64,
            token_to_kv_pool_allocator=SimpleNamespace(
                full_attn_allocator=full, swa_attn_allocator=swa
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
        )
        req = SimpleNamespace(rid="7", req_pool_idx=0, finished=lambda: finished)
        batch = SimpleNamespace(reqs=[req], seq_lens=torch.tensor([3]))
        return list(found["wrong"](scheduler, batch))

    assert told(pool(2, 4), pool(1, 3)) == []
    assert told(pool(2, 3), pool(1)) == ["full page 3 is free, and request 7 reads it"]
    assert told(pool(2, 3), pool(1), finished=True) == []
    assert told(pool(2), pool(1, 5, later=torch.tensor([5]))) == ["swa page 5 is free twice"]


def test_what_a_script_sees_in_pages_is_its_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = recording(), "WRONG PAGES: full page 2 is free twice\n"
    monkeypatch.setattr(script, "_run", lambda *_: script.Run(said, 0, tmp_path))
    record = SimpleNamespace(finding=FINDING)
    workload = Workload((0,), after={0: ENDED})
    arguments: Any = (record, setting(), made, workload, (), tmp_path, math.inf)
    found = script.made(*arguments, looks=True)
    assert found.tells
    assert found.shows.endswith("before a step: full page 2 is free twice")
    said = "completed"
    with pytest.raises(script.NoScript, match="neither a free list nor a row"):
        script.made(*arguments, looks=True)


def test_prompts_are_those_of_the_replay() -> None:
    prompts = names(text(Workload((1, 6))))["PROMPTS"]
    assert isinstance(prompts, dict)
    made = recording()
    tokens = Tokens(made, 512 - FIRST_WORD)
    assert prompts == {n: tokens.prompt(made.requests[n]) for n in (2, 7)}
    assert prompts[2][:PAGE] == prompts[7][:PAGE]


def test_an_exact_round_becomes_the_nearest_event_and_is_told() -> None:
    events = Workload((0, 1, 2), after={0: ENDED}).events(recording())
    found, guessed = script.in_words_of_the_api(events, [{}, {1: 4}, {1: After.ENDED, 2: 0}])
    assert [after for _, after in found] == [ENDED, After(1, 4), TOGETHER]
    assert guessed == "request 2, request 3"


def test_the_error_of_a_dead_scheduler_is_read_from_its_log() -> None:
    log = (
        "[2026-11-26 10:00:00] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n    g()\n'
        "AttributeError: 'X' object has no attribute 'y'\n\n"
        "[2026-11-26 10:00:01] SIGQUIT received.\n"
    )
    died = script.Run(log, -9, Path())
    assert died.error == died.end == "AttributeError: 'X' object has no attribute 'y'"
    assert script.Run(log, 0, Path()).error == ""
    assert script.Run("", None, Path()).end.startswith("it did not end")


@pytest.mark.parametrize(
    ("logs", "shows", "tells"),
    [
        (["ValueError: a leak!"], "SGLang's own error: ValueError: a leak!", True),
        (["", "ANOTHER ANSWER of request 1"], "wrong answers: ANOTHER ANSWER of request 1", True),
        (["", "", "AssertionError: twice"], "with its own checks (SGLANG_CHECK_KV", True),
        (["", "", ""], "nothing that SGLang itself says", False),
    ],
)
def test_sglang_itself_is_asked_for_its_words_before_its_checks(
    logs: list[str],
    shows: str,
    tells: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First beside the tracer, then alone, then with SGLang's checks; it ends with the first word.

    logs: of the runs without the tracer. An empty one is the traced run's, and another one's.
    """
    said = iter(["", *filter(None, logs)] if logs[0] else logs)
    runs: list[tuple[bool, bool]] = []

    def run(
        text: str, setting: Setting, trace: Sequence[str], folder: Path, until: float
    ) -> script.Run:
        runs.append((bool(trace), "SGLANG_CHECK_KV_PAGE_INVARIANTS" in text))
        log = next(said)
        died = "Error" in log
        return script.Run("Traceback (most recent call last):\n" * died + log, -died, folder)

    monkeypatch.setattr(script, "_run", run)
    monkeypatch.setattr(script.host, "dumps_in", lambda folder: ())
    record = SimpleNamespace(finding=FINDING)
    monkeypatch.setattr(script.verdict, "first_alike", lambda there, records: record)
    made = recording()
    workload = Workload((0,), after={0: ENDED})
    found = script.made(record, setting(), made, workload, (), tmp_path, math.inf)  # type: ignore[arg-type]
    assert shows in found.shows
    assert found.tells == tells
    asked = 3 if "checks" in shows or not tells else 2
    assert runs == [(True, False), (False, False), (False, True)][:asked]
    assert ("SGLANG_CHECK_KV_PAGE_INVARIANTS" in found.text.partition("import asyncio")[2]) == (
        "checks" in shows
    )


@pytest.mark.parametrize("stands", [True, False])
def test_a_server_that_hangs_does_so_in_a_script_of_its_own(
    stands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = dataclasses.replace(FINDING, check="flight-recorder", kind="hang")
    texts: list[str] = []

    def run(
        text: str, setting: Setting, trace: Sequence[str], folder: Path, until: float
    ) -> script.Run:
        texts.append(text)
        return script.Run("STANDS: request 1 got 0 of 1 tokens in 30 s\n" * stands, 1, folder)

    record: Any = SimpleNamespace(finding=hung)
    monkeypatch.setattr(script, "_run", run)
    monkeypatch.setattr(script.host, "dumps_in", lambda folder: ())
    monkeypatch.setattr(script.verdict, "first_alike", lambda there, records: record)
    workload = Workload((0,), after={0: ENDED})
    if not stands:
        with pytest.raises(script.NoScript, match="does not stand"):
            script.made(record, setting(), recording(), workload, (), tmp_path, math.inf)
        return
    found = script.made(record, setting(), recording(), workload, (), tmp_path, math.inf)
    assert found.tells
    assert found.shows.endswith("request 1 got 0 of 1 tokens in 30 s")
    assert len(texts) == 2
    assert "asyncio.wait_for(workload(run), 30)" in texts[0]
    ast.parse(found.text)


def test_no_script_is_run_when_the_time_is_over(tmp_path: Path) -> None:
    made: Any = SimpleNamespace(finding=FINDING)
    workload = Workload((0,), after={0: ENDED})
    with pytest.raises(script.NoScript, match="no time left to run it; give --seconds more"):
        script.made(made, setting(), recording(), workload, (), tmp_path, time.monotonic())


HANG = dataclasses.replace(FINDING, check="flight-recorder", kind="hang")


@pytest.mark.parametrize(
    ("found", "which", "seen"),
    [(FINDING, 1, False), (FINDING, 2, True), (FINDING, 3, True), (HANG, 2, True)],
)
def test_of_a_run_that_did_not_end_nothing_is_said(
    found: Finding, which: int, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def run(text: str, *_: Any) -> script.Run:
        runs.append(text)
        return script.Run("", None if len(runs) == which else 0, tmp_path, 7)

    made: Any = SimpleNamespace(finding=found)
    monkeypatch.setattr(script, "_run", run)
    monkeypatch.setattr(script.host, "dumps_in", lambda folder: ())
    monkeypatch.setattr(script.verdict, "first_alike", lambda *_: made if seen else None)
    workload = Workload((0,), after={0: ENDED})
    with pytest.raises(script.NoScript, match=r"^it did not end in 7 s, so what it shows is not"):
        script.made(made, setting(), recording(), workload, (), tmp_path, math.inf)


def test_a_fault_gives_no_script(tmp_path: Path) -> None:
    made = recording()
    with pytest.raises(script.NoScript, match="injected"):
        script.made(
            None,  # type: ignore[arg-type]
            setting(G4DEBUG_FAULTS="page-oob=1*on"), made, Workload.whole(made), (), tmp_path, 0,
        )  # fmt: skip
