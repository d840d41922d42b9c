"""Two pipeline ranks: several batches are on their way at once, and each rank has its scheduler.

Most tracers say that they judge nothing there. The flight recorder does, also what stands. The
pools are not small: SGLang kills a request there, see docs/cases/08-hang.md.
"""

from __future__ import annotations

from g4debug.hooking import targets
from suites.healthy.groups.control import no_traffic
from suites.healthy.groups.endings import aborted, shared_prefix
from suites.healthy.groups.pressure import long_prompts
from suites.healthy.groups.shapes import batches
from suites.healthy.workload import without_mtp

_SAYS = "with pipeline parallelism it says that it judges nothing"
OFF = dict.fromkeys(
    ("kv-allocator", "kv-integrity", "pool-leak", "prefix-cache", "spec-lifecycle"), _SAYS
)

_PIPELINE = (
    without_mtp(
        "pipeline",
        "two pipeline ranks, no MTP, prefix cache",
        (batches, shared_prefix, long_prompts, aborted, no_traffic),
        {"pp_size": 2},
        idle=OFF,
        only="with pipeline ranks it was not run",
    ),
)
# Gemma-4 of 0.5.12 has no pipeline ranks, and those of the releases between were not run.
GROUPS = _PIPELINE if targets.matches(">=0.5.23") else ()
