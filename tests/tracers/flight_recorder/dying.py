"""An SGLang plugin of the engine test: the device dies in a step of the test's choice.

The kernel that faults got a right page table. DIE_AT is the step. Two steps earlier it puts back
the original of PUT_BACK, or wraps WRAP (a class and a method of ``mem_cache/allocator.py``).
"""

import os


def over(owner, name):
    inner = getattr(owner, name)

    def meddling(*args, **kwargs):
        return inner(*args, **kwargs)

    return meddling


def register():
    from sglang.srt.mem_cache import allocator
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from g4debug import plugin
    from g4debug.cpu import fault

    die_at = int(os.environ["DIE_AT"])
    owner, _, name = os.environ.get("PUT_BACK", os.environ.get("WRAP", "")).partition(".")
    original = getattr(allocator, owner).__dict__[name] if name else None

    def instead():
        return original if "PUT_BACK" in os.environ else over(getattr(allocator, owner), name)

    meddled = False

    def forward(attend, *args, **kwargs):
        step = plugin.in_force.recorder.step
        nonlocal meddled
        if original is not None and step == die_at - 2 and not meddled:
            meddled = True
            setattr(getattr(allocator, owner), name, instead())
        if step >= die_at and fault.pending() is None:
            print(f"THE DEVICE DIES IN STEP {step}", flush=True)
            fault.record(fault.DeviceFault("a kernel", 0, 0, 0, 1, -1))
        return attend(*args, **kwargs)

    backend = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
    for phase in ("forward_decode", "forward_extend"):
        HookRegistry.register(f"{backend}.{phase}", forward, HookType.AROUND)
