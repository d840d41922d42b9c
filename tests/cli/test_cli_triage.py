"""``g4debug triage``: a log, standard input, a number or a line, and the facts of this machine."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug import cli
from g4debug.dumps import heads, writing

LEAK = "ValueError: pool memory leak detected! [full] total=8\n"
UNKNOWN = (
    "[2026-09-14 03:22:11] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "a.py", line 1, in f\nKeyError: 3\n'
)


@pytest.fixture(autouse=True)
def _no_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TRTLLM_MHA_DEBUG_DIR", str(tmp_path / "none"))


def log(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.log"
    path.write_text(text)
    return str(path)


def as_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", log(tmp_path, LEAK)]) == 0
    out = capsys.readouterr().out
    assert "10. Pool memory leak detected" in out
    assert "line 1 of 1" in out
    assert out.rstrip().splitlines()[-1].startswith("NEXT  SGLANG_TRTLLM_MHA_DEBUG=1")
    assert len(out.splitlines()) < 45


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(LEAK.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["triage", "--json"]) == 0
    assert as_json(capsys)["entry"] == 10


@pytest.mark.parametrize("number", range(1, 28))
def test_every_number(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", str(number)]) == 0
    out = capsys.readouterr().out
    assert out.lstrip().startswith(f"{number}. ")
    assert len(out.splitlines()) < 45


def test_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["triage", LEAK.strip(), "--json"]) == 0
    found = as_json(capsys)
    assert (found["state"], found["entry"], found["first"]["line"]) == ("entry", 10, 1)


def test_what_is_not_known_ends_with_1(tmp_path: Path, capsys) -> None:
    assert cli.main(["triage", log(tmp_path, UNKNOWN)]) == 1
    out = capsys.readouterr().out
    assert "NOT KNOWN" in out
    assert "KeyError: 3" in out


@pytest.mark.parametrize("what", ["99", "0", "/no/such.log"])
def test_what_is_nothing_of_these_ends_with_2(what: str, capsys) -> None:
    assert cli.main(["triage", what]) == 2
    assert "expected" in capsys.readouterr().err


def test_a_folder_is_no_log(tmp_path: Path, capsys) -> None:
    assert cli.main(["triage", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_the_dumps_and_cores_of_that_time(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    name = "g4debug-page-table-20260914T032211Z-n1-dp0-tp0-pp0-441-1-ab12cd34.pt"
    (folder / name).write_bytes(writing.encode(sample_record()))
    (folder / "core_1_n1_441.nvcudmp").touch()
    made = heads.read(folder / name).time[:19].replace("T", " ")
    os.utime(folder / "core_1_n1_441.nvcudmp", (0, 0))  # of another time
    near = f"[{made}] Scheduler hit an exception: Traceback (most recent call last):\n" + LEAK
    assert cli.main(["triage", log(tmp_path, near), "--dumps", str(folder), "--json"]) == 0
    found = as_json(capsys)
    assert [Path(p).name for p in found["dumps"]] == [name]
    assert found["cores"] == []
    assert name in found["next"]
    far = near.replace(made, "2001-01-01 00:00:00")
    assert cli.main(["triage", log(tmp_path, far), "--dumps", str(folder), "--json"]) == 0
    assert as_json(capsys)["dumps"] == []


def test_the_fixes_of_another_release(tmp_path: Path, capsys) -> None:
    head = "sglang==0.5.12.post1\n"
    error = "AttributeError: 'FrozenKVMTPVerifyInput' object has no attribute 'merge_batch'\n"
    assert cli.main(["triage", log(tmp_path, head + error), "--json"]) == 0
    found = as_json(capsys)
    assert found["entry"] == 3
    assert {f["id"]: f["state"] for f in found["fixes"]}["idle-draft-input"] in (
        "applies",
        "needed",
    )
    new = "sglang==0.5.23.post9\n"
    assert cli.main(["triage", log(tmp_path, new + error), "--json"]) == 0
    states = {f["id"]: f["state"] for f in as_json(capsys)["fixes"]}
    assert states["idle-draft-input"] == "not for it"
    armed = (
        "g4debug 0.9 [scheduler] armed: pool-leak (raise); fixes: 1 in force (idle-draft-input); "
        "faults: none; 12 sites hooked; dumps: /tmp/d\n"
    )
    assert cli.main(["triage", log(tmp_path, head + armed + error), "--json"]) == 0
    states = {f["id"]: f["state"] for f in as_json(capsys)["fixes"]}
    assert states == {"idle-draft-input": "in force", "spec-batch-guards": "off"}


def test_hostile_text_does_not_steer_the_terminal(tmp_path: Path, capsys) -> None:
    text = "ValueError: pool memory leak detected! \x1b[2J\x1b]0;x\x07 \u202egnp\x9b31m\n"
    assert cli.main(["triage", log(tmp_path, text)]) == 0
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)


DIED = "[2026-09-14 03:22:11] Scheduler hit an exception: Traceback (most recent call last):\n"
CUDA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
KILLED = "[2026-09-14 03:22:15] Subprocess scheduler_0 (pid=4410) crashed with exit code -9.\n"


@pytest.mark.parametrize(
    ("text", "command"), [(DIED + CUDA, "SGLANG_TRTLLM_MHA_DEBUG=1"), (KILLED, "dmesg -T")]
)
def test_without_g4debug_in_the_server_there_is_no_dump_to_open(text, command, tmp_path, capsys):
    assert cli.main(["triage", log(tmp_path, text), "--json"]) == 0
    assert as_json(capsys)["next"].startswith(command)
    armed = "g4debug 1.0 [scheduler] armed: page-table (raise); fixes: none; dumps: /tmp/none\n"
    assert cli.main(["triage", log(tmp_path, armed + KILLED), "--json"]) == 0
    assert as_json(capsys)["next"].endswith("g4debug list")


def test_the_next_command_is_one_that_a_shell_finds(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("g4debug.dumps.calling.program", lambda: "/opt/venv/bin/g4debug")
    cli.main(["triage", "26"])
    assert capsys.readouterr().out.rstrip().endswith("NEXT  /opt/venv/bin/g4debug list")
    dump = f"{DIED}{CUDA}  dump:     /tmp/x.pt\n"
    cli.main(["triage", log(tmp_path, dump), "--json"])
    assert as_json(capsys)["next"] == "/opt/venv/bin/g4debug show /tmp/x.pt"


def test_show_and_triage_name_the_same_entry(tmp_path, capsys) -> None:
    """Who freed the page decides it, in a recorded dump and in the line of the log."""
    dump = Path(__file__).parents[1] / "replay" / "locked-prefix-0.5.12.post1.pt"
    assert cli.main(["show", str(dump)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "More: g4debug triage 9 " in out
    assert "TRIAGE.md, 'Wrong answers under load with a shared prefix'" in out
    line = heads.read(dump).headline
    assert cli.main(["triage", line, "--json"]) == 0
    assert as_json(capsys)["entry"] == 9


def test_what_the_server_survived_and_what_came_later(tmp_path, capsys) -> None:
    start = "[2026-09-14 03:22:01] server_args=ServerArgs(model_path='acme/oak', tp_size=2)\n"
    up = "[2026-09-14 03:23:01] The server is fired up and ready to roll!\n"
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    assert cli.main(["triage", log(tmp_path, start + oom + up)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "NOTHING" in out
    assert "line 2 is no cause: the server served on (line 3): torch.OutOfMemoryError" in out
    assert cli.main(["triage", log(tmp_path, start + DIED + CUDA + start + up)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Later another start at line 4: it serves in line 5" in out
    assert "Run this type" not in out


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("assert cd.lock_ref == 0", 25),
        ("pool memory leak detected", 10),
        ("POOL MEMORY LEAK detected! and more", 10),
        ("watchdog timeout", 8),
        ("Health check failed", 8),
        ("exit code -9", 26),
        ("locked-prefix", 9),
    ],
)
def test_a_piece_of_a_line_leads_to_its_entry(words: str, number: int, capsys) -> None:
    assert cli.main(["triage", words, "--json"]) == 0
    found = as_json(capsys)
    assert (found["state"], found["entry"]) == ("entry", number)


def test_words_of_something_that_is_not_ours(capsys) -> None:
    assert cli.main(["triage", "CUDA out of memory"]) == 0
    assert "no matter of g4debug. The GPU's memory is full" in capsys.readouterr().out


def test_several_entries_have_the_words(capsys) -> None:
    assert cli.main(["triage", "page-table: use-after-free"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "17. The page table names a wrong page: page-table: use-after-free" in out
    assert "9. Wrong answers under load with a shared prefix" in out
    assert "lines were read" not in out
    assert cli.main(["triage", "AssertionError", "--json"]) == 0
    found = as_json(capsys)
    assert found["state"] == "several"
    assert {hit["entry"] for hit in found["words_in"]} >= {14, 25}
    assert len(found["words_in"]) <= 5


def test_a_text_of_many_causes_says_where_it_must_stand(capsys) -> None:
    assert cli.main(["triage", "IndexError: list index out of range"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "only in _get_key_buffer" in out
    assert "You see" not in out


def test_words_that_no_entry_has(capsys) -> None:
    assert cli.main(["triage", "the quick brown fox"]) == 1
    out = capsys.readouterr().out
    assert "No entry has these words." in out
    assert "whole log" in out


def test_a_log_that_is_not_in_this_folder_is_no_word(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["triage", "server.log"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_release_is_the_logs_and_not_this_machines(tmp_path, monkeypatch, capsys) -> None:
    """The same log says the same beside each SGLang; --here is the user's word for it."""
    from packaging.version import Version

    start = "[2026-11-20 02:11:04] server_args={}\n"
    args = "model_path='google/gemma-4-31B-it', tp_size=2, speculative_algorithm='FROZEN_KV_MTP'"
    fell = (
        "[2026-11-20 02:12:12 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        "Exception: Capture frozen-KV MTP cuda graph failed: CUDA error: device-side assert\n"
    )
    path = log(tmp_path, start.format(f"ServerArgs({args})") + fell)
    said = []
    for installed in ("0.5.12.post1", "0.5.23"):
        monkeypatch.setattr(
            "g4debug.hooking.targets.sglang_version", lambda v=installed: Version(v)
        )
        assert cli.main(["triage", path, "--json"]) == 0
        said.append(as_json(capsys))
    assert said[0] == said[1]
    assert (said[0]["entry"], said[0]["also"]) == (23, [22])
    assert said[0]["server"]["release"] is None
    assert said[0]["server"]["release_by_form"] == "before 0.5.23"
    assert {f["state"] for f in said[0]["fixes"]} == {"by release"}
    new = log(tmp_path, start.format("{'tp_size': 2}") + "AttributeError: 'FrozenKVMTPVerifyInput' "
              "object has no attribute 'merge_batch'\n")  # fmt: skip
    assert cli.main(["triage", new, "--json"]) == 0
    states = {f["id"]: f["state"] for f in as_json(capsys)["fixes"]}
    assert states["idle-draft-input"] == "not for it"  # 0.5.23 prints a dict


def test_this_machines_release_is_taken_if_the_user_says_so(tmp_path, monkeypatch, capsys) -> None:
    from g4debug.hooking import targets

    if targets.sglang_version() is None:
        pytest.skip("needs SGLang")
    path = log(tmp_path, LEAK)
    assert cli.main(["triage", path, "--here"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"taken for {targets.sglang_version()}, which is installed here (--here)" in out
    monkeypatch.setattr("g4debug.hooking.targets.sglang_version", lambda: None)
    assert cli.main(["triage", path, "--here"]) == 2
    assert "no SGLang is installed" in capsys.readouterr().err


START = "[2026-09-14 03:22:01] server_args=ServerArgs(model_path='acme/oak', tp_size=2)\n"
UP = "[2026-09-14 03:22:05] The server is fired up and ready to roll!\n"
HANG = "[2026-09-14 03:42:05 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300.0, {})\n"
ARMED = "g4debug 1.0 [scheduler] armed: page-table (watch, contain); SGLang 0.5.23; fixes: none\n"
STACKS = "[2026-09-14 03:42:04 TP0] Pyspy dump for PID 4412:\n"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (START + UNKNOWN, "g4debug doctor"),  # it never served: there was nothing to trace
        (START + UP + UNKNOWN, "SGLANG_TRTLLM_MHA_DEBUG=watch "),
        (UNKNOWN, "SGLANG_TRTLLM_MHA_DEBUG=watch "),
        (LEAK, "SGLANG_TRTLLM_MHA_DEBUG=1 G4DEBUG_MODE=log "),  # =1 alone may refuse to start
        (START + UP + HANG.format("soft=False"), "SGLANG_TRTLLM_MHA_DEBUG=watch "),
        (START + UP + HANG.format("soft=True"), "py-spy dump "),
        (START + ARMED + UP + HANG.format("soft=True"), "g4debug doctor --pid"),
    ],
)
def test_the_next_command_can_be_honoured(text: str, command: str, tmp_path, capsys) -> None:
    cli.main(["triage", log(tmp_path, text), "--json"])
    found = as_json(capsys)["next"]
    assert found.removeprefix("/").split("/")[-1].startswith(command) or found.startswith(command)


def test_what_sglang_printed_of_a_hang_is_named(tmp_path, capsys) -> None:
    text = START + UP + STACKS + HANG.format("soft=False")
    assert cli.main(["triage", log(tmp_path, text)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "SGLang's own (py-spy's) begin in lines 3 to 3" in out
    assert "fix parked-chunk by release" in out


def test_a_failure_of_the_start_is_not_answered_with_tracers(tmp_path, capsys) -> None:
    assert cli.main(["triage", log(tmp_path, START + UNKNOWN)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "It ended before it served" in out
    assert "SGLANG_TRTLLM_MHA_DEBUG" not in out


VLLM = (
    "INFO 11-20 02:11:04 [api_server.py:1772] vLLM API server version 0.11.0\n"
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
)


def test_a_log_of_something_else_gets_no_entry(tmp_path, capsys) -> None:
    path = log(tmp_path, VLLM)
    assert cli.main(["triage", path]) == 1
    out = capsys.readouterr().out
    assert "no log of SGLang" in " ".join(out.split())
    assert "NEXT" not in out
    assert cli.main(["triage", path, "--json"]) == 1
    found = as_json(capsys)
    assert (found["state"], found["entry"], found["next"]) == ("foreign", None, None)


def test_a_dump_that_is_on_another_machine(tmp_path, capsys) -> None:
    text = f"{DIED}{CUDA}  dump:     /no/such/x.pt\n"
    assert cli.main(["triage", log(tmp_path, text)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "/no/such/x.pt is not on this machine" in out
    assert "kubectl cp POD:/no/such/x.pt ." in out


def test_another_process_is_told_beside(tmp_path, capsys) -> None:
    kill = "Nov 20 02:40:11 node7 kernel: Out of memory: Killed process 9 (java) total-vm:1\n"
    assert cli.main(["triage", log(tmp_path, UP + kill)]) == 0
    assert "line 2 is about another process" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("number", range(1, 28))
def test_the_case_of_every_entry_is_at_hand(number: int, capsys) -> None:
    assert cli.main(["triage", str(number), "--case"]) == 0
    assert capsys.readouterr().out.startswith(f"# {number}. ")


def test_a_case_is_an_entrys(capsys) -> None:
    assert cli.main(["triage", "words", "--case"]) == 2
    assert "needs the number of an entry" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "entries"),
    [
        ("accept len is low", {1, 5, 12, 14, 22}),
        ("queue grows", {10}),
        ("NCCL timeout", {24}),
        ("exit code 137", {26}),
        ("server hangs", {8}),
        ("server does not start", {4}),
        ("NaN", {15}),
        ("Xid 31", {7}),
        ("answers are wrong", {15, 17}),
        ("slow", {2}),
    ],
)
def test_what_people_see_is_found_in_their_words(words: str, entries: set[int], capsys) -> None:
    assert cli.main(["triage", words, "--json"]) == 0
    found = as_json(capsys)
    assert entries <= {found["entry"], *(hit["entry"] for hit in found["words_in"])}


def test_entries_beyond_a_screen_are_counted(capsys) -> None:
    assert cli.main(["triage", "slow"]) == 0
    assert "more: give more words" in " ".join(capsys.readouterr().out.split())


def test_words_that_an_entry_has_somewhere_do_not_print_it(capsys) -> None:
    """Two common words stand in one entry by chance: it is offered, not told."""
    assert cli.main(["triage", "some line", "--json"]) == 0
    found = as_json(capsys)
    assert (found["state"], found["entry"]) == ("several", None)
    (hit,) = found["words_in"]
    assert hit["where"] == "if you mean that: its text has these words somewhere"
    cli.main(["triage", "some line"])
    said = " ".join(capsys.readouterr().out.split())
    assert "PERHAPS an entry has these words" in said
    assert "only if you mean that" in said
