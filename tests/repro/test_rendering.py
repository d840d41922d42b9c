"""The output of the repro scripts, from logs of real runs, in terminals of several widths.

A change of the output is a change of its snapshot, seen in review. To accept it:

    UPDATE_SNAPSHOTS=1 pytest tests/repro/test_rendering.py; git diff tests
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from sample_trap import sample_record

from g4debug.dumps import writing
from g4debug.hooking import targets

pytestmark = pytest.mark.once("a terminal's width has nothing to do with SGLang")

REPRO = Path(__file__).parents[2] / "repro"
SNAPSHOTS = Path(__file__).parent / "snapshots"
SCRIPTS = sorted(path.stem for path in REPRO.glob("[a-z]*.py"))
PACKAGES = "/a/very/long/way/to/an/environment/.venv/lib/python3.12/site-packages"
UP = "g4debug-repro: engine up"
FIRED = "[2026-11-21 10:00:00] g4debug fault (seed=7) stale-swa-state #1: draft backend: …"
USED = "[2026-11-21 10:00:00] Decode batch, #running-req: 10, swa token usage: 0.87, #queue-req: 0"
CRASH = f"""\
[2026-11-21 10:00:09] Scheduler hit an exception: Traceback (most recent call last):
  File "{PACKAGES}/sglang/srt/managers/scheduler.py", line 3890, in run_scheduler_process
    scheduler.run_event_loop()
  File "{PACKAGES}/sglang/srt/managers/scheduler.py", line 1553, in event_loop_normal
    self.process_batch_result(batch, result)
  File "{PACKAGES}/sglang/srt/managers/scheduler.py", line 3183, in process_batch_result
    self.process_batch_result_prefill(batch, result)
  File "{PACKAGES}/sglang/srt/managers/scheduler_output_processor_mixin.py", line 211, in \
process_batch_result_prefill
    next_token_ids = next_token_ids.tolist()
                     ^^^^^^^^^^^^^^^^^^^^^^^
  File "{REPRO.parent}/g4debug/cpu/fault.py", line 127, in synchronise
    raise torch.AcceleratorError(CUDA_TEXT + STAND_IN_TEXT)
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
(g4debug: raised by the CPU engine's stand-in for the attention kernel, which faults as the GPU \
does; no CUDA device is involved)

[2026-11-21 10:00:09] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""
HEADLINE = (
    "g4debug: page-table in draft decode: sliding layer 4 gets full-pool page 54, its SWA pool has "
    "53 pages (request c4f7a6b81e2d4a909b3c5d7e8f012a3b, row 3, column 8)"
)
TOKENS = {"tokens": [[n, n + 1] for n in range(10)], "accept_length": 2.63}
DUMP = "g4debug-page-table-20261121T050434Z-26996-1.pt"


@pytest.fixture
def repro(monkeypatch):
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module


@pytest.fixture
def at_home(monkeypatch, tmp_path):
    """The same short paths wherever the tests run."""
    monkeypatch.chdir(tmp_path)
    return Path()


def finding():
    """The demo's finding, as the diagnosed variant dumps it."""
    record = sample_record()
    headline = dataclasses.replace(
        record.finding, headline=HEADLINE, kind="full-index-in-swa-table"
    )
    return dataclasses.replace(record, finding=headline)


def demo_runs(repro, folder):
    """The demo's outcomes."""
    outcome = repro("harness.processes").Outcome
    (folder / DUMP).write_bytes(writing.encode(finding()))
    logs = {
        "clean": (0, 11.2, f"{UP}\n{USED}\n", TOKENS),
        "broken": (-9, 9.4, f"{UP}\n{FIRED}\n{CRASH}", {}),
        "diagnosed": (-9, 9.8, f"{UP}\n{FIRED}\n{HEADLINE}\n  dump:     {DUMP}\n{CRASH}", {}),
        "fixed": (0, 12.6, f"{UP}\n{FIRED}\n{USED}\n", TOKENS),
        "replayed": (0, 12.1, "", {"text": f"reproduced: {HEADLINE}", "more": ["10 of 10 equal."]}),
    }
    runs = {}
    for name, (status, seconds, text, result) in logs.items():
        log = folder / f"{name}.log"
        log.write_text(text)
        runs[name] = outcome(name, status, seconds, log, result)
    return runs


def judged(script, runs):
    """name -> (outcome, verdict), as run_all makes it."""
    with targets.looking_at(Path(PACKAGES)):  # the SGLang of the logs
        return {
            name: (run, script.REPRO.variants[name].judge(run, runs.get("clean")))
            for name, run in runs.items()
        }


def console(width, terminal=True):
    return Console(
        file=io.StringIO(),
        width=width,
        highlight=False,
        force_terminal=terminal,
        color_system=None,
    )


def compare(name, got):
    path = SNAPSHOTS / name
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(got, encoding="utf-8")
    assert got == path.read_text(encoding="utf-8"), f"{name} changed; see this file's docstring"


def whole(text, got, width):
    """Every word of the text is a whole word of a line; a line is too long only for one word."""
    words = {word for line in got.splitlines() for word in line.split()}
    assert set(text.split()) <= words
    for line in got.splitlines():
        assert len(line) <= width or len(line.split()) == 1, line


def demo(repro, folder, monkeypatch, width, terminal=True):
    """What the demo prints after each variant, and at the end."""
    variants, script = repro("harness.variants"), repro("e4b_trtllm_mtp")
    monkeypatch.setattr(variants, "viewer", lambda: ".venv/bin/g4debug")
    done = judged(script, demo_runs(repro, folder))
    out = console(width, terminal)
    for name in ("broken", "diagnosed"):
        variants.explain(script.REPRO.variants[name], done[name][0], out)
    variants.summary(script.REPRO, done, out)
    return done, out.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_demo(repro, at_home, monkeypatch, width):
    done, got = demo(repro, at_home, monkeypatch, width)
    assert all(verdict.good for _, verdict in done.values()), done
    compare(f"demo-{width}.txt", got)


def test_no_name_of_the_demo_is_broken_at_80_columns(repro, at_home, monkeypatch):
    done, got = demo(repro, at_home, monkeypatch, 80)
    show, *_, replay = commands = got.splitlines()[-3:]  # to be copied as they are
    assert show == f"    .venv/bin/g4debug show {DUMP}"
    assert replay == f"    .venv/bin/g4debug replay {DUMP} --pages-only --shrink small.pt"
    facts = [verdict.what for _, verdict in done.values()]
    assert "(scheduler_output_processor_mixin.py)" in facts[1]  # or this test is too easy
    whole(
        f"{' '.join(facts)} {HEADLINE} G4DEBUG_FIX_SWA_STATE_SWAP=0",
        got.replace("\n".join(commands), ""),
        80,
    )
    assert PACKAGES not in got
    assert 'File "sglang/srt/managers/scheduler_output_processor_mixin.py"' in got
    assert "g4debug/cpu" not in got  # its stand-ins are no part of what a GPU shows


def test_a_folder_called_like_sglang_makes_nothing_sglangs(repro, at_home):
    """PACKAGES may lie below any folder, and so may the clone that has the stand-ins."""
    log = at_home / "broken.log"
    log.write_text(CRASH.replace('File "/', 'File "/sglang/g4debug/cpu/'))
    run = repro("harness.processes").Outcome("broken", -9, 1.0, log, {})
    with targets.looking_at(Path("/sglang/g4debug/cpu" + PACKAGES)):
        assert repro("harness.verdicts").blamed(run).startswith("process_batch_result_prefill (")
    shown = [line for line in run.traceback(99) if line.startswith("  File ")]
    assert len(shown) == 5  # none of them is a stand-in of this g4debug


def test_in_a_file_what_is_quoted_stays_whole(repro, at_home, monkeypatch):
    got = demo(repro, at_home, monkeypatch, 80, terminal=False)[1].splitlines()
    assert f"    {HEADLINE}" in got
    assert [line for line in got if "so the stacktrace below might be incorrect" in line] == [
        "    CUDA kernel errors might be asynchronously reported at some other API call, "
        "so the stacktrace below might be incorrect."
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_demo_that_fails(repro, at_home, width):
    """Each verdict that can be bad, with the place of its log on a line of its own."""
    script, render = repro("e4b_trtllm_mtp"), repro("harness.render")
    good = demo_runs(repro, at_home)
    outcome, crash = (
        repro("harness.processes").Outcome,
        "torch.OutOfMemoryError: CUDA out of memory.\n",
    )
    (at_home / "other.log").write_text(crash)
    runs = {
        "clean": outcome("clean", -9, 9.4, good["broken"].log),
        "broken": outcome("broken", 0, 11.2, good["clean"].log, TOKENS),
        "diagnosed": outcome("diagnosed", -9, 8.2, at_home / "other.log"),
        "fixed": outcome("fixed", None, 150.0, good["fixed"].log),
    }
    done = judged(script, runs)
    assert not any(verdict.good for _, verdict in done.values())
    out = console(width)
    render.summary(out, "What happened:", repro("harness.variants").blocks(script.REPRO, done))
    got = out.file.getvalue()
    whole(" ".join(verdict.what for _, verdict in done.values()), got, width)
    for run, _ in done.values():
        assert f"         {run.log}" in got.splitlines()
    compare(f"demo-bad-{width}.txt", got)


def test_where_a_demo_has_left_no_dump_none_is_replayed(repro, at_home, monkeypatch):
    """As on a machine on which SGLang does not start at all."""
    script, variants = repro("e4b_trtllm_mtp"), repro("harness.variants")

    def died(name, child, arguments, *_, **__):
        assert child != "harness.replaying", arguments
        log = at_home / f"{name}.log"
        log.write_text("RuntimeError: Unexpected error running 'lscpu'\n")
        return repro("harness.processes").Outcome(name, 1, 2.0, log)

    monkeypatch.setattr(variants, "run_child", died)
    names = list(script.REPRO.variants)
    done = variants.run_all(script.REPRO, names, "cpu", 0, 60.0, at_home, console(80))
    assert list(done) == names
    assert not any(verdict.good for _, verdict in done.values())
    assert done["replayed"][1].what == "diagnosed left no dump that could be replayed."
    variants.summary(script.REPRO, done, console(80))


def test_a_child_that_only_began_to_write_its_result_has_none(repro, at_home, monkeypatch):
    processes = repro("harness.processes")
    monkeypatch.setattr(
        processes,
        "child",
        lambda module, device, result, *_: [
            sys.executable, "-c", f"open({str(result)!r}, 'w'); raise SystemExit(2)"
        ],
    )  # fmt: skip
    run = processes.run_child("x", "module", {}, {}, at_home, 60.0, device="cuda", warm=False)
    assert (run.status, run.result, run.completed) == (2, {}, False)


def test_a_log_far_away_is_not_broken(repro):
    render = repro("harness.render")
    far = Path("/") / "/".join(["a-folder-with-a-long-name"] * 8) / "broken.log"
    out = console(80)
    render.block(out, render.Block("broken", False, "It completes.", log=far))
    assert str(far) in [line.strip() for line in out.file.getvalue().splitlines()]


WITH_VARIANTS = [s for s in SCRIPTS if "\nREPRO = " in (REPRO / f"{s}.py").read_text()]


@pytest.mark.parametrize("name", WITH_VARIANTS)
def test_titles_and_switches_of_every_script(repro, tmp_path, name):
    """At 80 columns each is whole, and a switch can be typed into a shell."""
    script, variants, render = repro(name), repro("harness.variants"), repro("harness.render")
    run = repro("harness.processes").Outcome(name, 0, 1.0, tmp_path / "log")
    verdict = repro("harness.verdicts").Verdict(True, "It completes.")
    done = dict.fromkeys(script.REPRO.variants, (run, verdict))
    out = console(80)
    render.summary(out, script.REPRO.title, variants.blocks(script.REPRO, done))
    got = out.file.getvalue()
    for variant, it in script.REPRO.variants.items():
        whole(f"{variant}: {it.title}", got, 80)
        for switch in render.switches(it.environment) if it.environment else ():
            key = switch.partition("=")[0]
            assert switch in [line.split()[-1] for line in got.splitlines() if line]
            typed = ["sh", "-c", f"{switch} printenv {key}"]
            read = subprocess.run(typed, capture_output=True, text=True, check=True)
            assert read.stdout == f"{it.environment[key]}\n"
    said = f"All {len(done)} variants did" if len(done) > 1 else "It did"
    assert f"{said} what they should." in got.replace("it should", "they should")


def test_the_other_layouts_share_it(repro):
    """Verdicts as residual_aliasing and the matrix write them."""
    residual, table, matrix = (
        repro("residual_aliasing"),
        repro("suites.matrix.table"),
        repro("suites.matrix.drill"),
    )
    render = repro("harness.render")
    some = {"captured": list(range(1, 42)), "wrong": list(range(1, 41)), "cosine": 0.6071}
    row = matrix.Row("alloc-out-of-range", "1*swa@mode=decode", ("kv-allocator", "page-table"))
    row.fired, row.caught = 12, {"kv-allocator": 0, "flight-recorder": 3}
    row.kinds = {"kv-allocator": "out-of-range", "flight-recorder": "crash"}
    row.seen = "dies: IndexError: index 640046272 is out of bounds for dimension 0 with size 1664"
    blocks = [
        render.Block("broken", True, residual.what(some | {"wrong": some["captured"]})),
        render.Block("fixed", False, residual.what(some)),
        table.block(row, "fault 3 of 31"),
    ]
    out = console(80)
    render.summary(out, "What happened:", blocks)
    whole(" ".join(it.what for it in blocks), out.file.getvalue(), 80)
    compare("others-80.txt", out.file.getvalue())


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_fits_into_80_columns_and_shows_no_markup(name):
    done = subprocess.run(
        [sys.executable, str(REPRO / f"{name}.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
    )
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "``" not in done.stdout
    assert "The exit code is 0 if " in done.stdout
    if "--variant" in done.stdout:
        # The old name works, too. From Python 3.13 on argparse says NAME once.
        once = sys.version_info >= (3, 13)
        assert f"--variant{'' if once else ' NAME'}, --arm NAME" in done.stdout


@pytest.mark.parametrize("flag", ["--variant", "--arm"])
def test_variant_and_its_old_name_are_one_flag(repro, monkeypatch, flag):
    variants, script = repro("harness.variants"), repro("e4b_trtllm_mtp")
    monkeypatch.setattr(sys, "argv", ["e4b_trtllm_mtp.py", flag, "broken", flag, "fixed"])
    assert variants.arguments(script.REPRO, script.__doc__, "10").variants == ["broken", "fixed"]
