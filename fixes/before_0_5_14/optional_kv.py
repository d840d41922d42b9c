"""Lets layers without K and V of their own run under piecewise CUDA graphs (seed PR #16).

A KV-shared layer (20 of 35 layers in E2B, 18 of 42 in E4B) reads the KV of an earlier layer and
passes ``key=None, value=None``. Under piecewise CUDA graphs, which are the default, attention in a
prefill goes through the custom op ``sglang::unified_attention_with_output``, which slices both. So
the server dies at start of ``TypeError: 'NoneType' object is not subscriptable``
(``radix_attention.py:169``).

The schema and the body of an op cannot be changed once it is registered. So a call without K and V
goes to an op of our own that has no such arguments, ``sglang::unified_attention_without_kv``. It is
a split op like SGLang's, so the graph is cut around it, too. Its body calls SGLang's op with empty
K and V, and right before the backend it puts None in their place again. Calls with K and V are not
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around, before
from g4debug.fixes.source import source

ID = "optional-kv"
OP = "unified_attention_without_kv"
SGLANGS_OP = "sglang.srt.layers.radix_attention.unified_attention_with_output"
_calls: dict[str, Callable[..., None]] = {}  # "piecewise" and "breakable", once it is registered


class _WithoutKV:
    """Takes the place of a ForwardBatch's backend for one call."""

    def __init__(self, forward_batch: Any) -> None:
        self.forward_batch, self.backend = forward_batch, forward_batch.attn_backend
        forward_batch.attn_backend = self

    def forward(self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        self.step_aside()
        return self.backend.forward(q, None, None, *args, **kwargs)

    def step_aside(self) -> None:
        self.forward_batch.attn_backend = self.backend


def register_op() -> None:
    """Register our op with torch and as a split op, once per process.

    It has the arguments of SGLang's op, except for key and value: query [tokens, heads, dim] and
    output, both padded to the graph's size, save_kv_cache and layer_id.
    """
    if _calls:
        return
    import torch
    from sglang.srt.compilation.compilation_config import register_split_op
    from sglang.srt.compilation.piecewise_context_manager import get_forward_context
    from sglang.srt.model_executor.breakable_cuda_graph.breakable_cuda_graph import eager_on_graph
    from sglang.srt.utils.custom_op import register_custom_op

    def unified_attention_without_kv(query, output, save_kv_cache, layer_id):  # type: ignore[no-untyped-def]
        context = get_forward_context()
        assert context is not None, "called outside of a piecewise forward"
        stand_in = _WithoutKV(context.forward_batch)
        nothing = query.new_empty(0)
        try:
            torch.ops.sglang.unified_attention_with_output(
                query, nothing, nothing, output, save_kv_cache, layer_id
            )
        finally:
            stand_in.step_aside()

    # torch makes the schema from types. In this module annotations are only strings.
    unified_attention_without_kv.__annotations__ = {
        "query": torch.Tensor,
        "output": torch.Tensor,
        "save_kv_cache": bool,
        "layer_id": int,
        "return": None,
    }
    op = register_custom_op(unified_attention_without_kv, mutates_args=["output"])
    register_split_op(OP)(op)
    _calls["piecewise"], _calls["breakable"] = op, eager_on_graph(True)(op)


def before_init_graphs(*args: Any, **kwargs: Any) -> None:
    """Runs before ``ModelRunner.init_piecewise_cuda_graphs``, which reads the list of split ops."""
    register_op()


def _around(kind: str) -> Callable[..., None]:
    """Wraps SGLang's op for one kind of CUDA graphs. dynamo traces through it."""

    def around_op(
        call_next: Callable[..., None],
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        save_kv_cache: bool,
        layer_id: int,
        **kwargs: Any,
    ) -> None:
        if key is not None or value is not None or kwargs:
            return call_next(query, key, value, output, save_kv_cache, layer_id, **kwargs)
        return _calls[kind](query, output, save_kv_cache, layer_id)

    return around_op


def still_broken() -> bool:
    """True if the op slices ``key`` without asking whether there is one."""
    body = source(SGLANGS_OP)
    return "key = key[:" in body and "key is not None" not in body


FIX = Fix(
    id=ID,
    title="KV-shared layers run under piecewise CUDA graphs",
    seed="PR #16",
    upstream="in 0.5.13 (key and value are Optional there)",
    needs=">=0.5.12,<0.5.13",
    elsewhere={">=0.5.13": "key and value may be missing in SGLang's own operator"},
    still_broken=still_broken,
    hooks=(
        before("runner.init_piecewise", before_init_graphs),
        around("attn.unified_op", _around("piecewise")),
        around("attn.unified_op_breakable", _around("breakable")),
    ),
    purpose="correctness",
)
