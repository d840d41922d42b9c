"""SGLang's profiler beside an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def profiled(engine: Any, device: str, folder: Sequence[str], host: bool = False) -> Iterator[None]:
    """Let it look on, if a folder for its trace was asked for: at the GPU, and at the host, too."""
    if not folder:
        yield
        return
    both = ["CPU", "GPU"] if host else ["GPU"]
    activities = both if device == "cuda" else ["CPU"]
    engine.start_profile(output_dir=folder[0], activities=activities, with_stack=False)
    yield
    engine.stop_profile()
