"""A place that can be corrupted: one number, the pages of a row, and the change that is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# What the grader must know of a place: docs/tracers.md says what cannot be seen there, or not soon.
UNFINISHED = "in the last, unfinished page of a request"
MIDDLE = "not at the begin of a page, where page tables are read"
AHEAD = "of a token that is not computed yet"


@dataclass
class Place:
    """One number that can be changed.

    tensor, index: it is ``tensor[index]``. values: its wrong values, by the names in ``TO``. words:
    its name. put: changes it, if it cannot be changed in place. note: UNFINISHED, MIDDLE, AHEAD
    or ''. rid: the request that it is read for, '' if it is not known.
    """

    tensor: torch.Tensor
    index: tuple[int, ...]
    values: dict[str, int]
    words: str
    put: Callable[[torch.Tensor], None] | None = None
    note: str = ""
    rid: str = ""


@dataclass
class Row:
    """The whole pages of a row, which can be rotated.

    tensor, index: they are ``tensor[index]``. unit: elements of a page. The rest as in Place.
    """

    tensor: torch.Tensor
    index: Any
    unit: int
    words: str
    put: Callable[[torch.Tensor], None] | None = None
    note: str = ""
    rid: str = ""


@dataclass
class Change:
    """``tensor[index]`` becomes ``value``. rids: the requests. The rest as in Place."""

    tensor: torch.Tensor
    index: Any
    value: Any
    words: str
    put: Callable[[torch.Tensor], None] | None = None
    note: str = ""
    rids: tuple[str, ...] = ()
