"""Makes the record of a finding: where it was made, versions, settings, sizes, last steps."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from g4debug.dumps import launch
from g4debug.findings.memory_map import MemoryMap
from g4debug.findings.record import (
    Evidence,
    Finding,
    OtherHook,
    PageEvent,
    Plain,
    RequestEvent,
    Tape,
    TrapRecord,
)
from g4debug.findings.steps import Recorder
from g4debug.trapping import sanitise

logger = logging.getLogger("g4debug")
PACKAGES = (
    "g4debug",
    "sglang",
    "torch",
    "triton",
    "flashinfer-python",
    "sglang-kernel",
    "transformers",
)


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


_T = TypeVar("_T")
SIZES = (
    "vocab_size",
    "context_len",
    "num_hidden_layers",
    "sliding_window_size",
    "head_dim",
    "swa_head_dim",
)


def geometry(scheduler: Any) -> dict[str, Plain]:
    """Sizes of the model that matter for KV pools and page tables."""
    model = getattr(scheduler, "model_config", None)
    found = {name: getattr(model, name, None) for name in SIZES}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def located(finding: Finding, recorder: Recorder) -> Finding:
    """``finding`` with what this process knows of itself: host, pid and ranks.

    A rank of -1 and a host of '' are not known.
    """
    at = finding.location
    ranks = recorder.ranks
    known = dataclasses.replace(
        at,
        host=at.host or platform.node(),
        pid=os.getpid() if at.pid < 0 else at.pid,
        rank=ranks.tp if at.rank < 0 else at.rank,
        dp_rank=ranks.dp if at.dp_rank < 0 else at.dp_rank,
        pp_rank=ranks.pp if at.pp_rank < 0 else at.pp_rank,
    )
    return dataclasses.replace(finding, location=known)


class Describer:
    """Makes the TrapRecords of this process. Knows what plugin.register switched on."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.fixes: dict[str, str] = {}
        self.schedules: list[list[str]] = []
        # The last events of all pages in the ledger, oldest first; () if there is no ledger.
        self.allocator_events: Callable[[], tuple[PageEvent, ...]] = tuple
        # The last events of all requests, oldest first, and how many were before them.
        self.request_events: Callable[[], tuple[tuple[RequestEvent, ...], int]] = lambda: ((), 0)
        self.plugins: dict[str, str] = {}  # SGLang's plugins: name -> "allowed: where"
        # Looks at our hooks, so that the status is true, and lists who else is at our sites.
        self.look: Callable[[], tuple[OtherHook, ...]] = tuple
        self.tape: Callable[[], Tape | None] = lambda: None  # up to now; None if there is none
        self.memory: Callable[[], MemoryMap | None] = lambda: None  # as it was made last
        self.launch = ""  # its name; of several nodes once the scheduler's arguments are known
        self._machine: dict[str, str] = {}

    def remember(self) -> None:
        """Ask for versions and device now: later the GPU may be dead, or its driver may hang.

        The scheduler is complete by now, so the name of its launch is known, too.
        """
        self._machine = {**versions(), **device()}
        self.name_launch()

    def _serves(self) -> dict[str, Plain]:
        """The class of the model, its attention backends and the draft, once they are known."""
        return {"serves": self.recorder.status.serves} if self.recorder.status.serves else {}

    def name_launch(self) -> None:
        """Ask for the name of the launch again: the scheduler's arguments may be known by now."""
        self.launch = launch.of(self.recorder.scheduler)

    def __call__(self, finding: Finding, evidence: Evidence, history: bool = True) -> TrapRecord:
        """history: with the last steps, the allocators' last events and the tape, which take long
        to make of what is kept.
        """
        others = self.look()
        requests = _optional("request events", self.request_events) if history else None
        different, same = sanitise.arguments(getattr(self.recorder.scheduler, "server_args", None))
        return TrapRecord(
            finding=located(finding, self.recorder),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            versions=dict(self._machine) or {**versions(), **device()},
            environment=sanitise.environment(os.environ),
            arguments=different,
            defaults=same,
            geometry=geometry(self.recorder.scheduler) | self._serves(),
            fixes=dict(self.fixes),
            tracers=self.recorder.status.records(),
            faults=tuple(itertools.chain(*self.schedules)),
            pools=self.recorder.pools(),
            steps=self.recorder.steps if history else (),
            allocator=self.allocator_events() if history else (),
            launch=self.launch,
            plugins=dict(self.plugins),
            others=others,
            tape=_optional("tape", self.tape) if history else None,
            memory=_optional("memory map", self.memory),
            requests=requests[0] if requests else (),
            requests_lost=requests[1] if requests else 0,
            **vars(evidence),
        )


def _optional(what: str, ask: Callable[[], _T]) -> _T | None:
    """A part of a dump. If it cannot be had, the finding must not lose its dump."""
    try:
        return ask()
    except Exception:
        logger.exception("g4debug: the dump has no %s. Please report this.", what)
        return None
