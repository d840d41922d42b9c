"""Decides which arguments of the server and which variables may stand in a dump.

People pass dumps around. So a value is copied only if its name is on a list of names that carry
nothing about persons, secrets or prompts, or if it is a number or a switch. Any other argument is
told by its name only, with "set" or "default". A value that looks like a secret is not copied,
whatever its name is, and a path or an address keeps only the parts that name nobody.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from g4debug import discovery
from g4debug.findings.record import Plain

SET, DEFAULT = "set", "default"  # in place of a value that is not shown

# Arguments of SGLang with values that may be shown: names out of a fixed list, sizes of CUDA
# graphs, and numbers in arguments with a name like a secret's. Any other number or switch is shown
# without being here.
_SHOWN = """
attention_backend bf16_gemm_backend boundary_reduction cp_strategy cuda_graph_backend_decode
cuda_graph_backend_prefill cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill
cuda_graph_max_bs_decode cuda_graph_max_bs_prefill dcp_comm_backend decode_attention_backend
decoupled_spec_role deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode device
disaggregation_decode_allocation_policy disaggregation_decode_retraction_backup disaggregation_mode
disaggregation_transfer_backend dllm_algorithm draft_attention_backend dsa_decode_backend
dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend dsv4_attn_backend
dsv4_prefill_backend dtype dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
elastic_ep_backend enable_dynamic_batch_tokenizer enable_unified_memory encoder_transfer_backend
ep_dispatch_algorithm ep_join_mode eplb_algorithm expert_balancedness_report_mode
expert_distribution_recorder_mode flashinfer_a2a_dispatch_type flashinfer_allreduce_fusion_backend
flashinfer_mxfp4_moe_precision fp4_gemm_runner_backend fp8_gemm_runner_backend fuseep_mode
gc_threshold grammar_backend hicache_host_memory_mode hicache_io_backend hicache_mem_layout
hicache_storage_backend hicache_storage_prefetch_policy hicache_write_policy image_processor_backend
kv_cache_dtype kv_canary linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
linear_attn_verify_backend load_balance_method load_format log_level lora_backend
lora_eviction_policy mamba_backend mamba_radix_cache_strategy mamba_ssm_dtype max_prefill_tokens
max_total_tokens mm_attention_backend mm_feature_transport mm_global_cache_backend model_impl
moe_a2a_backend moe_runner_backend num_reserved_decode_tokens numa_node offload_mode
piecewise_cuda_graph_compiler piecewise_cuda_graph_max_tokens piecewise_cuda_graph_tokens
ple_offload_backend prefill_attention_backend prefill_cp_mode prefill_kv_cache_dequant_dtype
qsa_indexer_dtype quantization radix_cache_backend radix_eviction_policy
remote_instance_weight_loader_backend retraction_policy return_hidden_states_mode
rl_on_policy_target sampling_backend schedule_policy skip_tokenizer_init speculative_algorithm
speculative_attention_mode speculative_boundary_reduction speculative_draft_attention_backend
speculative_draft_kv_cache_dtype speculative_draft_load_format speculative_draft_model_quantization
speculative_dsa_topk_backend speculative_moe_a2a_backend speculative_moe_runner_backend
speculative_ngram_match_type speculative_num_draft_tokens startup_weight_load_mode
swa_full_tokens_ratio tbo_token_distribution_threshold tokenizer_backend tokenizer_mode
tokenizer_worker_num unified_cache_external_linker_backend weight_cache_mode
"""
ARGUMENTS = frozenset(_SHOWN.split())
# Their values are paths or names of models. Of a path only the last part is shown (``model``).
MODELS = frozenset({"model_path", "speculative_draft_model_path", "tokenizer_path"})

# Variables whose values may be shown, by the beginning of their names.
VARIABLES = (
    "CUDA_",
    "FLASHINFER_",
    "G4DEBUG_",
    "GLOO_",
    "NCCL_",
    "NVSHMEM_",
    "PYTORCH_",
    "SGLANG_",
    "SGL_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "UCX_",
)
ALSO = frozenset(
    {"HF_HUB_OFFLINE", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
)

_SECRET = re.compile(
    r"api|auth|bearer|cert|cookie|credential|key|pass|private|pwd|secret|sig(?!moid|ma|nal|quit)"
    r"|ssl|token|user",
    re.IGNORECASE,
)
# ``name=value`` or ``"name": value`` with a name that tells of a secret, anywhere in a value.
_NAMED_SECRET = re.compile(rf"[\w-]*(?:{_SECRET.pattern})[\w-]*[\"']?\s*[=:]", re.IGNORECASE)
# ``user:password@`` in a URL, and the beginnings of the tokens of widely used services.
_BARE_SECRET = re.compile(
    r"://[^/\s]*@|\bBearer\s|\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA|eyJ)[\w-]{8,}"
)
_HOME = re.compile(r"(?<![\w.])/(?:root|(?:home|Users)/[^/\s:,;\"']+)(?=[/\s:,;\"']|$)")
# Folders that are on every machine. The parts of any other path may name a person or a project.
_PATH = re.compile(
    r"(?<![\w.~…/])/(?!/|(?:bin|dev|etc|lib|lib64|opt|proc|run|sys|tmp|usr|var)(?:/|$))"
    r"[^\s:,;\"']*/(?=[^/\s:,;\"'])"
)
_ADDRESS = re.compile(r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
LONGEST = 200  # characters of a value; a longer one is not shown
ITEMS = 64  # values of a list


def arguments(args: Any) -> tuple[dict[str, Plain], dict[str, Plain]]:
    """``ServerArgs`` as two mappings: the values that differ from the defaults, and all others.

    A value that may be shown is unchanged, but a path is cut down to its last part. Every other
    value is replaced by SET or DEFAULT. Whether the user or SGLang itself has set an argument
    cannot be seen.
    """
    different: dict[str, Plain] = {}
    same: dict[str, Plain] = {}
    for name, value, unchanged in _arguments(args):
        shown = _argument(name, value)
        if unchanged:
            same[name] = DEFAULT if shown is _HIDDEN else shown
        else:
            different[name] = SET if shown is _HIDDEN else shown
    return different, same


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter for a GPU server, by name; SET in place of a hidden value."""
    return {
        name: SET if _SECRET.search(name) or _tells(_known(name, value), name) else _nowhere(value)
        for name, value in sorted(environ.items())
        if name.startswith(VARIABLES) or name in ALSO
    }


def _known(name: str, value: str) -> str:
    """``value`` without the names of faults, some of which are of tokens and keys."""
    if name != "G4DEBUG_FAULTS":
        return value
    names = "|".join(map(re.escape, discovery.names("fault")))
    return re.sub(rf"(?:^|(?<=;))\s*(?:{names})\s*=", "fault=", value)


def model(path: str) -> str:
    """The last part of a path, because the others may name a person.

    A name on a model hub (``google/gemma-4-E4B-it``) stays whole. A snapshot in the hub's cache
    becomes that name with the snapshot's first eight letters.
    """
    cached = re.search(r"models--([^/]+?)--([^/]+)(?:/snapshots/([^/]{1,8}))?", path)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}" + (f"@{cached[3]}" if cached[3] else "")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith((".", "~")):
        return path
    return re.split(r"[?#]", path)[0].rstrip("/").rpartition("/")[2]


class _Hidden:
    """Stands for a value that may not be shown."""


_HIDDEN: Any = _Hidden()


def _arguments(args: Any) -> list[tuple[str, Any, bool]]:
    """(name, value, whether it is the default) of each argument."""
    if args is None:
        return []
    if hasattr(args, "__struct_fields__"):
        fields = _of_struct(type(args))
    elif dataclasses.is_dataclass(args):
        fields = [(f.name, f.default, f.default_factory) for f in dataclasses.fields(args)]
    else:
        return [(str(name), value, False) for name, value in vars(args).items()]
    found = []
    for name, default, factory in fields:
        if factory is not dataclasses.MISSING:
            default = factory()
        value = getattr(args, name, None)
        found.append((name, value, type(value) is type(default) and bool(value == default)))
    return found


def _of_struct(kind: Any) -> list[tuple[str, Any, Any]]:
    """(name, default, factory of the default) of each field, as dataclasses have them.

    From 0.5.23 on SGLang's arguments are a msgspec.Struct. msgspec comes with such a SGLang only.
    """
    import msgspec

    def missing(x: Any) -> Any:
        return dataclasses.MISSING if x is msgspec.NODEFAULT else x

    fields = msgspec.structs.fields(kind)
    return [(f.name, missing(f.default), missing(f.default_factory)) for f in fields]


def _argument(name: str, value: Any) -> Any:
    """The value as a dump may have it, or _HIDDEN."""
    if name in MODELS and isinstance(value, str):
        value = model(value)
    elif (value is None or isinstance(value, (bool, int, float))) and not _SECRET.search(name):
        return value
    elif name not in ARGUMENTS and not (name in MODELS and value is None):
        return _HIDDEN
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(v, (int, float, str)) for v in value):
        more = f" … ({len(value)})" if len(value) > ITEMS else ""
        value = " ".join(str(v) for v in value[:ITEMS]) + more
    if not isinstance(value, str) or _tells(value, ""):
        return _HIDDEN
    return _nowhere(value)


def _tells(value: str, name: str) -> bool:
    """True if a value may hold a secret."""
    # The faults and folders of g4debug's own variables are no secrets, and are often long.
    longest = 10 * LONGEST if name.startswith("G4DEBUG_") else LONGEST
    if len(value) > longest or _BARE_SECRET.search(value):
        return True
    return bool(_NAMED_SECRET.search(value))


def _nowhere(text: str) -> str:
    """``text`` without what names a person or a machine: home folders, other paths, addresses."""
    shorter = _PATH.sub("…/", _HOME.sub("~", text))
    return _ADDRESS.sub("<address>", shorter)
