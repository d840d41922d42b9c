"""Counts the calls of FROZEN_KV_MTP's worker, and those with an argument that it does not have.

The scheduler hands ``pp_proxy_tensors`` to every worker of speculative decoding v2 when overlap
scheduling is off (0.5.23, ``managers/scheduler.py:4829``). Upstream's open repair gives
``FrozenKVMTPWorkerV2.forward_batch_generation`` (``:762``) that argument.
"""

from __future__ import annotations

import inspect
from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPWorkerV2

    known = inspect.signature(FrozenKVMTPWorkerV2.forward_batch_generation).parameters

    @around(FrozenKVMTPWorkerV2, "forward_batch_generation")
    def forward(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        counter.reached()
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            counter.triggered(f"the worker does not know {', '.join(unknown)}")
