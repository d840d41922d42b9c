"""The layout of a verify's tree mask: the one that SGLang's kernels for GPUs read.

For each draft token it has a line of ``prefix + W`` cells (`draft_tree`), where SGLang's only
kernel for CPUs reads W cells. triton's stand-in reads the former, as the kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def full(own: object) -> Callable[[], Any]:
    """`default_tree_mask_mode`, as it answers on a GPU."""

    def mode() -> Any:
        from sglang.srt.speculative.eagle_utils import TreeMaskMode

        return TreeMaskMode.FULL_MASK

    return mode


def full_of_ngram(own: object) -> bool:
    """`_is_cpu` of NGRAM's worker, which asks it for nothing else."""
    return False
