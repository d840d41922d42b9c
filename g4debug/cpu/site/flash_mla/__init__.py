"""The CPU engine's `flash_mla`, in whose place SGLang's backend gets stand-ins.

The real wheel is for CUDA only. What has no stand-in here is an error that names it.
"""

from types import ModuleType

from g4debug.cpu.mla_kernels import flash_mla_with_kvcache as flash_mla_with_kvcache
from g4debug.cpu.mla_kernels import plan_nothing as get_mla_decoding_metadata

__all__ = ["flash_mla_with_kvcache", "fused_norm_rope_attn_rope_cast", "get_mla_decoding_metadata"]
# Other models' kernels, whose module SGLang always imports. It has nothing in it.
fused_norm_rope_attn_rope_cast = ModuleType("fused_norm_rope_attn_rope_cast")
