"""What happens when the path itself fails before a layer has run.

Alone, a process goes on: the path is off from then on, and SGLang's own forward computes all rows.

With tensor parallelism that would be wrong. The ranks add up what they have computed in every
layer, and in the KV-shared layers the others have cut their rows. A rank that comes with all of
its rows then hangs the server, or the sums are of different rows. So its error is raised, which
ends the server and says what to do. What every rank sees alike, such as a batch that the path does
not fit, is no failure: see ``plan.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from g4debug.fixes.paths import base
from g4debug.settings import fix_switch

ID = "yoco-fast-prefill"
SWITCH = "SGLANG_GEMMA4_YOCO"  # the seed's
logger = logging.getLogger("g4debug")
off = False  # True after the path has failed in this process: by our mistake, or as SGLang changed


@contextmanager
def handled() -> Iterator[None]:
    """Around code of the path that runs before the layers: its errors end here, but see above."""
    from g4debug.trapping.trap import TrapError

    try:
        yield
    except TrapError:
        raise
    except Exception as e:
        _give_up(e)


def _give_up(error: Exception) -> None:
    import torch

    global off
    group = base.ranks()
    if group.world_size > 1:
        kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
        raise kind(
            f"g4debug: {ID}: rank {group.rank_in_group} of {group.world_size} could not prepare a "
            "prefill, whose rows the other ranks have cut, so that it cannot go on with all rows. "
            f"Set {fix_switch(ID)}=0 (without {SWITCH}=1), or lower --mem-fraction-static if "
            "memory ran out. "
            f"({type(error).__name__}: {error})"
        ) from error
    off = True
    logger.error(
        "g4debug: %s: an error came up while it prepared a prefill. It is off in this process "
        "from now on, and a prefill computes all rows. Please report this.", ID, exc_info=error,
    )  # fmt: skip
