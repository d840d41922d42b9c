"""Two pipeline ranks: several batches are on their way at once, and each rank has its scheduler.

Most tracers say that they judge nothing there. The flight recorder does, also what stands.
"""

from __future__ import annotations

from suites.healthy.groups.control import no_traffic
from suites.healthy.groups.endings import aborted, shared_prefix
from suites.healthy.groups.pressure import SMALL, long_prompts, retracted
from suites.healthy.groups.shapes import batches
from suites.healthy.workload import without_mtp

PIPELINE = {"pp_size": 2}
_SAYS = "with pipeline parallelism it says that it judges nothing"
OFF = dict.fromkeys(
    ("kv-allocator", "kv-integrity", "pool-leak", "prefix-cache", "spec-lifecycle"), _SAYS
)

GROUPS = (
    without_mtp(
        "pipeline",
        "two pipeline ranks, no MTP, prefix cache",
        (batches, shared_prefix, long_prompts, aborted, no_traffic),
        PIPELINE,
        idle=OFF,
    ),
    without_mtp(
        "pipeline-small",
        "two pipeline ranks, small pools",
        (retracted, long_prompts),
        {**PIPELINE, **SMALL},
        idle=OFF,
    ),
)
