"""Who called an allocator: the nearest function on the stack that a reader looks for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).resolve().parents[1])
_SGLANG = "/sglang/srt/"
# Frames that nobody looks for when they ask who called an allocator, besides our own.
_SKIPPED = (
    "mem_cache/allocator",
    "mem_cache/allocation",
    "mem_cache/swa_memory_pool",
    "mem_cache/common",
    "plugins/hook_registry",
    "functools",
    "contextlib",
    "torch/utils/_contextlib",
)
# Keyed by strings and numbers: the hash of a code object is computed anew each time.
_uninteresting: dict[str, bool] = {}  # by file
_names: dict[tuple[str, int, str], str] = {}  # of the callers that were seen before


def caller() -> str:
    """Who called the allocator, for example ``schedule_batch.py:2744 _evict_swa``.

    Another plugin may have put a function of its own between SGLang and the allocator. Whether it
    only looked on or made the call, no frame tells; so it is named, and SGLang's function after
    it: ``their_plugin.py:12 looked, called by schedule_batch.py:2744 _evict_swa``.
    """
    foreign = ""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        skip = _uninteresting.get(file)
        if skip is None:
            skip = file.startswith(_OURS) or any(part in file for part in _SKIPPED)
            _uninteresting[file] = skip
        if not skip:
            at = file, frame.f_lineno, frame.f_code.co_name
            name = _names.get(at)
            if name is None:
                name = _names[at] = f"{Path(file).name}:{at[1]} {at[2]}"
            if _SGLANG in file:
                return f"{foreign}, called by {name}" if foreign else name
            foreign = foreign or name
        frame = frame.f_back
    return foreign
