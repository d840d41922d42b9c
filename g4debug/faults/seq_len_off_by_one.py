"""Changes the length of one request by one after a decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, at_end_of_decode
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks

OFF = {"plus": 1, "minus": -1, "device": 1}


def install(hooks: Hooks, injection: Injection) -> None:
    def shift(batch: Any, rows: list[int], action: Action) -> None:
        row = injection.random.choice(rows)
        off = OFF[action.task]
        was = int(batch.seq_lens_cpu[row])
        batch.seq_lens[row] += off
        where = "device"
        if action.task != "device":
            batch.seq_lens_cpu[row] += off
            where = "host and device"
        injection.log(
            f"request {batch.reqs[row].rid} (row {row}): seq_len {was} {off:+d} on {where}"
        )

    at_end_of_decode(hooks, injection, shift)


FAULT = Fault(
    id="seq-len-off-by-one",
    title="the length of a request is wrong by one after a decode step",
    tasks={
        "plus": "it is one too long, on the host and on the device",
        "minus": "it is one too short, on the host and on the device",
        "device": "it is one too long, only on the device",
    },
    caught_by=CAUGHT_BY,
    install=install,
    drills=("1*plus", "1*minus"),
)
