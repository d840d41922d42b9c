"""What a process is in SGLang, on the real functions that a process of SGLang runs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import warm

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
RUN_CODE = Path(__file__).parents[1] / "support" / "run_code.py"
# Where SGLang loads its plugins, the role is printed in their place. What is on the stack by then
# is SGLang's own.
ROLES = """
import importlib, multiprocessing, os, sys
from g4debug import plugin

class Told(BaseException):
    pass

def tell():
    print(plugin.role(), end=" ", flush=True)
    raise Told

def run(function, *args):
    try:
        function(*args)
    except Told:
        return
    print("nothing", end=" ")

names = ("entrypoints.engine", "managers.scheduler", "managers.detokenizer_manager",
         "managers.data_parallel_controller")
engine, scheduler, detokenizer, controller = (
    importlib.import_module(f"sglang.srt.{name}") for name in names)
for module in (engine, scheduler, detokenizer, controller):
    if hasattr(module, "load_plugins"):
        module.load_plugins = tell
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
args = ServerArgs(model_path="dummy", device="cpu")

def process(function, *args):
    started = multiprocessing.get_context("fork").Process(target=run, args=(function, *args))
    started.start()
    started.join()

for inside in (run, process):
    inside(launch_server, args)
    inside(lambda: engine.Engine(model_path="dummy"))
    inside(scheduler.run_scheduler_process, args, *[None] * 9)
    if hasattr(detokenizer, "load_plugins"):
        inside(detokenizer.run_detokenizer_process, args, None)
    if hasattr(controller, "load_plugins"):
        inside(controller.run_data_parallel_controller_process, args, None, None)
    print(flush=True)
print(plugin.role())
process(tell)
"""


def test_a_process_is_what_it_calls_and_not_who_started_it(tmp_path: Path) -> None:
    """``http_server_engine.py`` starts a server in a child of its own process, for example."""
    out, err = tmp_path / "out", tmp_path / "err"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    with err.open("wb") as log:
        status = warm.start((str(RUN_CODE), str(out), ROLES), environ, log.fileno()).wait(300)
    assert status == 0, err.read_text()[-2000:]
    first, second, alone, child = out.read_text().splitlines()
    assert first.split()[:3] == ["server", "server", "scheduler"], err.read_text()[-2000:]
    assert first.split()[3:] in ([], ["detokenizer", "data_parallel_controller"])
    assert second == first
    assert (alone, child.strip()) == ("server", "scheduler")  # where nothing tells it


def test_what_a_process_calls_later_corrects_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    from g4debug.hooking.roles import Role

    role = Role()
    assert (role.name, role.launches(), role.guessed) == ("server", False, False)
    role.schedules()
    assert role.name == "scheduler"
    assert role.launches()
    assert not role.launches()
    monkeypatch.setattr(os, "getpid", lambda: 1)  # a fork of a server starts one of its own
    assert role.launches()
    assert role.name == "server"
