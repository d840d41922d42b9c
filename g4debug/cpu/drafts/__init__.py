"""The drafts of the toys: one file each, found by its name, with a ``DRAFT``."""

from __future__ import annotations

from g4debug import discovery
from g4debug.cpu.error import CpuEngineError
from g4debug.cpu.toy import Draft


def load(name: str, model: str) -> Draft:
    """The draft of that name for a toy. CpuEngineError if there is none, or not for this toy."""
    known = discovery.names("draft")
    if name not in known:
        raise CpuEngineError(
            f"CPU engine: got the draft {name!r}, expected one of {', '.join(known)}. Another "
            "draft is served with --speculative-draft-model-path FOLDER."
        )
    found: Draft = discovery.load("draft", name)
    if model not in found.targets:
        raise CpuEngineError(
            f"CPU engine: got the draft {name!r} for the model {model!r}, expected one of the "
            f"models with which it was run: {', '.join(found.targets)}."
        )
    return found
