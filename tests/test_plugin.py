"""The plugin in real processes: what stops a start, with which words, and what it leaves alone."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from packaging.version import Version

from g4debug import discovery
from g4debug.hooking import targets
from g4debug.settings import Settings, fix_switch

pytestmark = [
    pytest.mark.once("who stops a start, and with which words, is g4debug's own code"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
TRACERS = ", ".join(discovery.names("tracer"))
NO_FIX = {fix_switch(name): "0" for name in discovery.names("fix")}
CLONE = Path(__file__).parents[1]
RUN_CODE = Path(__file__).parent / "support" / "run_code.py"
CPU = [sys.executable, "-m", "g4debug.cpu"]
# What each SGLang process does first.
LOAD = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
import sys
torch = sys.modules.get('torch')
print('CUDA', torch is not None and torch.cuda.is_initialized())
print('SERVING ON with', len(HookRegistry._hooks), 'hooks')
"""
GONE = """
from g4debug.hooking import targets
targets.SITES['{site}'] = (('', targets.path('{site}') + '_gone'),)
"""

# The source has it, the class has not: only the audit can see that.
DELETED = """
import pkgutil
from g4debug.hooking import targets
owner, _, name = targets.path('worker.pool_view').rpartition('.')
delattr(pkgutil.resolve_name(owner), name)
"""
# A release that nothing was run on; with the second line, one whose sites have changed, too.
UNKNOWN = """
from g4debug.hooking import targets
targets.RUN.clear()
"""
CHANGED = (
    UNKNOWN
    + """
targets.SITES['attn.trtllm_mha.layer_page_table'] = (('', None),)
targets.SITES['pool.alloc_decode'] = (('', targets.path('pool.alloc_decode') + '_gone'),)
"""
)
# A release that has the bug: the fix is applied without anybody asking for it.
NEEDED = """
import dataclasses
from g4debug.fixes import swa_state_swap as module
module.FIX = dataclasses.replace(module.FIX, still_broken=lambda: True)
"""


def clean() -> dict[str, str]:
    """This process's environment without switches of g4debug and SGLang."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=clean() | environ, capture_output=True, text=True, timeout=300, check=False
    )


def load(code: str = LOAD, **environ: str) -> subprocess.CompletedProcess[str]:
    return run([*CPU, "-c", code], **environ)


def load_warm(code: str = LOAD, **environ: str) -> subprocess.CompletedProcess[str]:
    """The same in a process that has SGLang's imports behind it: much faster."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with err.open("wb") as log:
            process = warm.start((str(RUN_CODE), str(out), code), clean() | environ, log.fileno())
            status = process.wait(300)
        text = out.read_text() if out.exists() else ""
        return subprocess.CompletedProcess(code, status, text, err.read_text())


@pytest.fixture(scope="module")
def outcomes():
    """All the starts below, two at a time."""
    cases = {
        "typo": {"G4DEBUG_TRACER": "page-table"},
        "fault": {"G4DEBUG_FAULTS": "page-obb=on"},
        "flag": {"SGLANG_TRTLLM_MHA_DEBUG": "maybe"},
        "nothing": NO_FIX,
        "debug": {"SGLANG_TRTLLM_MHA_DEBUG": "1"},
        "left-out": {"SGLANG_TRTLLM_MHA_DEBUG": "1", "SGLANG_PLUGINS": "foo"},
        "gone-debug": {"SGLANG_TRTLLM_MHA_DEBUG": "1"},
        "gone-quiet": {},
        "gone-fix": {"SGLANG_TRTLLM_MHA_DEBUG": "1"},
        "deleted": {},
        "deleted-debug": {"SGLANG_TRTLLM_MHA_DEBUG": "1"},
        "deleted-forced": {"G4DEBUG_FIX_SWA_STATE_SWAP": "1"},
        "unknown": {"SGLANG_TRTLLM_MHA_DEBUG": "1"},
        "unknown-log": {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_MODE": "log"},
        "unknown-taken": {
            "G4DEBUG_TRACE": "page-table",
            "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
        },
        "changed-log": {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_MODE": "log"},
    }
    code = {
        "gone-debug": GONE.format(site="attn.trtllm_mha.layer_page_table") + LOAD,
        "gone-quiet": NEEDED + GONE.format(site="worker.pool_view") + LOAD,
        "gone-fix": NEEDED + GONE.format(site="worker.pool_view") + LOAD,
        "deleted": NEEDED + DELETED + LOAD,
        "deleted-debug": NEEDED + DELETED + LOAD,
        "deleted-forced": DELETED + LOAD,
        **{name: UNKNOWN + LOAD for name in cases if name.startswith("unknown")},
        **{name: CHANGED + LOAD for name in cases if name.startswith("changed")},
    }
    cold = ("debug",)  # test_a_real_server_does_not_start_with_a_typo is a cold start with a typo
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            k: pool.submit(load if k in cold else load_warm, code.get(k, LOAD), **v)
            for k, v in cases.items()
        }
        return {name: job.result() for name, job in jobs.items()}


def last_line(done) -> str:
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("case", "names", "valid"),
    [
        ("typo", "G4DEBUG_TRACER", "G4DEBUG_TRACE"),
        ("fault", "'page-obb'", ", ".join(discovery.names("fault"))),
        ("flag", "SGLANG_TRTLLM_MHA_DEBUG='maybe'", "1 or 0"),
    ],
)
def test_a_switch_that_is_not_understood_stops_the_process(outcomes, case, names, valid):
    done = outcomes[case]
    assert done.returncode == 1
    assert "SERVING ON" not in done.stdout
    assert last_line(done).startswith("g4debug: ")
    assert names in last_line(done)
    assert valid in last_line(done).partition(names)[2]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"G4DEBUG_FAULTS": "page-oob"}, "name=action"),
        ({"G4DEBUG_FAULTS": "page-oob=1*of"}, "page-oob has no task 'of'; valid: off, on, corrupt"),
        ({"G4DEBUG_FAULTS": "page-oob=corrupt(all)"}, "expected a number of cells, at least 1"),
        ({"G4DEBUG_TRACE": "pages"}, f"unknown tracer 'pages'; valid: {TRACERS}"),
        ({"G4DEBUG_FIX_SWA_STATE": "1"}, "no such fix; valid: G4DEBUG_FIX_"),
        ({"G4DEBUG_FIX_LOCKED_PREFIX": "1"}, "written for SGLang"),  # but not for this one
    ],
)
def test_every_such_switch_ends_in_one_line(sglang, monkeypatch, caplog, environ, says):
    """In this process; the tests above show that SGLang lets a SystemExit through."""
    from packaging.version import Version

    from g4debug import plugin
    from g4debug.hooking import targets

    for name in [n for n in os.environ if n.startswith(("G4DEBUG_", "SGLANG_TRTLLM_MHA"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(targets, "sglang_version", lambda: Version("99"))
    with pytest.raises(SystemExit) as error:
        plugin.register()
    (name,) = environ
    assert str(error.value).startswith(f"g4debug: {name}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not caplog.records  # no traceback beside it


def test_nothing_asked_no_hook_and_no_word(outcomes):
    done = outcomes["nothing"]
    assert done.returncode == 0
    assert "SERVING ON with 0 hooks" in done.stdout
    assert "armed" not in done.stderr


def in_force_by_itself() -> tuple[str, ...]:
    """What the line says of the fixes on a release that two of them are written for."""
    written = [
        targets.matches(discovery.load("fix", n).needs) for n in ("locked-prefix", "swa-ratio")
    ]
    if not all(written):
        return ("fixes: ",)
    return ("locked-prefix", "G4DEBUG_FIXES=all would add 6 performance paths and swa-ratio")


def test_debug_arms_and_says_so_in_one_line(outcomes):
    done = outcomes["debug"]
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stderr.splitlines() if "armed:" in x]
    for part in (
        "flight-recorder, ",
        "page-table",
        " (raise)",
        *in_force_by_itself(),
        "faults: none",
        "dumps: /",
    ):
        assert part in line
    hooked = line.split(" sites hooked")[0].split()[-1]
    assert f"SERVING ON with {hooked} hooks" in done.stdout
    assert int(hooked) > 0
    assert "CUDA False" in done.stdout


def test_left_out_by_the_allow_list_nobody_says_so(outcomes):
    """Why docs and doctor have to. If SGLang says it one day, environment.md is to be corrected."""
    done = outcomes["left-out"]
    assert done.returncode == 0, done.stderr
    assert "SERVING ON with 0 hooks" in done.stdout
    said = done.stderr.replace(str(CLONE), "")  # warnings name files, and .venv may be in it
    assert "g4debug" not in said
    assert "SGLANG_PLUGINS" not in done.stderr


def test_a_missing_site_stops_a_start_that_asked_for_debugging(outcomes):
    done, site = outcomes["gone-debug"], "attn.trtllm_mha.layer_page_table"
    assert done.returncode == 1
    assert "SERVING ON" not in done.stdout
    assert last_line(done).startswith(f"g4debug: not armed: {site} (missing: ")
    assert last_line(done).endswith("run: g4debug doctor")


@pytest.mark.parametrize("case", ["gone-quiet", "gone-fix"])
def test_a_site_that_only_a_fix_needs_costs_one_warning(outcomes, case):
    done = outcomes[case]
    assert done.returncode == 0, done.stderr
    assert "SERVING ON" in done.stdout
    warnings = [x for x in done.stderr.splitlines() if "cannot be applied" in x]
    assert len(warnings) == 1
    assert "fix swa-state-swap cannot be applied: " in warnings[0]
    assert "_target_kv_pool_view_gone (worker.pool_view)" in warnings[0]
    assert "not armed" not in done.stderr
    line = next(x for x in done.stderr.splitlines() if "fixes:" in x)
    assert "1 target-missing (swa-state-swap)" in line


@pytest.mark.parametrize("case", ["deleted", "deleted-debug"])
def test_the_audit_sees_what_the_source_does_not_tell(outcomes, case):
    done = outcomes[case]
    assert done.returncode == 0, done.stderr
    assert "SERVING ON" in done.stdout
    assert "g4debug: not armed: worker.pool_view (missing: " in done.stderr


def test_a_forced_fix_whose_site_is_gone_stops_the_start(outcomes):
    done = outcomes["deleted-forced"]
    assert done.returncode == 1
    assert "SERVING ON" not in done.stdout
    assert last_line(done).startswith("g4debug: not armed: worker.pool_view (missing: ")


def test_importing_the_plugin_is_cheap_and_touches_no_device():
    code = (
        "import sys, g4debug.plugin\n"
        "print(sorted(m for m in ('torch', 'sglang', 'triton', 'numpy') if m in sys.modules))"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.strip() == "[]", done.stderr


def test_without_sglang_asking_for_debugging_is_an_error(tmp_path):
    """Never half armed: whatever keeps g4debug from arming ends the process, if asked."""
    code = (
        "import sys; sys.modules['sglang'] = None\n"
        "from g4debug.plugin import register; register(); print('went on')"
    )
    done = run([sys.executable, "-c", code], SGLANG_TRTLLM_MHA_DEBUG="1")
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert last_line(done).startswith("g4debug: could not be armed: ")


@pytest.mark.engine
def test_a_real_server_does_not_start_with_a_typo():
    from g4debug.cpu import server

    done = run([*CPU, *server.command(["--port", "29999"])[1:]], G4DEBUG_MODES="log")
    assert done.returncode == 1
    assert last_line(done).startswith("g4debug: G4DEBUG_MODES: unknown variable; valid: ")


def test_a_release_that_the_tracers_were_never_run_on_is_refused(outcomes):
    done = outcomes["unknown"]
    assert done.returncode == 1
    assert "SERVING ON" not in done.stdout
    line = last_line(done)
    assert line.startswith(f"g4debug: SGLang {targets.sglang_version()} was never run with ")
    armed = "flight-recorder, kv-allocator, page-table, pool-leak, spec-lifecycle"
    assert f"with {armed} on the CPU engine, so a finding" in line
    assert "G4DEBUG_MODE=raise could harm" in line
    assert "G4DEBUG_MODE=log" in line
    assert "G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1" in line
    assert "Traceback" not in done.stderr


def test_there_it_can_report_or_the_risk_can_be_taken(outcomes):
    for case, armed, mode in (
        ("unknown-log", "flight-recorder, kv-allocator, page-table, pool-leak, ", "log"),
        ("unknown-taken", "page-table", "raise"),
    ):
        done = outcomes[case]
        assert done.returncode == 0, done.stderr[-2000:]
        assert "SERVING ON" in done.stdout
        line = next(x for x in done.stderr.splitlines() if f"armed: {armed}" in x)
        assert f"({mode}); never run on this SGLang or GPU: {armed}" in line


def test_what_was_run_is_named_where_only_some_were_not(monkeypatch, sglang):
    from g4debug import plugin
    from g4debug.settings import SettingsError

    release = str(targets.sglang_version())
    there = {k: v for k, v in targets.RUN[release].items() if k != "pool-leak"}
    monkeypatch.setitem(targets.RUN, release, there)
    settings = Settings(
        debug=True, mode="contain", cpu=True
    )  # which may free other pages than SGLang
    with pytest.raises(SettingsError) as error:
        plugin.refuse_if_not_run(settings, plugin.chosen(settings), cpu_engine=True)
    text = str(error.value)
    assert "G4DEBUG_MODE=contain could harm" in text
    assert "was never run with pool-leak on the CPU engine, so" in text
    assert (
        "G4DEBUG_TRACE=flight-recorder,kv-allocator,page-table,prefix-cache,spec-lifecycle" in text
    )
    settings = Settings(trace=("page-table", "kv-allocator"), cpu=True)
    assert plugin.refuse_if_not_run(settings, plugin.chosen(settings), cpu_engine=True) == ()


def test_what_only_keeps_a_record_refuses_no_start(monkeypatch, sglang):
    from g4debug import plugin

    monkeypatch.setattr(targets, "RUN", {})
    alone = Settings(trace=("flight-recorder",), cpu=True)
    armed = plugin.chosen(alone)
    assert plugin.refuse_if_not_run(alone, armed, cpu_engine=True) == ("flight-recorder",)


def test_a_build_that_is_not_exactly_that_release_was_not_run(monkeypatch):
    release = next(iter(targets.RUN))
    for build, count in ((release, 0), (f"{release}+fork", 1), ("0.5.99", 1), ("0.5.24.dev3", 1)):
        monkeypatch.setattr(targets, "sglang_version", lambda build=build: Version(build))
        assert len(targets.not_run(["page-table"], cpu_engine=True)) == count, build
    monkeypatch.setattr(targets, "sglang_version", lambda: None)
    assert targets.not_run(["page-table"], cpu_engine=True) == ("page-table",)


def test_what_was_run_on_the_cpu_engine_was_not_run_on_a_gpu(monkeypatch):
    monkeypatch.setattr(targets, "sglang_version", lambda: Version("0.5.99"))
    there = {"page-table": (targets.CPU,), "pool-leak": (targets.CPU, targets.H200)}
    monkeypatch.setitem(targets.RUN, "0.5.99", there)
    assert targets.not_run(there, cpu_engine=True) == ()
    assert targets.not_run(there, cpu_engine=False) == ("page-table",)


@pytest.mark.parametrize(("gpu", "refused"), [("sm90", False), ("", False), ("sm100", True)])
def test_what_was_run_on_one_kind_of_gpu_was_not_run_on_another(monkeypatch, sglang, gpu, refused):
    from g4debug import plugin
    from g4debug.settings import SettingsError

    monkeypatch.setattr(targets, "sglang_version", lambda: Version("0.5.12.post1"))
    settings = Settings(trace=("page-table",))
    armed = plugin.chosen(settings)
    if not refused:
        assert plugin.refuse_if_not_run(settings, armed, False, gpu) == ()
        return
    with pytest.raises(SettingsError, match=r"on a GPU of this kind \(sm100; run: sm90\)"):
        plugin.refuse_if_not_run(settings, armed, False, gpu)
    for allowed in (
        Settings(trace=("page-table",), mode="log"),
        Settings(trace=("page-table",), not_run_on_this_release=True),
    ):
        assert plugin.refuse_if_not_run(allowed, armed, False, gpu) == ("page-table",)
    assert plugin.refuse_if_not_run(settings, armed, True, gpu) == ()  # the CPU engine there


@pytest.mark.parametrize(("capability", "kind"), [((9, 0), "sm90"), ((12, 0), "sm120")])
def test_the_kind_of_a_gpu_is_its_capability(monkeypatch, capability, kind):
    from g4debug import plugin

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert plugin.kind_of_gpu() == kind
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert plugin.kind_of_gpu() == "ROCm"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_has_no_kind():
    from g4debug import plugin

    assert plugin.kind_of_gpu() == ""


def test_log_mode_works_there_as_far_as_it_can_and_says_how_far(outcomes):
    done = outcomes["changed-log"]
    assert done.returncode == 0, done.stderr[-2000:]
    assert "SERVING ON" in done.stdout
    said = done.stderr.replace("\n", " ")
    assert "page-table is off: page-table: SGLang " in said
    assert "has no attn.trtllm_mha.layer_page_table" in said
    assert "the page ledger is off: it does not see every event: SGLang's " in said
    assert "alloc_decode_gone is missing" in said


def test_the_table_of_runs_names_tracers_that_there_are():
    assert all(set(there) <= set(discovery.names("tracer")) for there in targets.RUN.values())
    assert set(next(iter(targets.RUN.values()))) == set(discovery.names("tracer"))


def test_a_start_goes_on_where_its_line_cannot_be_printed(monkeypatch, sglang):
    from sglang.srt.plugins.hook_registry import HookRegistry

    from g4debug import plugin
    from g4debug.hooking.hooks import Hooks

    def full(text):  # the disk that SGLang's log goes to
        raise OSError(errno.ENOSPC, "No space left on device")

    applied = []
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: applied.append(True))
    plugin._after_apply(Hooks(), Settings.from_environ({}), "armed", None, ())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", SimpleNamespace(write=full, flush=lambda: None))
        HookRegistry.apply_hooks()
    assert applied
