"""Where each hook site is in each SGLang release. No other module knows these paths.

``SITES`` maps a site to pairs of version specifier and dotted path. The first specifier that
matches the release counts. A path of None says that the release has no such place. It is made of
``_PLACES``, where a plain path stands for all releases, and every path is below ``sglang.srt``. The
table is checked against the releases that docs/supported.md lists. ``RUN`` says on which release
each tracer was run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

Places = tuple[tuple[str, str | None], ...]
_MHA = "layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
_FLASHINFER = "layers.attention.flashinfer_backend.FlashInferAttnBackend"
_TRTLLM_MLA = "layers.attention.trtllm_mla_backend.TRTLLMMLABackend"
_FLASHMLA = "layers.attention.flashmla_backend"
_FLASHINFER_MLA = "layers.attention.flashinfer_mla_backend.FlashInferMLAAttnBackend"
_FA = "layers.attention.flashattention_backend"
_NATIVE = "layers.attention.torch_native_backend.TorchNativeAttnBackend"
_HYBRID = "layers.attention.hybrid_attn_backend.HybridAttnBackend"
_TRITON = "layers.attention.triton_backend"
_TRITON_OPS = "layers.attention.triton_ops"  # up to 0.5.17
_WORKER = "speculative.frozen_kv_mtp_worker.FrozenKVMTPWorker"
_WORKER_V2 = "speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPWorkerV2"
_DRAFT_V2 = "speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker"
_EAGLE_V2 = "speculative.eagle_worker_v2.EAGLEWorkerV2"
_EAGLE_DRAFT = "speculative.eagle_worker_v2.EagleDraftWorker"
_LAYERED = "speculative.multi_layer_eagle_worker_v2.MultiLayerEagleWorkerV2"
_LAYERED_DRAFT = "speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
_NGRAM = "speculative.ngram_worker.NGRAMWorker"
_EAGLE_UTILS = "speculative.eagle_utils"
_FUTURE = "managers.overlap_utils.FutureMap"
_BATCH = "managers.schedule_batch.ScheduleBatch"
_ALGORITHM = "speculative.spec_info.SpeculativeAlgorithm"
_RADIX = "layers.radix_attention"
_RUNNER = "model_executor.model_runner.ModelRunner"
_SCHEDULER = "managers.scheduler.Scheduler"
_ADDER = "managers.schedule_policy.PrefillAdder"
_CAUSAL = "models.gemma4_causal.Gemma4ForCausalLM"
_MM = "models.gemma4_mm.Gemma4ForConditionalGeneration"
_ASSISTANT = "models.gemma4_mtp.Gemma4AssistantForCausalLM"
_GEMMA4 = "models.gemma4_causal"
_VISION = "models.gemma4_vision"
_ANY = ""


def _allocator(module: str, name: str) -> Places:
    """A method of an allocator. 0.5.13 split their module into a package."""
    old = "swa_memory_pool" if module == "swa" else "allocator"
    return _moved("0.5.13", f"mem_cache.{old}.{name}", f"mem_cache.allocator.{module}.{name}")


def _moved(release: str, before: str, after: str) -> Places:
    """A place that is elsewhere from this release on."""
    return ((f"<{release}", before), (_ANY, after))


def _until(release: str, path: str) -> Places:
    """A place that this release and later ones do not have."""
    return ((f"<{release}", path), (_ANY, None))


def _backend(name: str, path: str) -> dict[str, str | Places]:
    """The sites of every attention backend. 0.5.13 merged capture and replay into one method."""
    made = f"{path}.init_forward_metadata"
    return {
        f"attn.{name}.init": f"{path}.__init__",
        f"attn.{name}.init_graph_state": f"{path}.init_cuda_graph_state",
        f"attn.{name}.metadata": made,
        f"attn.{name}.metadata_capture": _until("0.5.13", f"{made}_capture_cuda_graph"),
        f"attn.{name}.metadata_replay": _moved(
            "0.5.13", f"{made}_replay_cuda_graph", f"{made}_out_graph"
        ),
    }


def _since(release: str, place: str | Places) -> Places:
    """A place that this release is the first to have, or the first in which it is looked for."""
    places = ((_ANY, place),) if isinstance(place, str) else place
    return ((f"<{release}", None), *places)


_CACHE, _PREFIX = "mem_cache", "prefix_device_indices"


def _tree(
    family: str, path: str, until: str = "", checkpoint: str = "checkpoint"
) -> dict[str, str | Places]:
    """The sites of a prefix cache that is a tree. checkpoint: hands pages over in 0.5.23."""
    path = f"{_CACHE}.{path}"
    sites: dict[str, Places] = {
        f"tree.{family}.insert": ((_ANY, f"{path}.insert"),),
        f"tree.{family}.match": _until("0.5.23", f"{path}.match_prefix"),
        f"tree.{family}.path": _since("0.5.23", f"{path}.path_device_indices"),
        f"tree.{family}.unfinished": _until("0.5.23", f"{path}.cache_unfinished_req"),
        f"tree.{family}.finished": (
            ("<0.5.21", f"{path}.cache_finished_req"),
            ("<0.5.23", f"{path}.insert_req"),
            (_ANY, f"{path}.{checkpoint}"),
        ),
    }
    gone: Places = ((f">={until}", None),) if until else ()
    return {site: (*gone, *places) for site, places in sites.items()}


_PAGED, _TOKEN = "PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"
_SWA, _BASE = "SWATokenToKVPoolAllocator", "BaseTokenToKVPoolAllocator"

_PLACES: dict[str, str | Places] = {
    **_backend("trtllm_mha", _MHA),
    "attn.trtllm_mha.layer_page_table": f"{_MHA}._get_layer_page_table",
    # The locations that its fused kernel writes FP8 KV to, past "kv.set".
    "attn.trtllm_mha.layer_cache_loc": f"{_MHA}._get_layer_cache_loc",
    "attn.trtllm_mha.alloc_swa_page_table": f"{_MHA}._alloc_swa_page_table",
    # From 0.5.15 on the captured graph itself fills in the page tables.
    "attn.trtllm_mha.metadata_in_graph": _since("0.5.15", f"{_MHA}.init_forward_metadata_in_graph"),
    **_backend("triton", f"{_TRITON}.TritonAttnBackend"),
    "attn.triton.multi_step": f"{_TRITON}.TritonMultiStepDraftBackend.__init__",
    "attn.triton.decode": f"{_TRITON}.TritonAttnBackend.forward_decode",
    "attn.triton.extend": f"{_TRITON}.TritonAttnBackend.forward_extend",
    # The window's lists before a replay. The path that wraps it is for 0.5.12 only.
    "attn.triton.window_lists": _until(
        "0.5.13", f"{_TRITON}.update_sliding_window_buffer_cuda_graph"
    ),
    # How large the blocks of its kernel are. Looked at on 0.5.12 only: later ones need no fix.
    "attn.triton.extend_blocks": _until(
        "0.5.13", f"{_TRITON_OPS}.extend_attention._get_block_sizes_for_extend_attention"
    ),
    **_backend("flashinfer", _FLASHINFER),
    "attn.flashinfer.extend": f"{_FLASHINFER}.forward_extend",
    "attn.flashinfer.decode": f"{_FLASHINFER}.forward_decode",
    **_backend("flashinfer_mla", _FLASHINFER_MLA),
    "attn.flashinfer_mla.extend": f"{_FLASHINFER_MLA}.forward_extend",
    "attn.flashinfer_mla.decode": f"{_FLASHINFER_MLA}.forward_decode",
    # Before 0.5.23 the module needs a kernel of another wheel even to be imported.
    **{
        site: _since("0.5.23", place)
        for site, place in {
            **_backend("flashmla", f"{_FLASHMLA}.FlashMLABackend"),
            "attn.flashmla.extend": f"{_FLASHMLA}.FlashMLABackend.forward_extend",
            "attn.flashmla.decode": f"{_FLASHMLA}.FlashMLABackend.forward_decode",
            "attn.flashmla.kernel": f"{_FLASHMLA}.flash_mla_with_kvcache",
        }.items()
    },
    **_backend("trtllm_mla", _TRTLLM_MLA),
    "attn.trtllm_mla.extend": f"{_TRTLLM_MLA}.forward_extend",
    "attn.trtllm_mla.decode": f"{_TRTLLM_MLA}.forward_decode",
    "attn.trtllm_mla.kernel": f"{_TRTLLM_MLA}._run_decode_kernel",
    **_backend("fa3", f"{_FA}.FlashAttentionBackend"),
    # A captured graph fills in the table of a draft extend itself.
    "attn.fa3.metadata_in_graph": _since(
        "0.5.18", f"{_FA}.FlashAttentionBackend.init_forward_metadata_in_graph"
    ),
    "attn.fa3.extend": f"{_FA}.FlashAttentionBackend.forward_extend",
    "attn.fa3.decode": f"{_FA}.FlashAttentionBackend.forward_decode",
    "attn.fa3.kernel": f"{_FA}.flash_attn_with_kvcache",
    **{
        f"attn.torch_native.{site}": f"{_NATIVE}.{method}"
        for site, method in {
            "init": "__init__",
            "metadata": "init_forward_metadata",
            "extend": "forward_extend",
            "decode": "forward_decode",
        }.items()
    },
    # Where every attention backend begins with a layer: SGLang's base class.
    "attn.forward": "layers.attention.base_attn_backend.AttentionBackend.forward",
    # The one that has layers with attention and others, and does not begin there.
    "attn.forward.linear": (
        "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.forward"
    ),
    # Where one pool writes the KV of a layer; with MLA as one vector, or as its two parts.
    "kv.set": "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
    "kv.set.mla": "mem_cache.memory_pool.MLATokenToKVPool.set_kv_buffer",
    "kv.set.mla_parts": "mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
    "attn.hybrid_init": f"{_HYBRID}.__init__",
    # Each forward of the two backends together. Before 0.5.13 a backend has no pool of its own.
    "attn.hybrid_metadata": _since("0.5.13", f"{_HYBRID}.init_forward_metadata"),
    "attn.hybrid_metadata_out_graph": _since(
        "0.5.14", f"{_HYBRID}.init_forward_metadata_out_graph"
    ),
    # The custom op of prefill attention under piecewise CUDA graphs.
    "attn.unified_op": _until("0.5.23", f"{_RADIX}.unified_attention_with_output"),
    "attn.unified_op_breakable": _until("0.5.14", f"{_RADIX}.bcg_unified_attention_with_output"),
    # A model with its pools: one for the target, one for the draft.
    "runner.init": "model_executor.model_runner.ModelRunner.__init__",
    # Builds the attention backends of a model, before a CUDA graph is captured.
    "runner.attention": _moved(
        "0.5.14", f"{_RUNNER}.init_attention_backend", f"{_RUNNER}.init_attention_backends"
    ),
    # A forward that is no replay of a whole CUDA graph, or that decides to be one.
    "runner.forward": f"{_RUNNER}.forward",
    # Samples the next tokens of the target's batch.
    "runner.sample": "model_executor.model_runner.ModelRunner.sample",
    "runner.sampler": "layers.sampler.Sampler.forward",
    "runner.init_piecewise": _until(
        "0.5.14", "model_executor.model_runner.ModelRunner.init_piecewise_cuda_graphs"
    ),
    "model.capture_eagle3": f"{_CAUSAL}.set_eagle3_layers_to_capture",
    "model.capture_eagle3_mm": f"{_MM}.set_eagle3_layers_to_capture",
    "model.capture_dflash": _since("0.5.14", f"{_CAUSAL}.set_dflash_layers_to_capture"),
    "model.capture_dflash_mm": _since("0.5.14", f"{_MM}.set_dflash_layers_to_capture"),
    "forward_batch.init_new": "model_executor.forward_batch_info.ForwardBatch.init_new",
    # Whether a prefill replays a CUDA graph, of whichever kind.
    "runner.prefill_graph_can_run": _moved(
        "0.5.14",
        "model_executor.piecewise_cuda_graph_runner.PiecewiseCudaGraphRunner.can_run",
        "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
    ),
    # Where the graphs of a prefill are captured, or it is decided that there are none.
    "graphs.capture_prefill": _since(
        "0.5.21",
        "model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
    ),
    # A prefill outside of CUDA graphs runs on a copy of its batch.
    "runner.eager_load_batch": _since(
        "0.5.15", "model_executor.runner.eager_runner.EagerRunner.load_batch"
    ),
    "model.embed_and_head": f"{_CAUSAL}.get_embed_and_head",
    # FROZEN_KV_MTP's draft gets the target's embedding table while its worker is built.
    "worker.init": _moved("0.5.14", f"{_WORKER}.__init__", f"{_DRAFT_V2}.__init__"),
    "draft.bind_embedding": f"{_ASSISTANT}.set_embed_and_head",
    "worker.frozen_view": _moved(
        "0.5.14", f"{_WORKER}._frozen_kv_target_view", f"{_DRAFT_V2}._frozen_kv_target_view"
    ),
    "worker.pool_view": _moved(
        "0.5.14", f"{_WORKER}._target_kv_pool_view", f"{_DRAFT_V2}._target_kv_pool_view"
    ),
    "worker.forward": _moved(
        "0.5.14", f"{_WORKER}.forward_batch_generation", f"{_WORKER_V2}.forward_batch_generation"
    ),
    # The target's forward. When this returns, the device still works on it.
    "worker.target_forward": "managers.tp_worker.TpModelWorker.forward_batch_generation",
    # The hand-overs of batch.spec_info: two in both workers, then the v1 worker's, and then those
    # of v2, which hands over through the FutureMap from one step to the next.
    "worker.draft": _moved("0.5.14", f"{_WORKER}.draft", f"{_DRAFT_V2}.draft"),
    "worker.draft_forward": _since("0.5.14", f"{_DRAFT_V2}.draft_forward"),
    # The v2 worker inherits it.
    "worker.verify": _moved("0.5.14", f"{_WORKER}.verify", f"{_EAGLE_V2}.verify"),
    # Puts the draft's tokens in order for the verify.
    "draft.tree": _since("0.5.14", f"{_EAGLE_UTILS}.build_tree_kernel_efficient"),
    # The acceptance in a verify: the kernel that decides it greedily, and all of the sampling.
    "verify.kernel": _since("0.5.14", f"{_EAGLE_UTILS}.verify_tree_greedy_func"),
    # Up to 0.5.13, the same kernel of FROZEN_KV_MTP's v1 worker.
    "verify.kernel.v1": _until("0.5.14", "speculative.eagle_info.verify_tree_greedy_func"),
    "verify.sample": _since("0.5.14", f"{_EAGLE_UTILS}.eagle_sample"),
    # Not hooked: where an accept index picks tokens.
    "verify.accept": (
        ("<0.5.14", "speculative.eagle_info.EagleVerifyInput.verify"),
        ("<0.5.18", f"{_EAGLE_V2}.verify"),
        (_ANY, "speculative.eagle_worker_common.run_eagle_verify"),
    ),
    "worker.extend_after_decode": _until("0.5.14", f"{_WORKER}.forward_draft_extend_after_decode"),
    "worker.seed_step": _until("0.5.14", f"{_WORKER}._run_assistant_seed_step"),
    "worker.select_verified": _until("0.5.14", f"{_WORKER}._select_last_verified_seed"),
    "worker.select_extended": _until("0.5.14", f"{_WORKER}._select_last_extend_hidden"),
    "worker.target_extend": _until("0.5.14", f"{_WORKER}.forward_target_extend"),
    "worker.draft_extend": _since("0.5.14", f"{_DRAFT_V2}._draft_extend_for_decode"),
    # The same of EAGLE, EAGLE3 and STANDALONE, which are known since they were run.
    "eagle.forward": _since("0.5.15", f"{_EAGLE_V2}.forward_batch_generation"),
    "eagle.draft": _since("0.5.15", f"{_EAGLE_DRAFT}.draft"),
    "eagle.draft_extend": _since("0.5.15", f"{_EAGLE_DRAFT}._draft_extend_for_decode"),
    # The same of multi-layer EAGLE, whose draft only puts together what its extend has drafted.
    "layered.forward": _since("0.5.23", f"{_LAYERED}.forward_batch_generation"),
    "layered.draft": _since("0.5.23", f"{_LAYERED_DRAFT}.draft"),
    "layered.verify": _since("0.5.23", f"{_LAYERED}.verify"),
    "layered.draft_extend": _since("0.5.23", f"{_LAYERED_DRAFT}._draft_extend_for_decode"),
    "ngram.forward": _since("0.5.23", f"{_NGRAM}.forward_batch_generation"),
    "ngram.draft": _since("0.5.23", f"{_NGRAM}._prepare_for_speculative_decoding"),
    # Takes the tokens of a forward by rows: the first that reads these, without overlap, too.
    "future.inputs": _since("0.5.14", "managers.scheduler.resolve_forward_inputs"),
    "future.resolve_lens": _since("0.5.14", f"{_FUTURE}.resolve_seq_lens_cpu"),
    "future.gather": _since("0.5.14", f"{_FUTURE}._resolve_spec_extras"),
    "future.publish": _since("0.5.14", f"{_FUTURE}.publish"),
    "future.stash": _since("0.5.14", f"{_FUTURE}.stash"),
    # 0.5.14 calls FutureMap.stash in run_batch itself.
    "scheduler.relay": _since("0.5.15", f"{_SCHEDULER}._relay_forward_payload"),
    # 0.5.14 has it, too, but there the next step's allocation counts a part of the tokens.
    "result.resolve": _since(
        "0.5.15",
        "managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    ),
    # The same of 0.5.12's v2, which FROZEN_KV_MTP has there with the path frozen-kv-mtp-v2 only.
    "result.resolve_overlap": _until(
        "0.5.13",
        "managers.scheduler_output_processor_mixin"
        ".SchedulerOutputProcessorMixin._resolve_spec_overlap_tokens",
    ),
    # The rest of 0.5.12's v2. There the FutureMap is a ring: a step gets rows of its own in it.
    "overlap.forward": _until("0.5.13", f"{_EAGLE_V2}.forward_batch_generation"),
    "overlap.verify": _until("0.5.13", f"{_EAGLE_V2}.verify"),
    "overlap.resolve": _until("0.5.13", f"{_FUTURE}.resolve_future"),
    "overlap.store": _until("0.5.13", f"{_FUTURE}.store_to_map"),
    # Which worker speculates, and whether under overlap scheduling.
    "args.speculative": _until("0.5.13", "server_args.ServerArgs._handle_speculative_decoding"),
    "spec.supports_v2": _until("0.5.13", f"{_ALGORITHM}.supports_spec_v2"),
    "spec.create_worker": _until("0.5.13", f"{_ALGORITHM}.create_worker"),
    # Called once for each request, before it may be scheduled.
    "grammar.begin": _until(
        "0.5.13", "constrained.grammar_manager.GrammarManager.process_req_with_grammar"
    ),
    # Called in a thread of its own, once for each grammar that is not in SGLang's cache.
    "grammar.compile": "constrained.base_grammar_backend.BaseGrammarBackend._init_value_dispatch",
    "batch.merge": f"{_BATCH}.merge_batch",
    "batch.filter": f"{_BATCH}.filter_batch",
    # 0.5.13 moved the speculative arguments into a module of their own.
    "args.spec_alias": _moved(
        "0.5.13",
        "server_args._resolve_speculative_algorithm_alias",
        "arg_groups.speculative_hook._resolve_speculative_algorithm_alias",
    ),
    # 0.5.14 decides this for each model.
    "args.piecewise": _until("0.5.14", "server_args.ServerArgs._handle_piecewise_cuda_graph"),
    # The allocator of one pool. The sites ".token" are in the allocator for pages of one token.
    "pool.init": _allocator("paged", f"{_PAGED}.__init__"),
    "pool.init.token": _allocator("token", f"{_TOKEN}.__init__"),
    "pool.alloc": _allocator("paged", f"{_PAGED}.alloc"),
    "pool.alloc.token": _allocator("token", f"{_TOKEN}.alloc"),
    "pool.alloc_extend": _allocator("paged", f"{_PAGED}.alloc_extend"),
    "pool.alloc_decode": _allocator("paged", f"{_PAGED}.alloc_decode"),
    "pool.free": _allocator("paged", f"{_PAGED}.free"),
    "pool.free.token": _allocator("token", f"{_TOKEN}.free"),
    "pool.clear": _allocator("paged", f"{_PAGED}.clear"),
    "pool.clear.token": _allocator("token", f"{_TOKEN}.clear"),
    "pool.free_segment": (("<0.5.18", None), *_allocator("paged", f"{_PAGED}.free_segment")),
    # Where all pages that are freed enter the free list. Before, "pool.free" put them there.
    "pool.release": (("<0.5.18", None), *_allocator("paged", f"{_PAGED}._release_page_ids")),
    "pool.backup_state": ((">=0.5.18", None), *_allocator("base", f"{_BASE}.backup_state")),
    "pool.restore_state": ((">=0.5.18", None), *_allocator("base", f"{_BASE}.restore_state")),
    # The SWA allocator, which uses two of these allocators, one for each pool.
    "swa.init": _allocator("swa", f"{_SWA}.__init__"),
    "swa.alloc": _allocator("swa", f"{_SWA}.alloc"),
    "swa.alloc_extend": _allocator("swa", f"{_SWA}.alloc_extend"),
    "swa.alloc_decode": _allocator("swa", f"{_SWA}.alloc_decode"),
    "swa.set_mapping": _allocator("swa", f"{_SWA}.set_full_to_swa_mapping"),
    # From 0.5.21 on, SWA pages may be moved from one full page to another.
    "swa.clear_mapping": (
        ("<0.5.21", None),
        *_allocator("swa", f"{_SWA}.clear_full_to_swa_mapping"),
    ),
    "swa.free": _allocator("swa", f"{_SWA}.free"),
    "swa.free_segment": (("<0.5.18", None), *_allocator("swa", f"{_SWA}.free_segment")),
    "swa.free_swa_segment": (("<0.5.21", None), *_allocator("swa", f"{_SWA}.free_swa_segment")),
    "swa.free_swa": _allocator("swa", f"{_SWA}.free_swa"),
    # Whether a waiting request is admitted to the next prefill, and how many SWA tokens it is said
    # to need.
    "adder.add": f"{_ADDER}.add_one_req",
    "adder.swa_need": _moved(
        "0.5.21",
        f"{_ADDER}._swa_budget_for_req",
        "mem_cache.prefill_budget.SWAPrefillBudget.swa_tokens",
    ),
    "batch.prepare_for_extend": f"{_BATCH}.prepare_for_extend",
    "batch.prepare_for_decode": f"{_BATCH}.prepare_for_decode",
    "batch.check_decode_mem": f"{_BATCH}.check_decode_mem",
    # Admits the next chunk of a prompt, or parks the prompt until the next round.
    "adder.add_chunked": f"{_ADDER}.add_chunked_req",
    "batch.evict_swa": f"{_BATCH}._evict_swa",
    # Decides in each step whether that is called: from 0.5.14 on, once in 128 steps or tokens.
    "batch.maybe_evict_swa": _since("0.5.14", f"{_BATCH}.maybe_evict_swa"),
    # Called once by the process that launches a server or an Engine, before it starts the others.
    "server_args.check": "server_args.ServerArgs.check_server_args",
    # Called before the server kills its processes because one of them has failed. In 0.5.23 it
    # waits 5 s, asks py-spy for the stacks, and waits 60 s for core dumps of CUDA.
    "server.before_crash": "managers.tokenizer_manager.TokenizerManager.dump_requests_before_crash",
    # Kills a process by SIGKILL with all that it has started: how every server ends, in all of its
    # processes but the first.
    "server.kill": "utils.common.kill_process_tree",
    # Whether one of its new tokens ends a request.
    "req.stops": "managers.schedule_batch.Req._check_token_based_finish",
    "cache.release": "mem_cache.common.release_kv_cache",
    "scheduler.on_idle": f"{_SCHEDULER}.on_idle",
    "scheduler.process_result": f"{_SCHEDULER}.process_batch_result",
    "tree.swa_insert": _until("0.5.21", "mem_cache.swa_radix_cache.SWARadixCache._insert_helper"),
    # The prefix cache: a request hands its pages over ("finished", "unfinished", and in them
    # "insert"), and gets pages. Up to 0.5.21 a match gives them; then it gives a node, and "prefix"
    # and "path" give the pages.
    **_tree("radix", "radix_cache.RadixCache"),
    **_tree("swa", "swa_radix_cache.SWARadixCache", until="0.5.21"),
    **_tree("unified", "unified_radix_cache.UnifiedRadixCache", checkpoint="checkpoint_into_tree"),
    "tree.prefix": _since("0.5.23", f"{_CACHE}.base_prefix_cache.BasePrefixCache.{_PREFIX}"),
    "tree.unified.prefix": _since(
        "0.5.23", f"{_CACHE}.unified_radix_cache.UnifiedRadixCache.{_PREFIX}"
    ),
    "mm.image_feature": f"{_MM}.get_image_feature",
    "mm.video_feature": f"{_MM}.get_video_feature",
    "vision.tower_init": f"{_VISION}.Gemma4VisionEncoder.__init__",
    "vision.encoder": f"{_VISION}.Gemma4VisionTransformer.forward",
    "vision.positions": f"{_VISION}.Gemma4VisionPatchEmbedder._position_embeddings",
    "gemma4.text": f"{_GEMMA4}.Gemma4TextModel.forward",
    "gemma4.layer": f"{_GEMMA4}.Gemma4DecoderLayer.forward",
    # The part of a layer after attention.
    "gemma4.next_stream": _since("0.5.23", f"{_GEMMA4}.Gemma4DecoderLayer._next_stream"),
    "gemma4.layer_init": f"{_GEMMA4}.Gemma4DecoderLayer.__init__",
    "gemma4.moe_init": f"{_GEMMA4}.Gemma4MoE.__init__",
    "scheduler.run_batch": f"{_SCHEDULER}.run_batch",
    # Not hooked: where there is such a barrier, a forward's tables are built before they change.
    "scheduler.war_barrier": _since("0.5.14", f"{_SCHEDULER}._apply_war_barrier"),
    "scheduler.next_batch": f"{_SCHEDULER}.get_next_batch_to_run",
    "scheduler.init": f"{_SCHEDULER}.__init__",
    "scheduler.run_event_loop": f"{_SCHEDULER}.run_event_loop",
    # Called in every round of every kind of event loop. 0.5.13 moved it.
    "scheduler.recv_requests": _moved(
        "0.5.13",
        f"{_SCHEDULER}.recv_requests",
        "managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
    ),
    # Gets what that returned, in every kind of event loop.
    "scheduler.process_inputs": f"{_SCHEDULER}.process_input_requests",
    "scheduler.stream_output": _moved(
        "0.5.13",
        f"{_SCHEDULER}.stream_output",
        "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
    ),
}
SITES: dict[str, Places] = {
    site: tuple(
        (release, dotted and f"sglang.srt.{dotted}")
        for release, dotted in (((_ANY, places),) if isinstance(places, str) else places)
    )
    for site, places in _PLACES.items()
}

# The arguments of a server that anybody here decides by, and the releases that have them. `make
# versions` proves it: one that a release has lost would read as if it had not been given.
ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(
        (
            "abort_on_priority_when_disabled", "allow_auto_truncate", "attention_backend",
            "attn_cp_size", "context_length", "crash_dump_folder", "decode_attention_backend",
            "disable_overlap_schedule", "disable_priority_preemption", "disaggregation_mode",
            "dist_init_addr", "dllm_algorithm", "dp_size", "enable_dp_attention",
            "enable_hierarchical_cache", "enable_hisparse", "enable_lmcache", "enable_metrics",
            "enable_lora", "enable_mixed_chunk", "enable_pdmux", "enable_prefill_delayer",
            "enable_two_batch_overlap", "kv_cache_dtype", "lora_paths", "nnodes", "pp_size",
            "prefill_attention_backend", "prefill_max_requests", "prefill_only_disable_kv_cache",
            "served_model_name", "speculative_adaptive", "speculative_algorithm",
            "speculative_attention_mode", "speculative_draft_attention_backend",
            "speculative_eagle_topk", "speculative_num_draft_tokens", "strip_thinking_cache",
            "tp_size", "watchdog_timeout",
        ),
        _ANY,
    ),
    "radix_cache_backend": ">=0.5.13",
    "dcp_size": ">=0.5.15",
    "enable_session_radix_cache": ">=0.5.15",
    "min_free_slots_delay": ">=0.5.15",
    "enable_unified_memory": ">=0.5.15",
    "enable_flexkv": ">=0.5.18",
    "enable_unified_cache_external_linker": ">=0.5.21",
    "attn_dp_size": ">=0.5.23",
    "enable_decoder_swa_bounded_replay": ">=0.5.23",
    "enable_encoder_swa_bounded_replay": ">=0.5.23",
    "enable_kv_cache_sharding": ">=0.5.23",
    "prefill_decode_interval": ">=0.5.23",
    "prefill_decode_interval_min_bs": ">=0.5.23",
    "radix_eviction_policy_config": ">=0.5.23",
}  # fmt: skip

# Where each tracer was run on each release: armed in real engines, on healthy servers and against
# its faults. A tracer that is missing here may be wrong there, whatever the code looks like, and
# would then stop a healthy server. So nothing is entered here that was only read.
CPU, H100, H200 = "CPU engine", "H100", "H200"
GPUS_RUN = ("sm90",)  # H100 and H200; by compute capability, as NVIDIA's compilers name them
_EVERY = (
    "flight-recorder", "kv-integrity", "page-table", "pool-leak", "spec-lifecycle", "kv-allocator"
)  # fmt: skip
RUN: dict[str, dict[str, tuple[str, ...]]] = {
    "0.5.12.post1": {
        **dict.fromkeys((*_EVERY, "kv-writes"), (CPU, H200)),
        "rank-divergence": (CPU,),
        "prefix-cache": (CPU, H100),
    },
    "0.5.13.post1": {name: (CPU,) for name in _EVERY if name != "kv-integrity"},
    "0.5.15.post1": {
        **dict.fromkeys(_EVERY, (CPU, H200)),
        **dict.fromkeys(("kv-writes", "rank-divergence"), (CPU,)),
        "prefix-cache": (CPU, H100),
    },
    "0.5.23": {
        **dict.fromkeys((*_EVERY, "kv-writes", "rank-divergence"), (CPU, H100, H200)),
        "prefix-cache": (CPU, H100),
    },
}


class UnknownSite(KeyError):
    """A tracer, fault or fix names a site that is not in ``SITES``."""


_elsewhere: ContextVar[Path | None] = ContextVar("_elsewhere", default=None)


@contextmanager
def looking_at(root: Path) -> Iterator[None]:
    """Let this module answer for the SGLang wheel that is unpacked in ``root``."""
    token = _elsewhere.set(root)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def sglang_root() -> Path:
    """The folder that holds the package ``sglang``, which is not imported for this.

    Raises ImportError if SGLang is not installed.
    """
    root = _elsewhere.get()
    if root is not None:
        return root
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("SGLang is not installed here")
    return Path(next(iter(spec.submodule_search_locations))).parent


@cache
def _installed() -> str:
    # This is asked 200 times at start, and the metadata is a file of 30 kB.
    return version("sglang")


def sglang_version() -> Version | None:
    """The version of the installed SGLang, from its metadata. None if it is not installed."""
    root = _elsewhere.get()
    try:
        if root is None:
            found = _installed()
        else:
            found = next(d.version for d in distributions(name="sglang", path=[str(root)]))
    except (PackageNotFoundError, StopIteration):
        return None
    # packaging comes with SGLang. A laptop that only opens dumps need not have it.
    from packaging.version import Version

    return Version(found)


def matches(specifier: str, installed: Version | None = None) -> bool:
    """True if the version of SGLang matches ``specifier``. Development builds count, too.

    specifier: of packaging, or several of them with " or " between them.
    """
    found = installed or sglang_version()
    if found is None:
        return False
    from packaging.specifiers import SpecifierSet

    return any(
        SpecifierSet(part).contains(found, prereleases=True) for part in specifier.split(" or ")
    )


def is_for(releases: str) -> bool:
    """True if what is declared for these releases is for the installed one.

    ``releases`` is a specifier as of :func:`matches`; '' is for all. Without SGLang all is.
    """
    return not releases or sglang_version() is None or matches(releases)


def ran_on(places: Iterable[str], cpu_engine: bool) -> bool:
    """True if one of these places is the CPU engine, or else a GPU."""
    return any((place == CPU) == cpu_engine for place in places)


def not_run(tracers: Iterable[str], cpu_engine: bool, gpu: str = "") -> tuple[str, ...]:
    """The tracers among ``tracers`` that were not run on the installed SGLang, in the order given.

    cpu_engine: SGLang runs on the CPU engine. Elsewhere a tracer must have been run on a GPU. A
    build that is not exactly a release of ``RUN`` (a development version, or one with a local label
    such as ``+fork``) was not run. gpu: the kind of the GPUs, such as sm90, '' if it is not known;
    on a kind that is not in ``GPUS_RUN`` nothing was run.
    """
    if gpu and not cpu_engine and gpu not in GPUS_RUN:
        return tuple(tracers)
    known = RUN.get(str(sglang_version()), {})
    return tuple(name for name in tracers if not ran_on(known.get(name, ()), cpu_engine))


def path(site: str, installed: Version | None = None) -> str | None:
    """Dotted path of a site in the installed SGLang. None if that release has no such place.

    Raises UnknownSite if ``SITES`` has no such site.
    """
    if site not in SITES:
        raise UnknownSite(f"unknown hook site {site!r}; valid: {', '.join(sorted(SITES))}")
    for specifier, dotted in SITES[site]:
        if specifier == _ANY or matches(specifier, installed):
            return dotted
    return None


def file(site: str) -> str:
    """The file below ``sglang/srt`` of a site that every release has."""
    return "/".join(str(path(site)).split(".")[2:4]) + ".py"


def absent(*sites: str) -> tuple[str, ...]:
    """The sites that the installed SGLang does not have, by the table ``SITES``."""
    return tuple(site for site in sites if path(site) is None)


# The abilities of a release. No other module asks for releases.


def ran_all_values() -> bool:
    """True if all values of a step were followed on a GPU, with temperatures and grammars."""
    return matches("==0.5.23")


def has_war_barrier() -> bool:
    """True if SGLang waits for a forward's reads before it changes what the forward reads."""
    return path("scheduler.war_barrier") is not None


def frees_in_one_place() -> bool:
    """True if all pages that are freed enter the free list at the site "pool.release"."""
    return path("pool.release") is not None


def restores_pages() -> bool:
    """True if pages that were taken for a draft can be given back before it writes into them.

    0.5.14 and 0.5.15 have the site "pool.restore_state", too, but no worker calls it any more.
    """
    return matches("<0.5.14")


def captures_apart() -> bool:
    """True if a function of its own makes triton's metadata when a CUDA graph is captured."""
    return path("attn.triton.metadata_capture") is not None


def fills_tables_in_graph(backend: str) -> bool:
    """True if a captured forward of this backend fills in its page table inside of its graph."""
    return path(f"attn.{backend}.metadata_in_graph") is not None


def captures_piecewise() -> bool:
    """True if piecewise CUDA graphs have a switch of their own."""
    return path("runner.init_piecewise") is not None


def counts_with_result() -> bool:
    """True if all that a verify accepts is counted when its result is processed, at the site
    "result.resolve". 0.5.14 counts a part of it before, in the allocation for the next step.
    """
    return path("result.resolve") is not None


def clears_draft_places() -> bool:
    """True if a draft that writes no KV is given no ``out_cache_loc`` (upstream's #29616)."""
    return matches(">=0.5.15")


def lists_draft_extend() -> bool:
    """True if a draft that extends its KV was seen to hand triton's kernels lists of its prefix."""
    return matches(">=0.5.15")


def layer_tail_is_apart() -> bool:
    """True if the end of a Gemma-4 layer is a function, at the site "gemma4.next_stream"."""
    return path("gemma4.next_stream") is not None
