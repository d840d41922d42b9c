"""The adapter: the one file that knows an attention backend of SGLang.

An adapter declares everything that the rest of g4debug has to know of its backend, so that nothing
else names a backend. What a backend hands to a kernel has one of two shapes
(:mod:`g4debug.backends.handed_over`): an adapter is a :class:`TableAdapter` or a
:class:`ListAdapter`. The check, the repair and the report of a hand-over depend on the shape only.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from g4debug.backends.handed_over import PageTable
from g4debug.hooking import targets
from g4debug.hooking.resolved import server_argument

if TYPE_CHECKING:
    import torch

    from g4debug.backends.handed_over import TokenLists
    from g4debug.settings import Settings

logger = logging.getLogger("g4debug")


PHASES = ("prefill", "decode", "verify", "draft")  # of serving
# What makes SGLang run forwards of these modes.
_MODES = {
    "MIXED": "enable_mixed_chunk",
    "SPLIT_PREFILL": "enable_pdmux",
    "DLLM_EXTEND": "dllm_algorithm",
}


class Sites(Protocol):
    """Where an adapter puts its hooks: a tracer's context, which isolates them."""

    def before(self, site: str, hook: Callable[..., None]) -> None: ...

    def after(self, site: str, hook: Callable[..., Any]) -> None: ...

    def replace(self, site: str, name: str, hook: Callable[..., Any]) -> None: ...

    def own(self, site: str) -> Callable[..., Any] | None: ...


class Guarding(Protocol):
    """The tracer, as an adapter calls it at a hand-over."""

    def again(self, table: torch.Tensor, backend: Any, layer: Any) -> torch.Tensor | None:
        """The table for the kernel, if this one was checked for another layer of the forward.

        None if it was not. It is asked at each layer, so it must cost next to nothing.
        """
        ...

    def page_table(
        self, adapter: Adapter, handed: PageTable, backend: Any, layer: Any, batch: Any
    ) -> torch.Tensor:
        """A layer's page table goes to its kernel. Returns the one that the kernel gets."""
        ...

    def listed(self, indices: torch.Tensor, backend: Any, layer: Any) -> bool:
        """True if these entries of lists were checked for another layer of the forward.

        It is asked at each layer, so it must cost next to nothing.
        """
        ...

    def token_lists(
        self, adapter: Adapter, lists: TokenLists, backend: Any, layer: Any, batch: Any
    ) -> None:
        """A layer's lists go to its kernel. Entries that the kernel must not read are replaced."""
        ...

    def layers_of(self, backend: Any) -> Sequence[Any]:
        """A layer for each list of this backend, if they may be checked before a forward's layers.

        Then what is changed in them between their making and a layer is not seen.
        """
        ...

    def judged_in_part(self, backends: Iterable[Any], phases: Iterable[str] = PHASES) -> None:
        """Some forwards of these backends in these phases are not judged.

        The log names each when it comes.
        """
        ...

    def not_guarded(self, what: str, why: str) -> None:
        """Something is handed over that this adapter cannot judge. It is said once."""
        ...

    def reads_nothing(self) -> None:
        """The kernel of this forward gets all that it reads as K and V: there is nothing to judge.

        It is asked at each layer, as is ``listed``.
        """
        ...


class Adapter(ABC):
    """One attention backend. Its sites are names in :data:`g4debug.hooking.targets.SITES`.

    name: the backend's name on SGLang's command line. unknown_modes: those of a prefill that were
        never run with it, and are not judged.
    built: the site of its constructor, which gets (backend, model_runner, ...).
    needs: a module without which SGLang cannot import the backend, '' if any SGLang can.
    releases: those whose backend is as it is known here, as a version specifier; on others it is
        not hooked.
    sites: the sites at which ``install`` puts hooks.
    fused_writes: sites of functions that give locations to a kernel which writes KV itself, past
        "kv.set": (backend, layer, forward_batch) -> tensor.
    metadata: the site at which the metadata of a forward are made outside of CUDA graphs.
    replay: the site at which the static buffers of a CUDA graph are filled in before a replay, ''
        if it has no CUDA graphs.
    in_graph: the site at which a CUDA graph fills in buffers itself, '' if none on this release.
    phases: the phases of serving in which its hand-overs are judged.
    run: SGLang's release -> where page-table was run with this backend, as in ``targets.RUN``.
    views: the attributes of the backend that hold the buffers behind the metadata outside of CUDA
        graphs, because the metadata are views of them; None if nobody has looked.
    lengths_on_device: its kernels take the length of each request from the device, so the host can
        plan a forward with a bound.
    decode_is_spread: its decode kernel spreads one request's KV over the GPU, and its prefill
        kernel does not.
    kernels: the name of each of its attention kernels -> the axis of the grid ("x", "y" or "z")
        on which a block's place is its row of the batch; where the axis also counts the heads of a
        KV cache, these are the inner ones.
    without_swa: the values of the backend's fields if it takes its KV pool for one without SWA; {}
        if it has no such fields.
    """

    name: str
    hands: str  # what it hands over, a plural
    unknown_modes: tuple[str, ...] = ()
    built: str
    needs: str = ""
    releases: str = ""
    sites: tuple[str, ...]
    fused_writes: tuple[str, ...] = ()
    metadata: str
    replay: str = ""
    in_graph: str = ""
    phases: tuple[str, ...] = PHASES
    run: ClassVar[Mapping[str, tuple[str, ...]]]
    views: tuple[str, ...] | None = None
    lengths_on_device: bool = False
    decode_is_spread: bool = False
    kernels: ClassVar[Mapping[str, str]] = {}
    without_swa: ClassVar[Mapping[str, Any]] = {}

    def is_there(self) -> bool:
        """True if SGLang can import this backend here.

        A wheel for another GPU or another CUDA fails with many kinds of errors. SGLang tells them
        to whoever asks for the backend; a server that runs another one has none of them.
        """
        if not targets.is_for(self.releases):
            return False
        try:
            return not self.needs or importlib.util.find_spec(self.needs) is not None
        except Exception as e:
            logger.debug("g4debug: SGLang cannot import the backend %s: %r", self.name, e)
            return False

    @abstractmethod
    def install(self, context: Sites, guard: Guarding) -> None:
        """Put hooks at the hand-overs."""

    def called(self, backend: Any) -> str:
        """The name of this very backend. A class that serves two of SGLang's has two."""
        return self.name

    def is_inherited_by(self, backend: Any) -> bool:
        """True for an object of a class that inherits from this backend's.

        Such a class has an adapter of its own, or none. It runs the code of this one in part, and
        so passes the sites of this adapter, with other lists and tables.
        """
        kind: Any = type(backend)
        return targets.path(self.built) in _constructors_above(kind)

    def is_judged(self, settings: Settings, on_cpu: bool) -> bool:
        """True if what this backend hands over is judged here.

        Where page-table was never run with it, a finding must not do more than be reported. on_cpu:
        SGLang runs on the CPU engine.
        """
        places = self.run.get(str(targets.sglang_version()), ())
        return settings.takes_the_risk or targets.ran_on(places, on_cpu)

    def learn(self, backend: Any, model_runner: Any, guard: Guarding) -> bool:
        """A backend was built. False if entries cannot be compared with ``req_to_token``."""
        for why, phases in self.left_out(backend, model_runner):
            self.leave_out(backend, guard, why, phases)
        translator = getattr(backend, "kv_index_translator", None)
        moves = getattr(backend, "_translate_kv_loc", None) is not None or bool(
            getattr(translator, "is_translating", False)
        )
        if moves:
            guard.not_guarded(
                f"what {self.name} hands over for ranges only",
                "the KV pools share their memory (unified memory pool), so a kernel gets other "
                "places than req_to_token has",
            )
        return not moves

    def left_out(self, backend: Any, model_runner: Any) -> Iterator[tuple[str, Iterable[str]]]:
        """Why some forwards of a backend will not be judged on this server, and in which phases."""
        args = getattr(model_runner, "server_args", None)
        for mode in self.unknown_modes:
            if server_argument(args, _MODES[mode]):
                yield never_run(mode), ("prefill",)
        config = getattr(model_runner, "model_config", None)
        if getattr(config, "is_local_attention_model", False):
            yield CHUNKS, self.phases

    def leave_out(
        self, backend: Any, guard: Guarding, why: str, phases: Iterable[str] = PHASES
    ) -> None:
        """Some of what a backend hands over in these phases is not judged."""
        guard.judged_in_part([backend], phases)
        guard.not_guarded(f"some of {self.name}'s {self.hands} are not judged", why)

    def note(self, backend: Any, batch: Any, captured: bool) -> None:
        """The backend has made its metadata for this ForwardBatch. captured: for a CUDA graph."""
        return

    def page_size(self, backend: Any, model_runner: Any) -> int:
        """Tokens in a page of the KV pools. model_runner: None if it is not known."""
        found = getattr(backend, "page_size", None) or model_runner.page_size
        return int(found)

    @abstractmethod
    def indices(self, backend: Any, batch: Any) -> torch.Tensor | None:
        """The row of ``req_to_token`` of each row of this forward. None if it is not known."""

    @abstractmethod
    def padding(self, backend: Any, batch: Any, frozen: bool) -> int:
        """The length of the padding rows in a captured CUDA graph.

        frozen: this is the backend of a FROZEN_KV_MTP draft.
        """

    @abstractmethod
    def handed_at(self, batch: Any) -> str:
        """The hook site at which a layer of this forward hands over; for the report."""

    def forgot_swa(self, backend: Any) -> bool:
        """True if the backend does not know that its pool is a SWA pool."""
        return False

    def swa_state(self, backend: Any) -> str:
        """The backend's fields that show it, for the report."""
        return ""


SHARDS = "each rank has a part of the KV"
CHUNKS = "some of its layers read the chunk that a token is in, and not all that a row has"
ENCODER = "an encoder's tokens come first in the rows"


def has_encoder(model_runner: Any) -> bool:
    """True if the model has an encoder, whose tokens have KV, too."""
    config = getattr(model_runner, "model_config", None)
    return bool(getattr(config, "is_encoder_decoder", False))


def never_run(mode: str) -> str:
    """Why a forward of this mode is not judged."""
    return f"a {mode} was never run with it"


def prefix_is_fetched(guard: Guarding) -> None:
    """Say that a prefill of MLA has a prefix of which the kernel gets no table and no list."""
    guard.not_guarded(
        "what a prefill of MLA reads of its prefix",
        "the model fetches it by a list of tokens, and hands the kernel K and V",
    )


@cache
def _constructors_above(kind: Any) -> frozenset[str]:
    """The constructors of the classes that a class inherits from, as paths."""
    return frozenset(f"{c.__module__}.{c.__qualname__}.__init__" for c in kind.__mro__[1:])


class TableAdapter(Adapter):
    """A backend that hands page tables to its kernels.

    tables: "full" and "swa" -> the field of :meth:`made` with that page table, int32 [rows,
    columns], or None. lengths: the field with the number of tokens of each row that the kernels may
    read, integer [rows]. Before a replay they are the static ones of its graph.
    """

    hands = "page tables"
    tables: ClassVar[Mapping[str, str]]
    lengths: str

    def made(self, backend: Any, batch: Any) -> Any:
        """The metadata of this forward with its tables, None if it has none.

        batch: the ForwardBatch, None in a CUDA graph before 0.5.13.
        """
        return backend.forward_metadata

    def lengths_in(self, metadata: Any, batch: Any) -> torch.Tensor:
        """How many tokens of each row the kernels may read, integer [rows]."""
        found: torch.Tensor = getattr(metadata, self.lengths)
        return found

    def tables_in(self, metadata: Any) -> dict[str, torch.Tensor]:
        """The page tables that there are, by the names in ``tables``."""
        found = {name: getattr(metadata, field) for name, field in self.tables.items()}
        return {name: table for name, table in found.items() if table is not None}

    def handed(self, table: torch.Tensor, backend: Any, layer: Any) -> PageTable:
        """A layer's table, with the lengths and the ends of the queries that its metadata have."""
        metadata, window = backend.forward_metadata, layer.sliding_window_size
        return PageTable(
            table,
            self.lengths_in(metadata, None),
            metadata.cu_seqlens_q,
            -1 if window is None else int(window),
        )

    def indices(self, backend: Any, batch: Any) -> torch.Tensor | None:
        found: torch.Tensor | None = batch.req_pool_indices
        return found

    def handed_at(self, batch: Any) -> str:
        return self.sites[0]


class ListAdapter(Adapter):
    """A backend that hands lists of tokens to its kernels."""

    hands = "lists of tokens"

    @abstractmethod
    def entries_of(self, backend: Any, layer: Any) -> torch.Tensor | None:
        """The entries of the list that this layer's kernel gets, None if it gets none."""

    @abstractmethod
    def lists(self, backend: Any, layer: Any, guard: Guarding) -> TokenLists | None:
        """The list for the kernel of this layer. None, with a limit, if it cannot be judged."""

    def hand_over(self, backend: Any, layer: Any, batch: Any, guard: Guarding) -> bool:
        """Have the list of a layer judged. True if a layer before it got the same one, so that
        nothing was to be done."""
        entries = self.entries_of(backend, layer)
        if entries is not None and guard.listed(entries, backend, layer):
            return True
        lists = self.lists(backend, layer, guard)
        if lists is not None:
            guard.token_lists(self, lists, backend, layer, batch)
        return False

    def hand_over_ahead(
        self, backend: Any, layers: Iterable[Any], batch: Any, guard: Guarding
    ) -> list[torch.Tensor]:
        """Have the lists of a forward judged before its first layer.

        layers: one for each list, which has got it in an earlier forward. Returns the entries of
        those that were judged.
        """
        found = []
        for layer in layers:
            lists = self.lists(backend, layer, guard)
            if lists is not None:
                guard.token_lists(self, lists, backend, layer, batch)
                found.append(lists.indices)
        return found

    @abstractmethod
    def all_lists(self, backend: Any, static: int | None) -> dict[str, tuple[Any, Any]]:
        """(indices, indptr) of the lists "full" and "window", each as in ``TokenLists`` or None.

        static: the number of rows of a CUDA graph that is about to be replayed, None for the lists
        of ``backend.forward_metadata``.
        """
