"""One file for each speculative worker of SGLang: how it drafts, and where its steps pass by.

The files are found by what they declare: ``ADAPTER``. A file of the same name in
``before_0_5_14/`` takes its place before that release.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from g4debug.hooking import targets
from g4debug.hooking.kv_buffers import buffers_of
from g4debug.hooking.older import older_module
from g4debug.speculation.base import Adapter as Adapter


@cache
def adapters() -> tuple[Adapter, ...]:
    """The adapters for the installed SGLang, by the names of their files."""
    modules = [older_module(name) or importlib.import_module(name) for name in _names()]
    found = [module.ADAPTER for module in modules if hasattr(module, "ADAPTER")]
    return tuple(adapter for adapter in found if targets.is_for(adapter.releases))


def _names() -> list[str]:
    return sorted(f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__) if not m.ispkg)


def replayed(release: str) -> frozenset[str]:
    """The algorithms of a release of SGLang with which ``g4debug replay`` was run.

    Whichever SGLang is installed here: a dump may be of another one.
    """
    from packaging.specifiers import SpecifierSet

    modules = (importlib.import_module(name) for name in _names())
    found = (module.ADAPTER for module in modules if hasattr(module, "ADAPTER"))
    return frozenset(
        adapter.name
        for adapter in found
        if adapter.replayed is not None
        and (SpecifierSet(adapter.releases) & SpecifierSet(adapter.replayed)).contains(release)
    )


def adapter(name: str) -> Adapter:
    """The adapter of the algorithm that SGLang calls so. Raises KeyError if there is none."""
    return {found.name: found for found in adapters()}[name]


def of(holder: Any) -> Adapter | None:
    """The adapter for a scheduler, a batch or a ModelRunner; None without one that is known.

    The server's arguments do not tell: in 0.5.23 they stay as they were typed (NEXTN).
    """
    algorithm = getattr(holder, "spec_algorithm", None)
    if algorithm is not None:
        for found in adapters():
            if found.runs(algorithm):
                return found
    return None


def is_plain(holder: Any) -> bool:
    """True if it is known that there is no draft."""
    algorithm = getattr(holder, "spec_algorithm", None)
    return algorithm is not None and bool(algorithm.is_none())


def draft_reads_target_kv(holder: Any) -> bool:
    """True if the draft has no KV of its own: it reads the target's, and writes none."""
    found = of(holder)
    return found is not None and found.draft_writes_kv is False


def draft_writes_own_kv(holder: Any) -> bool:
    """True if it is known that the draft has KV of its own, in the pages of the target's pool."""
    found = of(holder)
    return found is not None and found.draft_writes_kv is True


@dataclass(frozen=True)
class DraftPool:
    """A KV pool of a draft, with tensors for each layer.

    It has the pages of a pool of the target's: a page number is the same tokens in both.

    pages: that pool's name, "full" or "swa". whole: the pool as SGLang made it, which knows the
    numbers of its layers. model: which model of the draft has it, from 0; 0 of a draft with one.
    """

    pool: Any
    pages: str
    whole: Any
    model: int


def draft_pools(scheduler: Any) -> tuple[Any, ...]:
    """The KV pools of a draft that writes KV of its own, as SGLang made them, one for each of its
    models. () if there are none, or none are known.
    """
    found = of(scheduler)
    if found is None or not found.draft_writes_kv:
        return ()
    return found.pools(scheduler.draft_worker)


def draft_parts(scheduler: Any) -> tuple[DraftPool, ...]:
    """The same, apart by whose pages they have. A part without a layer is left out."""
    return tuple(
        DraftPool(part, name, pool, model)
        for model, pool in enumerate(draft_pools(scheduler))
        for name, part in (
            [("full", pool)]
            if not hasattr(pool, "swa_kv_pool")
            else [("full", pool.full_kv_pool), ("swa", pool.swa_kv_pool)]
        )
        if part is pool or any(buffers_of(part).values())
    )


def ends() -> tuple[str, ...]:
    """The hook sites at which a decode step of any of the workers may have ended."""
    return tuple(dict.fromkeys(site for found in adapters() for site in found.ends))


def has_ended(site: str, owner: Any, batch: Any) -> bool:
    """True if a step of this batch has ended here. owner: the site's first argument."""
    found = of(batch)
    return found is not None and site in found.ends and found.ends[site](owner)


def sites(what: str) -> tuple[str, ...]:
    """The hook sites at which one thing happens in any of the workers, see :class:`Adapter`."""
    return tuple(dict.fromkeys(s for found in adapters() for s in found.sites.get(what, ())))
