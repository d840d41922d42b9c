"""FROZEN_KV_MTP on speculative decoding v1, and on 0.5.12's v2 with the path frozen-kv-mtp-v2.

The v1 worker leaves the next draft input on the batch itself. With v2 the scheduler puts it there
after the worker's forward. A server decides for one of the two when its scheduler is made.
"""

from __future__ import annotations

from dataclasses import replace

from g4debug.hooking import targets
from g4debug.hooking.targets import CPU, H200
from g4debug.speculation import frozen_kv_mtp

V2_PATH = "frozen-kv-mtp-v2"
# Sites of 0.5.12's v2. With v1's worker nothing of FROZEN_KV_MTP passes them.
OVERLAP = ("overlap.forward", "overlap.verify", "result.resolve_overlap")
_FORWARD, _VERIFY, _ = ((site,) if not targets.absent(site) else () for site in OVERLAP)

ADAPTER = replace(
    frozen_kv_mtp.ADAPTER,
    overlap=False,
    # Those that are passed as today's worker passes them. v1's forward is in ``ends``.
    sites={"init": ("worker.init",), "forward": _FORWARD, "verify": ("worker.verify", *_VERIFY)},
    ends={
        "worker.forward": lambda worker: True,
        "scheduler.run_batch": lambda scheduler: bool(scheduler.enable_overlap),
    },
    run={"0.5.12.post1": (CPU, H200), "0.5.13.post1": (CPU,)},
)
