"""FlashAttention 3 of `sgl_kernel`, whose functions the CPU engine's stand-ins replace."""

from g4debug.cpu.flash_attention import flash_attn_with_kvcache as flash_attn_with_kvcache
from g4debug.cpu.flash_attention import get_scheduler_metadata as get_scheduler_metadata


def flash_attn_varlen_func(*_args: object, **_options: object) -> None:
    raise NotImplementedError(
        "flash_attn_varlen_func attends without a KV cache, which no toy model of the CPU engine "
        "needs, so it has no stand-in. Use another attention backend."
    )
