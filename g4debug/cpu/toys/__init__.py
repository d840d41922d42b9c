"""The models that the CPU engine serves: one file each, found by its name, with a ``TOY``."""

from __future__ import annotations

from g4debug import discovery
from g4debug.cpu.error import CpuEngineError
from g4debug.cpu.toy import Toy


def load(name: str) -> Toy:
    """The toy of that name. CpuEngineError, with the names that there are, if there is none."""
    known = discovery.names("toy")
    if name not in known:
        raise CpuEngineError(
            f"CPU engine: got the model {name!r}, expected one of {', '.join(known)}. Another "
            "model is served with --model-path FOLDER."
        )
    found: Toy = discovery.load("toy", name)
    return found
