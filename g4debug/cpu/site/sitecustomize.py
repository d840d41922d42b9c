"""Runs at the start of every Python process of the CPU engine: this folder is first in PYTHONPATH.

It lets no process of SGLang outlive its parent, prepares torchvision's operators, and lets the
garbage collector run less often, and see everything at the end. Then it runs the `sitecustomize`
that this one hides, if there is one.
"""

import atexit
import gc
import importlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _run_hidden() -> None:
    # Not this folder, and not another checkout's: the file there would run this one in turn.
    others = [p for p in sys.path if not os.path.exists(os.path.join(p, "g4debug_parent.py"))]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


importlib.import_module("g4debug_parent").end_with_parent()
importlib.import_module("g4debug_torchvision").declare_on_import()
# Importing SGLang makes a million objects that stay. With Python's own (700, 10, 10) the collector
# walks through all of them again and again, which takes one of the five seconds of each start.
gc.set_threshold(100_000, 20, 20)
# A server that is up calls gc.freeze(). What is frozen is not collected when the process ends, and
# then triton prints 40 lines that begin with "nanobind: leaked", as if something were wrong.
atexit.register(gc.unfreeze)
_run_hidden()
