"""The kernels of a verify's attention compiled, and in a CUDA graph, against float64."""

from __future__ import annotations

import pytest
import torch
from verify_cases import Case, error, tensors

from g4debug.fixes.paths.kernels.verify_attention import Cut, verify_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIXED = (0, 1, 31, 32, 63, 64, 65, 500, 1300)
CLOSE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("window", [-1, 64, 511])
@pytest.mark.parametrize(("d", "kv_heads"), [(128, 2), (256, 2), (512, 2), (256, 1)])
def test_every_size_and_window(dtype, window, d, kv_heads):
    case = Case(MIXED, d=d, dv=d, kv_heads=kv_heads, window=window, tree=True, dtype=dtype)
    for how in (None, Cut(32, 4, 2, 1, 1), Cut(32, 4, 2, 9999, 32)):
        arguments = tensors(case, "cuda")
        verify_attention(**arguments, how=how)
        assert error(case, arguments) < CLOSE[dtype]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_graph_reads_the_lists_of_its_replay(rows):
    """Captured on rows without a prefix, as SGLang does, and replayed on long ones."""
    case = Case((700,) * rows, d=256, dv=256, dtype=torch.bfloat16)
    arguments = tensors(case, "cuda")
    begins = arguments["kv_indptr"].clone()
    arguments["mask"] = arguments["mask_indptr"] = None
    verify_attention(**arguments)
    arguments["kv_indptr"].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_attention(**arguments)
    arguments["kv_indptr"].copy_(begins)
    arguments["out"].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert error(Case(case.prefixes, d=256, dv=256, masked=False), arguments) < 5e-3
