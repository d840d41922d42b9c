"""What a server may be started with, beside its model, that changes what the tracers judge by.

Most servers have none of these. With one, a model is a line of its own in the table
(:mod:`g4debug.combinations.run`), because it is another thing to be run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from g4debug.hooking.resolved import dp_attention, server_argument

TENSOR, PIPELINE, FP8 = "tensor parallelism", "pipeline parallelism", "KV in FP8"
NOT_READ = "arguments that cannot be read"


def _several(argument: str) -> Callable[[Any], bool]:
    return lambda args: int(server_argument(args, argument, 1)) > 1


def _given(*arguments: str) -> Callable[[Any], bool]:
    return lambda args: any(server_argument(args, name) for name in arguments)


def _fp8(args: Any) -> bool:
    return "fp8" in str(server_argument(args, "kv_cache_dtype", ""))


ASKED: dict[str, Callable[[Any], bool]] = {
    TENSOR: _several("tp_size"),
    PIPELINE: _several("pp_size"),
    "DP attention": dp_attention,
    "context parallelism": _several("attn_cp_size"),
    "decode context parallelism": _several("dcp_size"),
    "a unified memory pool": _given("enable_unified_memory"),
    "two-batch overlap": _given("enable_two_batch_overlap"),
    "a diffusion model's algorithm": _given("dllm_algorithm"),
    "LoRA": _given("enable_lora", "lora_paths"),
    FP8: _fp8,
}


def beside(server_args: Any, pool: Any = None) -> tuple[str, ...]:
    """The names of what is there. pool: the KV pool, if it is there; it knows what it keeps."""
    if server_args is None:
        return (NOT_READ,)
    found = {name: is_on(server_args) for name, is_on in ASKED.items()}
    found[FP8] |= any("float8" in str(dtype) for dtype in _dtypes(pool))
    return tuple(name for name, there in found.items() if there)


def _dtypes(pool: Any) -> Iterator[Any]:
    for name in ("full_kv_pool", "swa_kv_pool"):
        yield getattr(getattr(pool, name, None), "dtype", None)
    yield getattr(pool, "dtype", None)
