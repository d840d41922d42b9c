"""An SGLang plugin of test_core_dump_gpu.py: somebody else's kernel writes far behind its tensor.

Once, in front of the step FOREIGN_AT. It has no debug information, and no pointer to a KV buffer.
"""

import os

SOURCE = """extern "C" __global__ void foreign_scatter(float* out, int gib) {
    out[((long long)gib << 28) + blockIdx.x * 64 + threadIdx.x] = 1.0f;
}"""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from g4debug import plugin

    def run_batch(call_next, *args, **kwargs):
        import torch

        if plugin.in_force.recorder.step + 1 == int(os.environ["FOREIGN_AT"]):
            out = torch.empty(4096, device="cuda")
            kernel = torch.cuda._compile_kernel(SOURCE, "foreign_scatter")
            kernel(grid=(4, 1, 1), block=(64, 1, 1), args=[out, 64])
        return call_next(*args, **kwargs)

    path = "sglang.srt.managers.scheduler.Scheduler.run_batch"
    HookRegistry.register(path, run_batch, HookType.AROUND)
