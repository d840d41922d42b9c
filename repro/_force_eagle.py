"""The workloads of force_eagle: one toy target and its assistant, served in four ways."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _workload
from _hybrid import without_mtp
from _workload import Workload


def geometry(even: bool) -> Any:
    """TINY; ``even``: its full layers' head dimension everywhere, which EAGLE's pool needs."""
    from g4debug.cpu.geometry import TINY

    return replace(TINY, swa_head_dim=TINY.head_dim) if even else TINY


def cpu(requests: int | None, even: bool = True, **given: Any) -> Workload:
    """Eager, as everything on the CPU engine; ``given``: arguments of the engine."""
    from g4debug.cpu.models import write
    from g4debug.cpu.server import server_arguments

    folder = Path(tempfile.gettempdir()) / f"g4debug-force-eagle-{'even' if even else 'tiny'}"
    models = write(geometry(even), folder)
    engine = server_arguments(models, log_level="info", skip_tokenizer_init=True, **given)
    small = _workload.cpu(requests or 3)
    return replace(small, prompt=(60, 120), output=24, engine=engine)


def _with(**given: Any) -> dict[str, Callable[[int | None], Workload]]:
    return {"cpu": lambda requests: cpu(requests, **given)}


DEVICES = _with()
PLAIN = {"cpu": lambda requests: without_mtp(cpu(requests))}
# SGLang's default. No graph is captured here: EAGLE is refused before, FROZEN_KV_MTP not asked.
GRAPHS = _with(disable_cuda_graph=False)
UNEVEN = _with(even=False)
# What EAGLE's worker needs on this engine. Its draft steps on trtllm_mha are built on FlashInfer's,
# which has no stand-in, so the draft is on triton, interpreted (the target stays on trtllm_mha);
# its overlapping worker asks for CUDA streams.
EAGLE = _with(speculative_draft_attention_backend="triton", disable_overlap_schedule=True)
