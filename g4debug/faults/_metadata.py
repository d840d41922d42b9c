"""When the faults in page tables and in lists of tokens act: right after SGLang has made them.

That is the case when the metadata of a forward is ready (``init_forward_metadata``), and under CUDA
graphs when the static buffers are filled in before a replay, where no Python hook of the attention
layer runs. Nothing happens in a capture, which is passed on because something may be prepared then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from g4debug.backends import carrying
from g4debug.faults.base import Hook, Injection, Put

if TYPE_CHECKING:
    from g4debug.backends.base import Adapter


@dataclass(frozen=True)
class Made:
    """The metadata of one forward, just made.

    adapter: the TableAdapter or ListAdapter of the backend. runner: target or draft. mode: SGLang's
    forward mode in small letters, "replay" of a CUDA graph, or "capture". decode: it is a decode.
    live: the rows that belong to requests; padding does not. static: the number of rows of a
    graph's buffers, None outside of graphs. batch: the ForwardBatch, None in a graph before 0.5.13.
    """

    adapter: Any
    backend: Any
    runner: str
    mode: str
    decode: bool
    live: list[int]
    static: int | None
    batch: Any


def watch(injection: Injection, shape: type) -> Put:
    """Call ``act(Made)`` for each forward on a backend of this shape: TableAdapter, ListAdapter."""

    def put(act: Hook) -> Hook:
        for adapter in carrying(shape):
            _watch(injection, adapter, act)
        return act

    return put


def _watch(injection: Injection, adapter: Adapter, act: Callable[[Made], None]) -> None:
    drafts: set[int] = set()

    def made(backend: Any, mode: str, decode: bool, live: list[int], *rest: Any) -> None:
        if adapter.is_inherited_by(backend):
            return
        runner = "draft" if id(backend) in drafts else "target"
        act(Made(adapter, backend, runner, mode, decode, live, *rest))

    @injection.after(adapter.built)
    def after_init(result: Any, backend: Any, model_runner: Any, *args: Any, **kw: Any) -> Any:
        if getattr(model_runner, "is_draft_worker", False):
            drafts.add(id(backend))
        return result

    @injection.after(adapter.metadata)
    def after_metadata(result: Any, backend: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        live = [i for i, slot in enumerate(batch.req_pool_indices.tolist()) if slot]
        mode = batch.forward_mode
        made(backend, mode.name.lower(), mode.is_decode(), live, None, batch)
        return result

    def after_replay(result: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        """Up to 0.5.12 it gets ``bs, req_pool_indices, seq_lens, ...``, later a ForwardBatch."""
        given = (*args, *kwargs.values())
        if isinstance(given[0], int):
            batch, captures, (slots, lengths) = None, False, given[1:3]
            mode = next(a for a in given if hasattr(a, "is_decode"))
        else:
            batch = args[0] if args else kwargs["forward_batch"]
            captures = kwargs.get("in_capture", args[1] if len(args) > 1 else False)
            slots, lengths, mode = batch.req_pool_indices, batch.seq_lens, batch.forward_mode
        # Padding rows keep the requests of an earlier batch; only their lengths are reset.
        fill = backend.get_cuda_graph_seq_len_fill_value()
        rows = zip(slots.tolist(), lengths.tolist(), strict=False)
        live = [] if captures else [i for i, (slot, n) in enumerate(rows) if slot and n > fill]
        name = "capture" if captures else "replay"
        made(backend, name, mode.is_decode(), live, len(lengths), batch)
        return result

    if adapter.replay:
        injection.after(adapter.replay)(after_replay)
