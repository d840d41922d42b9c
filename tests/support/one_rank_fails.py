"""An SGLang plugin of test_yoco_ranks.py: on rank 1 a prefill's cut runs out of memory."""

from __future__ import annotations

from typing import Any


def register() -> None:
    import torch
    from sglang.srt.distributed import get_tp_group

    from g4debug.fixes.paths.yoco_fast_prefill import cut

    real = cut.cut_metadata

    def cut_metadata(backend: Any, batch: Any) -> Any:
        if get_tp_group().rank_in_group == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(backend, batch)

    cut.cut_metadata = cut_metadata
