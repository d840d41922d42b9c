"""Which arguments of its server SGLang's sources read, and which of them change no page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import variables_read

from g4debug.findings import decisive_arguments
from g4debug.replay import setting
from g4debug.tracers.flight_recorder import taping

# What arguments are read from: ServerArgs itself, or from 0.5.21 on a group of them.
HOLDER = re.compile(
    r"(^|\.)(server_args|get_(global_server_args|schedule|memory|spec|exec|parallel|disagg|serving"
    r"|model|lora|device)\(\)(\.(features|kernel|graph|overlap|dllm|deterministic|mamba|moe))?)$"
)
# On a tape as what became of them: sizes of pools, SGLang's own settings of its scheduler, when
# each request came, how many tokens each verify accepted.
_ON_TAPE = """
chunked_prefill_size context_length disable_overlap_schedule enable_mixed_chunk
enable_priority_scheduling max_prefill_tokens max_running_requests max_total_tokens
mem_fraction_static page_size pp_max_micro_batch_size priority_scheduling_preemption_threshold
schedule_low_priority_values_first schedule_policy scheduler_recv_interval
speculative_accept_threshold_acc speculative_accept_threshold_single
speculative_use_block_verification speculative_use_rejection_sampling
"""
# They change no page: where and how fast something is computed, what is logged and shown, which
# draft tokens are tried; what comes with a feature that a tape cannot carry, or with a message or a
# request that it cannot carry.
_HARMLESS = """
attention_backend attn_cp_group attn_cp_rank attn_dcp_rank attn_dcp_size attn_dp_enabled
attn_dp_rank attn_dp_size attn_tp_group attn_tp_rank attn_tp_size cuda_graph_bs_decode
cuda_graph_config dcp_enabled deterministic device disable_cuda_graph disable_cuda_graph_padding
disable_fast_image_processor disaggregation_bootstrap_port
disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum
disaggregation_transfer_backend dllm dp_rank dsa_decode_backend dsa_prefill_backend
elastic_ep_backend enable_broadcast_mm_inputs_process enable_deterministic_inference
enable_dp_attention enable_dp_attention_local_control_broadcast enable_dynamic_chunking
enable_linear_replayssm enable_linear_replayssm_spec enable_lora enable_lora_overlap_loading
enable_mamba_extra_buffer enable_mamba_extra_buffer_lazy enable_memory_saver enable_metrics
enable_metrics_for_all_schedulers enable_mis enable_multi_layer_eagle enable_page_major_kv_layout
enable_pd_role_switch enable_profile_cuda_graph enable_request_time_stats_logging
enable_streaming_session enable_torch_compile enable_trace enable_two_batch_overlap
encoder_transfer_backend ep_join_mode ep_size extra_metric_labels features file_storage_path
flexkv_config_file get_attention_backends gpu_id graph grpc_mode grpc_port hicache_host_memory_mode
hicache_io_backend hicache_mem_layout hicache_ratio hicache_size hicache_storage_backend
hicache_storage_backend_extra_config hicache_storage_prefetch_policy
hicache_storage_prefetch_retry_max_attempts hicache_write_policy is_ep_joiner is_ep_scale_joiner
is_startup_weight_load_overlap json_model_override_args kernel kv_cache_dtype kv_events_config
language_model_only language_only launch_world_size linear_replayssm_cache_len lmcache_config_file
load_format load_snapshot_publish_interval lora_drain_wait_threshold lora_paths mamba
mamba_cache_chunk_size mamba_full_memory_ratio mamba_max_states_per_path mamba_track_interval
max_ep_size max_loras_per_batch max_mamba_cache_size max_speculative_num_draft_tokens max_world_size
mlx_enable_sampling mm_feature_transport model_impl model_path moe moe_dp_size nnodes num_dp_ranks
num_reserved_decode_tokens otlp_traces_endpoint overlap override pop pp_group pp_rank
prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
prefill_delayer_token_usage_low_watermark qsa_indexer_dtype random_seed reasoning_parser revision
sampling_backend sampling_mask_max_tokens served_model_name skip_tokenizer_init sleep_on_idle
smg_grpc_mode soft_watchdog_timeout speculative_adaptive_config speculative_attention_mode
speculative_draft_attention_backend speculative_draft_kv_cache_dtype speculative_draft_load_format
speculative_draft_model_path speculative_draft_model_revision speculative_ngram_capacity
speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path
speculative_ngram_external_sam_budget speculative_ngram_match_type speculative_ngram_max_bfs_breadth
speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth speculative_skip_dp_mlp_sync
speculative_token_map stream_interval tokenizer_backend tokenizer_mode tokenizer_path tp_group
tp_rank tp_size trace_modules trust_remote_code unified_cache_external_linker_backend uno_lora_path
use_mla_backend watchdog_timeout weight_cache_mode weight_version world_group
"""
ON_TAPE, HARMLESS = frozenset(_ON_TAPE.split()), frozenset(_HARMLESS.split())


def read_in(source: str) -> Iterator[str]:
    """The arguments that a module reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if HOLDER.search(ast.unparse(node.value)):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            holder, name = node.args[:2]
            if isinstance(name, ast.Constant) and HOLDER.search(ast.unparse(holder)):
                yield str(name.value)


def known() -> frozenset[str]:
    """The arguments that a replay sets again, or that are a limit of the tape."""
    return frozenset(
        (
            *decisive_arguments.AGAIN,
            *decisive_arguments.LIMITS,
            *decisive_arguments.RANKS,
            *setting.CARRIED,
            *taping.SPECULATION,
        )
    )


def unknown(root: Path) -> dict[str, list[str]]:
    """Each argument that decides there and is neither known nor harmless, with its files.

    root: ``sglang/srt`` of a release.
    """
    return variables_read.not_in(known() | ON_TAPE | HARMLESS, read_in, root)
