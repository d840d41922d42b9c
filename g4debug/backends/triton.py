"""The lists that SGLang's ``triton`` backend hands to an attention kernel, and where they are.

``TritonAttnBackend.forward_decode`` and ``forward_extend`` give a kernel lists of tokens from the
backend's ``forward_metadata``: a sliding layer ``window_kv_indptr`` and ``window_kv_indices``, any
other layer ``kv_indptr`` and ``kv_indices``. With a SWA pool the window's entries are token indices
of that pool in every release.

How many tokens of each row are listed depends on the mode, and on what the backend was told when
it built the metadata: a prefill lists its prefix, and so does the extend of a draft (EAGLE) in each
verify step; a decode the whole sequence, a verify the sequence without the draft's tokens, and a
step of a multi-step draft also what that draft has made so far. So it is noted when the metadata
are built: which rows, how long, which window. In a CUDA graph these are static buffers, which
SGLang fills in before each replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from g4debug.backends.aside import Aside
from g4debug.backends.base import Guarding, ListAdapter, Sites
from g4debug.backends.handed_over import TokenLists
from g4debug.hooking import targets
from g4debug.hooking.targets import CPU, H200

if TYPE_CHECKING:
    import torch


# The fix triton-decode-window leaves here, on a backend, how many keys a decode lists.
DECODE_KEYS = "g4debug_decode_keys"
OTHER_LISTS = "with --enable-deterministic-inference sliding layers prefill with other lists"
_BUILT = "g4debug_built"  # attribute of SGLang's metadata


@dataclass(frozen=True)
class Built:
    """The inputs from which the metadata of a forward were built.

    indices: [rows], the row of ``req_to_token`` of each row. lengths: [rows]; row r has
    ``lengths[r] + extra`` tokens. window: of a sliding layer, -1 if there is none. verify: the rows
    have a mask. why: why the lists are not judged; '' if they are.
    """

    indices: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    extra: int = 0
    window: int = -1
    verify: bool = False
    why: str = ""


class Triton(ListAdapter):
    name = "triton"
    built = "attn.triton.init"
    sites = (
        "attn.triton.metadata",
        "attn.triton.metadata_capture",
        "attn.triton.metadata_replay",
        "attn.triton.multi_step",
        "attn.triton.decode",
        "attn.triton.extend",
    )
    metadata = "attn.triton.metadata"
    replay = "attn.triton.metadata_replay"
    run: ClassVar = {
        "0.5.12.post1": (CPU, H200),
        "0.5.15.post1": (CPU, H200),
        "0.5.23": (CPU, H200),
    }
    views = ("kv_indptr", "window_kv_indptr", "qo_indptr", "mask_indptr")
    lengths_on_device = True
    decode_is_spread = True
    kernels: ClassVar = {
        "_fwd_kernel_stage1": "x",
        "_fwd_grouped_kernel_stage1": "x",
        "_fwd_kernel_stage2": "x",
        "_fwd_kernel": "x",
        "_fwd_kernel_unified": "x",
    }

    def __init__(self) -> None:
        # By id() of a backend of a multi-step draft: its number, topk, and the draft's own window.
        self._step: dict[int, tuple[int, int, int]] = {}

    def install(self, context: Sites, guard: Guarding) -> None:
        aside = Aside("forward_extend", "attn.triton.extend", context.own)

        def after_metadata(result: Any, backend: Any, forward_batch: Any) -> Any:
            aside.begin(backend, forward_batch.forward_mode.name)
            self.note(backend, forward_batch, captured=False)
            layers = guard.layers_of(backend)
            if layers:
                judge = partial(self.hand_over_ahead, backend, layers, forward_batch, guard)
                lists = self.all_lists(backend, None).values()
                aside.ahead(backend, judge, (of[0] for of in lists))
            return result

        def after_capture(
            result: Any,
            backend: Any,
            bs: int,
            num_tokens: int,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            encoder_lens: Any,
            forward_mode: Any,
            spec_info: Any,
        ) -> Any:
            batch = SimpleNamespace(
                forward_mode=forward_mode,
                req_pool_indices=req_pool_indices,
                seq_lens=seq_lens,
                spec_info=spec_info,
            )
            aside.begin(backend)
            self.note(backend, batch, captured=True)
            return result

        def after_out_graph(
            result: Any, backend: Any, forward_batch: Any, in_capture: bool = False
        ) -> Any:
            aside.begin(backend)
            if in_capture:
                self.note(backend, forward_batch, captured=True)
            return result

        def after_multi_step(result: Any, draft: Any, *args: Any, **kwargs: Any) -> Any:
            window = int(getattr(draft, "draft_window_size", 0) or 0)
            for step, backend in enumerate(draft.attn_backends):
                self._step[id(backend)] = step, int(draft.topk), window
            guard.judged_in_part(draft.attn_backends, ("draft",))
            return result

        def before_attention(
            backend: Any,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if self.hand_over(backend, layer, forward_batch, guard):
                aside.again(backend)
            else:
                lists = self.all_lists(backend, None).values()
                aside.judged(backend, self.entries_of(backend, layer), (of[0] for of in lists))

        context.after("attn.triton.metadata", after_metadata)
        if targets.captures_apart():
            context.after("attn.triton.metadata_capture", after_capture)
        else:
            context.after("attn.triton.metadata_replay", after_out_graph)
        context.after("attn.triton.multi_step", after_multi_step)
        context.before("attn.triton.decode", before_attention)
        context.before("attn.triton.extend", before_attention)

    def left_out(self, backend: Any, model_runner: Any) -> Iterator[tuple[str, Iterable[str]]]:
        yield from super().left_out(backend, model_runner)
        slides = (getattr(backend, "sliding_window_size", None) or 0) > 0
        if slides and getattr(backend, "enable_deterministic", False):
            yield OTHER_LISTS, ("prefill",)

    def indices(self, backend: Any, batch: Any) -> torch.Tensor | None:
        return built(backend.forward_metadata).indices

    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        """A verify's lists hold the tokens of the sequence, without the draft's tokens."""
        metadata = backend.forward_metadata
        return int(backend.get_cuda_graph_seq_len_fill_value()) + built(metadata).extra

    def handed_at(self, batch: Any) -> str:
        decode = batch.forward_mode.name in ("DECODE", "IDLE")
        return "attn.triton.decode" if decode else "attn.triton.extend"

    def all_lists(self, backend: Any, static: int | None) -> dict[str, tuple[Any, Any]]:
        if static is None:
            m = backend.forward_metadata
            full, window = (m.kv_indices, m.kv_indptr), (m.window_kv_indices, m.window_kv_indptr)
            return {"full": full, "window": window}
        found = {"full": (backend.cuda_graph_kv_indices, backend.kv_indptr[: static + 1])}
        if backend.window_kv_indptr is not None:
            starts = backend.window_kv_indptr[: static + 1]
            found["window"] = backend.cuda_graph_window_kv_indices, starts
        return found

    def note(self, backend: Any, batch: Any, captured: bool) -> None:
        mode, spec_info = batch.forward_mode, batch.spec_info
        lengths, extra, why = batch.seq_lens, 0, ""
        if mode.is_decode_or_idle():
            if getattr(spec_info, "kv_indptr", None) is not None:
                step, topk, cut = self._step.get(id(backend), (0, 0, 0))
                extra = step + 1
                if cut > 0:
                    why = "--speculative-draft-window-size cuts its lists"
                elif captured:
                    why = "in a CUDA graph, of padding rows it is not known how much is listed"
                elif topk != 1:
                    why = "with more than one branch its lists are not those of a request"
                why = why and f"a multi-step draft: {why}"
        elif not mode.is_target_verify():
            # A draft extend is listed as a prefill is: the sequence before its own tokens.
            lengths = getattr(batch, "extend_prefix_lens", None)
            extends = mode.name.startswith("DRAFT_EXTEND")
            if captured or (extends and not targets.lists_draft_extend()):
                lengths = None
                why = "a draft with KV of its own, or a mode in a CUDA graph, that was never run"
            elif lengths is None:
                why = "a prefill without the lengths of its prefixes"
        if int(getattr(backend, "dcp_size", 1) or 1) > 1:
            why = "with decode context parallelism each rank has a part of the lists"
        window = getattr(backend, "sliding_window_size", None) or 0
        if mode.is_decode_or_idle() and extra == 0:
            window = decode_keys(backend) or 0
        found = Built(
            batch.req_pool_indices,
            lengths,
            extra,
            int(window) if window > 0 else -1,
            bool(mode.is_target_verify()),
            why,
        )
        setattr(backend.forward_metadata, _BUILT, found)

    def entries_of(self, backend: Any, layer: Any) -> torch.Tensor | None:
        metadata = backend.forward_metadata
        found: torch.Tensor | None = (
            metadata.window_kv_indices if _slides(layer) else metadata.kv_indices
        )
        return found

    def lists(self, backend: Any, layer: Any, guard: Guarding) -> TokenLists | None:
        metadata = backend.forward_metadata
        of = built(metadata)
        sliding = _slides(layer)
        indices: Any = self.entries_of(backend, layer)
        indptr = metadata.window_kv_indptr if sliding else metadata.kv_indptr
        why = of.why
        if sliding and getattr(metadata, "aligned_window_kv_indices", None) is not None:
            why = OTHER_LISTS
        if not why and (indptr is None or indices is None):
            why = f"it has no list for {'sliding' if sliding else 'full'} layers"
        if not why and (of.lengths is None or of.lengths.shape[0] < indptr.shape[0] - 1):
            why = "it is not known from which lengths they were made"
        if not why and not (indptr.is_contiguous() and indices.is_contiguous()):
            why = "they are not contiguous"
        if why:
            self.leave_out(backend, guard, why)
            return None
        mask, starts = metadata.custom_mask, metadata.mask_indptr
        masked = of.verify and mask is not None and starts is not None
        return TokenLists(
            indices=indices,
            indptr=indptr,
            lengths=of.lengths,  # type: ignore[arg-type]
            extra=of.extra,
            window=of.window if sliding else -1,
            splits=metadata.num_kv_splits,
            max_splits=int(backend.max_kv_splits),
            offsets=metadata.window_kv_offsets if sliding else None,
            mask_starts=starts if masked else None,
            mask_size=int(mask.shape[0]) if masked else 0,
            queries=int(metadata.max_extend_len) if masked else 0,
        )


def decode_keys(backend: Any) -> int | None:
    """How many keys of the window a TritonAttnBackend lists for a decode; None without a window.

    The number is the radius that SGLang gave it, and one more with the fix triton-decode-window.
    """
    found: int | None = getattr(backend, DECODE_KEYS, None) or backend.sliding_window_size
    return found if found is not None and found > 0 else None


def _slides(layer: Any) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


def built(metadata: Any) -> Built:
    """The inputs from which these metadata were built."""
    found = getattr(metadata, _BUILT, None)
    return found if found is not None else Built(why="they were built by somebody else")


ADAPTER = Triton()
