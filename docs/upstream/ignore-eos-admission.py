"""flight-recorder: the scheduler hangs: the event loop runs, but has begun no step for 4 s (1
requests waiting, 0 begun)

Expected: progress within 2 s (G4DEBUG_HANG_SECONDS)

Got: no step for 4 s

request 2: A deadlock. No step can free enough: the full pool has 256 tokens in all, and at
least 257 would have to be available.

SGLang 0.5.23. It shows a server that lives, says nothing and serves nobody: request 2 got 0 of
63 tokens in 30 s.

Run it: python THIS_FILE model_path=MODEL, and more arguments of sglang.Engine in the same form.
MODEL: one without sliding layers, as Llama. It was run with a toy model on a CPU (device=cpu
dtype=float32), with stand-ins for the kernels that need a GPU.
"""

import asyncio
import os
import sys

os.environ.update({"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"})

import sglang

ARGUMENTS = {
    "disable_radix_cache": True,
    "num_continuous_decode_steps": 1,
    "radix_eviction_policy": "lru",
    "retraction_policy": "length",
    "schedule_conservativeness": 1.0,
    "attention_backend": "trtllm_mha",
    "page_size": 64,
    "context_length": 2048,
    "max_total_tokens": 256,
    "max_running_requests": 8,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": 4096,
    "schedule_policy": "fcfs",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
}

# Pages of tokens. Prompts that begin with the same pages share them in the prefix cache.
P1 = [
    91, 471, 193, 421, 290, 161, 465, 458, 286, 438, 50, 22, 395, 137, 122, 57, 483, 103, 506,
    98, 383, 110, 102, 209, 387, 384, 384, 370, 46, 506, 104, 115, 90, 108, 295, 425, 148, 233,
    288, 108, 281, 304, 63, 155, 311, 86, 275, 227, 475, 395, 376, 464, 32, 443, 298, 45, 215,
    236, 303, 211, 372, 507, 289, 314,
]
P2 = [
    290, 160, 307, 498, 378, 93, 497, 324, 204, 224, 491, 466, 55, 310, 508, 241, 268, 305, 341,
    44, 121, 17, 353, 78, 339, 423, 15, 448, 420, 381, 495, 506, 65, 309, 201, 144, 23, 151, 80,
    507, 463, 221, 100, 444, 491, 112, 302, 287, 362, 207, 132, 414, 318, 192, 385, 378, 56,
    190, 269, 318, 60, 345, 33, 206,
]
PROMPTS = {
    2: P1 + P2,
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
    run.ask(2, 63)
    await run.ended()
    await asyncio.sleep(3)  # SGLang counts its pages when it has nothing to do


def main():
    engine = sglang.Engine(**ARGUMENTS, **dict(a.split("=", 1) for a in sys.argv[1:]))
    run = Run(engine)
    try:
        engine.loop.run_until_complete(asyncio.wait_for(workload(run), 30))
    except asyncio.TimeoutError:
        for who, answer in run.answers.items():
            if not run.tasks[who].done() or run.tasks[who].cancelled():
                got = f"{len(answer)} of {run.longest[who]} tokens in 30 s"
                print(f"STANDS: request {who} got {got}", flush=True)
        engine.shutdown()
        sys.exit(1)
    print("completed", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
