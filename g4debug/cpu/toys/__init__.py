"""The models that the CPU engine serves: one file each, found by its name, with a ``TOY``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from g4debug import discovery
from g4debug.cpu.error import CpuEngineError
from g4debug.cpu.toy import Toy

# Models that somebody may ask for, and why there is no toy of them.
NOT_SERVED: Final[Mapping[str, str]] = {
    "qwen3-next": (
        "on a CPU SGLang computes its linear attention (the gated delta rule) by kernels of "
        "sgl_kernel, a wheel that is not there, and the CPU engine has no stand-ins for them"
    ),
}


def load(name: str) -> Toy:
    """The toy of that name. CpuEngineError, with the names that there are, if there is none."""
    known = discovery.names("toy")
    if name in NOT_SERVED:
        raise CpuEngineError(
            f"CPU engine: got the model {name!r}, expected one of {', '.join(known)}. It is not "
            f"served: {NOT_SERVED[name]}."
        )
    if name not in known:
        raise CpuEngineError(
            f"CPU engine: got the model {name!r}, expected one of {', '.join(known)}. Another "
            "model is served with --model-path FOLDER."
        )
    found: Toy = discovery.load("toy", name)
    return found
