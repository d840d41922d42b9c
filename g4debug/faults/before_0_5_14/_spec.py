"""Shared by these faults: SGLang's v1 verify, and 0.5.12's v2, which one path runs."""

from __future__ import annotations

from typing import Any

from g4debug.hooking import targets
from g4debug.settings import Settings
from g4debug.speculation.before_0_5_14.frozen_kv_mtp import OVERLAP, V2_PATH


def verify_output(result: Any) -> Any:
    """The EagleVerifyOutput in the result of the v1 ``verify``; it is the result from 0.5.13 on."""
    return result if hasattr(result, "draft_extend_input") else result[1]


def with_path_only(why: str) -> str:
    """The ``absent`` of a fault of v2. why: what its ``needs`` say."""
    if targets.absent(*OVERLAP):
        return why
    if Settings.from_environ().switches.get(V2_PATH):
        return ""
    return f"{why}; with the path {V2_PATH} the fault has a place"
