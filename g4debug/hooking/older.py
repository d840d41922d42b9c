"""Finds what stands in for a module of today on older releases of SGLang.

It lies in a folder beside that module, such as ``before_0_5_14/``, under the same name. Only this
module leads there (and :mod:`g4debug.discovery`, which lists items): see there why.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from g4debug import discovery
from g4debug.hooking import targets


def stand_in(module: str, here: bool = True) -> Any:
    """The module that stands in for this one on the installed SGLang, None if none does.

    module: its dotted name, ``g4debug.faults.accept_length``. here: False for the one that stands
    in on the oldest releases, whatever is installed.
    """
    package, _, name = module.rpartition(".")
    for folder, releases in discovery.older_folders(package).items():
        dotted = f"{folder}.{name}"
        wanted = targets.matches(releases) or not here
        if wanted and importlib.util.find_spec(dotted) is not None:
            return importlib.import_module(dotted)
    return None
