"""Why yoco.py measures prefills without CUDA graphs: they refuse layers with another's KV."""

from __future__ import annotations

import importlib

import pytest
import releases
from real_model import served

SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
LAYERS = "sglang.srt.model_executor.model_runner_components.layer_setup"


@pytest.mark.usefixtures("_sglang_imported")
def test_sglangs_graphs_of_a_prefill_refuse_layers_that_read_anothers_kv() -> None:
    from g4debug.cpu.models import tiny_models

    if not releases.has(SETUP):
        pytest.skip("this SGLang has no such graphs")
    setup, layers = importlib.import_module(SETUP), importlib.import_module(LAYERS)
    with served(tiny_models()[0], disable_overlap_schedule=True) as made:
        text = made.runner.model.model
        found = layers.compute_attention_and_moe_layers(text)
        with pytest.raises(ValueError, match="invalid or duplicate attention layer_id"):
            setup.index_attention_layers_by_global_id(found[0], found[4], text)
