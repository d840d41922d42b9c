"""``g4debug doctor``: in real processes, and its parts one by one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import installed_plugin
import pytest
import torch
from warm import signals

import g4debug
from g4debug import cli
from g4debug.backends import adapter, adapters
from g4debug.cli import _diagnose, make_console
from g4debug.hooking import targets
from g4debug.reporters import doctor
from g4debug.reporters.doctor import Diagnosis, Row
from g4debug.settings import Settings
from g4debug.tracers.page_table import canary

MORE = pytest.mark.long("another signal")
needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
)
SITES = "import g4debug.hooking.targets as t\n"
NO_SGLANG = """
import importlib.metadata as m, sys
real = m.version
def version(name):
    if name in ("sglang", "triton"):
        raise m.PackageNotFoundError(name)
    return real(name)
m.version = version
class Blocker:
    def find_spec(self, name, *a):
        if name.partition(".")[0] in ("sglang", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""

FINDER = """
import sys
from importlib.util import spec_from_file_location
class Finder:
    def find_spec(self, name, *a):
        return spec_from_file_location(name, {file!r}) if name == "g4debug" else None
sys.path.remove({root!r})
sys.meta_path.append(Finder())
"""


def run_doctor(
    cwd: Path, *arguments: str, customize: str = "", **environment: str
) -> tuple[int, str]:
    """Exit code and stdout; ``customize`` runs first in every Python process of the call."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("G4DEBUG_", "SGLANG_")) and k != "COLUMNS"
    }
    clean["SGLANG_TRTLLM_MHA_DEBUG_DIR"] = str(cwd / "dumps")
    if customize:
        (cwd / "sitecustomize.py").write_text(customize)
        paths = [str(cwd), *filter(None, [clean.get("PYTHONPATH")])]
        clean["PYTHONPATH"] = os.pathsep.join(paths)
    command = "import sys; from g4debug.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, "doctor", *arguments],
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@needs_sglang
@pytest.mark.engine
def test_watch_is_told_apart(tmp_path: Path) -> None:
    switch = {"SGLANG_TRTLLM_MHA_DEBUG": "watch"}
    code, out = run_doctor(tmp_path, "--json", "--no-canary", **switch)
    data = json.loads(out)
    assert code == 0, data["problems"]
    parts = "flight-recorder, page-table, pool-leak"
    assert data["headline"] == f"ready: a server will arm what watch has of {parts} in mode contain"
    tracers = {t["name"]: t for t in data["tracers"]}
    armed = [name for name, t in tracers.items() if t["state"] == "armed (watch, contain)"]
    assert ", ".join(armed) == parts
    assert tracers["kv-allocator"]["state"] == "off"
    assert any("no page is known to be another's" in note for note in data["notes"])
    owners = " ".join(site["detail"] for site in data["sites"])
    assert "page-table" in owners
    assert "ledger" not in owners


@needs_sglang
@pytest.mark.engine
def test_all_is_well(tmp_path: Path) -> None:
    (tmp_path / "g4debug").mkdir()  # as in the parent of a clone: it hides nothing
    switches = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_FAULTS": "stale-swa-state=on"}
    code, out = run_doctor(tmp_path, "--json", "--canary", **switches)
    data = json.loads(out)
    assert code == 0, data["problems"]
    assert data["ready"]
    armed = [t["name"] for t in data["tracers"] if t["state"] == "armed (raise)"]
    opt_in = [t["name"] for t in data["tracers"] if t["state"] == "opt-in"]
    # SGLANG_TRTLLM_MHA_DEBUG=1 does not arm them.
    assert opt_in == ["kv-integrity", "kv-writes", "rank-divergence"]
    assert {"flight-recorder", "page-table"} <= set(armed)
    will = f"ready: a server will arm {', '.join(armed)} in mode raise"
    assert data["headline"] == f"{will}; FAULTS ARE INJECTED"
    backends = {b["name"]: b["state"] for b in data["backends"]}
    assert backends.items() >= {"triton": "judged", "trtllm_mha": "judged"}.items()
    sites = {s["name"]: s for s in data["sites"]}
    assert {s["state"] for s in sites.values()} <= {"wrapped", "found", "absent"}
    assert sites["attn.trtllm_mha.layer_page_table"]["state"] == "wrapped"
    assert sites["attn.trtllm_mha.init"]["detail"].startswith(
        "by swa-state-swap, stale-swa-state, "
    )
    assert "page-table" in sites["attn.trtllm_mha.init"]["detail"]
    assert ("swa-state-swap", "applied") in [(f["name"], f["state"]) for f in data["fixes"]]
    assert data["plugin"][0]["state"] == "seen"
    canaries = {c["name"]: c["state"] for c in data["canary"]}
    assert {"flight-recorder", "page-table"} <= set(canaries)
    assert set(canaries.values()) <= {"caught", "none"}
    assert canaries["flight-recorder"] == canaries["page-table"] == "caught"
    assert not (tmp_path / "dumps").exists(), "doctor must not change anything"


@needs_sglang
@pytest.mark.engine
def test_a_site_that_is_gone(tmp_path: Path) -> None:
    gone = (
        SITES + "t.SITES['attn.trtllm_mha.init'] = (('', 'sglang.srt.nowhere.Backend.__init__'),)\n"
    )
    code, out = run_doctor(tmp_path, "--no-canary", customize=gone)
    assert code == 1
    flat = " ".join(out.split())
    assert flat.startswith("not ready: not armed: attn.trtllm_mha.init (missing: AttributeError")
    assert "g4debug doctor" not in flat.partition("VERSIONS")[0]
    assert "SITES wrapped: " in flat
    assert "attn.trtllm_mha.layer_page_table" not in flat  # as it should be: counted
    assert "CANARY not checked" in flat
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


@needs_sglang
def test_an_allow_list_without_g4debug(tmp_path: Path) -> None:
    code, out = run_doctor(tmp_path, SGLANG_PLUGINS="foo, bar")
    assert code == 1
    flat = " ".join(out.split())
    assert flat.startswith("not ready: SGLANG_PLUGINS=foo, bar keeps SGLang from loading g4debug")
    assert "SGLANG_PLUGINS=foo,bar,g4debug" in flat
    assert "SITES not checked" in flat


@needs_sglang
def test_an_allow_list_without_g4debug_although_debugging_is_asked_for(tmp_path: Path) -> None:
    """The server would run, armed with nothing, and say nothing."""
    switches = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "SGLANG_PLUGINS": "foo"}
    code, out = run_doctor(tmp_path, "--json", **switches)
    data = json.loads(out)
    assert (code, data["ready"]) == (1, False)
    assert data["headline"] == (
        "not ready: SGLANG_PLUGINS=foo keeps SGLang from loading g4debug; add it "
        "(SGLANG_PLUGINS=foo,g4debug) or unset it; until then SGLANG_TRTLLM_MHA_DEBUG, "
        "SGLANG_TRTLLM_MHA_DEBUG_DIR do nothing, and no line in the server's log says so"
    )
    assert {"name": "SGLANG_PLUGINS", "state": "EXCLUDES g4debug", "detail": "foo"} in data[
        "plugin"
    ]


OTHER_PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from g4debug.hooking import targets

def timed(original, *args, **kwargs):
    return original(*args, **kwargs)

def patched(*args, **kwargs):
    return inner(*args, **kwargs)

def register():
    global inner
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    inner = ScheduleBatch.merge_batch
    ScheduleBatch.merge_batch = patched
    HookRegistry.register(targets.path("batch.filter"), timed, HookType.AROUND)
"""


def plugin(folder: Path, name: str, value: str, source: str = "", version: str = "0") -> str:
    """A plugin of SGLang as pip would install it. Returns the folder, for PYTHONPATH.

    SGLang loads plugins in the order of the folders.
    """
    installed_plugin.install(folder, name, value, version)
    if source:
        (folder / f"{name}.py").write_text(source)
    return str(folder)


@needs_sglang
@pytest.mark.engine
@pytest.mark.once("the order of plugins is the same on every release")
@pytest.mark.parametrize("first", ["timer", "g4debug"])
def test_other_plugins_and_the_sites_they_share_with_us(tmp_path: Path, first: str) -> None:
    ours = plugin(tmp_path / "1", "g4debug", "g4debug.plugin:register", version=g4debug.__version__)
    timer = plugin(tmp_path / "2", "timer", "timer:register", OTHER_PLUGIN)
    never = plugin(tmp_path / "3", "never", "never:register", "raise SystemExit('was imported')")
    path = [ours, timer] if first == "g4debug" else [timer, ours]
    code, out = run_doctor(
        tmp_path,
        "--json",
        "--no-canary",
        SGLANG_TRTLLM_MHA_DEBUG="1",
        SGLANG_PLUGINS="g4debug,timer",
        PYTHONPATH=os.pathsep.join([*path, never, os.environ.get("PYTHONPATH", "")]),
    )
    data = json.loads(out)
    assert code == 0, data["problems"]
    rows = {r["name"]: (r["state"], r["detail"]) for r in data["plugin"]}
    assert rows["timer"] == ("allowed", "timer:register, of timer 0")
    assert rows["never"] == ("left out", "never:register, of never 0")
    shared = {r["name"]: (r["state"], r["detail"]) for r in data["shared"]}
    hook, patch = "plugin timer: timed (timer.py:5) ", "plugin timer: patched (timer.py:8) "
    outside = "wraps our hook, so its changes are not checked"
    assert shared == {
        "batch.merge": ("inside", patch + "our hook wraps it"),
        "batch.filter": ("outside", hook + outside)
        if first == "g4debug"
        else ("inside", hook + "our hook wraps it"),
    }
    told = "plugin timer wraps g4debug's hooks at batch.filter: its changes there are not checked"
    assert (told in data["notes"]) is (first == "g4debug")


@needs_sglang
def test_a_typo_is_the_servers_own_line(tmp_path: Path) -> None:
    code, out = run_doctor(tmp_path, "--json", G4DEBUG_MOED="log")
    data = json.loads(out)
    assert code == 1
    assert data["headline"].startswith("not ready: G4DEBUG_MOED: unknown variable; valid:")
    assert {"name": "G4DEBUG_MOED", "state": "log", "detail": ""} in data["environment"]


def test_no_sglang_on_a_laptop(tmp_path: Path) -> None:
    """Nothing can be debugged there, and doctor says what can be done all the same."""
    code, out = run_doctor(tmp_path, customize=NO_SGLANG)
    assert code == 1
    assert out.startswith("not ready: this Python has no SGLang")
    code, out = run_doctor(tmp_path, "--json", customize=NO_SGLANG)
    data = json.loads(out)
    assert code == 1
    assert not data["ready"]
    everything = {cli._load(name).NAME for name in cli.command_names()}
    assert set(data["works"]) == everything - {"cpu-server", "replay"}
    assert {"show", "list", "report", "diff", "pools", "faults"} <= set(data["works"])
    assert ", ".join(data["works"]) in data["headline"]
    assert data["faults"] == []  # only those that are on
    code, out = run_doctor(tmp_path, customize=NO_SGLANG, SGLANG_TRTLLM_MHA_DEBUG="1")
    assert code == 1
    assert out.startswith(
        "not ready: the environment asks for debugging, but this Python has no SGLang"
    )


@needs_sglang
def test_no_dump_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "x"
    code, out = run_doctor(tmp_path, SGLANG_TRTLLM_MHA_DEBUG_DIR=str(directory))
    assert code == 1
    flat = " ".join(out.split())
    assert flat.startswith(f"not ready: no dump can be written to {directory}: Not a directory")


@pytest.mark.long("a doctor in a process of its own")
@needs_sglang
def test_a_folder_that_hides_the_package(tmp_path: Path) -> None:
    """It hides an editable install that is a finder, as it was without our package-dir."""
    root = Path(g4debug.__file__).parents[1]
    if root == Path(sysconfig.get_path("purelib")):
        pytest.skip("a plain install is hidden by no folder")
    here, paths = tmp_path / "here", tmp_path / "paths"
    (here / "g4debug").mkdir(parents=True)
    paths.mkdir()
    (paths / "sitecustomize.py").write_text(FINDER.format(root=str(root), file=g4debug.__file__))
    code, out = run_doctor(here, PYTHONPATH=str(paths))
    assert code == 1
    assert "hides the package g4debug" in " ".join(out.split())


class FakeEntry:
    def __init__(self, dist: str, error: Exception | None = None) -> None:
        self.name = "g4debug"
        self.value = "g4debug.plugin:register"
        self.dist = type("Dist", (), {"name": dist, "version": g4debug.__version__})()
        self.error = error

    def load(self) -> None:
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([], "SGLang does not see g4debug"),
        ([FakeEntry("g4debug"), FakeEntry("other")], "more than one distribution"),
        ([FakeEntry("g4debug", ImportError("no\nway"))], "ImportError: no way"),
    ],
)
def test_the_entry_point(entries: list[Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnose.metadata, "entry_points", lambda group: entries)
    d = Diagnosis()
    _diagnose._plugin(d, {})
    assert len(d.problems) == 1
    assert problem in d.problems[0]


def facts(**changes: Any) -> dict[str, Any]:
    site = {
        "site": "attn.trtllm_mha.init",
        "path": "x.y",
        "state": "wrapped",
        "owners": ["page-table"],
    }
    return {
        "error": "",
        "cuda": True,
        "registered": True,
        "sites": [{**site, "detail": ""}],
        "fixes": {"swa-state-swap": "not-needed: the installed SGLang does not have this bug"},
        "neighbours": [],
        "canary": {},
    } | changes


def test_a_fix_that_was_forced_and_is_not_in_force() -> None:
    d = Diagnosis()
    _diagnose._report(d, Settings(switches={"swa-state-swap": True}), facts())
    assert d.problems[0].startswith("G4DEBUG_FIX_SWA_STATE_SWAP=1 cannot be honoured: not-needed")
    assert d.unchecked["canary"].startswith("it takes GPU memory")


def test_a_plugin_that_was_not_called_and_a_canary_that_failed() -> None:
    d = Diagnosis()
    seen = {"page-table": {"state": "FAILED", "detail": "on the CPU reference: boom"}}
    _diagnose._report(d, Settings(), facts(registered=False, canary=seen))
    assert "did not call g4debug" in d.problems[0]
    assert "canary of tracer page-table failed" in d.problems[1]


def test_a_probe_that_dies_says_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(arguments: list[str], environment: dict[str, str], log: Path) -> int:
        assert environment["SGLANG_TRTLLM_MHA_DEBUG"] == "1"
        log.write_text("first\nSegmentation fault \x1b[31m\n")
        return -11

    monkeypatch.setattr(_diagnose, "_run", dies)
    d = Diagnosis()
    _diagnose._probe(d, Settings(), {}, "auto")
    assert d.problems == [
        "loading SGLang's plugins ended with status -11: Segmentation fault \\x1b[31m"
    ]


def test_the_probe_does_not_outlive_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_diagnose, "PROBE_SECONDS", 0.2)
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(_diagnose.sys, "executable", str(slow))
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(_diagnose.subprocess, "Popen", Popen)
    assert _diagnose._run([], {}, tmp_path / "log") is None
    (probe,) = started
    assert probe.returncode == -signal.SIGKILL
    assert gone(probe.pid)


def gone(group: int) -> bool:
    """Whether a group of processes has ended, or does so very soon."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


HANGING = """
import os, sys, time
from pathlib import Path
class Hang:
    def find_spec(self, name, *a):
        if name == "sglang.srt.plugins":
            Path("probe.part").write_text(str(os.getpid()))
            os.replace("probe.part", "probe")
            time.sleep(600)
sys.meta_path.insert(0, Hang())
"""


@needs_sglang
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=MORE) for n in (signal.SIGHUP, signal.SIGKILL)),
    ],
)
def test_a_probe_that_hangs_ends_with_doctor(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    command = [sys.executable, "-P", "-m", "g4debug", "doctor", "--no-canary"]
    doctor = subprocess.Popen(
        [*signals(), *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 300
        while not (tmp_path / "probe").exists():
            assert doctor.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        doctor.send_signal(number)
        assert doctor.wait(60) == -number
    finally:
        doctor.kill()
        doctor.wait()
    probe = int((tmp_path / "probe").read_text())
    try:
        assert gone(probe)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(probe, signal.SIGKILL)


def test_the_canary_bites_and_leaves_a_dump(tmp_path: Path) -> None:
    assert "dumps read back" in canary.fire(tmp_path, torch.device("cpu"))
    # One for each backend, and for the first one of each fault.
    assert len(list(tmp_path.glob("g4debug-page-table-*.pt"))) == len(adapters()) + 1


def test_the_canary_tells_of_a_guard_that_sees_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g4debug.tracers.page_table.check.reference", lambda *a: None)
    with pytest.raises(canary.CanaryError, match="was not found"):
        canary.fire(tmp_path, torch.device("cpu"))


def test_the_canary_tells_of_a_dump_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(canary.CanaryError, match="not dumped: cannot write"):
        canary.fire(tmp_path / "file", torch.device("cpu"))


@pytest.mark.parametrize("width", [80, 40, 120])
def test_the_report_fits_and_is_plain(width: int) -> None:
    d = Diagnosis(problems=["first \x1b[31m", "second " * 30], notes=["note " * 40])
    d.versions = {"g4debug": "0.1.0", "sglang": "0.5.12.post1"}
    d.sites = [
        Row("attn.trtllm_mha.init", "missing", "ModuleNotFoundError: " + "x" * 30 + " gone " * 20)
    ]
    d.unchecked = {"fixes": "loading failed"}
    d.conclude("")
    stream = io.StringIO()
    doctor.render(d, make_console(width=width, stream=stream))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "not ready: first \\x1b[31m"
    assert max(map(len, lines)) <= width
    assert "\x1b" not in stream.getvalue()


def test_the_short_form_counts_what_is_quiet_and_ends_with_the_verdict() -> None:
    d = Diagnosis(problems=["a hook is gone"])
    d.sites = [Row(f"site.{n}", "wrapped", "by x") for n in range(30)]
    d.sites.append(Row("site.bad", "missing", "AttributeError"))
    d.tracers = [Row("page-table", "armed", "pages")]
    d.conclude("")
    stream = io.StringIO()
    console = make_console(width=80, stream=stream)
    doctor.render(d, console, everything=False, again="g4debug doctor --all")
    lines = stream.getvalue().splitlines()
    assert lines[0] == lines[-1] == "not ready: a hook is gone"
    assert lines[-2].split(maxsplit=1) == ["MORE", "g4debug doctor --all"]
    flat = " ".join(stream.getvalue().split())
    assert "SITES wrapped: 30 site.bad missing AttributeError" in flat
    assert "TRACERS armed: page-table" in flat
    assert "site.7" not in flat


def test_the_last_line_of_the_short_form_is_one_word_if_all_is_well() -> None:
    d = Diagnosis()
    d.conclude("ready: a server will arm " + ", ".join(f"tracer-{n}" for n in range(9)))
    stream = io.StringIO()
    doctor.render(d, make_console(width=80, stream=stream), everything=False, again="again")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("ready: a server will arm")
    assert lines[-1] == "ready"


@needs_sglang
@pytest.mark.parametrize(
    ("switches", "state"),
    [
        ({}, "not judged"),
        ({"G4DEBUG_MODE": "contain"}, "not judged"),
        ({"G4DEBUG_MODE": "log"}, "judged"),
        ({"G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}, "judged"),
    ],
)
@pytest.mark.parametrize("was_run", [False, True])
def test_a_backend_that_was_not_run_on_a_gpu_is_named(monkeypatch, switches, state, was_run):
    """What a backend hands over is judged only where that was run, or nothing is stopped by it."""
    places = (targets.CPU, targets.H200) if was_run else (targets.CPU,)
    runs = {str(targets.sglang_version()): places}
    monkeypatch.setattr(adapter("triton"), "run", runs)
    state = "judged" if was_run else state
    d = Diagnosis(gpus=["1 x NVIDIA H200"])
    _diagnose._backends(d, Settings.from_environ({"SGLANG_TRTLLM_MHA_DEBUG": "1", **switches}))
    found = {b.name: b for b in d.backends}
    assert (found["triton"].state, found["trtllm_mha"].state) == (state, "judged")
    assert ("G4DEBUG_MODE=log" in found["triton"].detail) is (state == "not judged")


@needs_sglang
@pytest.mark.parametrize(
    ("switches", "gpus", "models", "other"),
    [
        ({}, [], {"Llama, Qwen3", "DeepSeek", "Gemma-4"}, "refused"),
        ({}, ["1 x NVIDIA H200"], {"Llama", "Qwen3", "gpt-oss"}, "refused"),
        ({"G4DEBUG_MODE": "log"}, [], {"DeepSeek"}, "judged"),
    ],
)
def test_the_models_that_were_run_here_are_named(monkeypatch, switches, gpus, models, other):
    monkeypatch.setattr(targets, "sglang_version", lambda: "0.5.23")
    d = Diagnosis(gpus=gpus)
    _diagnose._models(d, Settings.from_environ({"SGLANG_TRTLLM_MHA_DEBUG": "1", **switches}))
    *known, last = d.models
    assert models | {"Gemma-4"} <= {row.name for row in known}
    assert not gpus or {row.name for row in known} == models | {"Gemma-4"}
    assert (last.name, last.state) == ("any other", other)
    assert ("G4DEBUG_NOT_RUN_ON_THIS_RELEASE=1" in last.detail) is (other == "refused")


@needs_sglang
@pytest.mark.parametrize(("capability", "there"), [("9.0", True), ("10.0", False)])
def test_on_a_gpu_of_a_kind_that_nobody_has_run_no_model_was_run(monkeypatch, capability, there):
    monkeypatch.setattr(targets, "sglang_version", lambda: "0.5.23")
    d = Diagnosis(gpus=[f"1 x NVIDIA B200, {capability}, 180 GiB"])
    _diagnose._models(d, Settings.from_environ({"SGLANG_TRTLLM_MHA_DEBUG": "1"}))
    *known, last = d.models
    assert (bool(known), last.name) == (there, "any other")
