"""Which row of the batch a block of a kernel works on, and whose row that is."""

from __future__ import annotations

from collections.abc import Sequence

from g4debug.backends import adapters
from g4debug.findings.record import Step, TrapRecord

AXES = "xyz"


def row_of(kernel: str, block: Sequence[int], dtype: str) -> int:
    """The row of the batch, -1 if it is not known for this kernel. dtype: of the KV cache.

    With FP8 KV another kernel of the same name may run, whose z also counts the heads.
    """
    kernel = kernel.removesuffix("<…>")
    axis = next((a.kernels[kernel] for a in adapters() if kernel in a.kernels), "")
    if not axis or len(block) != len(AXES) or (axis == "z" and dtype.startswith("float8")):
        return -1
    return block[AXES.index(axis)]


def request_of(row: int, steps: Sequence[Step]) -> str:
    """The request in a row, '' if it is not known.

    The device may still be in the step before the last one. So both must have the same one. A
    step with fewer requests may have had it as padding of a CUDA graph; a prefill has no such rows.
    """
    last = [step for step in steps[-2:] if row < len(step.rids) or step.forward_mode != "EXTEND"]
    rids = {step.rids[row] if 0 <= row < len(step.rids) else "" for step in last}
    return rids.pop() if len(rids) == 1 else ""


def may_be_branches(record: TrapRecord) -> bool:
    """True if a draft may have a row for each branch of a request's tree."""
    name = "speculative_eagle_topk"
    width = record.arguments.get(name, record.defaults.get(name))
    return isinstance(width, int) and width > 1
