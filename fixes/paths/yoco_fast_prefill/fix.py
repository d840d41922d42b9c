"""A prefill computes the KV-shared layers only for the rows that somebody reads (seed PR #14).

The last layers of Gemma-4 E2B (20 of 35) and E4B (18 of 42) have no KV of their own: they read the
KV of an earlier layer. So in a prefill a row of these layers is of use only for its own output, and
nobody reads most of these outputs. A token is sampled from the last row of a prompt; the other rows
are read only if prompt logprobs are asked for. The idea comes from YOCO (Sun et al., 2024, "You
Only Cache Once"). vLLM's --kv-sharing-fast-prefill (#22628, #38879) and seed PR #14 do it for a
whole batch or not at all. Here it is decided for each request; see ``plan.py``.

SGLang's own forward still runs. ``Gemma4TextModel.forward`` is wrapped to make the plan and to put
the results back, and ``Gemma4DecoderLayer.forward`` to cut the rows. The first KV-shared layer gets
the rows that are read, with their positions, per-layer inputs and metadata. The next layers get its
output. In the end the results are put back to their places among zeros. If no row is read, these
layers are not called.

In some cases SGLang's forward runs for all rows: see :func:`plan <.plan.plan>` and
:func:`batch_limit`. SGLang's CUDA graphs of a prefill have all rows in them, of whichever kind they
are. The path lets them be replayed, and takes their place only if it spares at least
``G4DEBUG_YOCO_EAGER_ROWS`` rows; see :func:`around_can_run`.

If the path itself fails, it is off in that process, or the server stops: see ``giving_up.py``.

The tokens are the same, but not the bits: a matrix product of fewer rows may add in another order.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.backends import adapters, names
from g4debug.fixes.base import Fix, after, around
from g4debug.fixes.paths import base
from g4debug.fixes.paths.yoco_fast_prefill import giving_up
from g4debug.fixes.paths.yoco_fast_prefill import plan as yoco_plan
from g4debug.fixes.source import source

if TYPE_CHECKING:
    from g4debug.fixes.paths.yoco_fast_prefill.cut import Cut

ID = giving_up.ID
MODEL = "sglang.srt.models.gemma4_causal.Gemma4TextModel"
CUT = "g4debug_yoco_cut"  # attribute of a ForwardBatch while its forward runs
_first: weakref.WeakKeyDictionary[Any, int | str] = weakref.WeakKeyDictionary()


def around_model(
    call_next: Callable[..., Any],
    model: Any,
    input_ids: Any,
    positions: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps ``Gemma4TextModel.forward``: input_ids and positions [rows]."""
    import torch

    if torch.compiler.is_compiling():
        return call_next(model, input_ids, positions, forward_batch, *args, **kwargs)
    cut = cut_for(model, forward_batch)
    if cut is None:
        return call_next(model, input_ids, positions, forward_batch, *args, **kwargs)
    setattr(forward_batch, CUT, cut)
    try:
        result = call_next(model, input_ids, positions, forward_batch, *args, **kwargs)
    finally:
        delattr(forward_batch, CUT)
        cut.leave()
    if cut.given_up:
        return result
    if isinstance(result, tuple):  # it also has hidden states that were captured before the cut
        return cut.scatter(result[0]), *result[1:]
    return cut.scatter(result)


def around_layer(
    call_next: Callable[..., Any],
    layer: Any,
    positions: Any,
    hidden_states: Any,
    per_layer_input: Any,
    forward_batch: Any,
    **kwargs: Any,
) -> Any:
    """Wraps ``Gemma4DecoderLayer.forward``: hidden_states [rows, hidden], before the cut all."""
    import torch

    from g4debug.fixes.paths.yoco_fast_prefill import forwards

    cut = None if torch.compiler.is_compiling() else getattr(forward_batch, CUT, None)
    if cut is not None and not cut.prepared and not cut.given_up and layer.layer_id >= cut.at:
        with giving_up.handled():
            cut.prepare()
        if not cut.prepared:
            cut.given_up = "its metadata could not be made"  # the log says why
    if cut is None or layer.layer_id < cut.first or cut.given_up:
        return call_next(layer, positions, hidden_states, per_layer_input, forward_batch, **kwargs)
    if not cut.entered:
        whole = hidden_states
        hidden_states = cut.enter(positions, whole)
        if cut.given_up:
            base.once(ID, f"not used: {cut.given_up}", level=logging.WARNING)
            return call_next(layer, positions, whole, per_layer_input, forward_batch, **kwargs)
        # From 0.5.23 on the layer itself captures its input. That has all rows.
        if kwargs.get("capture_output") is not None:
            kwargs.pop("capture_output")(whole)
    if cut.batch is None:
        return (hidden_states, None) if forwards.layers_return_a_pair() else hidden_states
    if per_layer_input is not None:
        per_layer_input = per_layer_input[cut.rows]
    return call_next(layer, cut.positions, hidden_states, per_layer_input, cut.batch, **kwargs)


def around_can_run(call_next: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
    """Wraps ``can_run`` of the runner of prefill graphs: whether this prefill replays a graph."""
    possible = call_next(runner, forward_batch)
    model = text_model(runner.model_runner.model)
    if not possible or model is None:
        return possible
    with giving_up.handled():
        kept = decide(model, forward_batch)
        if isinstance(kept, str):
            return possible
        spared = len(forward_batch.positions) - sum(kept)
        if eager_rows() and spared >= eager_rows():
            return False
        least = f"at least {eager_rows()} rows" if eager_rows() else "nothing, as it is 0"
        base.once(
            ID,
            "a prefill replays SGLang's CUDA graph, which computes all rows of all layers, unless "
            f"this path spares {least} (G4DEBUG_YOCO_EAGER_ROWS)",
        )
    return possible


def text_model(model: Any) -> Any:
    """The Gemma4TextModel of a model, which may have a tower for images; None if it has none."""
    from sglang.srt.models.gemma4_causal import Gemma4TextModel

    parts = (getattr(model, name, None) for name in ("language_model", "model"))
    return next((part for part in parts if isinstance(part, Gemma4TextModel)), None)


def cut_for(model: Any, forward_batch: Any) -> Cut | None:
    """The cut of this forward; None if all rows are computed."""
    with giving_up.handled():
        from g4debug.fixes.paths.yoco_fast_prefill.cut import Cut

        kept = decide(model, forward_batch)
        if isinstance(kept, str):
            return None
        first = first_shared_layer(model)
        assert isinstance(first, int)
        cut = Cut(forward_batch, kept, first)
        last, count = len(model.layers) - 1, len(model.layers)
        base.once(
            ID,
            f"on: layers {first} to {last} of {count} run on the rows of a prefill that are read",
        )
        return cut
    return None


def decide(model: Any, forward_batch: Any) -> list[int] | str:
    """How many rows to keep of each request, or the reason why all are computed."""
    if getattr(forward_batch, yoco_plan.FACTS, None) is None:
        return "no prefill of the target"  # decode, verify, a draft, the capture of a graph
    if giving_up.off:
        return "it has failed in this process"
    first = first_shared_layer(model)
    if isinstance(first, str):
        base.once(ID, f"not used: {first}")
        return first
    why = batch_limit(forward_batch)
    if why:
        base.once(ID, f"not used: {why}")
        return why
    kept: list[int] | str = yoco_plan.plan(forward_batch, model.layers_to_capture, first)
    return kept


def first_shared_layer(model: Any) -> int | str:
    """The index of the first KV-shared layer, or why the rows cannot be cut there."""
    if model not in _first:
        shared = [bool(layer.self_attn.is_kv_shared_layer) for layer in model.layers]
        if not any(shared):
            _first[model] = "this model has no KV-shared layers"
        elif not all(shared[shared.index(True) :]) or shared[0]:
            _first[model] = "the KV-shared layers are not the model's last ones"
        else:
            _first[model] = shared.index(True)
    return _first[model]


def batch_limit(forward_batch: Any) -> str:
    """Why this server cannot use the path; '' if it can."""
    from g4debug.fixes.paths.yoco_fast_prefill.cut import prefill_backend, unsupported
    from g4debug.fixes.paths.yoco_fast_prefill.forwards import in_prefill_graph

    args = base.arguments()
    if args.pp_size > 1:
        return "pipeline parallelism"
    if why := base.numbers_limit(args):
        return why
    if args.enable_return_routed_experts:
        return "--enable-return-routed-experts reads every row"
    if in_prefill_graph():
        return "inside of a CUDA graph of a prefill"
    limit: str = unsupported(prefill_backend(forward_batch))
    return limit


def eager_rows() -> int:
    """If this many rows are spared, the path runs instead of a piecewise CUDA graph; 0: never."""
    from g4debug.settings import Settings

    global _eager_rows
    if _eager_rows is None:
        _eager_rows = Settings.from_environ().yoco_eager_rows
    return _eager_rows


_eager_rows: int | None = None


def still_broken() -> bool:
    """True if SGLang sends all rows of a prefill through all layers."""
    text = source(f"{MODEL}.forward")
    return "for layer" in text and "fast_prefill" not in text and "extend_seq_lens" not in text


FIX = Fix(
    id=ID,
    title="prefill computes the KV-shared layers only for the rows that are read",
    seed="PR #14",
    upstream="none up to 0.5.23; vLLM #22628 and #38879",
    needs="==0.5.12.post1 or ==0.5.15.post1 or ==0.5.23",
    elsewhere={">=0.5.12": "it was never run there"},
    still_broken=still_broken,
    hooks=(
        after("forward_batch.init_new", yoco_plan.after_init_new),
        after("runner.eager_load_batch", yoco_plan.after_load_batch, optional=True),
        around("gemma4.text", around_model),
        # This wraps the layer's other paths: fixes are put on in the order of their names.
        around("gemma4.layer", around_layer),
        around("runner.prefill_graph_can_run", around_can_run, optional=True),
    ),
    purpose="performance",
    switch=giving_up.SWITCH,
    eligible="in models with KV-shared layers (E2B, E4B), with prefill on "
    f"{names(a for a in adapters() if a.views is not None)} and one pipeline stage, outside of "
    "CUDA graphs of a prefill",
)
