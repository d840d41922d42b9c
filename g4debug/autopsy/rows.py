"""Which row of the batch a block of a kernel works on, and whose row that is."""

from __future__ import annotations

from collections.abc import Sequence

from g4debug.backends import adapters
from g4debug.findings.record import Step

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

    The device may still be in the step before the last one. So both must have the same one.
    """
    rids = {step.rids[row] for step in steps[-2:] if 0 <= row < len(step.rids)}
    return rids.pop() if len(rids) == 1 else ""
