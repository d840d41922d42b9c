"""On triton, a decode step behind the sliding window reads one key too few: a wrong answer only.

The thread's example is a long sequence that decodes on. Here the prompts are longer than the toy
model's window of 128 tokens, so every decode step is behind it.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import FLAGS, Arm, case, predicted


@case(
    number=9,
    title="a decode step on triton leaves out the oldest key of the sliding window",
    threads=("#32087", "#34354"),
    origin=FLAGS,
    buggy=Arm("0.5.23"),
    fixed=Arm("0.5.23", fixes=("triton-decode-window",)),
    cause=(("layers/attention/triton_backend.py", "update_sliding_window_buffer"),),
    engine={"attention_backend": "triton"},
    mtp=False,
    innocent=True,
    why="Every page and every list is what SGLang meant. Only the model's own definition says "
    "that a key is missing, and no tool knows that one.",
    expected=predicted(
        silent="nothing g4debug g4debug-best sglang busy-inv strict tree kv-canary "
        "compute-sanitizer core watch"
    ),
    seconds=180.0,
)
async def lost_key(client: Client) -> None:
    await client.batch(8, (140, 400), 48)
