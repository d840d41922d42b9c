"""A plugin of SGLang's that counts how often the fix parked-chunk acts in a scheduler.

Each time it adds a letter to ``$PARKED_COUNTS``.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    from g4debug.fixes import parked_chunk

    gives = parked_chunk.give_back

    def counted(*args: Any) -> None:
        with open(os.environ["PARKED_COUNTS"], "a") as file:
            file.write("x")
        gives(*args)

    parked_chunk.give_back = counted
