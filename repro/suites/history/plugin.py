"""Puts a case's ground truth into SGLang's processes, as a plugin of its own beside g4debug's.

SGLang finds it by the entry point that the runner writes next to the cell. It imports nothing of
g4debug, and wraps SGLang's functions before SGLang applies the hooks of other plugins: so it sees
the arguments that SGLang's own code is given.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from suites.history.counter import Counter, GroundTruthError, around

TRUTH = "G4HISTORY_TRUTH"  # the module of the case's truth
FOLDER = "G4HISTORY_FOLDER"  # where the counts go
PUT_BACK = "G4HISTORY_PUT_BACK"  # the module of put_back/ for a bug that the release has not


def register() -> None:
    truth = os.environ.get(TRUTH)
    if not truth:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry.apply_hooks

    def apply_hooks(*args: Any, **kwargs: Any) -> Any:
        HookRegistry.apply_hooks = original
        install(truth, Counter(Path(os.environ[FOLDER])))
        return original(*args, **kwargs)

    HookRegistry.apply_hooks = staticmethod(apply_hooks)


def install(truth: str, counter: Counter) -> None:
    """Count the scheduler's batches, and let the case's truth wrap SGLang's functions."""
    from sglang.srt.managers.scheduler import Scheduler

    around(Scheduler, "run_batch")(lambda *args, **kwargs: counter.step())
    try:
        importlib.import_module(truth).install(counter)
    except Exception as e:
        raise GroundTruthError(e) from e
    put_back = os.environ.get(PUT_BACK)
    if put_back:  # around the truth, which sees what SGLang's own code is then given
        importlib.import_module(f"suites.history.put_back.{put_back}").install()
