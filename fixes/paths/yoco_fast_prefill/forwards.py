"""What SGLang's releases do differently around one forward of the model.

* **The backend.** Up to 0.5.12 it is an attribute of the batch. From 0.5.13 on it belongs to the
  context of the forward (``model_executor/forward_context.py``), which a layer asks for it. A part
  of a forward gets another view of it by a second context inside of the first.
* **The residual.** From 0.5.23 on the batch keeps what one layer leaves to the next, and the
  final norm checks that it gets just that.
* **The slots.** From 0.5.23 on the metadata of a batch are made from its *plan* of KV locations.
* **The graphs.** Each release has its own way to say that a CUDA graph of a prefill is run.

Each function looks for what is there and does not ask for the release.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_RUNNER = "sglang.srt.model_executor"
# Module, function, and what the function returns while no prefill graph is run or captured.
_IN_GRAPH = (
    ("sglang.srt.compilation.piecewise_context_manager", "get_forward_context", None),
    (
        f"{_RUNNER}.runner_backend_utils.tc_piecewise_cuda_graph",
        "get_tc_piecewise_forward_context",
        None,
    ),
    (f"{_RUNNER}.runner_utils.prefill_graph", "is_in_prefill_graph_scope", False),
)


def backend_of(forward_batch: Any) -> Any:
    """The attention backend of the forward that runs, or is about to run, on this batch."""
    own = getattr(forward_batch, "attn_backend", None)
    if own is not None:
        return own
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend()


@contextmanager
def attention_on(backend: Any, batch: Any) -> Iterator[None]:
    """While this lasts, the layers that run on ``batch`` use this backend."""
    if hasattr(batch, "attn_backend"):
        batch.attn_backend = backend
        yield
        return
    from sglang.srt.model_executor import forward_context as module

    view = dataclasses.replace(module.get_forward_context(), attn_backend=backend)
    with module.forward_context(view):
        yield


def moves_slots(backend: Any) -> bool:
    """True if kernels get other places than ``req_to_token`` has: KV pools that share memory."""
    translator = getattr(backend, "kv_index_translator", None)
    return getattr(backend, "_translate_kv_loc", None) is not None or bool(
        getattr(translator, "is_translating", False)
    )


def plan_slots(backend: Any, batch: Any) -> None:
    """Give a batch that was cut out of another one the plan of its own slots."""
    if getattr(batch, "kv_loc_plan", None) is not None:
        translator = backend.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)


def is_whole(hidden_states: Any, forward_batch: Any) -> bool:
    """True if a layer's output [rows, hidden] is all that it leaves to the next one.

    False if a sum over the ranks, or the residual, is still to be added.
    """
    stream = getattr(forward_batch, "residual_stream", None)
    if stream is None:
        return True
    return stream.pending is None and (stream.residual is None or stream.residual is hidden_states)


def leave_residual(hidden_states: Any, full: Any, cut: Any) -> None:
    """Go on with these rows [kept, hidden] as the residual, for both batches. cut may be None."""
    stream = getattr(full, "residual_stream", None)
    if stream is not None:
        stream.write(hidden_states)
        if cut is not None:
            cut.residual_stream = stream


def layers_return_a_pair() -> bool:
    """True if a decoder layer returns (hidden_states, None): up to 0.5.21."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return "residual_stream" not in ForwardBatch.__dataclass_fields__


def in_prefill_graph() -> bool:
    """True while SGLang captures or replays a CUDA graph of a prefill."""
    for module, name, outside in _IN_GRAPH:
        try:
            asked = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if asked is not None and asked() is not outside:
            return True
    return False
