"""What the releases of SGLang do differently, for tests that build SGLang's own objects.

Each function asks SGLang for what it has, so that a release that nobody has listed is no surprise.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch

from g4debug.hooking import targets


def has(module: str) -> bool:
    """True if there is such a module; its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def has_v1_worker() -> bool:
    """True if FROZEN_KV_MTP is the worker of speculative decoding v1, which 0.5.14 dropped."""
    return targets.path("worker.draft") is not None


def accepted(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Those of the keywords that a function of this release takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in names}


def allocator_class(site: str) -> Any:
    """The allocator of a hook site; 0.5.13 moved them, and the table of sites knows where to."""
    return pkgutil.resolve_name(targets.path(site).rpartition(".")[0])


def paged_module() -> Any:
    """The module of the paged allocator, in which its two kernels are."""
    return importlib.import_module(allocator_class("pool.init").__module__)


def no_kv() -> dict[str, Any]:
    """What a request without KV has in addition: from 0.5.23 on, an object for what it holds."""
    from sglang.srt.managers import schedule_batch

    kind = getattr(schedule_batch, "ReqKvInfo", None)
    return {} if kind is None else {"kv": kind()}


def kv_of(request: Any) -> Any:
    """The object that has a request's row and its KV lengths: the request itself up to 0.5.21."""
    return getattr(request, "kv", request)


def swa_pool(full: int, swa: int, page: int, dim: int, sliding: list[int], whole: list[int]) -> Any:
    """A SWAKVPool of one head on the CPU, float32; full, swa: tokens; sliding, whole: layer ids."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=full, size_swa=swa, page_size=page, dtype=torch.float32, head_num=1, head_dim=dim,
        swa_attention_layer_ids=sliding, full_attention_layer_ids=whole, device="cpu",
        **accepted(SWAKVPool, enable_kvcache_transpose=False),
    )  # fmt: skip


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


def publish(server_args: Any) -> None:
    """Put a ServerArgs in force for this process, as the scheduler of a server of one rank does."""
    if has("sglang.srt.runtime_context"):
        context = importlib.import_module("sglang.srt.runtime_context")
        if hasattr(context, "SpawnRanks"):  # from 0.5.23 on
            ranks = context.SpawnRanks(world_rank=0)
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
