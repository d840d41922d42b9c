"""Lets the layers of a prefill pass without our hook, once all their lists were judged.

In a forward outside of CUDA graphs each layer passes our hook. All but the first ones of each kind
only find that their list was checked, and that costs a prefill of 42 layers 1 ms of the host
(docs/costs.md). All lists that these layers can get are in the metadata of their forward. So when
each of them was judged, the backend gets SGLang's own function as an attribute of its own, which
hides the hooked one of its class. It is taken away when metadata are made anew, and when a step
begins.

A list is judged at the first layer that gets it. With ``watch`` all are judged when the metadata
were made, so that no layer passes the hook.

In the first forwards of a backend in a mode (``FIRST``), and after these in one of ``EVERY``, all
layers keep the hook, with ``watch``, too. If a layer gets a list there that was not in the metadata
when the first layer got one, somebody changes metadata in the middle of a forward. Then the hook
stays at every layer of this backend for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    aside: the hook is hidden. stays: it is never hidden again. whole: nor in this forward.
    """

    backend: Any
    method: str
    forwards: dict[str, int] = field(default_factory=dict)
    mode: str = ""
    lists: tuple[torch.Tensor, ...] = ()
    judged: list[torch.Tensor] = field(default_factory=list)
    aside: bool = False
    stays: bool = False
    whole: bool = False

    def forget(self) -> None:
        """The hook runs again, and no list was judged."""
        if self.aside:
            self.aside = False
            vars(self.backend).pop(self.method, None)
        self.lists = ()
        self.judged.clear()


_hidden: list[_State] = []  # those that were put aside in this step


class Aside:
    """Takes the hook at a method of some backends out of their way, and puts it back.

    site: the method's. own: SGLang's own function at a site, None if anybody else has a hook or a
    wrapper there, which must run in each layer.
    """

    def __init__(self, method: str, site: str, own: Callable[[str], Any]) -> None:
        self._method, self._site, self._own = method, site, own

    def begin(self, backend: Any, mode: str = "") -> None:
        """The metadata of this backend were made anew, for a forward of this mode, or a graph."""
        state = _state(backend)
        if state is None:
            state = _State(backend, self._method)
            setattr(backend, _STATE, state)
        state.forget()
        state.mode = mode if mode in PREFILLS and not (state.stays or state.whole) else ""

    def ahead(
        self, backend: Any, judge: Callable[[], Sequence[torch.Tensor]], lists: Iterable[Any]
    ) -> None:
        """Judge the lists of the forward that begins before its first layer, if that may be.

        Hides the hook if they were all judged. judge: returns the entries of those that were.
        lists: those of the metadata, None where none is.
        """
        state = _state(backend)
        if state is None or not state.mode:
            return
        n = state.forwards.get(state.mode, 0) + 1
        if n <= FIRST or n % EVERY == 0 or (own := self._unhidden(state)) is None:
            return
        judged = judge()
        if all(_is_in(given, judged) for given in lists if given is not None):
            state.forwards[state.mode] = n
            state.mode = ""
            self._hide(state, own)

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
        """A layer got a list that was judged in this forward. Hides the hook if all were."""
        state = _state(backend)
        if state is None or not state.mode:
            return
        if not all(_is_in(given, state.judged) for given in state.lists):
            return
        state.mode = ""  # whatever comes of it, it is not tried twice in a forward
        own = self._unhidden(state)
        if own is not None:
            self._hide(state, own)

    def _unhidden(self, state: _State) -> Any:
        """SGLang's own method, if the layers of a backend call our hook of it and nobody else's."""
        own = self._own(self._site)
        if own is None or self._method in vars(state.backend):
            return None
        # A class that inherits from the hooked one may have a method of its own in front of it.
        hooked = getattr(type(state.backend), self._method, None)
        return own if getattr(hooked, "__wrapped__", None) is own else None

    def _hide(self, state: _State, own: Any) -> None:
        vars(state.backend)[self._method] = MethodType(own, state.backend)
        state.aside = True
        _hidden.append(state)


def step() -> None:
    """A step begins. The hooks run, and what was judged in the last step counts no more."""
    for state in _hidden:
        state.forget()
    _hidden.clear()


@contextmanager
def every_layer(backend: Any) -> Iterator[None]:
    """While this lasts, metadata that are made are not those of a whole forward.

    The hook is at all layers of the forward that runs from here on. For who cuts a forward.
    """
    state = _state(backend)
    if state is None:
        yield
        return
    state.whole = True
    try:
        yield
    finally:
        state.whole = False


def come_back(backend: Any) -> None:
    """Lets the hook run at all layers again. For who gives a backend other metadata."""
    state = _state(backend)
    if state is not None:
        state.forget()


def _state(backend: Any) -> _State | None:
    """The state of this backend. None if there is none, or if it is a copy of another backend."""
    state: _State | None = vars(backend).get(_STATE)
    if state is None or state.backend is backend:
        return state
    mine = vars(backend)
    del mine[_STATE]
    found = mine.get(state.method)
    if isinstance(found, MethodType) and found.__self__ is state.backend:
        del mine[state.method]
    return None


def _is_in(entries: torch.Tensor, lists: Iterable[torch.Tensor]) -> bool:
    return any(entries is given for given in lists)
