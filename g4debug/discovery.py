"""Finds tracers, faults, fixes, toys and drafts by the names of their files, with no list to edit.

An item is one module (``faults/page_oob.py``) or one folder (``tracers/page_table/``, which is
recognised by its ``tracer.py``). Its id is that name with ``-`` for ``_``. To list the names, no
item is imported, so that a typo in the environment is caught before SGLang is loaded.

What only older releases of SGLang need lies in folders named for them, such as
``fixes/before_0_5_14/``. Nothing outside of these folders imports from them, so that on the day
such a release is dropped its folders are deleted, and that is all.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

Noun = Literal["tracer", "fault", "fix", "toy", "draft"]

# The folders of each kind of item. Performance paths are fixes, but have a folder of their own.
FOLDERS: Final[dict[Noun, tuple[str, ...]]] = {
    "tracer": ("g4debug.tracers",),
    "fault": ("g4debug.faults",),
    "fix": ("g4debug.fixes", "g4debug.fixes.paths"),
    "toy": ("g4debug.cpu.toys",),
    "draft": ("g4debug.cpu.drafts",),
}
_OLDER: Final = "before_"
# Modules in the same folders that are no items. Other rooms use them, so their names have no
# underscore.
_SHARED: Final = (
    "base", "canary", "fitting", "gate", "grammar", "hook_watch", "lists", "locations",
    "silence", "source", "tables",
)  # fmt: skip


# Former names of items, which stay valid wherever a user types one, and in old dumps.
FORMER: Final = {"swa-allocator": "kv-allocator"}


def names(noun: Noun) -> tuple[str, ...]:
    """The ids of all items of a kind, sorted."""
    return tuple(sorted(_modules(noun)))


def named(text: str) -> tuple[str, ...]:
    """The items that a list with commas names, by their names of today, each once.

    There need be no such items.
    """
    given = (name.strip() for name in text.split(",") if name.strip())
    return tuple(dict.fromkeys(FORMER.get(name, name) for name in given))


def module_name(noun: Noun, name: str) -> str:
    """Dotted name of the module that declares an item. Raises KeyError if there is no such item."""
    return _modules(noun)[name]


@cache
def watching() -> tuple[str, ...]:
    """The tracers of which a part is armed by ``SGLANG_TRTLLM_MHA_DEBUG=watch``, sorted.

    They are those with a module ``watch.py`` beside their ``tracer.py``.
    """
    return tuple(name for name in names("tracer") if _watch(name) is not None)


def load_watch(name: str) -> Any:
    """The declaration ``WATCH`` of the part of a tracer that ``watch`` arms: a ``Tracer``.

    Raises KeyError if the tracer has no such part, and ValueError if the ids differ.
    """
    dotted = _watch(name)
    if dotted is None:
        raise KeyError(f"tracer {name} has no watch.py; those with one: {', '.join(watching())}")
    item = importlib.import_module(dotted).WATCH
    if item.id != name:
        raise ValueError(f"{dotted}: id is {item.id!r}, expected {name!r} (its name)")
    return item


def _watch(name: str) -> str | None:
    """Dotted name of a tracer's ``watch.py``; imports only the folder that it may be in."""
    folder = module_name("tracer", name).rpartition(".")[0]
    found = [m.name for m in pkgutil.iter_modules(importlib.import_module(folder).__path__)]
    return f"{folder}.watch" if "watch" in found else None


def load(noun: Noun, name: str) -> Any:
    """The declaration of an item: the module's ``TRACER``, ``FAULT``, ``FIX``, ``TOY``, ``DRAFT``.

    Raises AttributeError if the module does not declare it, and ValueError if the id that it
    declares differs from its file name. Both are mistakes of the item's author.
    """
    module = importlib.import_module(module_name(noun, name))
    item = getattr(module, noun.upper())
    if item.id != name:
        raise ValueError(f"{module.__name__}: id is {item.id!r}, expected {name!r} (its name)")
    return item


@cache
def older_folders(package: str) -> dict[str, str]:
    """The folders of a package for older releases of SGLang, those for the oldest ones first.

    Dotted name -> version specifier: ``g4debug.faults.before_0_5_14`` -> ``<0.5.14``.
    """
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    names = [m.name for m in modules if m.ispkg and m.name.startswith(_OLDER)]
    versions = {name: name.removeprefix(_OLDER).split("_") for name in names}
    names.sort(key=lambda name: [int(part) for part in versions[name]])
    return {f"{package}.{name}": f"<{'.'.join(versions[name])}" for name in names}


@cache
def _modules(noun: Noun) -> dict[str, str]:
    found: dict[str, str] = {}
    packages = [p for package in FOLDERS[noun] for p in (package, *older_folders(package))]
    for package in packages:
        for folder in importlib.import_module(package).__path__:
            for module in pkgutil.iter_modules([folder]):
                if module.name.startswith("_") or module.name in _SHARED:
                    continue
                dotted = f"{package}.{module.name}"
                if module.ispkg:
                    if not (Path(folder) / module.name / f"{noun}.py").is_file():
                        continue  # a folder that holds something else, such as fixes/paths
                    dotted += f".{noun}"
                # A module in a folder for older releases may have the name of an item of today: it
                # is that item's form on these releases, see g4debug.hooking.older.
                found.setdefault(module.name.replace("_", "-"), dotted)
    return found
