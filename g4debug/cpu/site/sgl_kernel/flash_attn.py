"""FlashAttention 3 of `sgl_kernel`, in whose place SGLang gets the CPU engine's stand-ins."""

from g4debug.cpu.flash_attention import flash_attn_varlen_func as flash_attn_varlen_func
from g4debug.cpu.flash_attention import flash_attn_with_kvcache as flash_attn_with_kvcache
from g4debug.cpu.flash_attention import get_scheduler_metadata as get_scheduler_metadata
