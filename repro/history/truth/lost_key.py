"""Counts the decode steps of sliding layers on triton behind the window, and those a key short.

A sliding layer of SGLang has as ``sliding_window_size`` the number of keys *before* a token that it
sees. So a decode step needs one more, the token's own. The closed pull request #32087 adds it in
``update_sliding_window_buffer`` (0.5.23, ``triton_backend.py:2845``). What is counted here is the
list that the kernel is given.
"""

from __future__ import annotations

from typing import Any

from _history.counter import Counter, before


def install(counter: Counter) -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    def decode(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        radius = layer.sliding_window_size
        if radius is None or radius <= 0 or not batch.forward_mode.is_decode():
            return
        bounds = backend.forward_metadata.window_kv_indptr[: batch.batch_size + 1]
        listed = (bounds[1:] - bounds[:-1])[batch.seq_lens > radius]
        if not len(listed):
            return
        counter.reached()
        least = int(listed.min())
        if least <= radius:
            counter.triggered(f"{least} keys, and the window has {radius + 1}")

    before(TritonAttnBackend, "forward_decode", decode)
