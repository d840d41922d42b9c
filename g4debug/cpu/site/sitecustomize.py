"""Runs at the start of every Python process on the CPU engine (this folder leads PYTHONPATH).

Prepares torchvision's operators, lets the garbage collector run less often, then runs the
`sitecustomize` that this one hides, if any.
"""

import gc
import importlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    others = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


importlib.import_module("g4debug_torchvision").declare_on_import()
# SGLang's import makes a million objects that stay. Python's own (700, 10, 10) walks through all
# of them again and again: over a second of the five that each of an engine's processes takes.
gc.set_threshold(100_000, 20, 20)
_run_hidden()
