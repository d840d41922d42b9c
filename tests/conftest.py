"""What all tests share: Triton's interpreter where there is no GPU, and real SGLang in-process."""

from __future__ import annotations

import gc
import importlib.util
import os
import pkgutil
import sys
import tempfile
from pathlib import Path

import effort
import hook_search
import pytest
import releases
import torch
from hypothesis import HealthCheck, settings

from g4debug import discovery
from g4debug.cpu import interpreter
from g4debug.hooking import targets

if not torch.cuda.is_available():
    # Read when Triton is imported and when a kernel is decorated: before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.quicken()

# Some shells forbid it; then each of some thousand processes would compile g4debug by itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Small tensors: a second thread only waits, on a busy machine six times as long as the work takes.
torch.set_num_threads(1)

# As in the CPU engine's own processes: what SGLang's import makes stays, and is not walked again.
gc.set_threshold(100_000, 20, 20)

NOBODY = 65534  # a user who is nobody on every Linux


def pytest_addoption(parser):
    parser.addoption(
        "--versions", action="store_true", help="also the tests that download SGLang's wheels"
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="also the tests that take minutes, and all examples of each property",
    )


def pytest_configure(config):
    """The same examples in each run, however slow the machine is; before a test module is read."""
    effort.long = config.getoption("--long")
    settings.register_profile(
        "same",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=effort.examples(100),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("same")


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that every worker has short files left for the end."""
    marks = ("engine", "early")
    long = {i.path for i in items if any(map(i.get_closest_marker, marks))}
    items.sort(key=lambda item: item.path not in long)


def pytest_runtest_setup(item):
    """Skip what belongs to other releases of SGLang than the installed one."""
    if targets.sglang_version() is None:
        return
    takes = item.get_closest_marker("long")
    if takes and not item.config.getoption("--long"):
        pytest.skip(f"{takes.args[0]}: it runs with --long")
    once = item.get_closest_marker("once")
    if once and not releases.is_newest():
        pytest.skip(f"{once.args[0]}: it runs on {releases.newest()}")
    if item.get_closest_marker("v1_worker") and not releases.has_v1_worker():
        pytest.skip("this SGLang has no worker of FROZEN_KV_MTP for speculative decoding v1")
    for mark in item.iter_markers("written_for"):
        fix = discovery.load("fix", mark.args[0])
        if not targets.matches(fix.needs):
            pytest.skip(f"{fix.id} is written for SGLang {fix.needs}")


@pytest.fixture(autouse=True)
def _same_numbers():
    """A test draws the same numbers, whichever ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture
def nobody():
    """``(folder, run)``: a folder of a user who is not root, and what ``run(call)`` in a child of
    that user returned or raised, as text. Not root, so far as that is not who runs the tests."""

    def run(call) -> str:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if root:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                text = str(call())
            except BaseException as e:
                text = f"{type(e).__name__}: {e}"
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            text = told.read().decode()
        os.waitpid(pid, 0)
        return text

    root = os.geteuid() == 0
    # Not tmp_path: only root may look into its parents.
    with tempfile.TemporaryDirectory(prefix="g4debug-nobody-") as folder:
        if root:
            os.chown(folder, NOBODY, NOBODY)
        yield Path(folder), run
        os.chmod(folder, 0o700)


@pytest.fixture(scope="session")
def _sglang_imported():
    """Real SGLang in this process, on the CPU engine; the environment is put back after."""
    if torch.cuda.is_available():
        pytest.skip("the CPU engine refuses CUDA machines")
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang")
    from g4debug import cpu

    with pytest.MonkeyPatch.context() as patch:
        for name, value in cpu.environment(os.environ).items():
            patch.setenv(name, value)  # registers the old value, to be restored
        cpu.prepare()
        cpu.activate()
        import sglang.srt.plugins.hook_registry

        list(_hooked())  # imports all that the hook sites of this release live in

    with pytest.MonkeyPatch.context() as patch:
        registry = sglang.srt.plugins.hook_registry
        patch.setattr(registry, "_propagate_patch", registry._propagate_patch)  # put back after
        hook_search.shorten()
        yield


def _hooked():
    """The class or module, the name and the present value of each hook site."""
    for site in targets.SITES:
        dotted = targets.path(site)
        if dotted is not None:
            parent, attribute = dotted.rsplit(".", 1)
            owner = pkgutil.resolve_name(parent)
            yield owner, attribute, owner.__dict__.get(attribute)


@pytest.fixture
def sglang(_sglang_imported, monkeypatch):
    """Real SGLang for one test: what it hooks is unhooked afterwards, faults are mended."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from g4debug.cpu import fault

    for name in ("SGLANG_USE_CPU_ENGINE", "G4DEBUG_CPU"):
        monkeypatch.setenv(name, "1")
    saved = list(_hooked())
    apply_hooks = HookRegistry.__dict__["apply_hooks"]
    HookRegistry.reset()
    with releases.configuration_kept():
        yield
    HookRegistry.reset()
    HookRegistry.apply_hooks = apply_hooks
    for owner, attribute, original in saved:
        if original is not None:
            setattr(owner, attribute, original)
        elif attribute in owner.__dict__:
            delattr(owner, attribute)  # uncovers the inherited method
    fault.clear()


@pytest.fixture
def arm(sglang, tmp_path, monkeypatch):
    """``arm(G4DEBUG_MODE="log", ...)`` puts g4debug into this SGLang, as its plugin loader does.

    Returns the directory of the dumps.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from g4debug import plugin
    from g4debug.sanitizer import forward_snapshots
    from g4debug.tracers.flight_recorder import coredump

    def register(**environ: str):
        for name in [n for n in os.environ if n.startswith(("G4DEBUG_", "SGLANG_TRTLLM_MHA"))]:
            monkeypatch.delenv(name)
        for name in (coredump.ENABLE, coredump.FLAGS, coredump.FILE, coredump.LIGHTWEIGHT):
            monkeypatch.setenv(name, "")  # so that what g4debug sets now is gone after the test:
            monkeypatch.delenv(name)  # a later one would wait 8 s for the core dump of its crash
        monkeypatch.setenv("SGLANG_TRTLLM_MHA_DEBUG_DIR", str(tmp_path / "dumps"))
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        show_nothing()
        plugin.register()
        HookRegistry.apply_hooks()
        if plugin.in_force is not None:  # what a test runs, its scheduler has launched
            forward_snapshots.shared(plugin.in_force.recorder).running = True
        return tmp_path / "dumps"

    def show_nothing() -> None:
        """What a test has left would be taken for this process's own."""
        if plugin.in_force is not None and plugin.in_force.teller is not None:
            plugin.in_force.teller.close()
        if plugin.in_force is not None and plugin.in_force.others is not None:
            plugin.in_force.others.close()

    yield register
    show_nothing()
