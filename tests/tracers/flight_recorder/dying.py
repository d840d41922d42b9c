"""An SGLang plugin of the engine test: the device dies in a step of the test's choice.

The kernel that faults got a right page table. DIE_AT is the step, PUT_BACK a function of SGLang
(a class and a method of ``mem_cache/allocator.py``) whose original is put back two steps earlier.
"""

import os


def register():
    from sglang.srt.mem_cache import allocator
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from g4debug import plugin
    from g4debug.cpu import fault

    die_at = int(os.environ["DIE_AT"])
    owner, _, name = os.environ.get("PUT_BACK", "").partition(".")
    original = getattr(allocator, owner).__dict__[name] if name else None

    def forward(attend, *args, **kwargs):
        step = plugin.in_force.recorder.step
        if original is not None and step == die_at - 2:
            setattr(getattr(allocator, owner), name, original)
        if step >= die_at and fault.pending() is None:
            print(f"THE DEVICE DIES IN STEP {step}", flush=True)
            fault.record(fault.DeviceFault("a kernel", 0, 0, 0, 1, -1))
        return attend(*args, **kwargs)

    backend = "sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend"
    for phase in ("forward_decode", "forward_extend"):
        HookRegistry.register(f"{backend}.{phase}", forward, HookType.AROUND)
