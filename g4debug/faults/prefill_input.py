"""Changes what the target's prefill is given of one request, behind the making of the batch.

The host's lists stay as they are.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, another, changed, one_of, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.hooking.arguments import of_init_new

OFF = {"more": 1, "less": -1}


def install(injection: Injection) -> None:
    @injection.after("forward_batch.init_new")
    def after_new(made: Any, *args: Any, **kwargs: Any) -> Any:
        batch, runner = of_init_new(args, kwargs)
        counts = made.extend_seq_lens_cpu
        if made.forward_mode.name != "EXTEND" or not counts or len(counts) != len(batch.reqs or ()):
            return made
        # With a single token left, its own page would be read beside it.
        able = [row for row in survivors(batch) if counts[row] > 1]
        draft = getattr(runner, "is_draft_worker", False)
        action = injection.fire() if able and not draft else None
        if action is None:
            return made
        row, _, who = one_of(injection, batch, able)
        if action.task == "token":
            at = injection.random.randrange(counts[row])
            made.input_ids = another(made.input_ids, sum(counts[:row]) + at)
            injection.log(f"token: {who}: token {at} of its prefill is another one")
        else:
            wrong = counts[row] + OFF[action.task]
            made.extend_seq_lens = changed(made.extend_seq_lens, row, wrong)
            injection.log(f"{action.task}: {who}: extend_seq_lens is {wrong}, not {counts[row]}")
        return made


FAULT = Fault(
    id="prefill-input",
    title="a prefill gets another token of a prompt, or a wrong number of new tokens",
    tasks={
        "token": "one token of one request is another one",
        "more": "the device's extend_seq_lens of one request is one too large",
        "less": "the device's extend_seq_lens of one request is one too small",
    },
    caught_by=CAUGHT_BY,
    drills=("1*token", "1*more", "1*less"),
    needs=("result.resolve",),
)
