"""What the releases of SGLang do differently, for tests that build SGLang's own objects.

Each function asks SGLang for what it has, so that a release that nobody has listed is no surprise.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from packaging.version import Version

from g4debug.combinations import run
from g4debug.combinations.seen import NO_DRAFT
from g4debug.hooking import targets


@cache
def newest() -> Version:
    """The newest SGLang that there are pins for."""
    pins = Path(__file__).parents[2].glob("requirements/sglang-*.txt")
    return max(Version(path.stem.removeprefix("sglang-")) for path in pins)


def is_newest() -> bool:
    """True on the newest SGLang. Where examples are drawn, the older releases get fewer of them."""
    return targets.sglang_version() == newest()


def only_where_entered(model: str, backend: str, draft: str = NO_DRAFT) -> None:
    """Skip this test on an older SGLang, if the table has no such run on the CPU engine there.

    model, draft: the names of a toy and of a draft for toys.
    """
    release = str(targets.sglang_version())
    entered = any(
        model in found.models.lower().split(", ")
        and backend in found.backends
        and any(draft in (name, name.lower().replace(" ", "-")) for name in found.drafts)
        for found in run.there(release, on_cpu=True)
    )
    if not is_newest() and not entered:
        pytest.skip(f"{model} on {backend} with {draft} was not run on {release}")


def has(module: str) -> bool:
    """True if there is such a module; its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def has_v1_worker() -> bool:
    """True if FROZEN_KV_MTP is the worker of speculative decoding v1, which 0.5.14 dropped."""
    return targets.path("worker.seed_step") is not None


def accepted(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """The keywords that a function of this release takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in names}


def allocator_class(site: str) -> Any:
    """The allocator of a hook site; 0.5.13 moved them, and the table of sites knows where to."""
    return pkgutil.resolve_name(targets.path(site).rpartition(".")[0])


def paged_module() -> Any:
    """The module of the paged allocator, in which its two kernels are."""
    return importlib.import_module(allocator_class("pool.init").__module__)


def free_list(allocator: Any) -> list[int]:
    """The pages that the allocator of one pool has to give, sorted: one that is there twice shows.

    Those that were freed last wait in a list of their own, or from 0.5.23 on in several.
    """
    staged = getattr(allocator, "staged_pages", None) or []
    lists = (allocator.free_pages, getattr(allocator, "release_pages", None), *staged)
    return sorted(page for pages in lists if pages is not None for page in pages.tolist())


def story(events: Iterable[Any]) -> list[str]:
    """The kinds of the events of pages.

    From 0.5.21 on a SWA page is taken out of the mapping by a call of its own before it is free.
    That event is left out here.
    """
    return [e.kind for e in events if e.kind != "unmap"]


def no_kv() -> dict[str, Any]:
    """What a request without KV has in addition: from 0.5.23 on, an object for what it holds."""
    from sglang.srt.managers import schedule_batch

    kind = getattr(schedule_batch, "ReqKvInfo", None)
    return {} if kind is None else {"kv": kind()}


def kv_of(request: Any) -> Any:
    """The object that has a request's row and its KV lengths: the request itself up to 0.5.21."""
    return getattr(request, "kv", request)


class Request(SimpleNamespace):
    """What the ledger and the tracers read of a Req, each field where this release has it."""

    def __init__(self, rid: str, **fields: Any) -> None:
        super().__init__(rid=rid, **no_kv())
        self.put(**{"req_pool_idx": None, **fields})

    __hash__ = object.__hash__

    def finished(self) -> bool:
        return False

    def put(self, **fields: Any) -> None:
        """Set these fields of a Req."""
        kv = kv_of(self)
        for name, value in fields.items():
            if name == "swa_evicted_seqlen" and hasattr(kv, "set_evicted_seqlen"):
                kv.set_evicted_seqlen(swa_component(), value)
            else:
                setattr(kv if hasattr(kv, name) else self, name, value)


def evicted(request: Any) -> int:
    """Up to which token a request has given back its SWA pages."""
    kv = kv_of(request)
    if hasattr(kv, "get_evicted_seqlen"):
        return int(kv.get_evicted_seqlen(swa_component()))
    return int(kv.swa_evicted_seqlen)


def kept_behind(query: int, window: int, page: int) -> int:
    """The first token with a SWA page that a request in a radix tree keeps at position ``query``.

    It keeps one page more than the window up to 0.5.14, then only the window, and in 0.5.23 the
    window in whole pages.
    """
    if targets.matches("<0.5.15"):
        return query - window - page
    if targets.matches("<0.5.22"):
        return query - max(window, page)
    return query - -(-max(window, page) // page) * page


def swa_component() -> Any:
    """The name of the SWA pool in a prefix cache of components; None before there was one."""
    for module in ("unified_cache.component_type", "unified_cache_components"):
        if has(f"sglang.srt.mem_cache.{module}"):
            return importlib.import_module(f"sglang.srt.mem_cache.{module}").ComponentType.SWA
    return None


def prefix_cache(rows: Any, allocator: Any, page: int, window: int, **given: Any) -> Any:
    """The prefix cache that a hybrid model gets by default, on these pools.

    rows: the ReqToTokenPool; page, window: in tokens; given: more of its parameters, of which those
    that this release has count. disable=True: without a radix tree.
    """
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    swa = swa_component()
    fields = accepted(
        CacheInitParams, **{"disable": False, **given}, req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator, page_size=page, sliding_window_size=window,
        tree_components=None if swa is None else (type(swa).FULL, swa),
    )  # fmt: skip
    return prefix_cache_class(not fields["disable"])(CacheInitParams(**fields))


def token_ids(ids: Iterable[int]) -> Any:
    """The tokens of a request or of a key of the prefix cache, in the release's own type."""
    from sglang.srt.managers import schedule_batch

    return array("q", ids) if hasattr(schedule_batch, "array") else list(ids)


def insert(tree: Any, ids: Iterable[int], slots: torch.Tensor, swa_evicted: int = 0) -> Any:
    """Put ``slots`` of these tokens into a prefix cache; the first ``swa_evicted`` have no SWA."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    evicted = accepted(
        InsertParams,
        swa_evicted_seqlen=swa_evicted,
        component_evicted_seqlens={swa_component(): swa_evicted},
    )
    return tree.insert(InsertParams(key=RadixKey(token_ids(ids)), value=slots, **evicted))


def prefix_cache_class(radix: bool) -> Any:
    """As mem_cache/registry.py chooses it for a hybrid model; radix: with a radix tree."""
    base = "sglang.srt.mem_cache"
    old = f"{base}.swa_radix_cache.SWARadixCache" if radix else f"{base}.chunk_cache.SWAChunkCache"
    there = targets.matches("<0.5.18") if radix else has(old.rpartition(".")[0])
    return pkgutil.resolve_name(old if there else f"{base}.unified_radix_cache.UnifiedRadixCache")


def swa_pool(full: int, swa: int, page: int, dim: int, sliding: list[int], whole: list[int]) -> Any:
    """A SWAKVPool of one head on the CPU, float32; full, swa: tokens; sliding, whole: layer ids."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=full, size_swa=swa, page_size=page, dtype=torch.float32, head_num=1, head_dim=dim,
        swa_attention_layer_ids=sliding, full_attention_layer_ids=whole, device="cpu",
        **accepted(SWAKVPool, enable_kvcache_transpose=False),
    )  # fmt: skip


def write_kv(pool: Any, layer: Any, tokens: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write the KV of these tokens of the full pool, as a backend does; pool: a SWAKVPool."""
    from sglang.srt.mem_cache import memory_pool

    swa = pool.translate_loc_from_full_to_swa(tokens)
    if "swa_loc" in inspect.signature(type(pool).set_kv_buffer).parameters:
        pool.set_kv_buffer(layer, tokens, k, v, swa_loc=swa)  # 0.5.13: the caller translates
    elif hasattr(memory_pool, "KVWriteLoc"):
        pool.set_kv_buffer(layer, memory_pool.KVWriteLoc(tokens, swa), k, v)
    else:
        pool.set_kv_buffer(layer, tokens, k, v)


def configure(**fields: Any) -> None:
    """Put these arguments in force for this process, where SGLang asks for them process-wide.

    The fixture ``sglang`` puts back what was in force before.
    """
    override = configured(**fields)
    if hasattr(override, "install"):
        override.install()


def configured(**fields: Any) -> AbstractContextManager[Any]:
    """The same while the context is open."""
    if has("sglang.srt.runtime_context"):
        from sglang.srt import runtime_context

        if hasattr(runtime_context.RuntimeContext, "override_server_args"):
            override = runtime_context.get_context().override_server_args(**fields)
            return cast("AbstractContextManager[Any]", override)
    return nullcontext()


def publish(server_args: Any, rank: int = 0) -> None:
    """Put a ServerArgs in force for this process, as the scheduler of that rank does."""
    if has("sglang.srt.runtime_context"):
        context = importlib.import_module("sglang.srt.runtime_context")
        if hasattr(context, "SpawnRanks"):  # from 0.5.23 on
            ranks = context.SpawnRanks(world_rank=rank, gpu_id=rank)
            context.publish(server_args, role="scheduler", ranks=ranks)
            return
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(server_args)


@contextmanager
def configuration_kept() -> Iterator[None]:
    """Put back the process-wide server arguments at the end."""
    holders = list(_holders())
    saved = [(holder, name, getattr(holder, name)) for holder, name in holders]
    try:
        yield
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)


def _holders() -> Iterator[tuple[Any, str]]:
    """Where the arguments are: in a global up to 0.5.13, later in an object of their own."""
    from sglang.srt import server_args

    if hasattr(server_args, "_global_server_args"):
        yield server_args, "_global_server_args"
    if has("sglang.srt.runtime_context"):
        context = importlib.import_module("sglang.srt.runtime_context").get_context()
        for name in type(context).__slots__:
            if hasattr(context, name):
                yield context, name
        if hasattr(context.parallel, "_config"):
            yield context.parallel, "_config"
