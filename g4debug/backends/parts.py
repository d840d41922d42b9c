"""The attention backends that one is made of: of phases, kinds of layers, parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def parts(backend: Any) -> Iterator[Any]:
    """This backend, and each that it passes layers or forwards on to."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    found, seen = [backend], {id(backend)}
    while found:
        part = found.pop()
        yield part
        for value in getattr(part, "__dict__", {}).values():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, AttentionBackend) and id(each) not in seen:
                    seen.add(id(each))
                    found.append(each)
