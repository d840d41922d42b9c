"""seq-len-off-by-one: the length on the batch, when a step has ended."""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import at_end_of_decode, one_of
from g4debug.faults.base import Injection
from g4debug.faults.grammar import Action
from g4debug.faults.seq_len_off_by_one import OFF


def install(injection: Injection) -> None:
    def shift(batch: Any, rows: list[int], action: Action) -> None:
        (row, _, who), off = one_of(injection, batch, rows), OFF[action.task]
        was = int(batch.seq_lens_cpu[row])
        batch.seq_lens[row] += off
        where = "device"
        if action.task != "device":
            batch.seq_lens_cpu[row] += off
            where = "host and device"
        injection.log(f"{who}: seq_len {was} {off:+d} on {where}")

    at_end_of_decode(injection, shift)
