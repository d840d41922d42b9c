"""An SGLang plugin of test_device_assert_gpu.py: the draft is given the first half of its table.

So it is with two tensor-parallel ranks, where a target gives away this rank's part of it.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def bound(call_next, model, embed, head):
        call_next(model, embed[: embed.shape[0] // 2], head)

    model = "sglang.srt.models.gemma4_mtp.Gemma4AssistantForCausalLM"
    HookRegistry.register(f"{model}.set_embed_and_head", bound, HookType.AROUND)
