"""future-row on 0.5.12's v2: the FutureMap is a ring, in which each step has rows of its own.

Nothing is published apart from these stored rows.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import asks_for, decodes, survivors
from g4debug.faults.base import Injection
from g4debug.faults.before_0_5_14._spec import with_path_only as absent
from g4debug.faults.future_row import exchanged
from g4debug.faults.grammar import GrammarError

__all__ = ["absent", "install"]
BUFFERS = ("bonus_tokens_buf", "topk_index_buf", "topk_p_buf", "hidden_states_buf")


def install(injection: Injection) -> None:
    if any(action.task == "publish" for action in injection.chain.actions):
        raise GrammarError("future-row: with this SGLang's FutureMap nothing is published")
    launched: list[Any] = [None]  # the batch whose step is stored next
    silenced: list[Any] = []  # the FutureMap into which nothing is stored

    @injection.before("overlap.resolve")
    def before_read(future_map: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        launched[0] = batch if decodes(batch) else None
        if launched[0] is None:
            return
        of = batch.spec_info.future_indices
        rows = exchanged(injection, of.indices, batch, "read")
        if rows is not of.indices:
            batch.spec_info.future_indices = type(of)(indices=rows, interval=of.interval)
        if survivors(batch) and asks_for(injection, "lost") and injection.fire() is not None:
            injection.log(f"lost: nothing is stashed for {len(batch.reqs)} requests")
            future_map.store_to_map = lambda *args: None  # until this step was launched
            silenced.append(future_map)

    @injection.after("scheduler.run_batch")
    def after_run(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        while silenced:
            del silenced.pop().store_to_map
        return result

    @injection.after("overlap.store")
    def after_store(result: Any, future_map: Any, future_indices: Any, *args: Any) -> Any:
        batch, launched[0] = launched[0], None
        if batch is None:
            return result
        given = exchanged(injection, future_indices.indices, batch, "stash")
        if given is not future_indices.indices:
            for name in BUFFERS:
                buffer = getattr(future_map, name)
                buffer[future_indices.interval] = buffer[given]
        return result
