"""SGLang's registry of models imports the model that is asked for, not all of its 250 modules.

That takes more than a second of a core in each process that loads a model. The registry has the
same names and classes: the module of a class is found by reading the sources. Whoever asks for a
class that is not found so, or for the names of all models, has all of them imported, as ever.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

from g4debug.cpu.on_import import Execute, in_place_of_its_code

PACKAGE = "sglang.srt.models"
REGISTRY = f"{PACKAGE}.registry"


class Models(MutableMapping[str, Any]):
    """The registry's ``models``: the class of each architecture, imported when it is asked for.

    import_all: imports all modules and gives the classes of all architectures. left_out: names of
    modules that the user of SGLang does not want to be imported.
    """

    def __init__(
        self, folder: Path, import_all: Callable[[], dict[str, Any]], left_out: tuple[str, ...]
    ) -> None:
        self._folder, self._import_all, self._left_out = folder, import_all, left_out
        self._known: dict[str, Any] = {}
        self._all = False

    def _whole(self) -> dict[str, Any]:
        if not self._all:
            self._all = True
            self._known = {**self._import_all(), **self._known}
        return self._known

    def __getitem__(self, architecture: str) -> Any:
        if architecture not in self._known and not self._all:
            found = self._alone(architecture)
            if found is None:
                self._whole()
            else:
                self._known[architecture] = found
        return self._known[architecture]

    def _alone(self, architecture: str) -> Any:
        """Import the one module that defines it; None if it is not that simple."""
        defines = f"\nclass {architecture}(".encode()
        files = [p for p in self._folder.glob("*.py") if defines in p.read_bytes()]
        if len(files) != 1 or files[0].stem in self._left_out:
            return None
        try:
            module = importlib.import_module(f"{PACKAGE}.{files[0].stem}")
        except Exception:  # SGLang logs it, when it imports all
            return None
        entry = getattr(module, "EntryClass", None)
        classes = entry if isinstance(entry, list) else [entry]
        return next((c for c in classes if getattr(c, "__name__", "") == architecture), None)

    def __setitem__(self, architecture: str, cls: Any) -> None:
        self._known[architecture] = cls

    def __delitem__(self, architecture: str) -> None:
        del self._whole()[architecture]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())


class _Everything:
    """In place of the names of the modules that are not to be imported."""

    def __contains__(self, name: object) -> bool:
        return True


def install() -> None:
    """For the rest of this process. Where SGLang has imported its models already, nothing."""
    if REGISTRY not in sys.modules:
        in_place_of_its_code(REGISTRY, _registered)


def _registered(execute: Execute, module: ModuleType) -> None:
    from sglang.srt.environ import envs

    left_out = envs.SGLANG_DISABLED_MODEL_ARCHS
    if envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get():  # its models may be in place of SGLang's
        execute(module)
        return
    names = tuple(left_out.get())
    left_out.get = _Everything
    try:
        execute(module)
    finally:
        del left_out.get
    assert module.__file__ is not None
    module.ModelRegistry.models = Models(
        Path(module.__file__).parent,
        lambda: dict(module.import_model_classes(PACKAGE)),
        names,
    )
