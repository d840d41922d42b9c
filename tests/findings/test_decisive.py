"""The variables by which SGLang's host decides are known, on the SGLang that is installed here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import variables_read

from g4debug.findings import decisive


def test_the_sources_are_read_in_each_way() -> None:
    source = (
        'envs.SGLANG_A.get()\nos.environ.get("B")\nos.getenv("C", "1")\nget_int_env_var("D", 1)\n'
        'sizes = {"triton": ("SGLANG_E", 1)}\n"SGLANG_F" in os.environ\n'
    )
    assert {*variables_read.read_in(source)} == {"SGLANG_A", "B", "C", "D", "SGLANG_E", "SGLANG_F"}


def test_each_variable_that_scheduler_caches_and_workers_read_is_known() -> None:
    """If one is not: does it decide where pages go? It belongs there or to the harmless ones."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    assert not variables_read.unknown(Path(spec.submodule_search_locations[0]) / "srt")


def test_a_value_that_may_say_anything_is_no_value() -> None:
    environ = {
        "SGLANG_INIT_NEW_TOKEN_RATIO": "0.3", "SGLANG_PREFILL_TILE_BUDGET_MODE": " legacy ",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "a.b:c(d)", "SGLANG_OTHER": "1",
        "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD": "-1", "SGLANG_REQ_WAITING_TIMEOUT": "3.5",
        "SGLANG_REQ_RUNNING_TIMEOUT": "-1", "SGLANG_RUST_SERVER": "false",
    }  # fmt: skip
    assert decisive.variables(environ) == {
        "SGLANG_INIT_NEW_TOKEN_RATIO": "0.3", "SGLANG_PREFILL_TILE_BUDGET_MODE": "legacy",
        "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD": "-1",
    }  # fmt: skip
    limits = list(decisive.not_carried(environ, polls=False))
    assert [name for name in environ if any(name in limit for limit in limits)] == [
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "SGLANG_REQ_WAITING_TIMEOUT",
    ]  # fmt: skip
    assert len(list(decisive.not_carried({"SGLANG_REQ_WAITING_TIMEOUT": "1"}, polls=True))) == 0
    assert len(list(decisive.not_carried({"SGLANG_RUST_SERVER": "1"}, polls=True))) == 1
