"""bonus-token on 0.5.12's v2: a step reads it from the FutureMap before the worker begins."""

from __future__ import annotations

from typing import Any

from g4debug.faults.base import Injection
from g4debug.faults.before_0_5_14._spec import with_path_only as absent
from g4debug.faults.bonus_token import change

__all__ = ["absent", "install"]


def install(injection: Injection) -> None:
    @injection.after("overlap.resolve")
    def after_read(result: Any, future_map: Any, batch: Any) -> Any:
        change(injection, batch)
        return result
