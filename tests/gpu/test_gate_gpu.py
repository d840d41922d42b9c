"""On a GPU: what was run starts in mode `raise` and serves in silence; the rest does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_prefill_gpu
import torch
from test_engine_replay import run_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
E4B, SHAPES = "workloads.e4b_trtllm_mtp", "workloads.shapes"
OPEN = {
    "Gemma-4, split": f"{E4B}:ON_A_GPU",
    "Gemma-4, split, no draft": f"{E4B}:NO_MTP",
    "Gemma-4 on triton": f"{E4B}:TRITON",
    "Gemma-4 on triton, no draft": f"{E4B}:TRITON_NO_MTP",
    "Gemma-4 on trtllm_mha": f"{E4B}:ONE_BACKEND",
    "Gemma-4 on trtllm_mha, no draft": f"{E4B}:ONE_BACKEND_NO_MTP",
    "Llama": f"{SHAPES}:LLAMA",
    "Llama on triton": f"{SHAPES}:LLAMA_TRITON",
    "Llama on flashinfer": f"{SHAPES}:LLAMA_FLASHINFER",
    "Llama, prompts shorter than a chunk's graph": f"{SHAPES}:SHORT_CONTEXT",
    "Llama with EAGLE": f"{SHAPES}:EAGLE",
    "Llama with EAGLE on triton": f"{SHAPES}:EAGLE_TRITON",
    "Qwen3": f"{SHAPES}:QWEN3",
    "gpt-oss": f"{SHAPES}:GPT_OSS",
    "gpt-oss on triton": f"{SHAPES}:GPT_OSS_TRITON",
}
CLOSED = {"Llama with EAGLE, a tree": f"{SHAPES}:EAGLE_TREE"}


@pytest.mark.parametrize("name", OPEN)
def test_what_was_run_starts_and_serves_in_silence(name: str, tmp_path: Path) -> None:
    if "ONE_BACKEND" in OPEN[name] and not test_prefill_gpu.on_sm90():
        pytest.skip("this SGLang has no trtllm_mha prefill on sm90")
    status, log, dumps = run_engine(tmp_path, OPEN[name])
    said = [line for line in log.splitlines() if "g4debug: this server runs" in line]
    print(name, *said, sep="\n")
    assert status == 0, log[-5000:]
    assert dumps == []
    assert len(said) == 1


@pytest.mark.parametrize("name", CLOSED)
def test_what_was_never_run_does_not_start(name: str, tmp_path: Path) -> None:
    status, log, dumps = run_engine(tmp_path, CLOSED[name])
    assert status != 0
    assert "That was never run with g4debug" in log, log[-5000:]
    assert "G4DEBUG_MODE=log" in log
    assert dumps == []
