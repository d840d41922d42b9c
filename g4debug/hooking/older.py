"""Finds the module that does the work of one of today's on older releases of SGLang.

It has the same name and lies in a folder beside that one, such as ``before_0_5_14/``. Only this
module leads there, and :mod:`g4debug.discovery`, which lists items and says why that is so.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from g4debug import discovery
from g4debug.hooking import targets


def older_module(module: str, here: bool = True) -> Any:
    """The module that works in place of this one on the installed SGLang, None if this one does.

    module: its dotted name, ``g4debug.faults.accept_length``. here: False for the module of the
    oldest releases, whatever is installed.
    """
    package, _, name = module.rpartition(".")
    for folder, releases in discovery.older_folders(package).items():
        dotted = f"{folder}.{name}"
        wanted = targets.matches(releases) or not here
        if wanted and importlib.util.find_spec(dotted) is not None:
            return importlib.import_module(dotted)
    return None
