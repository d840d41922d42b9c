"""Makes it possible to import a CUDA build of torchvision beside a CPU build of torch.

PyPI's torchvision wheels are linked against CUDA torch, so their `_C.so` cannot be loaded here, and
`torchvision/_meta_registrations.py` then fails to register fakes for operators that do not exist.
SGLang imports transformers, which imports that. It is enough to declare the two schemas, because
torchvision checks `_has_ops()` before everything else. If `_C.so` can be loaded, nothing is
declared.
"""

from __future__ import annotations

import glob
import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_OPERATORS = ("nms", "qnms")
_library: object = None  # the declarations live as long as this object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare_if_needed()
        return None


def declare_on_import() -> None:
    """Declare the schemas as soon as torchvision is imported."""
    ready = "torchvision" in sys.modules or any(
        isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path
    )
    if not ready:
        sys.meta_path.insert(0, _BeforeTorchvision())


def _declare_if_needed() -> None:
    global _library
    spec = PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    for binary in glob.glob(os.path.join(os.path.dirname(spec.origin), "_C*.so")):
        try:
            torch.ops.load_library(binary)  # type: ignore[no-untyped-call]
        except OSError:
            continue  # the expected case: built for another torch
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    _library = library
