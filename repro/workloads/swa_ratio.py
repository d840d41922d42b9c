"""The workloads of swa_ratio: a toy mixture of experts whose KV memory is short.

On a CPU, SGLang measures another amount of free memory each time. So each variant is given the same
number of bytes, as ``max_total_tokens``: the size of the full pool that SGLang would make of these
bytes at the variant's ratio. The script reads in SGLang's log that both pools together take them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness.workload import Make, Workload

KV_BYTES = 28_000_000
PAGE, INPUT, OUTPUT, REQUESTS = 16, 800, 48, 8
DEFAULT, MOE = 0.8, 0.15
SMALL_CHUNK, LARGE_CHUNK = 128, 1024


def plan(ratio: float, chunk: int) -> Any:
    """What ``g4debug pools`` says: the pools at ``ratio``, and how many requests each holds."""
    from g4debug.cpu.geometry import TINY_MOE
    from g4debug.pools import config, solve
    from g4debug.pools import plan as pools

    geometry = config.parse(TINY_MOE.target_config(), "tiny-moe")
    memory = solve.Memory(KV_BYTES, PAGE, element=4)
    load = pools.Workload(INPUT, OUTPUT, REQUESTS, chunk)
    return pools.row(geometry, memory, pools.need_of(geometry, memory, load), ratio)


def bytes_of(full: int, swa: int) -> int:
    """How many bytes pools of so many tokens take."""
    from g4debug.cpu.geometry import TINY_MOE
    from g4debug.pools import config, solve

    geometry = config.parse(TINY_MOE.target_config(), "tiny-moe")
    pools = solve.Pools(0, full, swa)
    return solve.bytes_of(geometry, solve.Memory(KV_BYTES, PAGE, element=4), pools)


def cpu(requests: int | None) -> Workload:
    """Pools that hold all requests. Their outputs are what the other variants must give, too."""
    from g4debug.cpu.geometry import TINY_MOE
    from g4debug.cpu.models import write
    from g4debug.cpu.server import server_arguments

    models = write(TINY_MOE, Path(tempfile.gettempdir()) / "g4debug-tiny-moe")
    count = requests or REQUESTS
    arguments = server_arguments(
        models,
        mtp=False,
        log_level="info",
        decode_log_interval=1,
        skip_tokenizer_init=True,
        page_size=PAGE,
        max_total_tokens=2 * count * (INPUT + OUTPUT),
        max_running_requests=count,
        chunked_prefill_size=SMALL_CHUNK,
    )
    return Workload(count, (INPUT, INPUT), OUTPUT, TINY_MOE.vocab, arguments, timeout=300)


def short(ratio: float, chunk: int = SMALL_CHUNK, **given: Any) -> dict[str, Make]:
    """KV_BYTES of memory, divided by ``ratio``. The server has to choose that ratio by itself."""

    def make(requests: int | None) -> Workload:
        full = plan(ratio, chunk).pools.full
        return cpu(requests).given(max_total_tokens=full, chunked_prefill_size=chunk, **given)

    return {"cpu": make}


DEVICES = {"cpu": cpu}
AT_DEFAULT = short(DEFAULT)
AT_MOE = short(MOE)
GIVEN = short(DEFAULT, swa_full_tokens_ratio=0.8)
AT_MOE_LARGE_CHUNK = short(MOE, LARGE_CHUNK)
