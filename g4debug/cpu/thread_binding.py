"""The cores on which the OpenMP threads of a rank run: all that its process may use.

SGLang gives each rank a NUMA node of its own, and refuses more ranks than there are nodes, unless
SGLANG_CPU_OMP_THREADS_BIND names the cores of each rank. The only reader of the answer is a kernel
for AMX, which the CPU engine does not have: here nothing is bound. So any number of ranks may run
on a laptop, which has one node. The collectives between them are SGLang's own, on gloo.
"""

from __future__ import annotations

import os
from typing import Any

from g4debug.cpu.error import CpuEngineError


def init_threads_binding(*, numa_index: int, world_size: int) -> str:
    """Stands in for SGLang's function of this name, since 0.5.19: the cores, as "0,1,2".

    numa_index: the rank, 0..world_size-1. Raises CpuEngineError for another one.
    """
    if not 0 <= numa_index < world_size:
        raise CpuEngineError(
            f"CPU engine: SGLang asks for the cores of rank {numa_index}, and has {world_size} "
            "ranks. Start all ranks on this machine, with one --tp-size for all of them."
        )
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def init_for_tensor_parallel(*, tp_rank: int, tp_size: int) -> str:
    """Stands in for the same function in 0.5.18, which counts the ranks of one group."""
    return init_threads_binding(numa_index=tp_rank, world_size=tp_size)


def init_of_runner(runner: Any) -> None:
    """Stands in for `ModelRunner.init_threads_binding`, up to 0.5.17."""
    runner.local_omp_cpuid = init_threads_binding(
        numa_index=runner.tp_rank, world_size=runner.tp_size
    )
