"""A plugin of SGLang's that counts the calls of g4debug's hooks in a scheduler, round by round.

A round is one pass of the event loop. It belongs to the mode of the batch that it launches, EXTEND
for a prefill; with overlap scheduling the result of the batch before is processed in it, too. At
the end of each round ``$HOOK_COUNTS`` has a list of ``[mode, {site: calls of its hooks}]``.
A call that returns at once counts as any other.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

ROUND, LAUNCH = "scheduler.recv_requests", "scheduler.run_batch"
RESULT = "scheduler.process_result"
rounds: list[tuple[str, dict[str, int]]] = []
_now: Counter[str] = Counter()
_mode = ""


def register() -> None:
    from g4debug import discovery, plugin
    from g4debug.hooking.hooks import Hooks

    if plugin.role() != "scheduler":
        return
    assert plugin.in_force is None, "g4debug was loaded first"
    compose, main = Hooks._compose, threading.main_thread()
    fixes = set(discovery.names("fix"))

    def counted(hooks: Hooks, site: str) -> Any:
        whole, mine = compose(hooks, site), [o for o in hooks.owners(site) if o not in fixes]

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is main:
                if site == ROUND:
                    _end_round()
                if site == LAUNCH:
                    _launched(args, kwargs)
                _now[site] += len(mine)
            return whole(original, *args, **kwargs)

        return around

    Hooks._compose = counted  # type: ignore[method-assign]


def _launched(args: Any, kwargs: Any) -> None:
    global _mode
    batch = kwargs.get("batch") or args[1]
    _mode = batch.forward_mode.name


def _end_round() -> None:
    global _mode
    if _mode or _now[RESULT]:
        rounds.append((_mode or "no batch", dict(_now)))
        path = Path(os.environ["HOOK_COUNTS"])
        path.with_suffix(".part").write_text(json.dumps(rounds))
        path.with_suffix(".part").rename(path)
    _now.clear()
    _mode = ""
