"""An SGLang plugin of test_core_dump_gpu.py: an embedding gets ids that its table has not.

From step 4 on, in whatever runs without a CUDA graph. Not the ids are wrong, as a check would tell,
but what the kernel of the lookup gets.
"""

import os


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from g4debug import plugin

    def lookup(call_next, layer, ids, *args, **kwargs):
        import torch

        capturing = torch.cuda.is_current_stream_capturing()
        if plugin.in_force.recorder.step >= int(os.environ["WRONG_AT"]) and not capturing:
            ids = torch.full_like(ids, layer.weight.shape[0] + 70_000)
            return torch.nn.functional.embedding(ids, layer.weight)
        return call_next(layer, ids, *args, **kwargs)

    path = "sglang.srt.models.gemma3_causal.Gemma3TextScaledWordEmbedding.forward"  # Gemma-4's, too
    HookRegistry.register(path, lookup, HookType.AROUND)
