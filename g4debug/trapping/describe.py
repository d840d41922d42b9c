"""Makes the record of a finding: versions, environment, sizes, pools, last steps."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from g4debug.dumps import launch, writing
from g4debug.findings.record import Evidence, Finding, PageEvent, Plain, TrapRecord
from g4debug.findings.steps import Recorder

PACKAGES = (
    "g4debug",
    "sglang",
    "torch",
    "triton",
    "flashinfer-python",
    "sglang-kernel",
    "transformers",
)
SWITCHES = ("G4DEBUG_", "SGLANG_", "CUDA_", "TRITON_INTERPRET")
# People pass dumps around, so no variable whose value could be a secret is copied into one.
PRIVATE = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def versions() -> dict[str, str]:
    """The installed versions, from the packages' metadata. No package is imported for this."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device() -> dict[str, str]:
    """The GPU's name and compute capability, if this process uses a GPU already."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu"}
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}  # asking would create a CUDA context in a process that has none
    major, minor = torch.cuda.get_device_capability()
    return {
        "device": torch.cuda.get_device_name(),
        "capability": f"sm{major}{minor}",
        "cuda": torch.version.cuda or "",
    }


def switches(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that matter, without any that may hold a secret."""
    env = os.environ if environ is None else environ
    return {
        k: v
        for k, v in sorted(env.items())
        if k.startswith(SWITCHES) and not any(word in k for word in PRIVATE)
    }


ARGS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "speculative_eagle_topk",
    "page_size",
    "swa_full_tokens_ratio",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "max_running_requests",
    "dtype",
    "kv_cache_dtype",
    "tp_size",
    "dp_size",
)


def geometry(scheduler: Any) -> dict[str, Plain]:
    """Server arguments and model sizes that matter for KV pools and page tables."""
    found: dict[str, Plain] = {}
    args = getattr(scheduler, "server_args", None)
    for name in ARGS:
        value = getattr(args, name, None)
        if isinstance(value, (str, int, float, bool)):
            found[name] = value
    model = getattr(scheduler, "model_config", None)
    for name in ("context_len", "num_hidden_layers", "sliding_window_size"):
        value = getattr(model, name, None)
        if isinstance(value, (int, float)):
            found[name] = value
    return found


class Describer:
    """Makes the TrapRecords of this process. Knows what plugin.register switched on."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.fixes: dict[str, str] = {}
        self.schedules: list[list[str]] = []
        # The last events of all pages in the ledger, oldest first; () if there is no ledger.
        self.allocator_events: Callable[[], tuple[PageEvent, ...]] = tuple
        self._machine: dict[str, str] = {}

    def remember_machine(self) -> None:
        """Ask for versions and device now: later the GPU may be dead, or its driver may hang."""
        self._machine = {**versions(), **device()}

    def __call__(self, finding: Finding, evidence: Evidence) -> TrapRecord:
        return TrapRecord(
            finding=finding,
            created=writing.now().isoformat(timespec="milliseconds"),
            versions=dict(self._machine) or {**versions(), **device()},
            environment=switches(),
            geometry=geometry(self.recorder.scheduler),
            fixes=dict(self.fixes),
            tracers=self.recorder.status.records(),
            faults=tuple(_flatten(self.schedules)),
            pools=self.recorder.pools(),
            table=evidence.table,
            steps=tuple(self.recorder.steps),
            events=evidence.events,
            transitions=evidence.transitions,
            holdings=evidence.holdings,
            allocator=self.allocator_events(),
            launch=launch.of(self.recorder.scheduler),
        )


def _flatten(schedules: Iterable[Iterable[str]]) -> Iterable[str]:
    return (line for schedule in schedules for line in schedule)
