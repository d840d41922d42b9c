"""stale-hidden-state: the seed step gets them, or the draft input that it leaves.

On 0.5.12's v2 the next draft finds them in its input. What only the seed step gets is inside the
draft there.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import put
from g4debug.faults.base import Injection
from g4debug.faults.stale_hidden_state import Old


def install(injection: Injection) -> None:
    seed, draft = Old(injection, "on"), Old(injection, "draft")

    @injection.after("worker.forward")
    def after_forward(result: Any, *args: Any, **kwargs: Any) -> Any:
        draft.see(*args, **kwargs)
        return result

    put(injection.before, "forward")(draft.see)
    injection.before("worker.extend_after_decode")(seed.see)
