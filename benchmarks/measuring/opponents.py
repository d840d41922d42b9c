"""SGLang's own kernels, which ours are measured against.

They are taken from the modules that call them, under the names that these give them. Their own
files move from release to release.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

NORMS = "sglang.srt.layers.layernorm"  # on CUDA it has the kernels that its classes call
LAYER = "sglang.srt.models.gemma4_causal"
VISION = "sglang.srt.models.gemma4_vision"


def found(*places: str) -> tuple[Callable[..., Any], ...] | None:
    """The functions at ``module.name``; None if one is missing, which is printed."""
    functions = []
    for place in places:
        module, _, name = place.rpartition(".")
        try:
            functions.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as e:
            print(f"SGLang's own kernels: left out; {type(e).__name__}: {e}")
            return None
    return tuple(functions)


def required(variants: Iterable[str], opponents: Iterable[str]) -> None:
    """Raise SystemExit if none of SGLang's own variants is there: ours would win without one."""
    if not set(variants) & set(opponents):
        raise SystemExit(
            f"SGLang's own kernel is missing (expected a variant {' or '.join(opponents)}; the "
            "reason is above), so that ours would be compared with torch alone. --without-sglang "
            "allows that."
        )
