"""Finds an allocator's caller: the nearest function on the stack that a reader looks for."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

# Modules with frames that nobody looks for when they ask who called an allocator. A module is known
# by its own name, because the folder that it is installed in may have any name.
_SKIPPED = re.compile(
    r"(g4debug|functools|contextlib|torch\.utils\._contextlib)(\.|$)"
    r"|sglang\.srt\.(mem_cache\.(allocator|allocation|swa_memory_pool|common)|plugins\.hook_registry)"
)
_SGLANG = "sglang.srt."
# Keyed by strings and numbers: the hash of a code object is computed anew each time.
_uninteresting: dict[str, bool] = {}  # by module
_names: dict[tuple[str, int, str], str] = {}  # of the callers that were seen before


def caller() -> str:
    """The allocator's caller, for example ``schedule_batch.py:2744 _evict_swa``.

    Another plugin may have put a function of its own between SGLang and the allocator. No frame
    tells whether that function only looked on or made the call. So it is named first, and SGLang's
    function after it: ``their_plugin.py:12 looked, called by schedule_batch.py:2744 _evict_swa``.
    """
    foreign = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        skip = _uninteresting.get(module)
        if skip is None:
            skip = _uninteresting[module] = _SKIPPED.match(module) is not None
        if not skip:
            at = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            name = _names.get(at)
            if name is None:
                name = _names[at] = f"{Path(at[0]).name}:{at[1]} {at[2]}"
            if module.startswith(_SGLANG):
                return f"{foreign}, called by {name}" if foreign else name
            foreign = foreign or name
        frame = frame.f_back
    return foreign
