"""The arguments of a server as SGLang resolved them, for whoever decides by them.

What the user gave and what runs are two things: SGLang chooses a backend, switches overlap
scheduling off, or finds a tree of drafts fitting. Until 0.5.18 it writes that into its record of
the arguments. From 0.5.21 on the record stays as it was given, and what was decided lies beside
it. Not the version is asked but SGLang itself.
"""

from __future__ import annotations

import sys
from typing import Any

from g4debug.hooking import targets

_DECISIONS = "sglang.srt.arg_groups.overrides"
_CONTEXT = "sglang.srt.runtime_context"


def server_argument(server_args: Any, name: str, default: Any = None) -> Any:
    """The value of an argument that counts on this server. ``default`` if it is None or not there.

    Raises KeyError if ``targets.ARGUMENTS`` does not have the name: then nothing would tell that a
    release has lost it.
    """
    targets.ARGUMENTS[name]
    for fields in reversed(_changed_later(server_args)):
        if name in fields:
            return default if fields[name] is None else fields[name]
    decided = getattr(sys.modules.get(_DECISIONS), "resolution_result", None)
    if decided is not None and type(server_args).__name__ == "ServerArgs":
        value = decided(server_args, name)
    else:
        value = getattr(server_args, name, None)
    return default if value is None else value


def dp_attention(server_args: Any) -> bool:
    """True if attention is data parallel. 0.5.23 has a width for it in place of a switch."""
    return bool(server_argument(server_args, "enable_dp_attention")) or (
        int(server_argument(server_args, "attn_dp_size", 1)) > 1
    )


def _changed_later(server_args: Any) -> list[dict[str, Any]]:
    """The changes of this process since it published these arguments, the oldest first."""
    ask = getattr(sys.modules.get(_CONTEXT), "get_context", None)
    if ask is None:
        return []
    try:
        context = ask()
        log = getattr(context, "overrides_log", None)
        if log is None or context.server_args is not server_args:
            return []
    except ValueError:  # SGLang's way to say that nothing is published yet
        return []
    return [fields for _, fields in log()]
