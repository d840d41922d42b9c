"""flight-recorder in step 1 (EXTEND, 1 request): TypeError:
FrozenKVMTPWorkerV2.forward_batch_generation() got an unexpected keyword argument
'pp_proxy_tensors'

Expected: a scheduler that keeps running

Got: TypeError in sglang/srt/managers/scheduler.py:4829 run_batch

SGLang 0.5.23. It shows SGLang's own error: TypeError:
FrozenKVMTPWorkerV2.forward_batch_generation() got an unexpected keyword argument
'pp_proxy_tensors'.

Run it: python THIS_FILE model_path=MODEL speculative_draft_model_path=ASSISTANT, and more
arguments of sglang.Engine in the same form. MODEL: one with sliding layers, as Gemma-4, whose
window is 128 tokens. It was run with a toy model on a CPU (device=cpu dtype=float32), with
stand-ins for the kernels that need a GPU.
"""

import asyncio
import os
import sys

os.environ.update({"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"})

import sglang

ARGUMENTS = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "num_continuous_decode_steps": 1,
    "radix_eviction_policy": "lru",
    "retraction_policy": "length",
    "schedule_conservativeness": 1.0,
    "attention_backend": "trtllm_mha",
    "page_size": 64,
    "context_length": 2048,
    "max_total_tokens": 8192,
    "swa_full_tokens_ratio": 0.80078125,
    "max_running_requests": 8,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": 4096,
    "disable_overlap_schedule": True,
    "schedule_policy": "fcfs",
    "speculative_num_draft_tokens": 4,
    "speculative_eagle_topk": 1,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
}

# Pages of tokens. Prompts that begin with the same pages share them in the prefix cache.
P1 = [
    136,
]
PROMPTS = {
    3: P1,
}


class Run:
    """Sends requests, and knows how many tokens each one has got."""

    def __init__(self, engine):
        self.engine, self.answers, self.tasks, self.longest = engine, {}, {}, {}

    def ask(self, who, longest, **more):
        self.answers[who], self.longest[who] = [], longest
        self.tasks[who] = asyncio.ensure_future(self._ask(who, longest, more))

    async def _ask(self, who, longest, more):
        sampling = {"temperature": 0, "max_new_tokens": longest, "ignore_eos": True}
        stream = await self.engine.async_generate(
            input_ids=PROMPTS[who], sampling_params=sampling, rid=str(who), stream=True, **more
        )
        async for part in stream:
            self.answers[who] = part["output_ids"]

    async def ended(self, *who):
        """Wait until these requests have ended, or all of them."""
        for one in who or list(self.tasks):
            await self.tasks[one]

    async def tokens(self, who, count):
        while len(self.answers[who]) < count and not self.tasks[who].done():
            await asyncio.sleep(0.001)


async def workload(run):
    run.ask(3, 1)
    await run.ended()
    await asyncio.sleep(3)  # SGLang counts its pages when it has nothing to do


def main():
    engine = sglang.Engine(**ARGUMENTS, **dict(a.split("=", 1) for a in sys.argv[1:]))
    run = Run(engine)
    engine.loop.run_until_complete(workload(run))
    print("completed", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
