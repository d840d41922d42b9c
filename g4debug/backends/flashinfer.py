"""The lists that SGLang's ``flashinfer`` backend hands to FlashInfer's wrappers.

A wrapper is planned with the lists of a forward before its first layer, and keeps them:
``_paged_kv_indptr_buf`` and ``_paged_kv_indices_buf`` are what its kernel reads at each layer, with
pages of one token on any server. A model with sliding layers has two wrappers, the first for these
layers. In a CUDA graph the two are static buffers, which SGLang fills in before each replay.

How much of a row is listed depends on the phase, and W is the window, as SGLang counts it, without
the query itself (flashinfer_backend.py, ``update_sliding_window``)::

    decode                    all tokens                  sliding: the last W + 1
    prefill, ragged           the prefix                  sliding: the last W of the prefix
    prefill, all from pages   all tokens                  sliding: the last W + the new ones

In a ragged prefill the new tokens come to the kernel as K and V. Without a prefix nothing else
does, and no list is handed over. In a prefill from pages (a model with images, a piecewise CUDA
graph, deterministic inference) the sliding lists differ in their window from row to row, so they
are not judged. Neither is what a plan has beside the lists: it is made on the host, and says how
the work is cut. Verify, drafts and prefills in a CUDA graph were never run and are not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from g4debug.backends.base import Guarding, ListAdapter, Sites, never_run
from g4debug.backends.handed_over import TokenLists
from g4debug.hooking import targets
from g4debug.hooking.targets import CPU, H100

if TYPE_CHECKING:
    import torch

SPECIAL = "an encoder, scoring of several items or a diffusion model reads in other ways"
COPY_IN = "a {} reads a copy of its KV, with places of its own"
OF_EACH_ROW = "in a prefill from pages a sliding layer's lists have a window for each row"
# Fields of SGLang's backend. If one of them is set, a prefill reads its new tokens from pages, too.
FROM_PAGES = ("is_multimodal", "enable_mis", "enable_deterministic", "use_paged")
_PLANNED = "g4debug_planned"  # attribute of SGLang's metadata


@dataclass(frozen=True)
class Planned:
    """The inputs from which the lists of a forward were made.

    indices: [rows], the row of ``req_to_token`` of each row. lengths: [rows], how many tokens each
    row has. window: how many of them a sliding layer's list has at most, -1 if that is not one
    number. why: why the lists are not judged; '' if they are.
    """

    indices: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    window: int = -1
    why: str = ""


class FlashInfer(ListAdapter):
    name = "flashinfer"
    built = "attn.flashinfer.init"
    sites = ("attn.flashinfer.metadata", "attn.flashinfer.decode", "attn.flashinfer.extend")
    metadata = "attn.flashinfer.metadata"
    replay = "attn.flashinfer.metadata_replay"
    phases = ("prefill", "decode")
    unknown_modes = ("SPLIT_PREFILL", "DLLM_EXTEND")
    run: ClassVar = {"0.5.15.post1": (CPU,), "0.5.23": (CPU, H100)}

    def __init__(self) -> None:
        self._windows: dict[int, int | None] = {}  # by id() of a backend: SGLang's window

    def install(self, context: Sites, guard: Guarding) -> None:
        def after_metadata(result: Any, backend: Any, forward_batch: Any) -> Any:
            if not self.is_inherited_by(backend):
                self.note(backend, forward_batch, captured=False)
            return result

        def after_out_graph(
            result: Any, backend: Any, forward_batch: Any, in_capture: bool = False
        ) -> Any:
            if in_capture and not self.is_inherited_by(backend):
                self.note(backend, forward_batch, captured=True)
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
            if self.is_inherited_by(backend):
                return
            if self.reads_no_list(backend, forward_batch, guard):
                guard.reads_nothing()
                return
            self.hand_over(backend, layer, forward_batch, guard)

        context.after(self.metadata, after_metadata)
        if not targets.captures_apart():  # before that, nothing of a graph is known, nor judged
            context.after(self.replay, after_out_graph)
        for site in self.sites[1:]:
            context.before(site, before_attention)

    def learn(self, backend: Any, model_runner: Any, guard: Guarding) -> bool:
        self._windows[id(backend)] = getattr(model_runner, "sliding_window_size", None)
        return super().learn(backend, model_runner, guard)

    def left_out(self, backend: Any, model_runner: Any) -> Iterator[tuple[str, Iterable[str]]]:
        yield from super().left_out(backend, model_runner)
        if self.is_special(backend):
            yield SPECIAL, self.phases
        for phase in self.phases:
            if getattr(backend, f"{phase}_uses_dequant_workspace", False):
                yield COPY_IN.format(phase), (phase,)
        slides = self._windows.get(id(backend)) is not None
        if slides and any(getattr(backend, name, False) for name in FROM_PAGES):
            yield OF_EACH_ROW, ("prefill",)

    def indices(self, backend: Any, batch: Any) -> torch.Tensor | None:
        return planned(backend.forward_metadata).indices

    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        """Before each replay SGLang resets the lengths of the padding rows, not their requests."""
        return int(backend.get_cuda_graph_seq_len_fill_value())

    def handed_at(self, batch: Any) -> str:
        return self.sites[1 if batch.forward_mode.name in ("DECODE", "IDLE") else 2]

    def reads_no_list(self, backend: Any, batch: Any, guard: Guarding | None = None) -> bool:
        """True if the kernels of this forward get all that they read as K and V."""
        metadata = backend.forward_metadata
        return bool(
            getattr(metadata, "use_ragged", False) and getattr(metadata, "extend_no_prefix", False)
        )

    def wrappers(self, metadata: Any) -> list[Any]:
        """Those that attend in a forward: one, or one for sliding layers and one for the others."""
        found = getattr(metadata, "decode_wrappers", None)
        return list(getattr(metadata, "prefill_wrappers", ()) if found is None else found)

    def wrapper(self, backend: Any, layer: Any) -> tuple[Any, bool]:
        """(the wrapper that attends for this layer, whether it is the one of sliding layers)."""
        found = self.wrappers(backend.forward_metadata)
        at = int(backend._get_wrapper_idx(layer))
        return found[at], len(found) == 2 and at == 0

    def entries(self, wrapper: Any) -> torch.Tensor | None:
        """The entries of the lists that a wrapper was planned with."""
        found: torch.Tensor | None = getattr(wrapper, "_paged_kv_indices_buf", None)
        return found

    def begins(self, backend: Any, wrapper: Any, rows: int | None) -> torch.Tensor | None:
        """Where the lists of so many rows begin, [rows + 1]; None for those of the plan."""
        found: torch.Tensor | None = getattr(wrapper, "_paged_kv_indptr_buf", None)
        return found

    def all_lists(self, backend: Any, static: int | None) -> dict[str, tuple[Any, Any]]:
        """Of a graph, those of a decode."""
        if static is not None:
            found = self.in_graphs(backend, static)
        elif self.reads_no_list(backend, None):
            found = []
        else:
            found = self.wrappers(backend.forward_metadata)
        names = ("window", "full") if len(found) == 2 else ("full",)
        return {
            name: (self.entries(wrapper), self.begins(backend, wrapper, static))
            for name, wrapper in zip(names, found, strict=False)
        }

    def in_graphs(self, backend: Any, rows: int) -> list[Any]:
        """The wrappers of the CUDA graph of a decode with so many rows."""
        return list(backend.decode_cuda_graph_metadata.get(rows, ()))

    def note(self, backend: Any, batch: Any, captured: bool) -> None:
        mode = batch.forward_mode.name
        metadata, size = backend.forward_metadata, self._windows.get(id(backend))
        lengths, window, why = batch.seq_lens, -1, ""
        if mode in ("DECODE", "IDLE"):
            window = -1 if size is None else size + 1
            if batch.spec_info is not None:
                why = "a decode of a draft was never run with it"
            elif getattr(backend, "decode_uses_dequant_workspace", False):
                why = COPY_IN.format("decode")
        elif mode in ("EXTEND", "MIXED"):
            if captured:
                why = "a prefill in a CUDA graph was never run with it"
            elif getattr(backend, "prefill_uses_dequant_workspace", False):
                why = COPY_IN.format("prefill")
            elif self.is_ragged(metadata):
                lengths, window = batch.extend_prefix_lens, -1 if size is None else size
        else:
            why = never_run(mode)
        if self.is_special(backend):
            why = SPECIAL
        setattr(metadata, _PLANNED, Planned(batch.req_pool_indices, lengths, window, why))

    def is_ragged(self, metadata: Any) -> bool:
        """True if a prefill lists its prefix only."""
        return bool(metadata.use_ragged)

    def is_special(self, backend: Any) -> bool:
        """True if the lists of this server follow other rules."""
        reason = getattr(getattr(backend, "dispatch_reason", None), "name", "")
        features = ("enable_mis", "is_dllm_model")
        return reason == "CROSS_ATTENTION" or any(getattr(backend, f, False) for f in features)

    def entries_of(self, backend: Any, layer: Any) -> torch.Tensor | None:
        return self.entries(self.wrapper(backend, layer)[0])

    def lists(self, backend: Any, layer: Any, guard: Guarding) -> TokenLists | None:
        wrapper, sliding = self.wrapper(backend, layer)
        of = planned(backend.forward_metadata)
        rows = 0 if of.lengths is None else of.lengths.shape[0]
        indices, indptr = self.entries(wrapper), self.begins(backend, wrapper, rows)
        why = of.why
        if not why and sliding and of.window < 0:
            why = OF_EACH_ROW
        if not why and (indices is None or indptr is None):
            why = "this release of FlashInfer keeps them elsewhere"
        if indices is None or indptr is None or of.lengths is None:
            why = why or "it is not known from which lengths they were made"
        elif not why and of.lengths.shape[0] < indptr.shape[0] - 1:
            why = "it is not known from which lengths they were made"
        elif not why and not (indptr.is_contiguous() and indices.is_contiguous()):
            why = "they are not contiguous"
        elif not why and indptr.device != of.lengths.device:
            why = "they are on another device than the lengths"
        if why:
            self.leave_out(backend, guard, why)
            return None
        return TokenLists(
            indices=indices,  # type: ignore[arg-type]
            indptr=indptr,  # type: ignore[arg-type]
            lengths=of.lengths,  # type: ignore[arg-type]
            window=of.window if sliding else -1,
        )


def planned(metadata: Any) -> Planned:
    """The inputs from which the lists of these metadata were made."""
    found = getattr(metadata, _PLANNED, None)
    return found if found is not None else Planned(why="they were planned by somebody else")


ADAPTER = FlashInfer()
