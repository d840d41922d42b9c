"""Changes the draft's hand-over to the verify: a token, a position, or the rows of two requests.

The verify begins with the first token of a row. Whatever follows it is only a guess, which the
verify decides on; but what it decides on must be what the target computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import (
    CAUGHT_BY,
    another,
    asks_for,
    decodes,
    one_of,
    put,
    survivors,
)
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


def exchanged(tensor: torch.Tensor, a: int, b: int, width: int) -> torch.Tensor:
    """A copy in which two rows of ``width`` numbers have changed places."""
    rows = tensor.clone().view(-1, width)
    rows[[a, b]] = rows[[b, a]]
    return rows.flatten()


def install(injection: Injection) -> None:
    @put(injection.after, "draft")
    def after_draft(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # A draft may leave what it has made on the batch, which then is a verify.
        made = batch.spec_info if result is None else result
        drafts = decodes(batch) or batch.forward_mode.is_target_verify()
        rows = survivors(batch) if drafts else []
        if not rows or (asks_for(injection, "rows") and len(rows) < 2):
            return result
        action = injection.fire()
        if action is None:
            return result
        width = made.draft_token_num
        if action.task == "rows":
            a, b = sorted(injection.random.sample(rows, 2))
            made.draft_token = exchanged(made.draft_token, a, b, width)
            injection.log(f"rows: the draft's tokens of rows {a} and {b} exchanged")
            return result
        row, _, who = one_of(injection, batch, rows)
        if action.task == "positions":
            made.positions = made.positions.clone()
            made.positions[row * width : (row + 1) * width] += 1
            injection.log(f"positions: {who}: each one too far")
        else:
            at = row * width + (width - 1 if action.task == "draft" else 0)
            made.draft_token = another(made.draft_token, at)
            injection.log(f"{action.task}: {who}: another token")
        return result


FAULT = Fault(
    id="verify-input",
    title="the verify gets other tokens or positions than the draft made",
    tasks={
        "bonus": "the verify of one request begins with another token",
        "draft": "the last guess of one request is another token",
        "positions": "each token of one request is one position too far",
        "rows": "the tokens of two requests are exchanged",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    drills=("1*bonus", "1*draft", "1*positions", "1*rows"),
    needs=("result.resolve",),
)
