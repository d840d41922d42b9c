"""What a server does otherwise than its model was trained for, and says once at most.

The log says it when the server starts, and ``g4debug doctor --pid`` as long as it runs. It is no
finding: SGLang does it on purpose.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any


def of(scheduler: Any) -> Iterator[str]:
    """Warnings on the server of this scheduler."""
    runner = getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)
    model, backend = getattr(runner, "model", None), getattr(runner, "attn_backend", None)
    text = getattr(getattr(model, "config", None), "text_config", None)
    # E2B and E4B do not want it: causal attention is right there.
    wanted = getattr(text, "use_bidirectional_attention", None) == "vision"
    if wanted and backend is not None and hasattr(model, "prepare_attn_masks"):
        yield from _causal_images(model, backend)


def _causal_images(model: Any, backend: Any) -> Iterator[str]:
    """As ``prepare_attn_masks`` of this release decides it."""
    decides = inspect.getsource(type(model).prepare_attn_masks)
    module: Any = sys.modules[type(model).__module__]
    try:
        seeing = module.TritonAttnBackend
    except AttributeError:
        return  # this release decides it in another way
    if "prefill_backend" in decides:  # others take split backends for one that cannot do it
        backend = getattr(backend, "prefill_backend", backend)
    fa4 = "fa_impl_ver" in decides and getattr(backend, "fa_impl_ver", None) == 4
    if not fa4 and not isinstance(backend, seeing):
        yield (
            f"{type(backend).__name__} attends causally to the tokens of an image, and this model "
            "was trained with bidirectional attention there, so answers on images may be worse; "
            f"{seeing.__name__} has it"
        )
