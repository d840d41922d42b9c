"""Counts the decode steps of sliding layers on triton behind the window, and those a key short.

The model's window has 128 keys, the token's own among them. From 0.5.14 on a layer's
``sliding_window_size`` is one less, and before it is not, so it is no measure. The closed pull
request #32087 adds the missing key in ``update_sliding_window_buffer`` (0.5.23,
``triton_backend.py:2845``). This counts the keys in the list that the kernel is given.
"""

from __future__ import annotations

from typing import Any

from suites.history.counter import Counter, around

WINDOW = 128  # the sliding_window of the toy models, in keys


def install(counter: Counter) -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    @around(TritonAttnBackend, "forward_decode")
    def decode(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        radius = layer.sliding_window_size
        if radius is None or radius <= 0 or not batch.forward_mode.is_decode():
            return
        bounds = backend.forward_metadata.window_kv_indptr[: batch.batch_size + 1]
        listed = (bounds[1:] - bounds[:-1])[batch.seq_lens >= WINDOW]
        if not len(listed):
            return
        counter.reached()
        least = int(listed.min())
        if least < WINDOW:
            counter.triggered(f"{least} keys, and the window has {WINDOW}")
