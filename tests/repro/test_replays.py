"""repro/harness/replays.py: which tapes of healthy servers pass that are not replayed."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug.dumps import writing
from g4debug.findings import tape
from g4debug.findings.tape import Code, Why
from g4debug.findings.tape_record import pack

REPRO = Path(__file__).parents[2] / "repro"
pytestmark = pytest.mark.once("tapes are read without SGLang")
START = bytes((Code.START, Why.START)) + tape.start(0, 0, 0, 0, 0.7, 0)
STEP = bytes((Code.STEP, 1, 0))
FACTS = {
    "page_size": 16, "size": 320, "max_running_requests": 8, "max_prefill_tokens": 512,
    "chunked_prefill_size": 128, "enable_overlap": True, "schedule_policy": "fcfs",
}  # fmt: skip


@pytest.fixture
def replays(monkeypatch):
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("harness.replays")


def write(folder: Path, events: bytes = START + STEP, limits: tuple[str, ...] = (), **facts):
    made = pack([events], b"", 16, False, 1, 0, {**FACTS, **facts}, dict.fromkeys(limits, -1))
    record = dataclasses.replace(
        sample_record(), versions={"sglang": "0.5.23"}, geometry={"context_len": 2048}, tape=made
    )
    (folder / "tape.pt").write_bytes(writing.encode(record))


@pytest.mark.parametrize(
    ("server", "passed", "told"),
    [
        ({"limits": ("grammars",)}, True, "no: grammars"),
        (
            {"speculative_algorithm": "MEDUSA"},
            True,
            "no: the speculative algorithm MEDUSA was never replayed",
        ),
        ({"events": START + STEP + b"\xee"}, False, "its tape is damaged"),
        ({"size": None}, False, "size is None"),
    ],
    ids=["limit", "never replayed", "damaged", "lacks a size"],
)
def test_a_tape_that_is_not_replayed(replays, tmp_path, monkeypatch, server, passed, told):
    """What was never replayed is no fault of the server's. A tape that is not whole is one."""
    monkeypatch.setattr(replays, "replay", lambda *args, **kwargs: pytest.fail("it was replayed"))
    write(tmp_path, **server)
    got = replays.replayed(tmp_path)
    assert got[0] is passed
    assert told in got[1]


@pytest.mark.parametrize("code", [0, 1])
def test_a_tape_that_is_replayed(replays, tmp_path, monkeypatch, code):
    result = {"code": code, "text": "not equal", "more": ["step 1"], "equal": 1, "steps": 1}
    monkeypatch.setattr(replays, "replay", lambda *args, **kwargs: result)
    write(tmp_path)
    told = (False, "not equal step 1") if code else (True, "1 of 1 steps equal")
    assert replays.replayed(tmp_path) == told
