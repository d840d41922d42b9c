"""flight-recorder: the scheduler hangs: the event loop runs, but has begun no step for 3 s (1
requests waiting, 0 begun)

Expected: progress within 2 s (G4DEBUG_HANG_SECONDS)

Got: no step for 3 s

request 2: A deadlock. It lacks 1 token of the SWA pool, no request runs that could give any
back, and what it lacks is its own cached prefix. No step of the scheduler frees it; an abort of
the request may.

as sglang #32379: SGLang locks the cached prefix of the request, and then lacks it for the rest
of the same request

SGLang 0.5.23. It shows a server that lives, says nothing and serves nobody: request 2 got 0 of
1 tokens in 30 s.

Run it: python THIS_FILE model_path=MODEL, and more arguments of sglang.Engine in the same form.
MODEL: one with sliding layers, as Gemma-4, whose window is 128 tokens. It was run with a toy
model on a CPU (device=cpu dtype=float32), with stand-ins for the kernels that need a GPU.
"""

import asyncio
import os
import sys

os.environ.update({"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"})

import sglang

ARGUMENTS = {
    "num_continuous_decode_steps": 1,
    "radix_eviction_policy": "lru",
    "retraction_policy": "length",
    "schedule_conservativeness": 1.0,
    "attention_backend": "trtllm_mha",
    "page_size": 64,
    "context_length": 2048,
    "max_total_tokens": 8192,
    "swa_full_tokens_ratio": 0.09765625,
    "max_running_requests": 2048,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": 1024,
    "schedule_policy": "fcfs",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
}

# Pages of tokens. Prompts that begin with the same pages share them in the prefix cache.
P1 = [
    400, 122, 392, 496, 179, 133, 418, 153, 72, 431, 229, 288, 188, 499, 69, 21, 123, 119, 416,
    329, 247, 129, 146, 454, 454, 202, 477, 204, 94, 129, 28, 221, 363, 139, 97, 113, 375, 89,
    446, 446, 117, 31, 435, 268, 318, 226, 429, 370, 101, 155, 307, 160, 45, 249, 129, 404, 275,
    461, 281, 264, 488, 53, 53, 241,
]
P2 = [
    372, 416, 393, 354, 452, 131, 95, 276, 431, 41, 73, 510, 272, 475, 377, 158, 375, 138, 117,
    42, 259, 407, 502, 431, 480, 17, 491, 497, 440, 220, 208, 510, 476, 113, 328, 502, 228, 408,
    179, 473, 431, 330, 26, 386, 311, 259, 114, 181, 141, 23, 206, 27, 406, 177, 82, 163, 371,
    84, 128, 404, 478, 376, 300, 229,
]
P3 = [
    105, 279, 361, 158, 429, 233, 359, 18, 97, 361, 478, 179, 436, 256, 192, 263, 374, 278, 324,
    164, 406, 248, 318, 199, 393, 267, 230, 485, 247, 458, 47, 296, 130, 29, 394, 488, 371, 212,
    360, 334, 302, 431, 71, 191, 125, 306, 107, 130, 224, 482, 208, 210, 320, 430, 360, 382,
    259, 286, 136, 417, 453, 400, 411, 401,
]
P4 = [
    339, 79, 366, 426, 113, 107, 149, 376, 498, 489, 90, 297, 340, 223, 188, 231, 421, 433, 414,
    61, 303, 289, 75, 400, 403, 346, 158, 310, 210, 34, 30, 77, 470, 348, 204, 118, 102, 153,
    416, 456, 77, 69, 438, 456, 84, 327, 232, 352, 490, 217, 202, 125, 268, 277, 504, 445, 189,
    442, 255, 498, 157, 367, 119, 104,
]
P5 = [
    212, 494, 76, 375, 317, 77, 16, 350, 115, 220, 89, 387, 126, 146, 317, 295, 219, 252, 401,
    446, 478, 206, 56, 21, 491, 394, 408, 391, 168, 481, 498, 375, 364, 77, 184, 287, 402, 205,
    381, 399, 66, 262, 134, 400, 429, 21, 313, 236, 252, 431, 441, 221, 217, 245, 341, 340, 248,
    35, 103, 171, 436, 45, 285, 56,
]
P6 = [
    508, 509, 98, 366, 327, 183, 149, 87, 79, 217, 105, 23, 190, 189, 126, 387, 100, 176, 24,
    241, 112, 474, 337, 425, 441, 331, 196, 365, 472, 148, 465, 391, 471, 180, 423, 394, 272,
    425, 15, 409, 366, 276, 467, 265, 93, 278, 122, 415, 84, 490, 254, 167, 448, 400, 33, 76,
    111, 437, 167, 411, 58, 461, 488, 274,
]
P7 = [
    65, 323, 206, 331, 343, 72, 216, 120, 71, 274, 182, 397, 365, 489, 246, 360, 126, 231, 339,
    478, 88, 273, 345, 198, 287, 117, 78, 242, 329, 71, 190, 208, 332, 144, 75, 81, 394, 293,
    344, 283, 297, 64, 68, 353, 63, 393, 137, 299, 236, 200, 280, 197, 462, 144, 267, 161, 359,
    209, 110, 157, 29, 416, 476, 368,
]
P8 = [
    292, 381, 63, 76, 338, 404, 266, 280, 381, 115, 380, 199, 40, 417, 51, 52, 433, 366, 159,
    124, 392, 39, 296, 56, 158, 484, 291, 170, 394, 348, 141, 325, 317, 12, 414, 42, 470, 429,
    154, 84, 223, 273, 155, 291, 20, 242, 373, 97, 496, 497, 254, 148, 186, 212, 393, 435, 455,
    507, 206, 371, 77, 245, 76, 178,
]
P9 = [
    417, 336, 225, 402, 449, 116, 39, 457, 311, 310, 426, 189, 172, 44, 27, 181, 341, 323, 251,
    333, 275, 499, 310, 480, 159, 333, 71, 231, 487, 194, 315, 88, 241, 159, 400, 402, 220, 176,
    256, 254, 179, 43, 476, 225, 290, 324, 453, 218, 305, 187, 185, 234, 106, 61, 471, 504, 262,
    275, 339, 168, 128, 222, 423, 313,
]
P10 = [
    400, 381, 441, 390, 216, 94, 458, 356, 364, 390, 312, 79, 216, 101, 152, 121, 14, 194, 132,
    393, 156, 437, 55, 142, 250, 69, 290, 89, 506, 424, 262, 210, 482, 136, 275, 212, 304, 351,
    63, 226, 137, 451, 201, 507, 81, 386, 195, 507, 471, 49, 16, 71, 159, 372, 108, 13, 82, 359,
    215, 445, 156, 257, 159, 438,
]
P11 = [
    443,
]
PROMPTS = {
    1: P1 + P2,
    2: P1 + P2 + P3 + P4 + P5 + P6 + P7 + P8 + P9 + P10 + P11,
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
    run.ask(1, 1)
    await run.ended()
    run.ask(2, 1)
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
