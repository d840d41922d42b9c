"""Lets a grammar compile for long, as a big schema does.

SGLang compiles in a thread of its own, and the request waits in a queue for it meanwhile. That is
work that is not stuck: however long it takes, no tracer may report anything.
"""

from __future__ import annotations

import time
from typing import Any

from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    @injection.before("grammar.compile")
    def before_compile(backend: Any, key: tuple[str, str], *args: Any, **kwargs: Any) -> None:
        action = injection.fire()
        if action is not None:
            wait = injection.fault.number_of(action)
            injection.log(f"{key[0]}: {wait} ms")
            time.sleep(wait / 1000)


FAULT = Fault(
    id="slow-grammar",
    title="a grammar is compiled for long",
    tasks={"on": "wait as many milliseconds as the argument says before it is compiled"},
    caught_by=(),
    arguments=("on",),
    counts="milliseconds",
    default=1000,
    drills=(),  # the load of repro/matrix.py has no grammar
)
