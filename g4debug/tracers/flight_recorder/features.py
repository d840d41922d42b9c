"""Features of a request that a tape cannot carry, told from the fields of its message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

# One beam is none, and so on. There is one object of each of these.
_NOTHING = frozenset(map(id, (None, False, True, 0, 1)))


class Features:
    """names: SGLang's field -> the feature in words."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._reads: dict[type, Callable[[Any], tuple[Any, ...]] | None] = {}

    def of(self, holder: Any) -> list[str]:
        """The features that this message asks for, or these sampling parameters do."""
        kind = type(holder)
        if kind not in self._reads:
            self._reads[kind] = self._reader(kind)
        read = self._reads[kind]
        if read is not None and _NOTHING.issuperset(map(id, read(holder))):
            return []  # nearly every request: it takes a third of the time of the next line
        return [what for name, what in self.names.items() if _asks(getattr(holder, name, None))]

    def _reader(self, kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
        """Reads all fields at once. None if an object may have some that its class does not name,
        as those of SGLang 0.5.12 may.
        """
        names = [name for name in self.names if hasattr(kind, name)]
        return None if kind.__dictoffset__ or len(names) < 2 else attrgetter(*names)


def _asks(value: Any) -> bool:
    # Some are tensors, which do not compare to one truth.
    return value is not None and not (isinstance(value, int) and value in (0, 1))


MESSAGE = Features(
    {
        "mm_inputs": "images, video or sound",
        "input_embeds": "embeddings in place of tokens",
        "session_params": "sessions",
        "session_id": "sessions",
        "lora_id": "LoRA adapters",
        "bootstrap_room": "disaggregation",
        "positional_embed_overrides": "embeddings at positions",
        "multi_item_delimiter_indices": "several items in a prompt",
        "custom_logit_processor": "logit processors of its own",
    }
)
SAMPLING = Features(
    {
        "json_schema": "grammars",
        "regex": "grammars",
        "ebnf": "grammars",
        "structural_tag": "grammars",
        "beam_width": "beam search",
    }
)
