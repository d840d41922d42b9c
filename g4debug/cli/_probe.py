"""The process in which ``g4debug doctor`` loads the plugins as SGLang does, to see what happens.

``python -m g4debug.cli._probe OUT.json CANARY LINE``, where CANARY is auto, 1 or 0, and LINE is a
pipe to doctor. Where there is no CUDA, this process gets the CPU engine's environment, so that
SGLang can be imported at all.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from g4debug import discovery


def main() -> None:
    out, canary, line = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    threading.Thread(target=_end_with_doctor, args=(line,), daemon=True).start()
    facts: dict[str, Any] = {"error": "", "sites": [], "fixes": {}, "tracers": {}, "canary": {}}
    facts["neighbours"] = []
    facts["cuda"] = cuda = _has_cuda()
    try:
        if not cuda:
            from g4debug import cpu

            cpu.prepare()
        _load_plugins(facts)
    except (Exception, SystemExit) as e:
        # g4debug raises SystemExit to stop a server at start. Its text is what the server says.
        text = str(e) if isinstance(e, SystemExit) else f"{type(e).__name__}: {e}"
        facts["error"] = text.removeprefix("g4debug: ")
    if canary == "1" or (canary == "auto" and not cuda):
        facts["canary"] = {t: _canary(t, cuda) for t in discovery.names("tracer")}
    out.write_text(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # do not wait for SGLang's atexit handlers and threads


def _end_with_doctor(line: int) -> None:
    """Whatever ends doctor closes its end of the pipe; a probe that hangs must not outlive it."""
    os.read(line, 1)
    os.killpg(0, signal.SIGKILL)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _load_plugins(facts: dict[str, Any]) -> None:
    """Run SGLang's own plugin loader, then ask g4debug's hooks whether they are in place."""
    from sglang.srt.plugins import load_plugins

    from g4debug import plugin
    from g4debug.hooking import plugins
    from g4debug.hooking.hooks import Hooks
    from g4debug.hooking.neighbours import neighbours

    try:
        load_plugins()
    finally:
        state = plugin.in_force
        if state is not None:
            facts["fixes"], facts["tracers"] = state.fixes, state.tracers
        hooks = state.hooks if state is not None else Hooks()
        facts["sites"] = [dataclasses.asdict(s) for s in hooks.audit()]
        facts["registered"] = state is not None and state.installed
        others = neighbours(hooks, plugins.installed(os.environ))
        facts["neighbours"] = [dataclasses.asdict(n) for n in others]


def _canary(tracer: str, cuda: bool) -> dict[str, str]:
    """Fire the tracer's canary: the module ``canary`` in the tracer's folder, if it has one."""
    name = f"{discovery.module_name('tracer', tracer).rpartition('.')[0]}.canary"
    if importlib.util.find_spec(name) is None:
        return {"state": "none", "detail": "this tracer has no canary"}
    import torch

    device = torch.device("cuda" if cuda else "cpu")
    on = f"on {torch.cuda.get_device_name()}" if cuda else "on the CPU"
    try:
        with tempfile.TemporaryDirectory(prefix="g4debug-canary-") as folder:
            seen = importlib.import_module(name).fire(Path(folder), device)
    except Exception as e:
        return {"state": "FAILED", "detail": f"{on}: {type(e).__name__}: {e}"}
    return {"state": "caught", "detail": f"{on}: {seen}"}


if __name__ == "__main__":
    main()
