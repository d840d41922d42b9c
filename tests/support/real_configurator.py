"""SGLang's own HybridSWAPoolConfigurator, on its own ModelConfig, without a model.

Only what asks for it is a plain namespace (the model runner, from 0.5.18 on the configurator of the
KV cache), and the number of ranks is stated, for process groups that a test does not start.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import releases


def model_config(model: Path) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(str(model))


def solve(
    monkeypatch: Any, config: Any, kv_dtype: Any, ratio: float, memory: int, page: int, tp: int = 1
) -> tuple[int, int]:
    """(full, swa) tokens by SGLang, without speculative decoding."""
    from sglang.srt.model_executor import pool_configurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asks = SimpleNamespace(
        model_config=config,
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_str=str(kv_dtype).removeprefix("torch."),
        server_args=SimpleNamespace(swa_full_tokens_ratio=ratio, max_running_requests=None),
        is_hybrid_swa=config.is_hybrid_swa,
        is_draft_worker=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        layer_info=config,
        page_size=page,
        sliding_window_size=None,  # or 0.5.23 refuses a pool that is smaller than the window
        fused_entry_bytes=lambda pool: None,
    )
    with ExitStack() as stack:
        if hasattr(pool_configurator, "get_attention_tp_size"):
            monkeypatch.setattr(pool_configurator, "get_attention_tp_size", lambda: tp)
        else:
            stack.enter_context(releases.configured(swa_full_tokens_ratio=ratio, tp_size=tp))
        configurator = pool_configurator.create_memory_pool_configurator(asks)
        assert isinstance(configurator, pool_configurator.HybridSWAPoolConfigurator)
        pools = configurator.calculate_pool_sizes(memory, page)
    return pools.full_max_total_num_tokens, pools.swa_max_total_num_tokens
