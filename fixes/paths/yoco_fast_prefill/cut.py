"""Cuts a prefill down to the rows that are read: the batch, its attention metadata, the way back.

For an attention backend the rows that are kept are a prefill of their own. A request that keeps its
last k rows has k new tokens, and all others are its prefix: the layers before have written their
KV. So the backend's own ``init_forward_metadata`` can make the metadata. A request that keeps no
row is not in the cut batch.

SGLang's metadata make the host wait for the GPU: the length of a sliding layer's list is read from
it. Before the first layer the GPU would idle while the host makes them, and behind some layers the
host would wait until they are computed, and then the GPU for the host. So they are made once, on a
stream of their own, when some layers have been launched (``AT``). That stream waits only for what
was launched before the first layer, and the first cut layer for that stream.

If every request keeps one row, a decode batch is made instead on some backends
(``Adapter.decode_is_spread``: triton), because a decode step is just that: one new token behind all
others. Such a decode kernel spreads a request's KV over the GPU, while the prefill kernel goes
through it in one program. (With E2B on a H200 and 4 prompts of 7000 tokens that took 30 of 278 ms.)

It works with every backend for which the adapter names the buffers behind the metadata
(``Adapter.views``), alone or as the prefill side of a hybrid.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from g4debug.backends import adapter_of, adapters, names, phases
from g4debug.backends.aside import come_back, every_layer
from g4debug.fixes.paths.yoco_fast_prefill import forwards
from g4debug.fixes.triton_decode_window import whole_window

AT = 2  # the layer before which the metadata are made; two keep a GPU busy for some milliseconds
_streams: dict[torch.device, Any] = {}


class Cut:
    """The cut of one forward. rows: int64 [kept], the rows of the batch that go on.

    kept: how many rows of each request go on. first: the first KV-shared layer. rows and batch are
    there after ``prepare``, which is called before layer ``at``; batch is None if no row goes on.
    ``enter`` is called at the first KV-shared layer, and ``leave`` at the end of the forward, also
    after an exception. given_up: why all rows go on after all, '' if the cut is made.
    """

    def __init__(self, forward_batch: Any, kept: list[int], first: int) -> None:
        self.first = first
        self.full = forward_batch
        self.backend = prefill_backend(forward_batch)
        self.batch: Any = None
        self.entered = False
        self.given_up = ""
        self.positions: torch.Tensor | None = None
        self._put_back = ExitStack()
        self._kept = kept
        self.prepared = not any(kept)
        self.at = min(AT, first)
        self._made: Any = None  # the event that the first cut layer waits for
        self._begun: Any = None
        if forward_batch.positions.is_cuda and not self.prepared:
            self._begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._begun.record()

    def prepare(self) -> None:
        """Make the batch and the metadata of the rows that go on. Some layers were launched."""
        if self._begun is None:
            self._prepare()
        else:
            device = self.full.positions.device
            stream = _streams.get(device)
            if stream is None:  # its small kernels go before the blocks of large ones that wait
                stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
                _streams[device] = stream
            # What is allocated on this stream is freed when the forward has been launched, and
            # given out again behind the begin of a later one: by then nobody reads it.
            stream.wait_event(self._begun)
            with torch.cuda.stream(stream):
                self._prepare()
                self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._made.record()
        self.prepared = True

    def _prepare(self) -> None:
        kept = self._kept
        self.rows, self.batch = cut_batch(self.full, kept)
        adapter = adapter_of(self.backend)
        if max(kept) == 1 and adapter is not None and adapter.decode_is_spread:
            as_decode(self.batch)
        forwards.plan_slots(self.backend, self.batch)
        with every_layer(self.backend):
            self.metadata = cut_metadata(self.backend, self.batch)
        mask = getattr(self.backend.forward_metadata, "custom_mask", None)
        # A single row attends to itself and to all before it, so it needs no mask.
        if mask is not None and max(kept) > 1:
            cut_mask(self.backend.forward_metadata, self.metadata, self.full, kept)

    def enter(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Let the layers use the cut metadata. Returns the rows [kept, hidden] that go on.

        If the layer before has not added up its output, all rows go on; see ``given_up``.
        """
        if not forwards.is_whole(hidden_states, self.full):
            self.given_up = "a layer leaves a sum to the next one, and rows of it cannot be taken"
            return hidden_states
        self.entered = True
        if self._made is not None:
            torch.cuda.current_stream().wait_event(self._made)
        if self.batch is None:
            # Keep one row, so that the kernel of the final norm does not get an empty tensor.
            kept = hidden_states[:1]
        else:
            self._put_back.callback(
                setattr, self.backend, "forward_metadata", self.backend.forward_metadata
            )
            self.backend.forward_metadata = self.metadata
            come_back(self.backend)
            # A hybrid backend would give a decode step to its other half.
            self._put_back.enter_context(forwards.attention_on(self.backend, self.batch))
            self.positions = positions[self.rows]
            kept = hidden_states[self.rows]
        forwards.leave_residual(kept, self.full, self.batch)
        return kept

    def leave(self) -> None:
        """Put SGLang's own metadata and context back. A second call does nothing."""
        self._put_back.close()

    def scatter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Put [kept, hidden] back into [all rows, hidden]. Rows that nobody reads are zero."""
        whole = hidden_states.new_zeros(len(self.full.positions), *hidden_states.shape[1:])
        if self.batch is not None:
            whole[self.rows] = hidden_states
        return whole


def prefill_backend(forward_batch: Any) -> Any:
    """The backend that runs this prefill's attention."""
    return phases.selected(forwards.backend_of(forward_batch), forward_batch.forward_mode)


def unsupported(backend: Any) -> str:
    """Why the metadata of ``backend`` cannot be cut; '' if they can."""
    adapter = adapter_of(backend)
    if adapter is None or adapter.views is None:
        fit = names(a for a in adapters() if a.views is not None)
        return f"prefill attention is {type(backend).__name__}, not {fit}"
    if getattr(backend, "enable_deterministic", False):
        return "deterministic inference"  # its kernel takes the SWA slots of all rows
    if forwards.moves_slots(backend):
        return "KV pools that share their memory"
    return ""


def cut_batch(forward_batch: Any, kept: list[int]) -> tuple[torch.Tensor, Any]:
    """The rows that are kept (int64, on the batch's device) and a ForwardBatch of them.

    It is a shallow copy; ``forward_batch`` is not changed.
    """
    b = forward_batch
    old = [int(n) for n in b.extend_prefix_lens_cpu]
    new = [int(n) for n in b.extend_seq_lens_cpu]
    who = [i for i, k in enumerate(kept) if k]
    rows: list[int] = []
    end = 0
    for n, k in zip(new, kept, strict=True):
        end += n
        rows += range(end - k, end)
    extend = [kept[i] for i in who]
    prefix = [old[i] + new[i] - kept[i] for i in who]
    starts = [sum(extend[:i]) for i in range(len(extend))]
    # This is one copy to the device, and the host does not wait for it.
    packed = torch.tensor(rows + who + extend + prefix + starts, dtype=torch.int64)
    if b.positions.is_cuda:
        packed = packed.pin_memory()
    packed = packed.to(b.positions.device, non_blocking=True)
    parts = torch.split(packed, [len(rows)] + 4 * [len(who)])
    at, index = parts[0], parts[1]

    cut = copy.copy(b)
    cut.batch_size = len(who)
    lengths = ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc")
    for name, values in zip(lengths, parts[2:], strict=True):
        before = getattr(b, name)
        setattr(cut, name, values if before is None else values.to(before.dtype))
    cut.extend_seq_lens_cpu, cut.extend_prefix_lens_cpu = extend, prefix
    cut.extend_num_tokens = len(rows)
    for name in ("num_token_non_padded_cpu", "global_num_token_non_padded_cpu"):
        if hasattr(b, name):
            setattr(cut, name, len(rows))
    cut.extend_logprob_start_lens_cpu = None
    cut.return_logprob = False
    for name in ("input_ids", "positions", "out_cache_loc", "out_cache_loc_swa"):
        _select(cut, name, at)
    if len(who) < len(kept):
        for name in ("req_pool_indices", "seq_lens", "orig_seq_lens"):
            _select(cut, name, index)
        for name in ("seq_lens_cpu", "req_pool_indices_cpu"):
            _select(cut, name, torch.tensor(who))
        for name in ("rids", "mm_inputs", "lora_ids"):
            values = getattr(b, name)
            setattr(cut, name, None if values is None else [values[i] for i in who])
    cut.seq_lens_sum = sum(old[i] + new[i] for i in who)
    return at, cut


def as_decode(batch: Any) -> None:
    """Turn a cut batch in which each request has one row into a decode step."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch.forward_mode, batch.spec_info = ForwardMode.DECODE, None


def _select(batch: Any, name: str, at: torch.Tensor) -> None:
    tensor = getattr(batch, name, None)
    if tensor is not None:
        setattr(batch, name, tensor[at])


def cut_metadata(backend: Any, batch: Any) -> Any:
    """The metadata from ``backend.init_forward_metadata(batch)``. The backend is not changed."""
    before, adapter = dict(vars(backend)), adapter_of(backend)
    assert adapter is not None
    try:
        for name in adapter.views or ():
            if before.get(name) is not None:
                setattr(backend, name, torch.zeros_like(before[name]))
        # In a decode SGLang's triton backend reads one key less of the window than in a prefill.
        # The answer has to equal the prefill's. See TRIAGE.md, 'The triton backend decodes with one
        # key less than the window'.
        with whole_window(backend) if batch.forward_mode.is_decode() else nullcontext():
            backend.init_forward_metadata(batch)
        return backend.forward_metadata
    finally:
        vars(backend).update(before)


def cut_mask(full: Any, cut: Any, batch: Any, kept: list[int]) -> None:
    """The kept rows of the mask for image tokens (``prepare_attn_masks`` of gemma4_mm).

    The flat mask has new x (prefix + new) cells for each request. Its columns stay the same.
    """
    pieces, ends, begin = [], [0], 0
    lengths = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, kept, strict=True)
    for old, new, k in lengths:
        width = int(old) + int(new)
        end = begin + int(new) * width
        if k:
            pieces.append(full.custom_mask[end - k * width : end])
            ends.append(ends[-1] + k * width)
        begin = end
    cut.custom_mask = torch.cat(pieces)
    cut.mask_indptr = torch.tensor(
        ends, dtype=full.mask_indptr.dtype, device=full.mask_indptr.device
    )
