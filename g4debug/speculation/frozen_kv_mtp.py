"""FROZEN_KV_MTP: a Gemma-4 assistant drafts, and reads the KV of the target.

The v2 worker inherits its verify from EAGLE's.
"""

from __future__ import annotations

from typing import Any

from g4debug.hooking.targets import CPU, H200
from g4debug.speculation.base import Adapter


def runs(algorithm: Any) -> bool:
    return bool(algorithm.is_frozen_kv_mtp())


ADAPTER = Adapter(
    name="FROZEN_KV_MTP",
    runs=runs,
    prefix="FrozenKVMTP",
    draft_writes_kv=False,
    overlap=True,
    sites={
        "init": ("worker.init",),
        "forward": ("worker.forward",),
        "draft": ("worker.draft",),
        "draft_forward": ("worker.draft_forward",),
        "verify": ("worker.verify",),
        "draft_extend": ("worker.draft_extend",),
    },
    # After the worker's forward the scheduler puts the next draft input on the batch.
    ends={"scheduler.run_batch": lambda scheduler: True},
    run={"0.5.15.post1": (CPU, H200), "0.5.23": (CPU, H200)},
    replayed="",
)
