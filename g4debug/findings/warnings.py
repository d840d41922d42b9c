"""What a server does otherwise than its model was trained for, and says once at most.

``g4debug doctor --pid`` shows it. It is no finding: SGLang does it on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from g4debug.hooking import targets


def of(scheduler: Any) -> Iterator[str]:
    """Warnings on the server of this scheduler."""
    runner = getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)
    model, backend = getattr(runner, "model", None), getattr(runner, "attn_backend", None)
    if type(model).__name__ != "Gemma4ForConditionalGeneration" or backend is None:
        return
    text = getattr(getattr(model, "config", None), "text_config", None)
    if getattr(text, "use_bidirectional_attention", None) != "vision":
        return  # E2B and E4B: causal is right
    new = targets.matches(">=0.5.23")
    if new:  # before, SGLang asks the outer one of split backends, and gets no for an answer
        backend = getattr(backend, "prefill_backend", backend)
    if type(backend).__name__ == "TritonAttnBackend":
        return
    if new and getattr(backend, "fa_impl_ver", None) == 4:
        return
    yield (
        f"{type(backend).__name__} attends causally to the tokens of an image, and this model was "
        "trained with bidirectional attention there, so answers on images may be worse; use "
        "--attention-backend triton for images"
    )
