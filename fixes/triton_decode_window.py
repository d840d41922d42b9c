"""Lets a decode step on SGLang's triton backend read the whole window of a sliding layer.

Gemma-4 gives SGLang its window less one: the number of keys *before* a token that it sees. Every
backend takes it so in a prefill, and all but one in a decode. ``triton`` lists the keys of a decode
step, the token's own among them, and cuts the list at that number (``update_sliding_window_buffer``
in ``triton_backend.py``). So the oldest key of the window is missing in every decode step behind
it, in the target and in the draft of FROZEN_KV_MTP. Nothing crashes; some answers differ from the
model's own definition, and from a prefill of the same tokens.

While the backend makes the lists of a decode step, or the static lists of its CUDA graphs, the fix
lets it see one key more. A prefill and a verify are left as they are, because their lists do not
hold the token itself. The key is still there: SGLang evicts only what lies before it.

It is off by default, because it changes the answers of a healthy server: a server with the fix and
one without it do not agree any more. Upstream has not said which answer is right. The pull request
that mends it (sglang #32087) was closed without a merge, and the question in #34354 without an
answer of a maintainer.

A draft of EAGLE with several steps has lists of its own (``TritonMultiStepDraftBackend``), which
this fix does not touch. Gemma-4's assistant does not run there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from g4debug.backends.triton import DECODE_KEYS
from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source

MODULE = "sglang.srt.layers.attention.triton_backend"
WINDOW = "sliding_window_size"
_WHOLE = "_g4debug_whole_window"


@contextmanager
def whole_window(backend: Any) -> Iterator[None]:
    """While this lasts, a TritonAttnBackend makes its lists for the whole window, in tokens.

    Inside of another one, and for a model without sliding layers, it does nothing.
    """
    radius = getattr(backend, WINDOW)
    if vars(backend).get(_WHOLE) or radius is None or radius <= 0:
        yield
        return
    setattr(backend, WINDOW, radius + 1)
    setattr(backend, _WHOLE, True)
    try:
        yield
    finally:
        setattr(backend, WINDOW, radius)
        delattr(backend, _WHOLE)


def around_metadata(call_next: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the functions that make the lists of a forward. One of the arguments has its mode."""
    if not _decodes((*args, *kwargs.values())):
        return call_next(backend, *args, **kwargs)
    with whole_window(backend):
        setattr(backend, DECODE_KEYS, getattr(backend, WINDOW))  # for who judges the lists
        return call_next(backend, *args, **kwargs)


def around_graph_state(
    call_next: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``init_cuda_graph_state``: the static list needs room for the whole window."""
    with whole_window(backend):
        return call_next(backend, *args, **kwargs)


def _decodes(arguments: tuple[Any, ...]) -> bool:
    """True if the arguments name a decode, by a ForwardMode or by a ForwardBatch."""
    modes = (getattr(a, "forward_mode", a) for a in arguments)
    mode = next((m for m in modes if hasattr(m, "is_decode_or_idle")), None)
    return mode is not None and bool(mode.is_decode_or_idle())


def still_broken() -> bool:
    """True if the lists are cut at the window's radius, and nobody adds the token itself."""
    text = source(MODULE)
    cut = re.search(r"torch\.minimum\(\s*seq_lens,\s*torch\.tensor\(sliding_window_size\)", text)
    return cut is not None and re.search(r"sliding_window_size\s*\+\s*1\b", text) is None


FIX = Fix(
    id="triton-decode-window",
    title="a decode step on triton reads the whole window of a sliding layer",
    seed="none; found by this project, and by others",
    upstream="sglang #32087 and #34354, both closed without a change; 0.5.23 has the bug",
    needs=">=0.5.12",
    still_broken=still_broken,
    hooks=(
        around("attn.triton.metadata", around_metadata, optional=True),
        around("attn.triton.metadata_capture", around_metadata, optional=True),
        around("attn.triton.metadata_replay", around_metadata, optional=True),
        around("attn.triton.init_graph_state", around_graph_state),
    ),
    purpose="experiment",
)
