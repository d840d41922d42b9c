"""The tools that are compared: how each is switched on, and how its alarm is known.

Each has its documented best setting. The columns are in this order in the table.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from harness.tracers import on_one_rank
from packaging.version import Version

from suites.history.case import CPU, CUDA, Case

NOTHING: Final = "nothing"
BUSY: Final = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
DEBUG: Final = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_MODE": "raise"}
# SGLang's own checks raise with these messages. Each release has some of them. A check that is a
# tool of its own is known by its own words: the default ones run beside it, and have a column.
TREE_SAYS: Final = (r"in sanity_check\b",)
SGLANG_SAYS: Final = (
    r"memory leak detected![^\n]*",  # at idle: counts
    # While busy: counts. A traceback shows the line that raises it first, with a brace.
    r"(?:Full|SWA) Pool Mem Leak Detected!(?! \{)[^\n]*",
    r"KV double free:[^\n]*",
    r"KV page use-after-free:[^\n]*",
    # An assertion without a text: the function it stands in is all there is.
    r"in (?:_check_kv_page_invariants|_add_owner)\b",
    *TREE_SAYS,
)
# What it says of an invariant: where it ends the server, and where it only counts. A traceback has
# the line that says it first, with a brace.
STRICT_SAYS: Final = (r"invariant-check (?:FAILED )?\[[^{\n][^\n]*",)


# compute-sanitizer's line on an access; its last line, the number of errors, is no alarm.
SANITIZER_SAYS: Final = (
    r"========= (?:Invalid|Misaligned|Out-of-range) [^\n]*",
    r"========= Warp assert[^\n]*",  # an assertion of a kernel's own, with the way to its launch
)
CANARY_SAYS: Final = (r"KV cache canary violation detected[^\n]*", r"kv_canary violation: [^\n]*")
SANITIZER: Final = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
MEMCHECK: Final = "--tool memcheck --target-processes all --report-api-errors no --print-limit 20"


@dataclass(frozen=True)
class Tool:
    """A column of the table.

    environ: its switches. engine: arguments of the engine that its documentation asks for, by
    release and whether FROZEN_KV_MTP runs. ours: it is g4debug; its alarm is a dump. since: the
    first release in which it can tell anything here. what: what begins with that release. within:
    from this release on it is a tool of its own; before, SGLang does it by default. gpu: why no CPU
    can run it. no_mtp: why it cannot run beside FROZEN_KV_MTP. wrapper: the command that starts the
    engine's process. patience: how many times as long a run may take with it.
    """

    id: str
    title: str
    environ: Callable[[], Mapping[str, str]] = dict
    engine: Callable[[str, bool], Mapping[str, Any]] = lambda release, mtp: {}
    ours: bool = False
    since: str = ""
    what: str = "SGLang has it"
    within: str = ""
    gpu: str = ""
    no_mtp: str = ""
    says: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    patience: float = 1.0

    def refusal(self, release: str, device: str = CPU, mtp: bool = False) -> str:
        """Why it cannot be switched on in a release, '' if it can. device: "cpu" or "cuda"."""
        if self.gpu and device == CPU:
            return self.gpu
        if self.since and Version(release) < Version(self.since):
            return f"{self.what} from {self.since} on"
        if self.within and Version(release) < Version(self.within):
            return f"part of SGLang's default before {self.within}"
        if self.no_mtp and mtp:
            return self.no_mtp
        return ""

    def alarm(self, log: str) -> str:
        """The tool's alarm in the log, '' if there is none."""
        for pattern in self.says:
            found = re.search(pattern, log)
            if found:
                return found[0]
        return ""


def _best() -> dict[str, str]:
    return {
        **DEBUG,
        "G4DEBUG_TRACE": ",".join(on_one_rank()),
        "G4DEBUG_LEAK_STEPS": "1",
        "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
    }


def _best_engine(release: str, mtp: bool) -> dict[str, Any]:
    """The engine's arguments with which page-table can check more than ranges.

    Before 0.5.14 its line at start asks for them, except with FROZEN_KV_MTP, which runs without
    overlap scheduling anyhow. Later releases have the fences that page-table needs.
    """
    if Version(release) < Version("0.5.14") and not mtp:
        return {"disable_overlap_schedule": True}
    return {}


TOOLS: Final = {
    tool.id: tool
    for tool in (
        Tool(NOTHING, "no tool", lambda: {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}),
        Tool("g4debug", "g4debug, default", lambda: DEBUG, ours=True),
        Tool("g4debug-best", "g4debug, every tracer", _best, _best_engine, ours=True),
        Tool("watch", "g4debug, watch", lambda: {"SGLANG_TRTLLM_MHA_DEBUG": "watch"}, ours=True),
        Tool("sglang", "SGLang, default", says=SGLANG_SAYS),
        Tool(
            "busy-inv",
            "SGLang, busy and page checks",
            lambda: {**BUSY, "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"},
            says=SGLANG_SAYS,
        ),
        Tool(
            "strict",
            "SGLang, strict invariants",
            # InvariantCheckLevel.STRICT. A word is no level: SGLang warns, and checks nothing.
            lambda: {"SGLANG_INVARIANT_CHECK": "2"},
            since="0.5.21",
            what="it looks at pages of the pools",  # 0.5.18 has it, for another decoder
            says=STRICT_SAYS,
        ),
        Tool(
            "tree",
            "SGLang, tree check",
            lambda: {"SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1"},
            within="0.5.21",
            says=TREE_SAYS,
        ),
        Tool(
            "kv-canary",
            "SGLang, --kv-canary",
            engine=lambda release, mtp: {
                "kv_canary": "raise",
                "kv_canary_real_data": "all",
                "kv_canary_sweep_interval": 1,
            },
            since="0.5.13",
            gpu="needs CUDA",
            # With bugs and without, on H200 and H100.
            no_mtp="with FROZEN_KV_MTP it ends a healthy server (run on 0.5.13.post1, "
            "0.5.15.post1 and 0.5.23): AssertionError: kv-canary: pre_ops_maybe_inside_graph "
            "called without active SingleForwardManager",
            says=CANARY_SAYS,
        ),
        Tool(
            "core",
            "g4debug, flight recorder and core",
            # Nothing is checked: what is told is from the driver's core dump and the last steps.
            lambda: {**DEBUG, "G4DEBUG_TRACE": "flight-recorder"},
            ours=True,
            gpu="needs CUDA, and the real core dumps in `tests/autopsy/cores` are of no run of "
            "this suite",
        ),
        Tool(
            "compute-sanitizer",
            "compute-sanitizer",
            # Each tensor is an allocation of its own: in torch's cache, one reads into the next.
            lambda: {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            gpu="needs CUDA",
            says=SANITIZER_SAYS,
            wrapper=(SANITIZER, *MEMCHECK.split()),
            patience=4.0,
        ),
    )
}


def device_of(case: Case, tool: str) -> str:
    """The device from which the table takes a tool's result on a case: "cpu" or "cuda"."""
    return CUDA if case.gpu or TOOLS[tool].gpu else CPU
