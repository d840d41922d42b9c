"""The workloads of force_eagle: one toy target and its assistant, served in four ways."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.workload import Workload, each

from workloads import e4b_trtllm_mtp
from workloads.hybrid_pool_swap import without_mtp


def geometry(even: bool) -> Any:
    """TINY. ``even``: all layers get the head dimension of the full ones: EAGLE's pool needs it."""
    from g4debug.cpu.geometry import TINY

    return replace(TINY, swa_head_dim=TINY.head_dim) if even else TINY


def cpu(requests: int | None, even: bool = True) -> Workload:
    """The engine runs eagerly, as always on the CPU."""
    from g4debug.cpu.models import write
    from g4debug.cpu.server import server_arguments

    folder = Path(tempfile.gettempdir()) / f"g4debug-force-eagle-{'even' if even else 'tiny'}"
    models = write(geometry(even), folder)
    engine = server_arguments(models, log_level="info", skip_tokenizer_init=True)
    small = e4b_trtllm_mtp.cpu(requests or 3)
    return replace(small, prompt=(60, 120), output=24, engine=engine)


DEVICES = {"cpu": cpu}
PLAIN = {"cpu": lambda requests: without_mtp(cpu(requests))}
# CUDA graphs are on, as is SGLang's default. The server stops before it captures one.
GRAPHS = each(DEVICES, disable_cuda_graph=False)
UNEVEN = {"cpu": lambda requests: cpu(requests, even=False)}
# What EAGLE's worker needs on the CPU engine. On trtllm_mha its draft steps use FlashInfer, which
# has no stand-in. So the draft runs on triton, interpreted; the target stays on trtllm_mha. Overlap
# is off, because the overlapping worker needs CUDA streams.
EAGLE = each(DEVICES, speculative_draft_attention_backend="triton", disable_overlap_schedule=True)
