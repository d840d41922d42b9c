"""Which environment variables SGLang's sources read, and which of them change no page."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from g4debug.findings import decisive

# Files that decide what runs next and where its pages go.
FILES = (
    "managers/schedule*.py",
    "managers/scheduler_components/*.py",
    "managers/*_delayer.py",
    "managers/overlap_utils.py",
    "managers/tp_worker.py",
    "managers/io_struct.py",
    "session/*.py",
    "mem_cache/**/*.py",
    "speculative/*.py",
)
# Features that a tape cannot carry, workers that are not replayed, and what only measures.
OTHER = re.compile(
    r"storage|hicache|hisparse|hybrid_cache|deepseek|host|sparsity|buffer_mode|multimodal|pp_mixin"
    r"|dp_attn|dspark|dflash|lilicorr|minimax|multi_layer|ragged|page_interleave|kv_canary|dsv4"
    r"|unified_memory|unified_sub_pool|multi_ended|profiler|metrics|embedding|mamba|standalone"
    r"|cpp_utils|vmm|l2_transfer|dedup|index_key|internal_state"
)
# They change no page: what is checked, logged, measured and simulated; where and how fast something
# is computed; what comes with a feature that a tape cannot carry.
_HARMLESS = """
FLEXKV_CONFIG_PATH SGLANG_AITER_KV_CACHE_LAYOUT SGLANG_AMD_USE_FLYDSL_MEGA_MOE
SGLANG_CHECK_KV_PAGE_INVARIANTS SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH
SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS SGLANG_DISABLE_LAZY_COMPACTION SGLANG_DISAGG_STAGING_BUFFER
SGLANG_DP_RANK SGLANG_DSV4_COMPRESS_STATE_DTYPE SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR
SGLANG_EMBEDDINGS_SPARSE_HEAD SGLANG_EMPTY_CACHE_INTERVAL SGLANG_ENABLE_COLOCATED_BATCH_GEN
SGLANG_ENABLE_DELAY_SAMPLE SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION
SGLANG_ENABLE_OVERLAP_PLAN_STREAM SGLANG_ENABLE_PP_SPEC SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY
SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK
SGLANG_ENABLE_WAR_BARRIER SGLANG_EXPOSE_OWN_ENV_VARS SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE
SGLANG_FORCE_COARSE_WAR_BARRIER SGLANG_FORCE_STREAM_INTERVAL
SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM SGLANG_HUGEPAGE_SIZE SGLANG_IS_IN_CI
SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE SGLANG_LOG_GC
SGLANG_LOG_PICKLE_IPC_OBJECTS SGLANG_MAMBA_DEBUG_ASSERTS SGLANG_MM_BUFFER_SIZE_MB
SGLANG_MM_FEATURE_CACHE_MB SGLANG_MM_SKIP_COMPUTE_HASH SGLANG_MOONCAKE_CUSTOM_MEM_POOL
SGLANG_NATIVE_MOVE_KV_CACHE SGLANG_NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH
SGLANG_NGRAM_FORCE_GREEDY_VERIFY SGLANG_NUMA_BIND_V2 SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK
SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE SGLANG_OPT_USE_GUMBEL_SAMPLE
SGLANG_OPT_USE_MINIMAX_FUSED_KV_INDEX_STORE SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM
SGLANG_PREFILL_DELAYER_DEBUG_LOG SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG SGLANG_RUST_BUILD_MODE
SGLANG_SET_CPU_AFFINITY SGLANG_SPEC_ENABLE_STRICT_FILTER_CHECK SGLANG_SPEC_NAN_DETECTION
SGLANG_SPEC_OOB_DETECTION SGLANG_SPEC_TP_SYNC SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS
SGLANG_TEST_MAMBA_LAZY_ALLOC_FAIL SGLANG_TEST_STUCK_SCHEDULER_INIT
SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE SGLANG_USE_AITER SGLANG_USE_HND_KVCACHE
SGLANG_USE_MODELSCOPE SGLANG_USE_PICKLE_IPC SGLANG_VLM_CACHE_SIZE_MB
"""
HARMLESS = frozenset(_HARMLESS.split())
READERS = {"get_bool_env_var", "get_int_env_var", "getenv"}


def read_in(source: str) -> Iterator[str]:
    """The variables that a module reads, however it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "envs":
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"SGL(ANG)?_[A-Z0-9_]+", node.value):
                yield node.value
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith("environ.get") or called.rpartition(".")[2] in READERS:
                yield str(node.args[0].value)


def files(root: Path) -> list[Path]:
    """The modules that decide. root: ``sglang/srt`` of a release."""
    found = [p for pattern in FILES for p in root.glob(pattern)]
    assert len(found) > 40
    return [p for p in found if not OTHER.search(str(p.relative_to(root)))]


def not_in(
    known: frozenset[str], read: Callable[[str], Iterator[str]], root: Path
) -> dict[str, list[str]]:
    """Each name that the modules of ``files`` read and that is none of these, with its files.

    read: the names that a source reads. root: ``sglang/srt`` of a release.
    """
    found: dict[str, list[str]] = {}
    for path in files(root):
        for name in {*read(path.read_text())} - known:
            found.setdefault(name, []).append(str(path.relative_to(root)))
    return found


def unknown(root: Path) -> dict[str, list[str]]:
    """Each variable that decides there and is neither known nor harmless, with its files.

    root: ``sglang/srt`` of a release.
    """
    known = decisive.DECISIVE | decisive.ON_TAPE | decisive.OTHER_WAYS | {*decisive.SECONDS}
    return not_in(known | HARMLESS, read_in, root)
