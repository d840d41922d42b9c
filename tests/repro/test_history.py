"""The history suite: its ground truth knows nothing of g4debug, and its verdicts are what they
claim. A cell that cannot fail, a void run that counts as a miss, would make the table a lie.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import real_cores
from packaging.version import InvalidVersion, Version
from sample_trap import sample_record

from g4debug import cpu
from g4debug.autopsy import examine
from g4debug.autopsy.core import Core
from g4debug.dumps import writing
from g4debug.findings.record import PageEvent, Tape
from g4debug.hooking import targets

REPRO = Path(__file__).parents[2] / "repro"
SUITE = REPRO / "suites" / "history"


@pytest.fixture
def suite(suite):
    """``suite("table")``: a module of the suite's machinery."""
    return lambda name: suite(f"history.{name}")


@pytest.fixture
def known(suite):
    return suite("cases").cases()


# --- the cases --------------------------------------------------------------------------------


def test_each_case_has_a_truth_of_its_own(known):
    truths = {p.stem for p in (SUITE / "truth").glob("*.py")} - {"__init__"}
    assert truths == {name.replace("-", "_") for name in known}
    numbers = [case.number for case in known.values()]
    assert len(numbers) == len(set(numbers))


def test_a_server_that_stands_is_not_waited_for_longer_than_its_tools_need(
    suite, known, tmp_path, monkeypatch
):
    """Only where the bug was counted, and only while no batch begins."""
    standing, counts = suite("cell").Standing, suite("counter").Counter(tmp_path)
    now = 0.0
    monkeypatch.setattr(suite("cell").time, "monotonic", lambda: now)
    proof = standing(60.0, tmp_path)
    (tmp_path / "truth-1.json").touch()  # a process that has just begun to count
    assert not proof.proved()
    counts.step()
    counts.reached()
    now = 100.0
    assert not proof.proved()  # it may be slow; nothing was counted yet
    counts.triggered("stands")
    assert not proof.proved()
    now = 159.0
    assert not proof.proved()
    counts.step()  # it goes on
    now = 170.0
    assert not proof.proved()
    now = 230.0
    assert proof.proved()
    assert not standing(0.0, tmp_path).proved()
    told = {name for name, case in known.items() if case.stands}
    assert told == {"parked-chunk", "idle-admission"}
    # g4debug says so after 20 seconds.
    assert all(known[name].stands >= 2 * 20 for name in told)


def test_what_is_left_out_is_no_case_and_is_on_the_page(known, suite):
    left_out = suite("page").markdown([], {}).partition("## Left out")[2]
    threads = [
        t for of, _ in re.findall(r"^- (#[^:]+): (.+)\.$", left_out, re.M) for t in of.split(", ")
    ]
    assert threads
    assert len(threads) == len(set(threads))
    assert not {t for case in known.values() for t in case.threads} & set(threads)


@pytest.mark.parametrize("path", sorted((SUITE / "truth").glob("*.py")), ids=str)
def test_a_truth_imports_nothing_of_g4debug(path):
    """Nor of the suite, but for the counter, which imports nothing but Python's library."""
    for file in (path, SUITE / "counter.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("g4debug"), f"{file}: {name}"
                ours = name.startswith(("_", "suites", "harness", "workloads"))
                assert not ours or name in ("__future__", "suites.history.counter")


def test_a_tool_that_cannot_run_beside_mtp_refuses_there(suite):
    canary = suite("tools").TOOLS["kv-canary"]
    assert canary.refusal("0.5.23", "cuda") == ""
    assert "AssertionError: kv-canary" in canary.refusal("0.5.23", "cuda", mtp=True)
    assert canary.refusal("0.5.12.post1", "cuda", mtp=True) == "SGLang has it from 0.5.13 on"


def test_what_is_predicted_is_a_grade_of_a_tool(known, suite):
    tools, order = suite("tools").TOOLS, suite("grades").ORDER
    for name, case in known.items():
        assert set(case.expected) <= set(tools), name
        assert set(case.expected.values()) <= set(order), name


# --- the ground truth -------------------------------------------------------------------------


def test_counts_outlive_a_process_that_is_killed(tmp_path, suite):
    counter = suite("counter")
    script = (
        "import sys; from pathlib import Path; from suites.history.counter import Counter\n"
        "c = Counter(Path(sys.argv[1])); c.step(); c.reached(); c.step(); c.triggered('page 7')\n"
        "c.step(); c.triggered('page 8'); print(flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPRO)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    found = counter.read(tmp_path)
    assert (found.steps, found.reached, found.triggered) == (3, 1, 2)
    assert (found.first, found.note) == (2, "page 7")


def test_the_process_that_ran_the_batches_counts(tmp_path, suite):
    counter = suite("counter")
    assert counter.read(tmp_path) == counter.Counts()
    (tmp_path / "truth-1.json").write_text(json.dumps({"steps": 0, "reached": 9}))
    (tmp_path / "truth-2.json").write_text(json.dumps({"steps": 4, "reached": 1}))
    assert counter.read(tmp_path).steps == 4


def test_a_truth_sees_arguments_and_results(suite):
    counter, seen = suite("counter"), []

    class Pool:
        def free(self, page):
            return page + 1

    counter.around(Pool, "free")(lambda _, page: lambda result: seen.append((page, result)))
    counter.around(Pool, "free")(lambda self, page: seen.append(page))
    assert Pool().free(1) == 2
    assert seen == [1, (1, 2)]


def test_a_truth_that_fails_says_that_it_is_not_sglang(suite):
    """Without the place of a module, which is a machine's own."""
    counter = suite("counter")

    class Pool:
        def free(self, page):
            return page

    def look(_pool, _page):
        raise ImportError("cannot import name 'x' from 'sglang.y' (/somewhere/sglang/y.py)")

    counter.around(Pool, "free")(look)
    with pytest.raises(counter.GroundTruthError) as failed:
        Pool().free(1)
    assert str(failed.value) == "ImportError: cannot import name 'x' from 'sglang.y'"

    class Other(Pool):
        def free(self, page):
            raise KeyError(page)

    counter.around(Other, "free")(lambda *_: None)
    with pytest.raises(KeyError):  # SGLang's own errors stay what they are
        Other().free(1)


# --- a cell's grade ---------------------------------------------------------------------------


@pytest.fixture
def judged(suite, known, tmp_path, monkeypatch):
    """``judged(tool, log, status, outputs, truth, finding)``: the cell that comes of it."""
    cell, tools = suite("cell"), suite("tools").TOOLS
    case = next(iter(known.values()))
    monkeypatch.syspath_prepend(str(REPRO))
    outcome = importlib.import_module("harness.processes").Outcome

    def judge(
        tool="g4debug",
        log="",
        status=0,
        outputs=None,
        finding=None,
        right=None,
        device="cpu",
        arm="buggy",
        **truth,
    ):
        (tmp_path / "cell.log").write_text(log)
        (tmp_path / "dumps").mkdir(exist_ok=True)
        (tmp_path / "truth-7.json").write_text(json.dumps(truth))
        if finding is not None:
            writing.write(writing.encode(finding), tmp_path / "dumps", "one.pt")
        result = {"outputs": outputs or {}, "completed": status == 0}
        ran = outcome("cell", status, 1.0, tmp_path / "cell.log", result)
        blank = cell.Cell("some", arm, tool, 0, device=device)
        return cell.judge(blank, case, tools[tool], ran, tmp_path, right or {})

    return judge


TRUTH = {"steps": 12, "reached": 3, "triggered": 1, "first": 10}


def test_who_says_nothing_is_silent_however_wrong_the_answers(judged):
    right, got = {"a": [[1]], "b": [[2]]}, {"a": [[1]], "b": [[3]]}
    cell = judged("nothing", outputs=got, right=right, **TRUTH)
    assert (cell.grade, cell.ended, cell.wrong, cell.answers) == ("silent", "completed", 1, 2)
    assert cell.after == 2


def test_sglangs_own_death_is_not_an_alarm(judged):
    log = "Scheduler hit an exception: Traceback\nIndexError: list index out of range\n"
    for tool in ("nothing", "g4debug", "sglang"):
        cell = judged(tool, log, status=-9, **TRUTH)
        assert (cell.grade, cell.said) == ("crash only", "IndexError: list index out of range")


@pytest.mark.parametrize(
    "said",
    [
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied",
        "suites.healthy.workload.NotExercised: the log has no 1 lines with 'Prefill batch'",
    ],
)
def test_what_the_machine_ended_proves_nothing(judged, said):
    log = f"Traceback (most recent call last):\n{said}\n"
    for tool in ("nothing", "g4debug", "kv-canary"):
        cell = judged(tool, log, status=1)
        assert (cell.grade, cell.ended, cell.said) == ("n/a", "spoiled", said)
    assert judged("nothing", log, **TRUTH).ended == "completed"
    # A run whose bug was triggered is a result, whatever the tool said, and an alarm without the
    # bug stays a false one.
    assert judged("sglang", log, status=1, **TRUTH).ended == "died"
    told = judged("g4debug", log, status=1, finding=sample_record())
    assert (told.grade, told.ended) == ("object", "died")
    earlier = f"IndexError: list index out of range\n{said}\n"
    assert judged("nothing", earlier, status=1).said == "IndexError: list index out of range"
    warned = f"[2026] a warning, not an end: {said}\nIndexError: x\n"
    assert judged("nothing", warned, status=1).ended == "died"


def test_a_truth_that_failed_is_named_and_not_its_cause(judged):
    """Python shows the cause first."""
    text = (
        "AttributeError: no attribute 'pool'\n\nThe above exception was the direct cause\n\n"
        "suites.history.counter.GroundTruthError: AttributeError: no attribute 'pool'\n"
    )
    said = "suites.history.counter.GroundTruthError: AttributeError: no attribute 'pool'"
    cell = judged("nothing", text, status=1, arm="0.5.14")
    assert (cell.said, cell.ended) == (said, "died")
    cell = judged("nothing", text, status=1, **TRUTH)  # it proves nothing of the bug
    assert (cell.said, cell.ended, cell.grade) == (said, "spoiled", "n/a")


def test_a_workload_that_comes_to_nothing_on_another_release_is_an_answer(judged):
    log = "suites.healthy.workload.NotExercised: all done before the abort\n"
    assert judged("nothing", log, status=1, arm="0.5.14").ended == "died"
    assert judged("nothing", log, status=1).ended == "spoiled"


def test_a_process_that_does_not_end_hangs(judged):
    cell = judged("sglang", status=None, **TRUTH)
    assert (cell.grade, cell.ended) == ("stands", "hangs")
    assert judged("sglang", "g4debug-repro: engine up\n", status=None).ended == "hangs"


def test_an_engine_that_was_never_up_proves_nothing(judged):
    """A machine that is busy with others is no hang."""
    cell = judged("sglang", status=None)
    assert (cell.grade, cell.ended) == ("n/a", "spoiled")
    assert cell.said == "the engine was not up in 900 s"


def test_what_a_child_may_take_is_counted_from_when_its_engine_is_up(tmp_path, monkeypatch):
    """It is up after two seconds, and may then take one: it is stopped after three, or later."""
    monkeypatch.syspath_prepend(str(REPRO))
    processes = importlib.import_module("harness.processes")
    (tmp_path / "slow_child.py").write_text(
        "import time\n"
        "def main(device, result):\n"
        "    time.sleep(2)\n"
        f"    print({processes.UP!r}, flush=True)\n"
        "    time.sleep(600)\n"
    )
    ran = processes.run_child(
        "slow", "slow_child", {}, {"PYTHONPATH": str(tmp_path)}, tmp_path, 1.0, start=600.0
    )
    assert ran.status is None
    assert processes.UP in ran.text
    assert ran.seconds >= 3


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: pool memory leak detected! [full] total=4096, available=4032",
        "AssertionError: SWA Pool Mem Leak Detected! [swa] total=1024",
        "ValueError: KV page use-after-free: 3 owner page refs are in the free pool",
        '  File "swa_radix_cache.py", line 3, in sanity_check\nAssertionError',
    ],
)
def test_sglangs_checks_are_known_by_their_words(judged, said):
    cell = judged("busy-inv", f"Scheduler hit an exception\n{said}\n", status=1, **TRUTH)
    assert cell.grade == "alarm"


@pytest.mark.parametrize(
    ("tool", "own"),
    [
        (
            "strict",
            '_assert_async(ok.all(), f"invariant-check FAILED [{inv.name}]: {msg}")\n'
            "RuntimeError: invariant-check FAILED [swa.peer_mapped]: 2 peers unmapped",
        ),
        ("strict", "[2026] invariant-check [swa.peer_mapped@rank0]: +2 hit(s), 2 total. unmapped"),
        ("tree", '  File "unified_radix_cache.py", line 3, in sanity_check\nAssertionError'),
    ],
)
def test_a_check_of_its_own_is_known_by_its_own_words(judged, tool, own):
    """SGLang's default checks run beside it, and are no merit of it."""
    cell = judged(tool, f"{own}\n", status=1, **TRUTH)
    assert cell.grade == "alarm"
    assert "{" not in cell.said
    default = "ValueError: pool memory leak detected! [full] total=4096\n"
    assert judged(tool, default, status=1, **TRUTH).grade == "crash only"
    assert judged("sglang", default, status=1, **TRUTH).grade == "alarm"


def test_a_switch_that_sglang_did_not_take_is_no_run_of_the_tool(judged):
    said = 'Invalid value for SGLANG_INVARIANT_CHECK: "strict" is not a valid integer value'
    cell = judged("strict", f"{said}, using default\n", **TRUTH)
    assert (cell.grade, cell.ended) == ("n/a", "spoiled")
    assert cell.said == f"{said}, using default"
    # Another tool does not need it, whoever has set it.
    assert judged("busy-inv", f"{said}, using default\n", **TRUTH).ended == "completed"


def test_strict_is_a_level_that_sglang_takes(suite):
    """SGLang answers a word with a warning, and checks nothing."""
    if targets.sglang_version() < Version("0.5.21"):
        pytest.skip("SGLang has no such levels before 0.5.21")
    code = (
        "from sglang.srt.utils.invariants import InvariantCheckLevel, resolve_level\n"
        "print(resolve_level() == InvariantCheckLevel.STRICT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=cpu.environment({**os.environ, **suite("tools").TOOLS["strict"].environ()}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[-1:] == ["True"], done.stderr


def test_what_sglang_says_is_quoted_and_not_the_line_that_says_it(judged):
    log = (
        '    assert not full_leak, f"Full Pool Mem Leak Detected! {full_msg}"\n'
        "AssertionError: Full Pool Mem Leak Detected! [full] total=4096, available=1920\n"
    )
    cell = judged("busy-inv", log, status=1, **TRUTH)
    assert cell.said == "Full Pool Mem Leak Detected! [full] total=4096, available=1920"


def test_sglangs_alarm_is_not_g4debugs(judged):
    cell = judged("g4debug", "ValueError: memory leak detected! x", status=1, **TRUTH)
    assert cell.grade == "crash only"


def test_an_alarm_after_a_wrong_answer_is_late(judged):
    cell = judged(finding=sample_record(), outputs={"a": [[3]]}, right={"a": [[1]]}, **TRUTH)
    assert cell.grade == "late"


def test_on_a_gpu_a_difference_may_be_rounding_and_makes_no_alarm_late(judged):
    answers = {"outputs": {"a": [[3]]}, "right": {"a": [[1]]}}
    cell = judged(finding=sample_record(), device="cuda", **answers, **TRUTH)
    assert (cell.grade, cell.wrong) == ("object", 1)


def test_a_finding_with_page_and_request_names_the_object(judged):
    cell = judged(finding=sample_record(), right={"a": [[1]]}, **TRUTH)
    assert cell.grade == "object"
    assert cell.said.startswith("g4debug: ")
    assert cell.wrong == 0


@pytest.mark.parametrize("prefix", ["", "could not be armed: SettingsError: "])
def test_a_refusal_is_quoted(judged, prefix):
    refusal = "SGLang 0.5.18 was never run with page-table, so a finding could be false"
    cell = judged("g4debug", f"g4debug: {prefix}{refusal}\n", status=1, **TRUTH)
    assert cell.grade == "n/a"
    assert refusal in cell.said


def test_what_names_only_the_file_does_not_name_the_cause(suite, known):
    cell = suite("cell")
    case = next(iter(known.values()))
    file, function = case.cause[0]
    name = Path(file).name
    assert cell._names(case, f"freed by {name}:12 {function}")
    assert not cell._names(case, f"freed by {name}:12 somewhere_else")
    assert not cell._names(case, f"freed by other_file.py:12 {function}")
    assert not cell._names(case, f"freed by {name}:12 some_caller\n{function} is far away")


# --- a row ------------------------------------------------------------------------------------


def row_of(suite, known, *cells):
    name = next(iter(known))
    return next(r for r in suite("table").rows(known, cells) if r.name == name)


@pytest.fixture
def cells(suite, known):
    """``cells(arm, tool, seed, ...)``: a cell of the first case."""
    cell, name = suite("cell").Cell, next(iter(known))

    def make(arm, tool, seed=0, **more):
        return cell(name, arm, tool, seed, **{"reached": 1, "ended": "completed", **more})

    return make


@pytest.fixture
def proven(suite, known, cells):
    """``proven(cell, ...)``: the row of the first case with these cells; its ground truth holds."""
    bare = cells("buggy", "nothing", triggered=1), cells("fixed", "nothing")
    return lambda *more: row_of(suite, known, *bare, *more)


def test_a_run_that_did_not_trigger_is_void_and_not_a_miss(proven, cells):
    row = proven(
        cells("buggy", "g4debug", 0, triggered=1, grade="object", after=0),
        cells("buggy", "g4debug", 1, triggered=0),
    )
    entry = row.entries["g4debug"]
    assert (entry.alarms, entry.seeds, entry.void) == (1, 1, 1)
    assert entry.words == "object 1/1, in its step"
    assert row.good


def test_who_stops_a_bug_before_it_is_triggered_has_told(suite, known, cells):
    """Only where the same seed triggers it without a tool. Else it accused a healthy run."""
    row = row_of(
        suite,
        known,
        cells("buggy", "nothing", 0, triggered=1),
        cells("buggy", "nothing", 1, triggered=0),
        cells("fixed", "nothing"),
        cells("buggy", "g4debug", 0, grade="alarm", after=-1),
        cells("buggy", "g4debug", 1, grade="alarm", after=-1),
        cells("fixed", "g4debug"),
    )
    entry = row.entries["g4debug"]
    assert (entry.alarms, entry.seeds, entry.void, entry.after) == (1, 1, 1, -1)
    assert entry.words == "alarm 1/1, before it; 1 foreign"


def test_who_also_accuses_the_healthy_arm_has_not_told_before_the_trigger(proven, cells):
    """What it says there is not about the bug. Nor is it known where it was not run there."""
    early = cells("buggy", "g4debug", 0, grade="cause", after=-1)
    row = proven(early, cells("fixed", "g4debug", grade="alarm"))
    assert row.entries["g4debug"].words == "void; 1 foreign; 1 FALSE"
    assert row.entries["g4debug"].foreign == 1
    assert proven(early).entries["g4debug"].alarms == 0


def test_late_alarms_among_the_others_are_said(proven, cells):
    row = proven(
        *(cells("buggy", "sglang", i, triggered=1, grade="alarm", after=5) for i in range(4)),
        cells("buggy", "sglang", 4, triggered=1, grade="late", after=9),
    )
    assert row.entries["sglang"].words == "alarm 5/5 (1 late), 5 steps later"


def test_one_run_that_was_refused_does_not_hide_the_others(proven, cells):
    row = proven(
        cells("buggy", "sglang", 0, grade="n/a", said="no", reached=0),
        cells("buggy", "sglang", 1, triggered=1, grade="alarm", after=0),
    )
    assert row.entries["sglang"].words == "alarm 1/1, in its step"


def test_a_case_that_never_triggers_proves_nothing(suite, known, cells):
    row = row_of(suite, known, cells("buggy", "nothing"), cells("fixed", "nothing"))
    assert "not triggered" in row.problem
    assert not row.good


@pytest.mark.parametrize("wrong", [{"triggered": 1}, {"reached": 0}])
def test_the_other_arm_must_reach_and_not_trigger(suite, known, cells, wrong):
    row = row_of(
        suite, known, cells("buggy", "nothing", triggered=1), cells("fixed", "nothing", **wrong)
    )
    assert row.problem


def test_what_was_not_run_without_the_bug_proves_nothing(suite, known, cells):
    """On a GPU it may be missing, where the release has no environment for one."""
    table, gpu = suite("table"), {"device": "cuda"}
    here = cells("buggy", "nothing", triggered=1), cells("fixed", "nothing")
    there = [cells("buggy", t, triggered=1, **gpu) for t in ("nothing", "compute-sanitizer")]
    row = row_of(suite, known, *here, *there)
    assert "not run there" in row.gpu.problem
    assert row.good
    assert row.entries["compute-sanitizer"].words == "silent (not valid)"
    assert table.rates([row], "compute-sanitizer") == "–"
    row = row_of(suite, known, *here, *there, cells("fixed", "nothing", **gpu))
    assert table.rates([row], "compute-sanitizer") == "0 of 1"


def test_an_alarm_on_the_healthy_arm_is_false(proven, cells):
    row = proven(
        cells("buggy", "g4debug", triggered=1),
        cells("fixed", "g4debug", grade="alarm"),
    )
    assert row.entries["g4debug"].words == "silent; 1 FALSE"
    assert row.entries["g4debug"].without == "1/1 FALSE"
    assert row.entries["nothing"].without == "silent 1/1"
    assert not row.good


def test_who_refused_or_did_not_come_there_was_not_silent_on_the_healthy_arm(proven, cells):
    row = proven(
        cells("buggy", "g4debug", triggered=1),
        cells("fixed", "g4debug", grade="n/a"),
        cells("fixed", "g4debug", seed=1, reached=0),
        cells("fixed", "g4debug", seed=2, reached=0, grade="alarm"),
    )
    assert row.entries["g4debug"].without == "1/1 FALSE"
    row = proven(
        cells("buggy", "sglang", triggered=1),
        cells("fixed", "sglang", grade="n/a"),
    )
    assert row.entries["sglang"].without == "–"


def test_the_totals_show_the_first_runs_too(suite, known, cells):
    name = next(iter(known))
    rows = suite("table").rows(
        known,
        [
            cells("buggy", "nothing", triggered=1),
            cells("fixed", "nothing"),
            cells("buggy", "g4debug", triggered=1, grade="object", after=1),
        ],
    )
    first = {name: {"g4debug": {"alarms": 0, "seeds": 3, "words": "silent", "commit": "abc"}}}
    page = suite("page").markdown(rows, first)
    assert "| natural | 1 of 1 |" in page
    assert "| natural, in the first run | 0 of 1 |" in page


def test_what_the_user_sees_counts_the_wrong_answers(suite, cells):
    seen = suite("table").seen
    wrong = cells("buggy", "nothing", triggered=1, wrong=2, answers=5)
    assert seen([wrong]) == "wrong answers (up to 2 of 5, in 1 of 1 runs)"
    died = cells("buggy", "nothing", triggered=1, ended="died", said="IndexError: x")
    assert seen([died]) == "IndexError: x"
    unknown = cells("buggy", "nothing", triggered=1, wrong=-1, ended="completed")
    assert "no right answers to compare with" in seen([unknown])
    assert seen([unknown, wrong]) == "wrong answers (up to 2 of 5, in 1 of 1 runs)"


def test_answers_that_differ_without_the_bug_too_are_no_sign_of_it(suite, known, cells):
    """In bfloat16, on a GPU. More of them are."""
    gpu = {"device": "cuda", "answers": 9}

    def seen(wrong):
        bare = cells("buggy", "nothing", triggered=1, wrong=wrong, **gpu)
        healthy = [
            cells("fixed", "nothing", wrong=-1, **gpu),
            cells("fixed", "sglang", wrong=1, **gpu),
        ]
        return row_of(suite, known, bare, *healthy).gpu.seen

    assert next(iter(known.values())).right is None
    sound = f"without the bug, on {next(iter(known.values())).fixed.release}, up to 1 d"
    assert seen(1) == f"nothing certain: up to 1 of 9 answers differ, and {sound}o"
    assert seen(3) == f"wrong answers (up to 3 of 9, in 1 of 1 runs; {sound}iffer)"


def test_on_a_gpu_another_release_without_the_bug_tells_what_is_rounding(suite, known):
    """The right answers are of the release with the bug, so the other arm has its own rounding."""
    name = next(n for n, c in known.items() if c.right is not None and not c.gpu)
    cell, rounding = suite("cell").Cell, suite("table").rounding

    def differs(device):
        return [cell(name, "fixed", "nothing", 0, wrong=3, answers=9, device=device)]

    assert rounding(known[name], differs("cuda")) == 3
    assert rounding(known[name], differs("cpu")) == 0
    assert rounding(known[name], []) == 0


def test_who_dies_before_the_bug_has_not_prevented_it(suite, known, cells):
    def entry(ended):
        mine = cells("buggy", "sglang", ended=ended)
        bare = cells("buggy", "nothing", triggered=1), cells("fixed", "nothing")
        return row_of(suite, known, *bare, mine).entries["sglang"].words

    assert entry("died") == "void"
    assert entry("completed") == "does not happen with it, 1/1"


def test_the_page_and_the_picture_have_every_row_that_ran(suite, known, cells):
    rows = suite("table").rows(
        known,
        [
            cells("buggy", "nothing", triggered=1),
            cells("fixed", "nothing"),
            cells("buggy", "g4debug", triggered=1, grade="cause", said="a | b <c>", after=3),
        ],
    )
    page = suite("page").markdown(rows, {})
    name = next(iter(known))
    assert f"[{name}](#{name})" in page
    assert "cause 1/1, 3 steps later" in page
    assert "a \\| b" in page
    picture = suite("picture").svg(rows)
    assert f"  {name}</text>" in picture
    assert "&lt;c&gt;" in picture


def test_the_page_says_in_how_many_runs_the_bug_was_met(suite, known, cells):
    rows = suite("table").rows(
        known,
        [
            cells("buggy", "nothing", 0, triggered=1),
            cells("buggy", "nothing", 1),
            cells("fixed", "nothing"),
        ],
    )
    assert "reached in 2 and triggered in 1 of 2 runs" in suite("page").markdown(rows, {})


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def runner(suite, monkeypatch):
    """The suite's script, which no test starts engines with."""
    suite("table")
    return importlib.import_module("history_suite")


def test_the_tools_that_need_a_gpu_run_there_beside_one_without_a_tool(runner, known):
    found = {n: c for n, c in known.items() if n in ("lost-key", "unfenced-results")}
    every = list(runner.TOOLS)
    first, rest = runner.tasks(found, every, 1, "cuda")
    lost = {t.tool for t in (*first, *rest) if t.case == "lost-key"}
    assert lost == {"nothing", "kv-canary", "core", "compute-sanitizer"}
    assert {t.tool for t in (*first, *rest) if t.case == "unfenced-results"} == set(every)
    assert all(t.id.endswith(".0.cuda") for t in (*first, *rest))
    first, rest = runner.tasks(found, every, 1, "cpu")
    assert {t.case for t in (*first, *rest)} == {"lost-key"}
    assert not any(runner.TOOLS[t.tool].gpu for t in rest)


def test_each_case_is_compared_with_its_own_right_answers(runner, known, tmp_path, monkeypatch):
    """Also where several cases run at a time: no case is compared with another's answers."""
    asked = []

    def run(cell, folder, right):
        asked.append((cell.case, cell.arm, cell.tool, dict(right)))
        return dataclasses.replace(cell, outputs={"request": cell.case})

    monkeypatch.setattr(runner, "run", run)
    found = {n: c for n, c in known.items() if n in ("lost-key", "pp-proxy")}
    work = runner.tasks(found, ["nothing", "sglang"], 2)
    cells = runner.run_all(work, 3, tmp_path, runner.Console(quiet=True), {})
    assert len(cells) == len(asked) == 16
    assert all(right == ({} if (a, t) == ("fixed", "nothing") else {"request": n})
               for n, a, t, right in asked)  # fmt: skip


def test_two_runs_with_one_folder_do_not_run_a_cell_twice(runner, known, tmp_path, monkeypatch):
    ran = []

    def run(cell, folder, right):
        ran.append((cell.arm, cell.tool))
        time.sleep(0.3)
        return cell

    monkeypatch.setattr(runner, "run", run)
    work = runner.tasks({"lost-key": known["lost-key"]}, ["nothing", "sglang"], 1)
    quiet = runner.Console(quiet=True)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(runner.run_all, work, 2, tmp_path, quiet, {}) for _ in range(2)]
    assert {c.id for c in both[0].result()} == {c.id for c in both[1].result()}
    assert len(ran) == len(set(ran)) == 4


def test_results_of_the_other_device_are_in_the_same_table(runner, suite, tmp_path):
    cell = suite("cell")
    for device in ("cpu", "cuda"):
        cell.keep(cell.Cell("lost-key", "buggy", "nothing", 0, device=device), tmp_path)
    (tmp_path / "history.json").write_text("{}")
    assert [c.device for c in runner.elsewhere(tmp_path, "cpu").values()] == ["cuda"]


def test_what_ran_before_its_right_answers_is_compared_with_them_later(runner, suite, known):
    """Where the cell's own answers are kept; each with the answers of its seed and device."""
    cell, name = suite("cell").Cell, "lost-key"
    right = cell(name, "fixed", "nothing", 0, outputs={"a": [1], "b": [2]})
    waits = cell(name, "buggy", "sglang", 0, grade="alarm", outputs={"a": [1], "b": [3]})
    gpu = dataclasses.replace(waits, device="cuda")
    other = dataclasses.replace(waits, seed=1)
    judged = dataclasses.replace(waits, tool="tree", wrong=0)
    lost = dataclasses.replace(waits, tool="strict", outputs={})
    mine = (right, waits, gpu, other, judged, lost)
    found = runner.with_right_answers({c.id: c for c in mine}, known)
    assert found[waits.id] == dataclasses.replace(waits, answers=2, wrong=1, grade="late")
    assert {c.id: c for c in mine if c is not waits}.items() <= found.items()
    there = dataclasses.replace(right, device="cuda")
    found = runner.with_right_answers({c.id: c for c in (*mine, there)}, known)
    assert found[gpu.id] == dataclasses.replace(gpu, answers=2, wrong=1)


def test_a_cell_that_the_machine_ended_is_no_result(runner, known, tmp_path, monkeypatch, capsys):
    """It is not kept, so it runs again, it is in no table, and the user is told."""

    def run(cell, folder, right):
        ended = "spoiled" if (cell.arm, cell.tool) == ("buggy", "sglang") else "completed"
        return dataclasses.replace(cell, ended=ended, reached=1, said="GPU is busy")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(sys, "argv", [
        "history_suite.py", "--case", "lost-key", "--tool", "nothing", "sglang", "--seeds", "1",
        "--results", str(tmp_path),
    ])  # fmt: skip
    assert runner.main() == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "1 cells prove nothing" in told
    assert "lost-key.buggy.sglang.0: GPU is busy." in told
    assert "lost-key.buggy.sglang.0" not in {p.stem for p in tmp_path.glob("*.json")}
    assert "lost-key.fixed.sglang.0" in {p.stem for p in tmp_path.glob("*.json")}
    assert "sglang" not in json.loads((tmp_path / "history.json").read_text())["lost-key"]


def test_nothing_is_compared_with_answers_that_the_machine_cut_off(
    runner, known, tmp_path, monkeypatch
):
    def run(cell, folder, right):
        spoiled = (cell.arm, cell.tool, cell.seed) == ("fixed", "nothing", 0)
        ended = "spoiled" if spoiled else "completed"
        return dataclasses.replace(cell, ended=ended, outputs={"r": [[cell.seed]]})

    monkeypatch.setattr(runner, "run", run)
    work = runner.tasks({"lost-key": known["lost-key"]}, ["nothing", "sglang"], 2)
    cells = runner.run_all(work, 2, tmp_path, runner.Console(quiet=True), {})
    assert {c.seed for c in cells if c.ended == "completed"} == {1}
    assert [c.id for c in cells if c.seed == 0] == ["lost-key.fixed.nothing.0"]


def test_published_cells_are_not_run_again(runner, suite, known, tmp_path, monkeypatch):
    """Nor lost: a cell reads back as it was written, with its right answers."""
    cell, ran = suite("cell"), []

    def run(blank, folder, right):
        ran.append((blank.arm, blank.tool, dict(right)))
        return dataclasses.replace(blank, steps=7, outputs={"r": [[1]]})

    monkeypatch.setattr(runner, "run", run)
    work = runner.tasks({"lost-key": known["lost-key"]}, ["nothing", "sglang"], 1)
    quiet = runner.Console(quiet=True)
    every = runner.run_all(work, 2, tmp_path, quiet, {})
    text = cell.as_text(every, runner.answers(every, known))
    published = cell.from_text(text)
    assert set(published) == {c.id for c in every}
    assert text.count("outputs") == 1
    del published["lost-key.buggy.sglang.0"]
    ran.clear()
    (tmp_path / "other").mkdir()
    again = runner.run_all(work, 2, tmp_path / "other", quiet, published)
    assert ran == [("buggy", "sglang", {"r": [[1]]})]
    assert {c.id: c.steps for c in again} == {c.id: 7 for c in every}


def test_a_python_that_is_not_there_is_refused(runner):
    release, path = runner.named(f"0.5.14={sys.executable}")
    assert (release, path) == ("0.5.14", Path(sys.executable))
    for text in ("0.5.14", "0.5.14=/nowhere"):
        with pytest.raises(runner.argparse.ArgumentTypeError, match="expected RELEASE=PATH"):
            runner.named(text)


def test_an_environment_for_the_cpu_does_not_count_for_a_gpu(suite, monkeypatch):
    cell = suite("cell")
    assert not cell.interpreter("0.0.1", "cuda").exists()
    monkeypatch.setitem(cell.PYTHONS, "0.0.1", Path(sys.executable))
    assert cell.interpreter("0.0.1", "cuda") == Path(sys.executable)


def test_without_a_gpu_it_says_so(suite, monkeypatch, tmp_path):
    gpu = suite("gpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu.names.cache_clear()
    with pytest.raises(RuntimeError, match="needs a GPU, and nvidia-smi found none"):
        gpu.names()


def test_the_gpus_take_turns_and_two_ranks_see_both(suite, known, monkeypatch, tmp_path):
    gpu = suite("gpu")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho one\necho two\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gpu.names.cache_clear()
    assert gpu.names() == ["one", "two"]
    case = known["lost-key"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = [gpu.environment(case, case.buggy)["CUDA_VISIBLE_DEVICES"] for _ in range(4)]
    assert seen in (["0", "1", "0", "1"], ["1", "0", "1", "0"])
    ranks = known["draft-embedding-shard"]
    assert "CUDA_VISIBLE_DEVICES" not in gpu.environment(ranks, ranks.buggy)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")  # another program has the others
    assert gpu.environment(case, case.buggy) == {"CUDA_VISIBLE_DEVICES": "5"}
    gpu.names.cache_clear()


def test_an_engine_that_does_not_come_up_with_a_tool_is_its_refusal(judged, suite):
    said = "AssertionError: kv-canary: called without an active manager"
    cell = judged("kv-canary", f"Traceback\n{said}\n", status=1)
    assert (cell.grade, cell.said) == ("n/a", said)
    up = importlib.import_module("harness.processes").UP
    cell = judged("kv-canary", f"{up}\nIndexError: list index out of range\n", status=1, **TRUTH)
    assert cell.grade == "crash only"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (
            "kv-canary",
            "RuntimeError: KV cache canary violation detected (kernel_kind=X, slot_idx=3)",
        ),
        ("compute-sanitizer", "========= Invalid __global__ read of size 2 bytes"),
        ("compute-sanitizer", "========= Warp assert"),
    ],
)
def test_the_alarms_of_the_tools_for_a_gpu_are_known_by_their_words(judged, suite, tool, said):
    up = importlib.import_module("harness.processes").UP
    assert judged(tool, f"{up}\n{said}\n", status=1, **TRUTH).grade == "alarm"
    assert judged(tool, f"{up}\n========= ERROR SUMMARY: 0 errors\n", **TRUTH).grade == "silent"


@pytest.mark.parametrize(
    ("name", "rows", "grade"),
    [
        ("decode-larger-pool given", 8, "object"),  # the request was given that page
        ("xqa-larger-pool", 0, "alarm"),  # no step tells whose row it is
        ("xqa-larger-pool", 8, "alarm"),  # only the distance tells the buffer
        ("decode-larger-pool", 8, "alarm"),
        ("decode-negative", 8, "crash only"),  # no register has the address any more
        ("embedding", 8, "crash only"),
    ],
)
def test_a_core_dump_is_an_alarm_if_it_names_a_kv_page(judged, name, rows, grade):
    name, given, _ = name.partition(" given")
    page = PageEvent(6, "alloc", "full", (384,), 1, "request-5")
    record = real_cores.record(name, rows=rows, allocator=(page,) if given else ())
    core = Core(memoryview(real_cores.core(name)))
    record = dataclasses.replace(record, autopsy=examine.of_core(core, name, record))
    log = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    cell = judged("core", log, status=1, finding=record, device="cuda", **TRUTH)
    assert cell.grade == grade
    assert ("page 384" in cell.said) == (grade != "crash only")


def test_a_tool_with_which_the_bug_does_not_happen_is_not_silent(suite, known, cells):
    row = row_of(
        suite,
        known,
        cells("buggy", "nothing", 0, triggered=1),
        cells("fixed", "nothing"),
        cells("buggy", "g4debug", 0, triggered=0),
    )
    assert row.entries["g4debug"].words == "does not happen with it, 1/1"
    assert "prevents it" in suite("picture").svg([row])


def test_what_ran_on_a_gpu_is_judged_by_the_runs_there(proven, suite, cells):
    """On the CPU the bug was triggered, on the GPU it was not: so its tools missed nothing."""
    on = {"device": "cuda", "where": "NVIDIA H100"}
    row = proven(
        cells("buggy", "nothing", **on),
        cells("fixed", "nothing", **on),
        cells("buggy", "compute-sanitizer", **on),
    )
    assert row.entries["compute-sanitizer"].words == "void"
    assert row.good
    assert "not triggered" in row.of("compute-sanitizer").problem
    page = suite("page").markdown([row], {})
    assert "On a GPU (NVIDIA H100)" in page
    assert "compute-sanitizer | void" in page.replace("  ", " ") or "| void |" in page


def test_a_finding_of_ours_has_a_page_that_says_nothing_of_the_machine(suite, known, tmp_path):
    reports = suite("reports")
    results, pages = tmp_path / "results", tmp_path / "pages"
    found, crashed, never = list(known)[:3]

    def dump(name, tool, record):
        folder = results / f"{name}.buggy.{tool}.0" / "dumps"
        folder.mkdir(parents=True)
        writing.write(writing.encode(record), folder, "g4debug-one.pt")

    record = sample_record()
    died = dataclasses.replace(record.finding, check="flight-recorder", kind="crash")
    here = dataclasses.replace(
        record.finding,
        got=f"a file in {results}/somewhere",
        expected=f"one in /elsewhere/{found}.buggy.g4debug-best.0/dumps",
    )
    dump(found, "g4debug", dataclasses.replace(record, finding=died))
    dump(found, "g4debug-best", dataclasses.replace(record, finding=here))
    dump(crashed, "g4debug", dataclasses.replace(record, finding=died))
    dump(never, "core", dataclasses.replace(record, finding=died))  # not what the page is of
    pages.mkdir()
    for name in (crashed, never):
        (pages / f"{name}.html").write_text("of an older run")
    # The one that was not run this time stays; the one without a finding any more does not.
    assert reports.write(known, results, pages) == {
        name: pages / f"{name}.html" for name in (found, never)
    }
    assert not (pages / f"{crashed}.html").exists()
    text = (pages / f"{found}.html").read_text()
    assert record.finding.headline[:20] in text
    assert "a file in somewhere" in text
    assert f"one in {found}.buggy.g4debug-best.0/dumps" in text
    assert str(tmp_path) not in text


# --- which release has which bug --------------------------------------------------------------


@pytest.fixture
def across(suite):
    return suite("across")


def test_every_release_with_pins_is_asked_oldest_first(across, suite, known):
    pins = {p.stem.removeprefix("sglang-") for p in (REPRO.parent / "requirements").glob("sgl*")}
    assert set(across.releases()) == pins
    assert across.releases().index("0.5.12.post1") < across.releases().index("0.5.23")
    assert set(pins) <= set(suite("table").releases(known))  # make history makes them


def test_only_bugs_that_a_release_has_by_itself_are_asked(across, known):
    asked = across.asked(known)
    assert asked
    assert not any(c.origin == "put back" or c.gpu for c in asked.values())


def test_a_release_is_an_arm_with_the_settings_of_the_bug(suite, known):
    for case in known.values():
        arm = suite("cell").arm_of(case, "0.5.99")
        assert arm == dataclasses.replace(case.buggy, release="0.5.99")
    with pytest.raises(InvalidVersion):
        suite("cell").arm_of(case, "bugy")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([{"triggered": 1}, {"triggered": 2, "ended": "died"}], "has it"),
        ([{"triggered": 1}, {}], "has it (1 of 2)"),
        ([{"triggered": 1}, {"ended": "died", "said": "IndexError: x"}], "has it (1 of 2)"),
        ([{}, {}], "no"),
        ([{}, {"reached": 0}], "no (1 of 2)"),
        ([{}, {"ended": "hangs"}], "hangs (1 of 2)"),
        ([{"reached": 0, "ended": "died", "said": "x.NotExercised: too fast"}], "not met"),
        ([{"reached": 0}], "not met"),
        ([{"ended": "died", "said": "IndexError: x"}], "dies first"),
        ([{"reached": 0, "ended": "hangs", "said": "hangs"}], "hangs"),
        ([{"ended": "died", "said": "suites.history.counter.GroundTruthError: KeyError: 'y'"}],
         "other code"),
        # As the first cells have it, which were kept when the module had another name.
        ([{"ended": "died", "said": "_history.counter.GroundTruthError: KeyError: 'y'"}],
         "other code"),
        ([], "not run"),
    ],
)  # fmt: skip
def test_what_the_runs_say_of_a_release(across, cells, more, said):
    found = across.answer([cells("0.5.14", "nothing", i, **m) for i, m in enumerate(more)])
    assert found.text == said


def test_the_page_says_which_release_has_which_bug(across, known, suite):
    cell, name = suite("cell").Cell, "zero-accept"
    cells = [
        cell(name, "0.5.12.post1", "nothing", 0, triggered=1, ended="died"),
        cell(name, "0.5.14", "nothing", 0, ended="died", said="RuntimeError: shapes"),
        cell(name, "0.5.12.post1", "nothing", 1, ended="died", said="RuntimeError: shapes"),
        cell(name, "buggy", "nothing", 0, triggered=1, ended="died"),
    ]
    lines = suite("page").markdown([], {}, (), across.answers(known, cells)).splitlines()
    row = next(line for line in lines if f"[{name}](#{name})" in line)
    assert row.count("**has it (1 of 2)**") == 1
    assert row.count("dies first") == 1
    assert row.count("not run") == len(across.releases()) - 2
    where = "zero-accept on 0.5.12.post1, zero-accept on 0.5.14"
    assert f"- {where}, dies first: `RuntimeError: shapes`." in lines
    assert across.answers(known, cells[-1:]) == {}


def test_the_runs_on_other_releases_are_on_the_page_and_in_no_row(runner, suite, known, tmp_path):
    cell = suite("cell")
    one = cell.Cell("lost-key", "0.5.14", "nothing", 0, triggered=1, wrong=-1, outputs={"a": [1]})
    right = cell.Cell("lost-key", "fixed", "nothing", 0, outputs={"a": [2]})
    cell.keep(one, tmp_path)
    assert runner.elsewhere(tmp_path, "cpu") == {one.id: one}
    assert suite("table").rows(known, [one])[0].truth.buggy.runs == 0
    found = runner.with_right_answers({c.id: c for c in (one, right)}, known)
    assert found[one.id] == one  # another release may answer otherwise


def test_a_release_without_an_environment_is_not_asked(runner, known, monkeypatch, tmp_path):
    here = tmp_path / "python"
    here.touch()
    monkeypatch.setattr(
        runner, "interpreter", lambda release: here if release == "0.5.14" else tmp_path / "none"
    )
    chosen = {n: known[n] for n in ("lost-key", "page-0-freed", "unfenced-results")}
    found = runner.across_tasks(chosen, ["nothing"], 5)
    assert {(t.case, t.arm) for t in found} == {("lost-key", "0.5.14")}
    assert len(found) == sys.modules["suites.history.across"].SEEDS
    assert runner.across_tasks(chosen, ["sglang"], 5) == []


# --- the replays ------------------------------------------------------------------------------


def told(text, **more):
    return {"text": text, "more": [], **more}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("reproduced: g4debug: page-table: page 9", "reproduced"),
        ("explained: in step 9, g4debug: page-table", "reproduced"),
        ("reproduced, on other pages: g4debug: page-table", "reproduced"),
        ("nothing was found, there or here: 9 of 9 steps are equal", "nothing found"),
        ("not reproduced, states equal", "innocent"),
        ("not reproduced: another finding came", "another finding"),
        ("found here, in step 3: g4debug: page-table", "found"),
        ("states differ from step 3 of 9 on", "states differ"),
        ("cannot be told: nothing was found here", "cannot be told"),
        ("cannot be replayed, because it has no tape", "cannot be replayed"),
    ],
)
def test_what_a_replay_said_in_a_word(suite, text, word):
    assert suite("replays").word_of(told(text)) == word


def test_the_suite_calls_nobody_innocent_of_whom_g4debug_did_not_say_so(suite, known):
    """It did, of runs without a finding; what was published then is read with the right word."""
    replays = suite("replays")
    quiet, innocent = (
        dataclasses.replace(replay(suite, "lost-key", "innocent"), said=said)
        for said in (
            "reproduced: 9 of 9 steps are equal, and nothing was found",
            "not reproduced, states equal",
        )
    )
    read = replays.from_text(replays.as_text([quiet, innocent]))
    assert [one.word for one in read] == ["nothing found", "innocent"]
    assert replays.words(known["lost-key"], read[:1]) == "nothing found 1/1, 0 s"
    published = replays.from_text(suite("page").REPLAYS.read_text())
    assert {one.word for one in published} & {"innocent", "nothing found"} == {"nothing found"}


def replay(suite, case, word, seed=0, **more):
    return suite("replays").Replay(case, seed, "g4debug", word, "said | so", **more)


def test_the_entry_of_a_case(suite, known):
    replays = suite("replays")
    case = known["locked-prefix"]
    assert replays.words(case, []) == "not run"
    same = [
        replay(
            suite,
            "locked-prefix",
            "reproduced",
            seed,
            requests=40 + seed,
            kept=kept,
            seconds=9.0 + seed,
        )
        for seed, kept in enumerate((7, 5))
    ]
    assert replays.words(case, same) == "reproduced 2/2, 5 of 41 requests, 10 s"
    other = replay(suite, "locked-prefix", "states differ", 2, seconds=4.0)
    assert replays.words(case, [*same, other]).startswith("reproduced 2/3, 5 of 41")
    there = replay(suite, "locked-prefix", "reproduced", seconds=30.0, device="cuda")
    assert replays.words(case, [there]) == "from a GPU: reproduced 1/1, 30 s"
    assert replays.words(case, [there, *same]).endswith("10 s; from a GPU: reproduced 1/1, 30 s")


def test_who_calls_a_guilty_host_innocent_is_told(suite, known):
    replays = suite("replays")
    guilty = replay(suite, "locked-prefix", "innocent", seconds=4.0)
    assert replays.words(known["locked-prefix"], [guilty]) == "innocent 1/1; 1 FALSE, 4 s"
    assert not replays.good([guilty])
    innocent = replay(suite, "lost-key", "innocent", seconds=4.0)
    assert replays.words(known["lost-key"], [innocent]) == "innocent 1/1, 4 s"
    assert replays.good([innocent])


def test_replays_are_on_the_page_and_in_a_file(suite, known, cells):
    table, page, replays = suite("table"), suite("page"), suite("replays")
    found = [replay(suite, "locked-prefix", "reproduced", steps=9, equal=9, requests=3, kept=1)]
    assert replays.from_text(replays.as_text(found)) == found
    rows = table.rows(known, [cells("buggy", "nothing")], found)
    text = page.markdown(rows, {})
    assert "| reproduced 1/1, 1 of 3 requests, 0 s |" in text
    assert "9 of 9 steps equal in the first run. It said: said \\| so" in text


def test_the_dump_of_the_first_finding_is_replayed(suite, tmp_path):
    replays = suite("replays")
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    assert replays.dump_of(tmp_path) is None
    (tmp_path / "tape.pt").touch()
    assert replays.dump_of(tmp_path) == tmp_path / "tape.pt"
    record = sample_record()
    tape = Tape(1, 16, False, "start", 0, 9, 1, 8, np.zeros(1, dtype=np.int64), (0,), {})
    for name, kind, step in (("a", "exception", 1), ("b", record.finding.kind, 9)):
        at = dataclasses.replace(record.finding.location, step=step)
        finding = dataclasses.replace(record.finding, kind=kind, location=at)
        made = dataclasses.replace(record, finding=finding, tape=tape)
        (dumps / f"{name}.pt").write_bytes(writing.encode(made))
    assert replays.dump_of(tmp_path) == dumps / "b.pt"
    (dumps / "b.pt").unlink()
    assert replays.dump_of(tmp_path) == dumps / "a.pt"


def test_a_run_on_a_gpu_is_replayed_if_it_was_kept(suite, tmp_path, monkeypatch):
    replays, cell = suite("replays"), suite("cell")
    assert replays.run("page-0-freed", 1, tmp_path, "cuda") is None
    refused = cell.Cell("page-0-freed", "buggy", "g4debug", 1, grade="n/a", device="cuda")
    ran = cell.Cell("page-0-freed", "buggy", "g4debug-best", 1, device="cuda")
    for one in (refused, ran):
        cell.keep(one, tmp_path)
    assert replays.run("page-0-freed", 1, tmp_path, "cuda") is None  # it left no dump
    tape = tmp_path / ran.id / "tape.pt"
    tape.parent.mkdir()
    tape.touch()
    asked = []

    def command(dump, *args):
        asked.append(dump)
        return {**told("nothing was found, there or here: 9 of 9 steps are equal"),
                "more": [], "equal": 9, "steps": 9, "requests": 2}  # fmt: skip

    monkeypatch.setattr(replays, "replay", command)
    assert replays.run("page-0-freed", 1, tmp_path, "cuda", watch=True) is None
    found = replays.run("page-0-freed", 1, tmp_path, "cuda")
    assert (found.device, found.tool, found.word) == ("cuda", "g4debug-best", "nothing found")
    assert replays.run("page-0-freed", 1, tmp_path, "cuda") == found
    assert asked == [tape]  # once
    assert replays.from_text(replays.as_text([found])) == [found]


def test_the_tape_of_a_watched_server_is_replayed_with_every_tracer(suite, tmp_path, monkeypatch):
    replays, cell = suite("replays"), suite("cell")
    ran = cell.Cell("locked-prefix", "buggy", "watch", 0)
    cell.keep(ran, tmp_path)
    tape = tmp_path / ran.id / "tape.pt"
    tape.parent.mkdir()
    tape.touch()
    given = []

    def command(dump, folder, environ, seconds, *more):
        given.append(more)
        return {**told("not reproduced: another finding came: kv-allocator: SWA page 3"),
                "equal": 9, "steps": 9, "requests": 2}  # fmt: skip

    monkeypatch.setattr(replays, "replay", command)
    found = replays.run("locked-prefix", 0, tmp_path, watch=True)
    ((option, names),) = given
    assert option == "--trace"
    assert {"kv-allocator", "kv-integrity", "flight-recorder"} <= set(names.split(","))
    assert (found.word, found.tool) == ("found", "watch")
    case = suite("cases").cases()["locked-prefix"]
    armed = replay(suite, "locked-prefix", "reproduced", seconds=7.0)
    assert replays.words(case, [armed, found], watch=True).startswith("found 1/1")
    assert replays.words(case, [armed, found]) == "reproduced 1/1, 7 s"


def test_on_a_gpu_a_release_that_is_not_there_is_told(
    runner, suite, known, tmp_path, monkeypatch, capsys
):
    """A run that could run nothing must not look like one that found nothing."""
    nowhere = tmp_path / "no-such-python"
    for arm in ("buggy", "fixed"):
        monkeypatch.setitem(
            suite("cell").PYTHONS, getattr(known["idle-admission"], arm).release, nowhere
        )
    monkeypatch.setattr(runner.gpu, "names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(sys, "argv", [
        "history_suite.py", "--device", "cuda", "--case", "idle-admission", "--seeds", "1",
        "--tool", "compute-sanitizer", "--results", str(tmp_path),
    ])  # fmt: skip
    assert runner.main() == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "idle-admission: not run in full, because a release of SGLang that is needed is" in told


def test_replays_are_of_watch_or_of_what_is_armed_by_default(runner, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["history_suite.py", "--replay", "--tool", "sglang"])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 2
    assert "--replay: expected no --tool, or --tool watch alone" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--device", "cuda", "--replay")])
def test_recording_is_for_a_gpu(runner, monkeypatch, capsys, more):
    monkeypatch.setattr(sys, "argv", ["history_suite.py", "--record", *more])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 2
    assert "--record: expected --device cuda, and no --replay with it" in capsys.readouterr().err


def test_what_a_gpu_recorded_is_told_with_what_left_no_dump(
    runner, suite, known, tmp_path, monkeypatch, capsys
):
    cell = suite("cell")

    def recorded(name, seed, folder, device):
        if name == "lost-key":
            return None
        ran = cell.Cell(
            name, "buggy", "g4debug", seed, "alarm", said="page 7", ended="died", device=device
        )
        if seed == 0:
            (folder / ran.id).mkdir()
            (folder / ran.id / "tape.pt").touch()
        return ran

    monkeypatch.setattr(runner.replays, "recorded", recorded)
    monkeypatch.setattr(runner.gpu, "names", lambda: ["NVIDIA H100"])
    monkeypatch.setattr(sys, "argv", [
        "history_suite.py", "--record", "--device", "cuda", "--case", "lost-key", "pp-proxy",
        "--seeds", "2", "--results", str(tmp_path),
    ])  # fmt: skip
    assert runner.main() == 1
    out = capsys.readouterr().out
    assert out.count("NO DUMP") == 3
    assert out.count("lost-key, seed 1: NO DUMP. g4debug refuses this SGLang") == 1
    assert "pp-proxy, seed 0: died, alarm. page 7" in out


def test_the_replay_has_the_same_sglang_with_a_bug_that_was_put_back(suite, tmp_path):
    replays, cell = suite("replays"), suite("cell")
    back = replays.environment(cell.Cell("page-0-freed", "buggy", "g4debug", 0), tmp_path)
    assert back["G4HISTORY_PUT_BACK"] == "page_0_freed"
    assert str(tmp_path / "plugin") in back["PYTHONPATH"]
    assert back["G4HISTORY_FOLDER"] != str(tmp_path)  # the counts of the run stay
    natural = replays.environment(cell.Cell("locked-prefix", "buggy", "g4debug", 0), tmp_path)
    assert natural["G4HISTORY_TRUTH"].endswith("locked_prefix")
    assert "G4HISTORY_PUT_BACK" not in natural
