"""Puts a case's ground truth into SGLang's processes, as a plugin of its own beside g4debug's.

SGLang finds it by the entry point that the runner writes next to the cell. It imports nothing of
g4debug, and wraps SGLang's functions before SGLang applies the hooks of other plugins: so what it
sees is what SGLang's own code was given.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from _history.counter import Counter, before

TRUTH = "G4HISTORY_TRUTH"  # the file of the case's truth
FOLDER = "G4HISTORY_FOLDER"  # where the counts go
PUT_BACK = "G4HISTORY_PUT_BACK"  # the file that puts the case's bug back, if it is not natural


def register() -> None:
    path = os.environ.get(TRUTH)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry.apply_hooks

    def apply_hooks(*args: Any, **kwargs: Any) -> Any:
        install(Path(path), Counter(Path(os.environ[FOLDER])))
        HookRegistry.apply_hooks = original
        return original(*args, **kwargs)

    HookRegistry.apply_hooks = apply_hooks


def install(path: Path, counter: Counter) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    before(Scheduler, "run_batch", lambda *args, **kwargs: counter.step())
    _module("truth", path).install(counter)
    put_back = os.environ.get(PUT_BACK)
    if put_back:  # around the truth, which so sees what SGLang's code is given in the end
        _module("put_back", Path(put_back)).install()


def _module(kind: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{kind}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
