"""A prefill's result is processed while the decode step that was just launched reads the tables.

The pull request's example is the traffic of case 1 once that bug is mended: a cached prefix has
lost its SWA half, a running request has locked it, and a newcomer with the same prefix brings a new
one. The newcomer's first decode step is in flight when its own entries of the mapping are cleared.
It is a race, so ``put_back/late_forward.py`` lets the forward come at the wrong moment.

On trtllm_mha: its page table is built on the device, without the host waiting for it. On triton the
host waits for the list of the window in each step, and the race cannot happen.
"""

from __future__ import annotations

from suites.healthy.workload import Client
from suites.history.case import HELD, Arm, case, predicted
from suites.history.cases.locked_prefix import NEARLY_FULL, agents

LATE = {"G4HISTORY_PUT_BACK": "late_forward"}


@case(
    number=11,
    title="a result is processed while the forward that was just launched reads the same tables",
    threads=("#31687", "#29353"),
    origin=HELD,
    buggy=Arm("0.5.15.post1"),
    fixed=Arm("0.5.15.post1", fixes=("result-fence",)),
    cause=(("managers/scheduler.py", "event_loop_overlap"),),
    mtp=False,
    engine={
        **NEARLY_FULL,
        "attention_backend": None,
        "prefill_attention_backend": "triton",  # sm90 has no other for trtllm_mha's prompts there
        "decode_attention_backend": "trtllm_mha",
    },
    environ=LATE,
    innocent=True,
    gpu="its forward has to be held back on a device",
    why="A race between two streams of one process. A tool that makes a stream wait hides it, and "
    "page-table does: see docs/tracers.md.",
    expected=predicted(
        na="strict",
        silent="nothing g4debug g4debug-best sglang busy-inv tree kv-canary compute-sanitizer core "
        "watch",
    ),
)
async def unfenced_results(client: Client) -> None:
    await agents(client, rounds=3, answer=160, task=16, tokens=8)
