"""flight-recorder: the scheduler hangs: the event loop runs, but has begun no step for 2 s (0
requests waiting, 1 begun)

Expected: progress within 2 s (G4DEBUG_HANG_SECONDS)

Got: no step for 2 s

request 1: A deadlock. It lacks 1 token of the SWA pool, no request runs that could give any
back, and those that hold it wait themselves. No step of the scheduler frees it; an abort of the
request may.

as sglang #36458: SGLang frees what is behind the window only after it has admitted the next
chunk

SGLang 0.5.23. It shows a server that lives, says nothing and serves nobody: request 1 got 0 of
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
    "disable_radix_cache": True,
    "num_continuous_decode_steps": 1,
    "radix_eviction_policy": "lru",
    "retraction_policy": "length",
    "schedule_conservativeness": 1.0,
    "attention_backend": "trtllm_mha",
    "page_size": 64,
    "context_length": 2048,
    "max_total_tokens": 8192,
    "swa_full_tokens_ratio": 0.09765625,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": 512,
    "schedule_policy": "fcfs",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
}

# Pages of tokens. Prompts that begin with the same pages share them in the prefix cache.
P1 = [
    425, 352, 446, 94, 203, 447, 380, 145, 471, 264, 48, 127, 142, 347, 258, 140, 63, 507, 497,
    305, 126, 235, 23, 427, 174, 477, 333, 97, 114, 101, 161, 202, 101, 50, 61, 123, 386, 92,
    337, 379, 176, 126, 504, 225, 51, 438, 411, 488, 136, 368, 465, 268, 260, 478, 111, 82, 169,
    451, 49, 488, 498, 312, 387, 15,
]
P2 = [
    132, 139, 453, 229, 461, 146, 30, 457, 181, 336, 381, 125, 332, 179, 241, 468, 280, 93, 177,
    398, 82, 495, 202, 214, 27, 96, 497, 52, 240, 120, 336, 451, 415, 123, 100, 239, 266, 208,
    411, 106, 22, 267, 158, 38, 388, 316, 56, 482, 397, 277, 217, 111, 370, 322, 492, 332, 302,
    242, 368, 448, 323, 254, 173, 454,
]
P3 = [
    304, 218, 387, 316, 223, 490, 162, 283, 387, 99, 345, 239, 271, 365, 450, 222, 321, 136,
    226, 338, 126, 23, 502, 458, 94, 164, 499, 224, 216, 89, 290, 371, 327, 431, 102, 492, 71,
    371, 164, 131, 477, 475, 478, 24, 497, 86, 311, 385, 147, 249, 324, 57, 234, 299, 341, 76,
    14, 71, 326, 14, 252, 105, 438, 238,
]
P4 = [
    478, 13, 393, 153, 183, 164, 261, 460, 112, 298, 193, 495, 283, 483, 160, 147, 290, 329, 69,
    392, 362, 226, 463, 344, 358, 64, 48, 168, 323, 507, 423, 464, 188, 308, 456, 49, 322, 467,
    242, 206, 391, 328, 321, 421, 329, 254, 473, 154, 73, 89, 374, 194, 160, 192, 57, 338, 315,
    377, 435, 388, 170, 42, 440, 402,
]
P5 = [
    354, 279, 421, 491, 12, 132, 68, 344, 259, 379, 238, 359, 372, 68, 289, 495, 63, 21, 231,
    347, 432, 419, 309, 136, 313, 101, 163, 145, 432, 375, 108, 269, 71, 137, 463, 188, 357,
    510, 131, 43, 354, 439, 385, 49, 391, 310, 282, 308, 273, 113, 416, 225, 97, 264, 32, 32,
    369, 282, 249, 257, 502, 109, 391, 192,
]
P6 = [
    144, 370, 446, 203, 459, 175, 444, 260, 412, 199, 356, 400, 39, 125, 202, 498, 306, 378,
    492, 395, 16, 128, 62, 133, 326, 47, 421, 51, 106, 486, 315, 317, 340, 88, 340, 136, 452,
    511, 49, 112, 189, 152, 367, 161, 179, 113, 244, 53, 259, 321, 128, 106, 479, 44, 53, 236,
    60, 348, 67, 510, 388, 443, 327, 468,
]
P7 = [
    306, 227, 400, 372, 480, 377, 505, 404, 76, 211, 341, 259, 77, 331, 476, 268, 86, 407, 281,
    461, 385, 36, 484, 229, 449, 198, 448, 257, 400, 187, 290, 71, 328, 207, 248, 328, 99, 453,
    268, 335, 20, 403, 212, 49, 83, 278, 327, 153, 343, 145, 400, 473, 511, 349, 48, 432, 40,
    175, 323, 192, 403, 247, 455, 343,
]
P8 = [
    214, 131, 486, 500, 420, 173, 167, 198, 381, 71, 465, 484, 214, 110, 299, 221, 389, 218,
    154, 142, 389, 153, 302, 411, 241, 472, 463, 303, 170, 44, 65, 63, 85, 165, 510, 196, 207,
    126, 85, 149, 200, 320, 274, 494, 91, 503, 299, 171, 178, 222, 405, 507, 472, 202, 37, 301,
    291, 186, 502, 169, 21, 237, 166, 185,
]
P9 = [
    157, 111, 344, 93, 170, 362, 134, 177, 243, 284, 248, 392, 192, 287, 125, 487, 179, 339,
    104, 489, 48, 500, 473, 400, 450, 475, 477, 65, 492, 243, 404, 369, 320, 340, 347, 91, 324,
    253, 20, 493, 509, 245, 51, 324, 376, 494, 76, 427, 31, 369, 240, 45, 359, 220, 359, 113,
    67, 208, 232, 336, 344, 396, 318, 301,
]
P10 = [
    318, 421, 77, 192, 21, 344, 410, 221, 51, 468, 498, 279, 421, 245, 166, 179, 145, 343, 386,
    344, 106, 441, 76, 13, 496, 436, 102, 405, 387, 126, 45, 363, 82, 191, 496, 13, 362, 485,
    444, 190, 269, 109, 375, 478, 88, 147, 449, 388, 373, 444, 311, 283, 504, 36, 203, 53, 308,
    16, 105, 207, 362, 235, 79, 42,
]
P11 = [
    497, 460, 426, 364, 384, 450, 414, 335, 413, 163, 154, 357, 501, 393, 130, 18, 107, 461, 73,
    321, 449, 294, 45, 104, 331, 511, 285, 228, 179, 89, 254, 109, 111, 88, 430, 191, 128, 132,
    403, 316, 83, 160, 20, 273, 173, 279, 311, 230, 375, 261, 166, 366, 202, 194, 185, 143, 86,
    440, 130, 344, 351, 500, 429, 16,
]
P12 = [
    341,
]
PROMPTS = {
    1: P1 + P2 + P3 + P4 + P5 + P6 + P7 + P8 + P9 + P10 + P11 + P12,
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
