"""The hand-over at start: the embedding table in which the draft looks token ids up.

FROZEN_KV_MTP's draft has no embedding of the target's size. While its worker is built, SGLang gives
it the target's table (``set_embed_and_head``), and its forward looks whole token ids up in that, by
``F.embedding``. So the table must have a row for each token, also with tensor parallelism, where
some of SGLang's layers have only the rows of their rank. This is looked at before the draft's first
forward, and before its CUDA graphs are captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from g4debug import speculation
from g4debug.hooking.resolved import server_argument
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.check import check_embedding
from g4debug.tracers.spec_lifecycle.log import SpecLog


@dataclass(frozen=True)
class Target:
    """vocabulary: how many tokens there are. rows: of its embedding, on all ranks together."""

    vocabulary: int
    rows: int
    weight: torch.Tensor  # what this rank has of it


class Binding:
    def __init__(self, context: Context, log: SpecLog) -> None:
        self.context = context
        self.log = log
        self._target: Any = None  # the target's worker, while the draft's is built

    def install(self) -> None:
        for site in speculation.sites("init"):
            self.context.before(site, self.before_init)
            self.context.after(site, self.after_init)
        self.context.after("draft.bind_embedding", self.after_bind)

    def before_init(self, worker: Any, *args: Any, **kwargs: Any) -> None:
        given = (*args, *kwargs.values())  # its place among them differs by release
        self._target = next((x for x in given if hasattr(x, "model_runner")), None)
        if self._target is None:
            self._cannot("the draft's worker is not given the target's")

    def after_init(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self._target = None
        return result

    def after_bind(self, result: Any, draft: Any, *args: Any, **kwargs: Any) -> Any:
        if self._target is None:
            return result  # of a worker that is not judged at all
        bound = getattr(draft, "target_embed_weight", None)
        target = _target(self._target.model_runner)
        if not isinstance(bound, torch.Tensor) or target is None:
            self._cannot("it, or the target's, is in another place than those that are known")
            return result
        server = getattr(self.context.recorder.scheduler, "server_args", None)
        violation = check_embedding(
            rows=int(bound.shape[0]),
            first=first_row(bound, target.weight),
            table=target.rows,
            vocabulary=target.vocabulary,
            rank=self.context.recorder.rank,
            ranks=int(server_argument(server, "tp_size", 1)),
        )
        self.log.judge("draft.bind_embedding", None, violation)
        return result

    def _cannot(self, why: str) -> None:
        self.context.limit("the embedding table of the draft is not checked", why)


def _target(runner: Any) -> Target | None:
    """The target's embedding, from its ModelRunner; None if that cannot be read."""
    layer = getattr(runner.model, "get_input_embeddings", lambda: None)()
    weight = getattr(layer, "weight", None)
    vocabulary = getattr(runner.model_config, "vocab_size", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(vocabulary, int):
        return None
    # A layer that has only the rows of its rank says here how many there are of all ranks.
    rows = getattr(layer, "num_embeddings", None)
    return Target(vocabulary, rows if isinstance(rows, int) else int(weight.shape[0]), weight)


def first_row(part: torch.Tensor, table: torch.Tensor) -> int:
    """Which row of ``table`` is the first one of ``part``; -1 if ``part`` is other memory.

    Both are [rows, hidden]. Reads no element of them.
    """
    if part.shape[1:] != table.shape[1:] or part.dtype != table.dtype:
        return -1
    offset = part.data_ptr() - table.data_ptr()
    row, rest = divmod(offset, max(1, table.stride(0) * table.element_size()))
    inside = part.device == table.device and 0 <= row <= table.shape[0] - part.shape[0]
    return row if inside and not rest else -1
