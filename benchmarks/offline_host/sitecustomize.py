"""``import cutlass...`` succeeds, and each name in it is a class that answers what it is asked.

FlashInfer and quack import CUTLASS' Python language for kernels of later chips when they are
imported themselves. A class here that is called with a function returns that function, so that it
can be a decorator; what is set on it is forgotten; it compares and adds up without an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar

# Names that Python itself asks for, to see what an object can do. The answer is that it cannot.
PROBED = frozenset(
    f"__{name}__"
    for name in (
        "wrapped", "set_name", "mro_entries", "len", "iter", "path", "file", "spec", "index", "int",
        "text_signature", "signature", "isabstractmethod", "abstractmethods", "fields", "float",
        "bool", "get", "set", "delete", "instancecheck", "orig_bases", "origin", "args", "next",
        "parameters", "annotations", "init_subclass", "prepare", "post_init", "slots", "await",
        "dataclass_fields", "dataclass_params", "match_args", "getstate", "type_params", "final",
        "typing_subst", "override", "deprecated",
    )
)  # fmt: skip
FAMILIES = ("as", "ae", "da", "ar", "cu", "to")  # __array__, __cuda_array_interface__, ...


def is_probe(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name in PROBED or (dunder and name[2:4] in FAMILIES)


def called(args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: Any) -> Any:
    is_decorator = len(args) == 1 and not kwargs and callable(args[0])
    return args[0] if is_decorator else otherwise


class AnyName(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return called(args, kwargs, object.__new__(cls))

    def __getattr__(cls, name: str) -> Any:
        if is_probe(name):
            raise AttributeError(name)
        return Nothing

    def __setattr__(cls, name: str, value: Any) -> None:
        pass

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __gt__(cls, other: Any) -> bool:
        return False

    __lt__ = __ge__ = __le__ = __gt__

    def __add__(cls, other: Any) -> Any:
        return cls

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __add__


class Nothing(metaclass=AnyName):
    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return called(args, kwargs, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "cutlass":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())
