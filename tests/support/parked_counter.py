"""A plugin of SGLang's that counts how often the fix parked-chunk acts in a scheduler.

Each time it adds an ``x`` to ``$PARKED_COUNTS``, and a ``p`` for each round in which SGLang parks a
prompt, whether the fix is in force or not.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    from g4debug.fixes import parked_chunk

    gives, asks = parked_chunk.give_back, PrefillAdder.add_chunked_req

    def count(letter: str) -> None:
        with open(os.environ["PARKED_COUNTS"], "a") as file:
            file.write(letter)

    def give_back(*args: Any) -> None:
        count("x")
        gives(*args)

    def add_chunked_req(adder: Any, request: Any) -> Any:
        goes_on = asks(adder, request)
        if goes_on is request and not any(r is request for r in adder.can_run_list):
            count("p")
        return goes_on

    parked_chunk.give_back = give_back
    PrefillAdder.add_chunked_req = add_chunked_req
