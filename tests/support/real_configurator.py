"""SGLang's own HybridSWAPoolConfigurator, on its own ModelConfig, without a model.

Only the model runner is a plain namespace, and ``get_attention_tp_size`` answers for the
process groups that a test does not start.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


def model_config(model: Path) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(str(model))


def solve(
    monkeypatch: Any, config: Any, kv_dtype: Any, ratio: float, memory: int, page: int, tp: int = 1
) -> tuple[int, int]:
    """(full, swa) tokens by SGLang."""
    from sglang.srt.model_executor import pool_configurator

    monkeypatch.setattr(pool_configurator, "get_attention_tp_size", lambda: tp)
    runner = SimpleNamespace(
        model_config=config,
        kv_cache_dtype=kv_dtype,
        server_args=SimpleNamespace(swa_full_tokens_ratio=ratio),
        is_hybrid_swa=config.is_hybrid_swa,
    )
    configurator = pool_configurator.create_memory_pool_configurator(runner)
    assert isinstance(configurator, pool_configurator.HybridSWAPoolConfigurator)
    pools = configurator.calculate_pool_sizes(memory, page)
    return pools.full_max_total_num_tokens, pools.swa_max_total_num_tokens
