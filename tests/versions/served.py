"""A release's own pools, prefix cache, requests and batches, driven like a scheduler drives them.

No model and no engine: a forward is the few numbers that come back from it. What hands out and
takes back pages is SGLang's: ``Req``, ``PrefillAdder``, ``ScheduleBatch`` with its eviction and
retraction, ``release_kv_cache``, the allocators and the prefix cache. Where releases call such a
thing by another name, this asks for each of the names.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAGE, WINDOW, CONTEXT = 16, 48, 512  # tokens
FULL, SWA = 40 * PAGE, 26 * PAGE  # tokens; small, so that requests are retracted
ROWS, DRAFT = 12, 4  # rows of req_to_token; tokens of a verify
CHUNK = 5 * PAGE


def without_kernels() -> None:
    """Make the release importable without a GPU and without the packages of its kernels.

    Nothing here computes, so a kernel that is called anyway is an error.
    """
    os.environ.update(
        SGLANG_USE_CPU_ENGINE="1", TRITON_INTERPRET="1", OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    from g4debug import cpu

    sys.path.insert(0, str(cpu.SITE))
    importlib.import_module("g4debug_torchvision").declare_on_import()
    real = importlib.import_module("sgl_kernel")

    class Kernels(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)

            def kernel(*args: Any, **kwargs: Any) -> None:
                raise RuntimeError(f"sgl_kernel.{name} was called, and nothing here computes")

            return kernel

    kernels = Kernels("sgl_kernel")
    kernels.__path__ = real.__path__  # type: ignore[attr-defined]
    kernels.assign_req_to_token_pool_cpu = assign  # type: ignore[attr-defined]
    sys.modules["sgl_kernel"] = kernels
    older_than_transformers()


def older_than_transformers() -> None:
    """Let a release register models that the installed transformers has by itself meanwhile.

    The environment is the newest release's. Nothing here loads a model.
    """
    from transformers import AutoConfig

    register = AutoConfig.register

    def registered(*args: Any, **kwargs: Any) -> None:
        register(*args, **{**kwargs, "exist_ok": True})

    AutoConfig.register = registered  # type: ignore[method-assign]


def assign(rows: Any, table: Any, begins: Any, ends: Any, out: Any, width: int) -> None:
    """Write ``out`` into the rows of ``req_to_token``, from ``begins`` to ``ends``."""
    at = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[row, begin:end] = out[at : at + end - begin].to(table.dtype)
        at += end - begin


def accepted(function: Any, **given: Any) -> dict[str, Any]:
    """The keywords that a function of this release takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in names}


def first(*paths: str) -> Any:
    """The first of these dotted paths that this release has."""
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise LookupError(f"this release has none of {', '.join(paths)}")


def configure(spec: bool, radix: bool) -> Any:
    """The process-wide configuration that batches and the prefix cache read."""
    from sglang.srt import server_args as module

    args = module.ServerArgs(model_path="dummy", device="cpu")
    wanted = {
        "page_size": PAGE,
        "disable_radix_cache": not radix,
        "chunked_prefill_size": CHUNK,
        "attention_backend": "torch_native",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "schedule_policy": "fcfs",
    }
    if spec:
        wanted |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": DRAFT - 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": DRAFT,
        }
    try:
        context = importlib.import_module("sglang.srt.runtime_context").get_context()
        override = context.override_server_args
    except (ImportError, AttributeError):
        for name, value in wanted.items():
            setattr(args, name, value)
        module.set_global_server_args_for_scheduler(args)
        return args
    return override(**wanted).install()


def fast_kernels() -> None:
    """Fill in indices by numpy: interpreted by Triton, the two kernels take milliseconds a call."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from allocator_model import Kernel, decode, extend

    for name in ("allocator.paged", "allocator"):
        try:
            module = importlib.import_module(f"sglang.srt.mem_cache.{name}")
        except ImportError:
            continue
        if hasattr(module, "alloc_extend_kernel"):
            module.alloc_extend_kernel = Kernel(extend)
            module.alloc_decode_kernel = Kernel(decode)
    try:
        module = importlib.import_module("sglang.srt.speculative.spec_utils")
    except ImportError:
        return
    if hasattr(module, "assign_req_to_token_pool_func"):

        def assign_rows(rows: Any, table: Any, begins: Any, ends: Any, out: Any, *_: Any) -> None:
            assign(rows, table, begins, ends, out, 0)

        module.assign_req_to_token_pool_func = assign_rows


class Server:
    """What a scheduler has of one server, and its rounds."""

    def __init__(
        self, spec: bool, radix: bool, overlap: bool, core: str | None = None, hybrid: bool = True
    ) -> None:
        """core: of the prefix cache, "python" or "rust", where the release lets one choose.

        hybrid: with a SWA pool, of ``SWA`` tokens. Else there is one pool, of ``FULL`` tokens.
        """

        self.spec, self.overlap = spec, overlap
        self.server_args = configure(spec, radix)
        base = "sglang.srt.mem_cache"
        rows_class = first(f"{base}.memory_pool.ReqToTokenPool")
        self.hybrid = hybrid
        self.allocator = hybrid_allocator() if hybrid else single_allocator()
        self.rows = rows_class(ROWS, CONTEXT, "cpu", False)
        self.tree = self._tree(radix, core)
        self.model = SimpleNamespace(
            is_encoder_decoder=False,
            is_matryoshka=False,
            vocab_size=100,
            context_len=CONTEXT,
            hidden_size=1,
        )
        algorithm = first("sglang.srt.speculative.spec_info.SpeculativeAlgorithm")
        self.algorithm = algorithm.from_string("EAGLE" if spec else None)
        self.waiting: list[Any] = []
        self.chunked: Any = None
        self.parked = False  # the chunked request got no room in the last round
        self.running: Any = None
        self.last: Any = None  # the batch that ran last
        self.queue: list[tuple[Any, list[int]]] = []  # batches, and tokens of each request
        self.aborted: set[str] = set()
        self.served = self.retracted = 0

    def _tree(self, radix: bool, core: str | None) -> Any:
        base = "sglang.srt.mem_cache"
        params_class = first(f"{base}.cache_init_params.CacheInitParams")
        components = None
        try:
            types_ = first(
                f"{base}.unified_cache.component_type.ComponentType",
                f"{base}.unified_cache_components.ComponentType",
            )
            components = (types_.FULL, types_.SWA) if self.hybrid else (types_.FULL,)
        except LookupError:
            pass
        params = params_class(
            **accepted(
                params_class, disable=not radix, req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator, page_size=PAGE,
                sliding_window_size=WINDOW if self.hybrid else None, chunked_prefill_size=CHUNK,
                tree_components=components, tree_core_backend=core,
            )
        )  # fmt: skip
        return tree_class(radix, self.hybrid)(params)

    # --- what a scheduler does in a round ------------------------------------------------------

    def come(self, rid: str, prompt: list[int], output: int) -> None:
        """A request arrives."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=output, ignore_eos=True)
        sampling.normalize(None)
        ids = array("q", prompt) if _arrays() else list(prompt)
        request = Req(rid, "", ids, sampling, vocab_size=100)
        if hasattr(request, "tokenizer"):
            request.tokenizer = None
        self.waiting.append(request)

    def before_run(self, batch: Any) -> None:
        """Called where a scheduler calls ``run_batch``."""

    def before_result(self) -> None:
        """Called where a scheduler calls ``process_batch_result``."""

    def round(self, accepts: Any) -> str:
        """One round. ``accepts()``: how many tokens a verify accepts. What ran, in a word."""
        import torch

        batch = self._next()
        if batch is not None:
            self.before_run(batch)
            extends = batch.forward_mode.is_extend()
            tokens = [
                0 if r is self.chunked else accepts() if self.spec and not extends else 1
                for r in batch.reqs
            ]
            if self.spec and not extends:
                more = torch.tensor(tokens, dtype=batch.seq_lens.dtype)
                batch.seq_lens = batch.seq_lens + more
                batch.seq_lens_cpu = batch.seq_lens_cpu + more.to(batch.seq_lens_cpu.dtype)
            if hasattr(batch, "output_ids"):
                batch.output_ids = torch.full((len(tokens),), 7)
            self.queue.append((batch.copy(), tokens))
            self.last = batch
        while len(self.queue) > (1 if self.overlap and batch is not None else 0):
            self.before_result()
            self._process(*self.queue.pop(0))
        if batch is None:
            self.last = None
            return "idle"
        return "extend" if batch.forward_mode.is_extend() else "decode"

    def _next(self) -> Any:
        last, chunked = self.last, self.chunked
        if chunked is not None and not self.parked:  # upstream #24252
            self._unfinished(chunked)
        if last is not None and last.forward_mode.is_extend():
            last.filter_batch(
                **{
                    name: [chunked] if chunked is not None else []
                    for name in inspect.signature(last.filter_batch).parameters
                    if name in ("chunked_req_to_exclude", "reqs_to_exclude")
                }
            )
            if not last.is_empty():
                if self.running is None or self.running.is_empty():
                    self.running = last
                else:
                    self.running.merge_batch(last)
        self.last = None
        batch = self._prefill()
        if batch is not None:
            return batch
        running = self.running
        if running is None or running.is_empty():
            return None
        running.filter_batch()
        if running.is_empty():
            return None
        if not running.check_decode_mem():
            given = accepted(running.retract_decode, server_args=self.server_args)
            retracted, _, aborted = running.retract_decode(**given)
            self.retracted += len(retracted)
            self.waiting += retracted
            self.served += len(aborted)
            if running.is_empty():
                return None
        running.prepare_for_decode()
        return running

    def _prefill(self) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

        if not self.waiting and self.chunked is None:
            return None
        adder = PrefillAdder(
            page_size=PAGE, tree_cache=self.tree, token_to_kv_pool_allocator=self.allocator,
            running_batch=self.running, new_token_ratio=0.3, rem_input_tokens=4 * CHUNK,
            rem_chunk_tokens=CHUNK,
        )  # fmt: skip
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
            self.parked = self.chunked is not None and self.chunked not in adder.can_run_list
        busy = 0 if self.running is None else len(self.running.reqs)
        for request in list(self.waiting):
            if busy + len(adder.can_run_list) >= ROWS - 2:
                break
            request.init_next_round_input(self.tree)
            result = adder.add_one_req(
                request, has_chunked_req=self.chunked is not None, truncation_align_size=None
            )
            if result != AddReqResult.CONTINUE:
                break
        if not adder.can_run_list:
            return None
        admitted = {id(r) for r in adder.can_run_list}
        self.waiting = [r for r in self.waiting if id(r) not in admitted]
        if adder.new_chunked_req is not None:
            self.chunked, self.parked = adder.new_chunked_req, False
        if self.chunked is not None:
            for name in ("is_chunked", "inflight_middle_chunks"):
                if hasattr(self.chunked, name):
                    setattr(self.chunked, name, getattr(self.chunked, name) + 1)
        batch = ScheduleBatch.init_new(
            adder.can_run_list, self.rows, self.allocator, self.tree, self.model, self.overlap,
            self.algorithm, chunked_req=self.chunked,
        )  # fmt: skip
        batch.prepare_for_extend()
        return batch

    def _process(self, batch: Any, tokens: list[int]) -> None:
        """What a forward came to: outputs, finished requests, what enters the prefix cache."""
        grouped = not batch.forward_mode.is_extend() or hasattr(self.allocator, "swa_free_group")
        if grouped:
            self.allocator.free_group_begin()
        for request, count in zip(batch.reqs, tokens, strict=True):
            if request.finished() or request.is_retracted:
                continue
            middle = [n for n in ("is_chunked", "inflight_middle_chunks") if hasattr(request, n)]
            if batch.forward_mode.is_extend() and getattr(request, middle[0]) > 0:
                setattr(request, middle[0], getattr(request, middle[0]) - 1)
                continue
            if self.spec and not batch.forward_mode.is_extend():
                kv = kv_of(request)
                kv.kv_committed_len += count
            request.output_ids.extend([7] * count)
            self._end(request, count, batch)
        if grouped:
            self.allocator.free_group_end()

    def _end(self, request: Any, count: int, batch: Any) -> None:
        finish = getattr(request, "update_finish_state", None) or request.check_finished
        if request.rid in self.aborted:
            request.to_finish = first("sglang.srt.managers.schedule_batch.FINISH_ABORT")()
        finish(count)
        if request.finished():
            self.served += 1
            release(request, self.tree)
        elif batch.forward_mode.is_extend():
            self._unfinished(request, chunked=False)

    def _unfinished(self, request: Any, chunked: bool = True) -> None:
        """The prefix cache keeps what a request has computed so far."""
        common = importlib.import_module("sglang.srt.mem_cache.common")
        if hasattr(common, "checkpoint_kv_cache"):
            common.checkpoint_kv_cache(request, self.tree)
        else:
            common.maybe_cache_unfinished_req(request, self.tree, chunked=chunked)


def hybrid_allocator() -> Any:
    """Hands out the pages of a full and a SWA pool, for a layer of each."""
    import torch

    base = "sglang.srt.mem_cache"
    pool_class = first(f"{base}.swa_memory_pool.SWAKVPool")
    allocator_class = first(
        f"{base}.allocator.swa.SWATokenToKVPoolAllocator",
        f"{base}.swa_memory_pool.SWATokenToKVPoolAllocator",
    )
    kv = pool_class(
        **accepted(
            pool_class.__init__, size=FULL, size_swa=SWA, page_size=PAGE, dtype=torch.float32,
            head_num=1, head_dim=1, swa_attention_layer_ids=[0], full_attention_layer_ids=[1],
            enable_kvcache_transpose=False, device="cpu",
        )
    )  # fmt: skip
    return allocator_class(FULL, SWA, PAGE, torch.float32, "cpu", kv, False)


def single_allocator() -> Any:
    """Hands out the pages of the only pool."""
    import torch

    base = "sglang.srt.mem_cache"
    pool_class = first(f"{base}.memory_pool.MHATokenToKVPool")
    allocator_class = first(
        f"{base}.allocator.paged.PagedTokenToKVPoolAllocator",
        f"{base}.allocator.PagedTokenToKVPoolAllocator",
    )
    kv = pool_class(
        FULL, PAGE, torch.float32, head_num=1, head_dim=1, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    return allocator_class(FULL, PAGE, torch.float32, "cpu", kv, False)


def tree_class(radix: bool, hybrid: bool = True) -> Any:
    """The prefix cache that a model gets by default, as mem_cache/registry.py chooses."""
    base = "sglang.srt.mem_cache"
    unified = f"{base}.unified_radix_cache.UnifiedRadixCache"
    if not hybrid:
        kind = "radix_cache.RadixCache" if radix else "chunk_cache.ChunkCache"
        return first(unified) if radix and not _swa_radix() else first(f"{base}.{kind}", unified)
    if radix:
        return first(f"{base}.swa_radix_cache.SWARadixCache" if _swa_radix() else unified)
    return first(f"{base}.chunk_cache.SWAChunkCache", unified)


def _swa_radix() -> bool:
    from g4debug.hooking import targets

    return targets.matches("<0.5.18")


def _arrays() -> bool:
    from sglang.srt.managers import schedule_batch

    return hasattr(schedule_batch, "array")


def kv_of(request: Any) -> Any:
    return request if hasattr(request, "kv_committed_len") else request.kv


def release(request: Any, tree: Any) -> None:
    function = first("sglang.srt.mem_cache.common.release_kv_cache")
    name = "checkpoint" if "checkpoint" in inspect.signature(function).parameters else "is_insert"
    function(request, tree, **{name: True})


def allocated(request: Any) -> int:
    """Tokens that are allocated in a request's row."""
    holder = request if hasattr(request, "kv_allocated_len") else request.kv
    return int(holder.kv_allocated_len)
