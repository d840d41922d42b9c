"""What is around a line is taken off: by its form, or as it was learned from SGLang's own lines."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from g4debug.triage import lines, reading, verdict
from g4debug.triage.carriers import Unwrapper

pytestmark = pytest.mark.once("a log is read without SGLang")

OWN = b"[2026-11-27 06:32:01 TP1] Decode batch, #running-req: 1, #queue-req: 0\n"
FRAME = b'  File "/src/sglang/srt/managers/scheduler.py", line 7, in f\n'


@pytest.mark.parametrize(
    "front",
    [
        b"llm-7d9f server ",
        b"[pod/llm-7d9f/server] ",
        b"server-1  | ",
        b"0|server   | ",
        b"(Worker pid=912, ip=10.0.0.3) ",
        b"2026-11-27T06:32:01.123456789Z ",
        b"2026-11-27T06:32:01.123Z stderr F ",
        b"2026-11-27T06:32:01+0000 node7 python3[22]: ",
        b"2026-11-27T06:32:01.123456+00:00 node7 python3[22]: ",
        b"Nov 27 06:32:01 node7 python[123]: ",
        b"Nov 27 06:32:01.123456 node7 run-it.sh[123]: ",
        b"Nov 27 06:32:01 ",
        b" 3: ",
        b"> ",
        b"    ",
        b"[default3]:",
        b"\x1b[32mserver-1  | \x1b[0m",
    ],
)
def test_what_stands_in_front_of_the_lines(front: bytes) -> None:
    log = Unwrapper()
    assert log.lines(front + OWN) == [OWN]
    assert log.lines(front + FRAME) == [FRAME]
    assert log.lines(front + b"ValueError: x\n") == [b"ValueError: x\n"]


@pytest.mark.parametrize(
    "record",
    [
        {"log": "", "stream": "stderr", "time": "2026-11-27T06:32:01Z"},
        {"stream": "stderr", "log": ""},
        {"line": "", "timestamp": "1763606402000000000", "fields": {}},
        {"insertId": "9", "severity": "ERROR", "textPayload": ""},
        {"severity": "ERROR", "jsonPayload": {"message": ""}},
        {"message": "", "host": "node7"},
    ],
    ids=lambda record: "-".join(record),
)
def test_a_record_of_json_has_the_line_in_one_of_its_fields(record: dict) -> None:
    log = Unwrapper()
    for own in (OWN, FRAME):
        inner = own.decode().rstrip()
        told = json.dumps(record).replace('""', json.dumps(inner), 1).encode()
        assert log.lines(told) == [inner.encode()]


def test_a_record_of_pythons_logging_is_a_line_of_sglangs_own() -> None:
    """With SGLANG_LOGGING_CONFIG_PATH there is no stamp, and a traceback is in one record."""
    record = {
        "asctime": "2026-11-27 06:32:01,123",
        "levelname": "ERROR",
        "message": "Scheduler hit an exception: Traceback (most recent call last):\n  File\nKey",
    }
    first, *others = Unwrapper().lines(json.dumps(record).encode())
    found = lines.read(1, first)
    assert (found.at, found.prefixed) == (datetime(2026, 11, 27, 6, 32, 1), True)
    assert others == [b"  File", b"Key"]
    del record["asctime"]
    found = lines.read(1, Unwrapper().lines(json.dumps(record).encode())[0])
    assert (found.at, found.prefixed) == (None, True)


def test_a_line_of_logfmt() -> None:
    log = Unwrapper()
    front = b'time="2026-11-27T06:32:01Z" level=info msg='
    for own in (OWN, FRAME):
        assert log.lines(front + json.dumps(own.decode().rstrip()).encode()) == [own.rstrip()]


def test_a_record_that_was_cut_has_its_beginning() -> None:
    log = b'{"stream":"stderr","log":"ValueError: pool memory leak detected! [full'
    assert Unwrapper().lines(log) == [b"ValueError: pool memory leak detected! [full"]
    assert Unwrapper().lines(b'{"log":3}\n') == [b'{"log":3}\n']
    assert Unwrapper().lines(b'{"log":\n') == [b'{"log":\n']


def test_a_table_with_a_column_of_lines() -> None:
    log = Unwrapper()
    log.lines(b'"date","host","message"\n')
    assert log.lines(b'"2026","node7","  File ""a.py"", line 1"\n') == [b'  File "a.py", line 1']


def test_a_traceback_teaches_where_nothing_else_does() -> None:
    log = Unwrapper()
    log.lines(b"llm-0 server Traceback (most recent call last):\n")
    assert log.lines(b"llm-0 server " + FRAME) == [FRAME]
    assert log.lines(b"llm-0 server OSError: x\n") == [b"OSError: x\n"]


def test_two_lines_in_one_are_two() -> None:
    """A crash in C writes no newline; a progress bar neither."""
    crash = b"RuntimeError: CUDA error: x"
    assert Unwrapper().lines(crash + OWN) == [crash, OWN]


def test_a_quotation_teaches_nothing() -> None:
    log = Unwrapper()
    said = b'a client said "[2026-11-27 06:32:01] Scheduler hit an exception"\n'
    assert log.lines(said) == [said]
    log.lines(OWN)
    log.lines(b"    " + OWN)  # indented in a log that is not
    assert log.lines(b"    " + FRAME) == [b"    " + FRAME]


def test_a_rank_is_no_wrapper() -> None:
    log = Unwrapper()
    log.lines(b"[rank5]:" + OWN)
    assert log.lines(b"[rank5]: ValueError: x\n") == [b"[rank5]: ValueError: x\n"]


def test_what_is_learned_is_bounded() -> None:
    log = Unwrapper()
    for i in range(500):
        log.lines(b"pod-%c%c " % (97 + i % 26, 97 + i // 26) + OWN)
    assert len(log._learned) <= 64


def test_the_lines_of_a_form_that_is_not_known() -> None:
    """Most of what SGLang says has no head: so nothing is blamed, and the reason is given."""
    log = [
        b"<14>1 The server is fired up and ready to roll!\n",
        b"<14>1 Decode batch, #running-req: 1, #queue-req: 0\n",
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    ]
    found = verdict.of(reading.of(log))
    assert (found.state, found.entry) == ("unknown", None)
    assert "in line 1" in found.why


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_a_log_that_powershell_has_saved(encoding: str, tmp_path) -> None:
    log = tmp_path / "server.log"
    batch = "[2026-11-27 06:30:01 TP1] Decode batch, #running-req: 1, #queue-req: 0\r\n"
    error = "ValueError: pool memory leak detected! [full] total=8\r\n"
    log.write_bytes((batch * 3000 + error).encode(encoding))
    with log.open("rb") as file:
        found = reading.read(file)
    first = found.chosen.first()
    assert first is not None
    assert (found.read, first.line, first.pattern.entry) == (3001, 3001, 10)


def test_a_stamp_in_front_of_sglangs_own_that_has_the_same_form() -> None:
    """``ts '[%Y-%m-%d %H:%M:%S]'``: it also stands in front of a traceback's lines."""
    log = (
        "The server is fired up and ready to roll!",
        "Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/opt/sglang/srt/managers/scheduler.py", line 1, in check_memory',
        "ValueError: pool memory leak detected! [full] total=8",
    )
    own = "[2026-11-20 02:40:12{}] "
    stamped = [own.format("") + log[0], own.format(" TP0") + log[1], *log[2:]]
    lines = [f"[2026-11-20 02:40:13] {x}\n".encode() for x in stamped]
    first = reading.of(lines).chosen.first()
    assert first is not None
    assert (first.line, first.rank, first.pattern.entry) == (4, "TP0", 10)
