"""Which attribute of SGLang each stand-in replaces, on which releases, and why.

Nothing else is replaced.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from g4debug.cpu import (
    bonus_tokens,
    cache_locs,
    delta_rule,
    draft_tree,
    experts,
    flash_attention,
    flashinfer_init,
    flashinfer_wrappers,
    gated_norm,
    grammar_mask,
    input_ids,
    irope,
    kv_copy,
    mla_kernels,
    ngram_tree,
    no_device,
    on_import,
    open_port,
    pinned,
    server_overlap,
    short_conv,
    sm100,
    softcap,
    streams,
    thread_binding,
    token_attention,
    tree_mask,
    verify_greedy,
    verify_sampling,
)
from g4debug.cpu.error import CpuEngineError
from g4debug.hooking import targets

log = logging.getLogger("g4debug.cpu")
# `site/sgl_kernel` asks for the stand-ins of this module when SGLang imports them from it.
SGL_KERNEL: Final = "sgl_kernel"


@dataclass(frozen=True)
class StandIn:
    """`setattr(module, path, replacement)`, on the releases that match the specifier.

    `created`: SGLang imports the name only on CUDA, so it need not exist here. If any other name is
    missing on a release that matches, the process stops, because the table does not know this
    SGLang.

    `wraps`: `replacement` is called with SGLang's own function, and what it returns is set. Few
    processes import that module, and it is done in those, when they do.
    """

    module: str
    path: str
    replacement: Callable[..., Any] | object
    why: str
    releases: str = ""
    created: bool = False
    wraps: bool = False


def _at(
    replacement: Callable[..., Any] | object, why: str, places: Mapping[str, str], **how: bool
) -> Iterator[StandIn]:
    """One replacement at several places: ``module:path`` -> releases. how: of ``StandIn``.

    A module that begins with a dot is below ``sglang.srt``.
    """
    for place, releases in places.items():
        module, _, path = place.partition(":")
        module = f"sglang.srt{module}" if module.startswith(".") else module
        yield StandIn(module, path, replacement, why, releases, **how)


def _kernel(name: str, replacement: Callable[..., Any], why: str) -> StandIn:
    """A kernel for CPUs that SGLang imports from `sgl_kernel`, of which no such wheel exists."""
    return StandIn(SGL_KERNEL, name, replacement, why, ">=0.5.18")


def _in_place_of(replacement: Any) -> Callable[[object], Any]:
    """For `wraps`, where nothing of SGLang's own function is wanted."""
    return lambda own: replacement


# Where SGLang's backends fa3 and flashinfer were run on the CPU engine.
_SERVED: Final = ">=0.5.15,<0.5.18 or >=0.5.23"
_NOT_YET: Final = "<0.5.15 or >=0.5.18,<0.5.23"
_CALLED: Final = "SGLang's branch for CPUs calls it"
_BINDS: Final = (
    "it refuses more tensor-parallel ranks than the machine has NUMA nodes, to bind threads that "
    "only a kernel for AMX has"
)
_MHA: Final = ".layers.attention.trtllm_mha_backend"
_MLA: Final = ".layers.attention.trtllm_mla_backend"
_UNQUANT: Final = ".layers.quantization.unquant:UnquantizedFusedMoEMethod"
TABLE: Final[tuple[StandIn, ...]] = (
    *_at(
        sm100.is_sm100_supported,
        "SGLang allows trtllm_mha for prefill only on sm100",
        {".server_args:is_sm100_supported": "<0.5.21"},
    ),
    *_at(
        sm100.get_platform,
        "SGLang allows trtllm_mha only on some GPUs, and the stand-ins are for sm100's kernels",
        {".arg_groups.attention_hook:get_platform": ">=0.5.21"},
    ),
    *_at(
        sm100.blackwell,
        "SGLang allows trtllm_mla only on sm100",
        {".arg_groups.overrides:get_platform": ">=0.5.23"},
    ),
    *_at(
        flashinfer_init.init_backend,
        "it builds CUDA wrappers that trtllm_mha never uses",
        {".layers.attention.flashinfer_backend:FlashInferAttnBackend.__init__": _NOT_YET},
    ),
    *_at(
        flashinfer_init.of_subclasses,
        "it builds CUDA wrappers that trtllm_mha never uses",
        {".layers.attention.flashinfer_backend:FlashInferAttnBackend.__init__": _SERVED},
        wraps=True,
    ),
    *(
        stand_in
        for name, wrapper in (
            ("BatchDecodeWithPagedKVCacheWrapper", "flashinfer_backend"),
            ("BatchPrefillWithPagedKVCacheWrapper", "flashinfer_backend"),
            ("BatchPrefillWithRaggedKVCacheWrapper", "flashinfer_backend"),
            ("BatchPrefillWithRaggedKVCacheWrapper", "flashinfer_mla_backend"),
            ("BatchMLAPagedAttentionWrapper", "flashinfer_mla_backend"),
        )
        for stand_in in _at(
            getattr(flashinfer_wrappers, name),
            "the attention kernels are CUDA only",
            {f".layers.attention.{wrapper}:{name}": _SERVED},
            created=True,
        )
    ),
    *_at(
        flashinfer_wrappers.merge,
        "the kernel that merges is CUDA only",
        {".layers.attention.flashinfer_backend:_safe_merge_state": _SERVED},
        created=True,
    ),
    *_at(
        flashinfer_wrappers.no_fast_plan,
        "SGLang compares a wrapper's plan with it",
        {".layers.attention.flashinfer_backend:fast_decode_plan": _SERVED},
        created=True,
    ),
    *_at(
        flashinfer_wrappers.TORCH,
        "the backend names the device cuda, and pins memory",
        {
            f".layers.attention.{module}:torch": _SERVED
            for module in ("flashinfer_backend", "flashinfer_mla_backend")
        },
    ),
    *_at(
        flashinfer_init.FLASHINFER,
        "the attention kernels are CUDA only",
        {f"{_MHA}:flashinfer": ""},
        created=True,
    ),
    *_at(
        flashinfer_init.no_counter_buffer,
        "its size depends on the multiprocessors of the GPU",
        {f"{_MHA}:make_persistent_multi_ctas_kv_counter_buffer": ">=0.5.18"},
    ),
    *_at(
        mla_kernels.FLASHINFER,
        "the attention kernels are CUDA only",
        {f"{_MLA}:flashinfer": ">=0.5.23"},
        created=True,
    ),
    *_at(
        flashinfer_init.no_counter_buffer,
        "its size depends on the multiprocessors of the GPU",
        {f"{_MLA}:make_persistent_multi_ctas_kv_counter_buffer": ">=0.5.23"},
    ),
    *_at(
        mla_kernels.no_module,
        "it compiles a kernel for CUDA",
        {f"{_MLA}:_jit_fixup_module": ">=0.5.23"},
    ),
    *_at(
        mla_kernels.fixup_zero_kv_rows,
        "the kernel is CUDA only",
        {f"{_MLA}:fixup_zero_kv_rows": ">=0.5.23"},
    ),
    *_at(
        flash_attention.flash_attn_with_kvcache,
        "the attention kernel is CUDA only",
        {".layers.attention.flashattention_backend:flash_attn_with_kvcache": _SERVED},
    ),
    *_at(
        flash_attention.flash_attn_varlen_func,
        "the attention kernel is CUDA only",
        {".layers.attention.flashattention_backend:flash_attn_varlen_func": _SERVED},
    ),
    *_at(
        flash_attention.get_device_capability,
        "SGLang allows fa3 only on some GPUs",
        {".layers.attention.attention_registry:get_device_capability": _SERVED},
    ),
    *(
        stand_in
        for name, file in (
            ("decode_attention_fwd", "decode_attention"),
            ("extend_attention_fwd", "extend_attention"),
            ("extend_attention_fwd_unified", "extend_attention"),
        )
        for stand_in in _at(
            getattr(token_attention, name),
            "its Triton kernel takes minutes in the interpreter",
            {
                f".layers.attention.triton_ops.{file}:{name}": "<0.5.18",
                f"sglang.kernels.ops.attention.{file}:{name}": ">=0.5.18",
            },
        )
    ),
    *(
        stand_in
        for name in ("causal_conv1d_fn", "causal_conv1d_update")
        for stand_in in _at(
            getattr(short_conv, name),
            "Triton's interpreter refuses its kernel",
            {f".models.lfm2:{name}": ">=0.5.23"},
        )
    ),
    *(
        stand_in
        for module, kernels in (
            ("gdn_backend", (short_conv.causal_conv1d_fn, short_conv.causal_conv1d_update)),
            ("gdn_backend", (delta_rule.fused_gdn_gating,)),
            (
                "kernels.gdn_triton",
                (
                    delta_rule.chunk_gated_delta_rule,
                    delta_rule.fused_sigmoid_gating_delta_rule_update,
                ),
            ),
        )
        for kernel in kernels
        for stand_in in _at(
            _in_place_of(kernel),
            "SGLang's branch for CPUs calls kernels of a wheel that is not there",
            {f".layers.attention.linear.{module}:{kernel.__name__}": ">=0.5.23"},
            wraps=True,
        )
    ),
    *_at(
        _in_place_of(gated_norm.rms_norm_gated),
        "its Triton kernel uses block pointers, which Triton has removed",
        {"sglang.kernels.ops.attention.fla.fused_norm_gate:rms_norm_gated": ">=0.5.23"},
        wraps=True,
    ),
    *_at(
        _in_place_of(experts.fused_gate_sigmoid_mul_add),
        "its Triton kernel takes seconds for each chunk in the interpreter",
        {".models.qwen2_moe:fused_gate_sigmoid_mul_add": ">=0.5.23"},
        wraps=True,
    ),
    *_at(
        delta_rule.keeps_states,
        "on a CPU SGLang does not let the prefix cache keep the states with which chunks begin",
        {".arg_groups.mamba_hook:_platform_supports_mamba_cache_extra_buffer": ">=0.5.23"},
        wraps=True,
    ),
    *_at(
        irope.rotations,
        "on a CPU it returns what Llama-4 expects to be written in place, as the kernel does",
        {".models.llama4:get_rope": ">=0.5.23"},
        wraps=True,
    ),
    *_at(
        irope.as_on_cuda,
        "but for CUDA, Llama-4 norms Q and K in bfloat16, and a model in float32 ends there",
        {".models.llama4:_is_cuda": ">=0.5.23"},
        wraps=True,
    ),
    *_at(
        softcap.softcap_in_place,
        "its Triton kernel calls libdevice.tanh, which the interpreter lacks",
        {".layers.logits_processor:fused_softcap": ""},
    ),
    *_at(
        pinned.TORCH,
        "prompt logprobs ask for pinned memory, which only an accelerator has",
        {".layers.logits_processor:torch": "<0.5.14"},
    ),
    *_at(
        pinned.pin_memory,
        "a decode asks for pinned memory where the prefix cache keeps states",
        {"torch:Tensor.pin_memory": ">=0.5.23"},
    ),
    *_at(
        grammar_mask.apply_vocab_mask,
        "it raises on a CPU, although xgrammar can do it there",
        {".constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask": "<0.5.18"},
    ),
    # forward_native is the same function, for CPUs without AMX.
    *_at(
        experts.forward_cpu,
        "it asserts that experts use silu; Gemma-4's use gelu, which SGLang's torch code can do",
        {f"{_UNQUANT}.forward_cpu": "<0.5.18", f"{_UNQUANT}.forward_native": "<0.5.18"},
    ),
    *_at(
        experts.narrowed,
        "on a CPU it takes a dimension that the bias of gpt-oss' experts does not have",
        {
            ".layers.moe.fused_moe_triton.layer:narrow_padded_param_and_loaded_weight": "<0.5.15",
        },
    ),
    *_at(
        draft_tree.build_tree,
        "it is in sgl_kernel, which SGLang imports only on CUDA",
        {".speculative.eagle_utils:sgl_build_tree_kernel_efficient": "<0.5.18"},
        created=True,
    ),
    # Up to 0.5.13 other modules hold the same function under their own names. In eagle_info_v2
    # only the path frozen-kv-mtp-v2 runs it.
    *_at(
        verify_greedy.verify_tree_greedy,
        "it has no CPU branch and would silently verify nothing",
        {
            ".speculative.eagle_utils:verify_tree_greedy_func": "<0.5.18",
            ".speculative.eagle_info:verify_tree_greedy_func": "<0.5.14",
            ".speculative.eagle_info_v2:verify_tree_greedy_func": "<0.5.13",
        },
    ),
    *(
        StandIn(SGL_KERNEL, name, kernel, "these verify on a CPU by it", ">=0.5.14,<0.5.18")
        for name, kernel in (
            ("top_k_renorm_prob", verify_sampling.top_k_renorm_prob),
            ("top_p_renorm_prob", verify_sampling.top_p_renorm_prob),
            ("tree_speculative_sampling_target_only", verify_sampling.sample_tree),
        )
    ),
    *_at(
        cache_locs.extend,
        "it has no CPU branch and would return None",
        {
            ".speculative.triton_ops.cache_locs:assign_extend_cache_locs_func": ">=0.5.14,<0.5.18",
            ".speculative.eagle_info_v2:assign_extend_cache_locs_func": "<0.5.13",
        },
    ),
    *_at(
        streams.record_stream,
        "torch refuses it for a tensor on the CPU, and overlap scheduling calls it on every device",
        {"torch:Tensor.record_stream": "<0.5.13 or >=0.5.14,<0.5.23"},
    ),
    *_at(
        thread_binding.init_of_runner,
        _BINDS,
        {".model_executor.model_runner:ModelRunner.init_threads_binding": "<0.5.18"},
    ),
    *_at(
        thread_binding.init_for_tensor_parallel,
        _BINDS,
        {".utils.numa_utils:init_threads_binding": ">=0.5.18,<0.5.19"},
    ),
    *_at(
        thread_binding.init_threads_binding,
        _BINDS,
        {".utils.numa_utils:init_threads_binding": ">=0.5.19"},
    ),
    *_at(
        open_port.awaited,
        "without a warm-up SGLang asks this of the server before its port is open",
        {".entrypoints.http_server:_freeze_gc_after_server_warmup": ">=0.5.18"},
        wraps=True,
    ),
    *_at(
        tree_mask.full,
        "SGLang's tree mask for CPUs is the one of a kernel for AMX; triton reads the one for GPUs",
        {
            f".{module}:default_tree_mask_mode": ">=0.5.23"
            for module in (
                "layers.attention.verify_mask",
                "speculative.eagle_worker_v2",
                "speculative.multi_layer_eagle_worker_v2",
                "speculative.standalone_worker_v2",
            )
        },
        wraps=True,
    ),
    *_at(
        tree_mask.full_of_ngram,
        "NGRAM has the same two tree masks, and decides between them by this",
        {".speculative.ngram_worker:_is_cpu": ">=0.5.23"},
        wraps=True,
    ),
    *_at(
        _in_place_of(no_device.TORCH),
        "it waits for the GPU, and torch raises where it was built without CUDA",
        {".models.mimo_v2_nextn:torch": ">=0.5.23", ".models.llama:torch": ">=0.5.15,<0.5.18"},
        wraps=True,
    ),
    *_at(
        server_overlap.kept,
        "SGLang switches overlap scheduling off on a CPU for all drafts but FROZEN_KV_MTP",
        {".arg_groups.speculative_hook:_disable_overlap_schedule_for_cpu": ">=0.5.23"},
    ),
    _kernel("build_tree_kernel_efficient_cpu", draft_tree.build_tree, _CALLED),
    _kernel("verify_tree_greedy_cpu", verify_greedy.verify_tree_greedy_cpu, _CALLED),
    _kernel("assign_req_to_token_pool_cpu", cache_locs.write, _CALLED),
    _kernel("assign_extend_cache_locs_cpu", cache_locs.read, _CALLED),
    _kernel("fill_bonus_tokens_cpu", bonus_tokens.fill, _CALLED),
    StandIn(
        f"{SGL_KERNEL}.speculative",
        "reconstruct_indices_from_tree_mask",
        ngram_tree.reconstruct,
        "NGRAM calls it, and SGLang imports it with NGRAM's worker",
        ">=0.5.23",
    ),
    _kernel("copy_all_layer_kv_cache_cpu", kv_copy.copy, _CALLED),
    _kernel("assign_draft_cache_locs_contiguous_cpu", cache_locs.draft, _CALLED),
    _kernel("fill_accept_out_cache_loc_cpu", cache_locs.accepted, _CALLED),
    _kernel("rotate_input_ids_cpu", input_ids.rotate, _CALLED),
)

_installed = False


def for_this_release() -> list[StandIn]:
    """The stand-ins of the table that the installed SGLang needs."""
    return [s for s in TABLE if not s.releases or targets.matches(s.releases)]


def install() -> None:
    """Put all stand-ins of the table in place, once per process."""
    global _installed
    if _installed:
        return
    stand_ins = for_this_release()
    for stand_in in stand_ins:
        if stand_in.wraps:
            on_import.when_imported(stand_in.module, functools.partial(_attach, stand_in))
        elif not stand_in.module.startswith(SGL_KERNEL):
            _attach(stand_in)
    _installed = True
    names = ", ".join(dict.fromkeys(s.path for s in stand_ins))
    log.warning("g4debug: CPU engine, with stand-ins for CUDA kernels in force: %s", names)


def kernel(name: str, module: str = SGL_KERNEL) -> object:
    """The stand-in for `sgl_kernel.NAME`. AttributeError if the table has none."""
    for stand_in in for_this_release():
        if (stand_in.module, stand_in.path) == (module, name):
            return stand_in.replacement
    raise AttributeError(
        f"{module}.{name} is a kernel of a wheel for CUDA, and the CPU engine has no stand-in "
        f"for it on SGLang {targets.sglang_version()}. If SGLang really needs it on a CPU, add it "
        "to TABLE in g4debug/cpu/attach.py."
    )


def _attach(stand_in: StandIn) -> None:
    owner = _module(stand_in.module)
    *parents, name = stand_in.path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or not (stand_in.created or hasattr(owner, name)):
        raise CpuEngineError(
            f"CPU engine: SGLang {targets.sglang_version()} has no "
            f"{stand_in.module}:{stand_in.path}, and the table of stand-ins expects it on "
            f"{stand_in.releases or 'every release'}. Use one of the releases that "
            "docs/supported.md names for the CPU engine, or extend TABLE in g4debug/cpu/attach.py "
            "for this one."
        )
    replacement: Any = stand_in.replacement
    setattr(owner, name, replacement(getattr(owner, name)) if stand_in.wraps else replacement)


def _module(name: str) -> Any:
    """The module, or None if this SGLang has no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(e.name + ".")):
            raise  # the module is there, and something that it imports is not
        return None
