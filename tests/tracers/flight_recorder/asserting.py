"""An SGLang plugin of the engine test: an assertion fails in a kernel, as CUDA and PyTorch tell it.

In step DIE_AT the text that CUDA would print is written to file descriptor 2, from below Python's
own stderr, and the forward raises PyTorch's error. SHARD: by then the draft has the first half
of its table, as from a target with two tensor-parallel ranks. AT_START: it happens while the model
of the draft is set up, where no step has begun.
"""

import os

TEXT = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1141: indexSelectLargeIndex: "
    "block: [%d,0,0], thread: [%d,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
)
ERROR = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def fail():
    import torch

    if "SILENT" not in os.environ:
        for block in range(3):
            os.write(2, b"".join((TEXT % (block, i)).encode() for i in range(64)))
    raise torch.AcceleratorError(ERROR)


def register():
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from g4debug import plugin

    drafts = []

    def end():
        for draft in drafts if "SHARD" in os.environ else ():
            table = draft.target_embed_weight
            draft.target_embed_weight = None  # it is registered as the target's parameter
            draft.target_embed_weight = torch.nn.Parameter(table[: len(table) // 2], False)
        fail()

    def bound(call_next, model, embed, head):
        call_next(model, embed, head)
        drafts.append(model)
        if "AT_START" in os.environ:
            end()

    def forward(attend, *args, **kwargs):
        if plugin.in_force.recorder.step >= int(os.environ.get("DIE_AT", "1000000")):
            end()
        return attend(*args, **kwargs)

    model = "sglang.srt.models.gemma4_mtp.Gemma4AssistantForCausalLM"
    HookRegistry.register(f"{model}.set_embed_and_head", bound, HookType.AROUND)
    backend = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
    for phase in ("forward_decode", "forward_extend"):
        HookRegistry.register(f"{backend}.{phase}", forward, HookType.AROUND)
