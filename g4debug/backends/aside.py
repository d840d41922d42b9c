"""Lets the layers of a prefill pass without our hook, once all their lists were judged.

In a forward outside of CUDA graphs each layer passes our hook. All but the first ones of each kind
only find that their list was checked, and that costs a prefill of 42 layers 1 ms of the host
(docs/costs.md). All lists that these layers can get are in the metadata of their forward. So when
each of them was judged, the backend gets SGLang's own functions as attributes of its own, which
hide the hooked ones of its class. They are taken away when metadata are made anew, and when a step
begins.

In the first forwards of a backend in a mode (``FIRST``), and after these in one of ``EVERY``, all
layers keep the hook. If a layer gets a list there that was not in the metadata when the first layer
got one, somebody changes metadata in the middle of a forward. Then the hook stays at every layer of
this backend for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PREFILLS = ("EXTEND", "MIXED")  # other modes run in CUDA graphs, or again on the same metadata
FIRST = 8
EVERY = 16
_STATE = "g4debug_aside"  # attribute of SGLang's backend
logger = logging.getLogger("g4debug")


@dataclass(slots=True)
class _State:
    """One backend.

    forwards: mode -> how many began. mode: of the one that runs, '' if each of its layers keeps the
    hook. lists: those of its metadata when the first of them was judged. judged: those that were.
    aside: the hooks are hidden. stays: they are never hidden again.
    """

    backend: Any
    methods: tuple[str, ...]
    forwards: dict[str, int] = field(default_factory=dict)
    mode: str = ""
    lists: tuple[torch.Tensor, ...] = ()
    judged: list[torch.Tensor] = field(default_factory=list)
    aside: bool = False
    stays: bool = False

    def forget(self) -> None:
        """The hooks run again, and no list was judged."""
        if self.aside:
            self.aside = False
            for method in self.methods:
                vars(self.backend).pop(method, None)
        self.lists = ()
        self.judged.clear()


_hidden: list[_State] = []  # those that were put aside in this step


class Aside:
    """Takes the hooks of an adapter out of the way of its backends, and puts them back.

    methods: a method of the backends -> its site. own: site -> SGLang's own function there, None if
    anybody else has a hook or a wrapper there, which must run in each layer.
    """

    def __init__(self, methods: Mapping[str, str], own: Callable[[str], Any]) -> None:
        self._methods, self._own = dict(methods), own

    def begin(self, backend: Any, mode: str = "") -> None:
        """The metadata of this backend were made anew, for a forward of this mode, or a graph."""
        state = _state(backend)
        if state is None:
            state = _State(backend, tuple(self._methods))
            setattr(backend, _STATE, state)
        state.forget()
        state.mode = mode if mode in PREFILLS and not state.stays else ""

    def judged(self, backend: Any, entries: torch.Tensor | None, lists: Iterable[Any]) -> None:
        """A list was judged, or will not be. lists: those of the metadata, None where none is."""
        state = _state(backend)
        if state is None or entries is None:
            return
        if not state.judged:
            state.lists = tuple(given for given in lists if given is not None)
            n = state.forwards[state.mode] = state.forwards.get(state.mode, 0) + 1
            if n <= FIRST or n % EVERY == 0:
                state.mode = ""
        state.judged.append(entries)
        if not state.stays and not _is_in(entries, state.lists):
            state.stays, state.mode = True, ""
            logger.info(
                "g4debug: page-table looks at each layer of each forward on this backend from now "
                "on, because lists are changed in the middle of a forward"
            )

    def again(self, backend: Any) -> None:
        """A layer got a list that was judged in this forward. Hides the hooks if all were."""
        state = _state(backend)
        if state is None or not state.mode:
            return
        if not all(_is_in(given, state.judged) for given in state.lists):
            return
        state.mode = ""  # whatever comes of it, it is not tried twice in a forward
        mine, kind = vars(backend), type(backend)
        own = {method: self._own(site) for method, site in self._methods.items()}
        # A class that inherits from the hooked one may have a method of its own in front of it.
        ours = all(f is not None and _is_hooked(kind, method, f) for method, f in own.items())
        if ours and not own.keys() & mine.keys():
            for method, function in own.items():
                mine[method] = MethodType(function, backend)
            state.aside = True
            _hidden.append(state)


def step() -> None:
    """A step begins. All hooks run, and what was judged in the last step counts no more."""
    for state in _hidden:
        state.forget()
    _hidden.clear()


def come_back(backend: Any) -> None:
    """Lets the hooks run at all layers again. For who gives a backend other metadata."""
    state = _state(backend)
    if state is not None:
        state.forget()


def _is_hooked(kind: type, method: str, own: Any) -> bool:
    """True if this class's method is SGLang's own function in the wrapper that calls our hook."""
    return getattr(getattr(kind, method, None), "__wrapped__", None) is own


def _state(backend: Any) -> _State | None:
    """The state of this backend. None if there is none, or if it is a copy of another backend."""
    state: _State | None = vars(backend).get(_STATE)
    if state is None or state.backend is backend:
        return state
    mine = vars(backend)
    del mine[_STATE]
    for method in state.methods:
        found = mine.get(method)
        if isinstance(found, MethodType) and found.__self__ is state.backend:
            del mine[method]
    return None


def _is_in(entries: torch.Tensor, lists: Iterable[torch.Tensor]) -> bool:
    return any(entries is given for given in lists)
