"""Free lists in another order have other digests, and older tapes keep theirs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from g4debug.findings import tape
from g4debug.tracers.flight_recorder import page_digests
from g4debug.tracers.flight_recorder.page_digests import PageDigests

pytestmark = pytest.mark.once("digests are made without SGLang")
PAGES = 1000
OLD = 10614872957423599965  # made by g4debug when it wrote format 2


def digest(digests: PageDigests, pages: torch.Tensor, *released: int) -> int:
    lists = SimpleNamespace(free_pages=pages, release_pages=torch.tensor(released))
    digests.look(lists, 7)
    taken = digests.take()
    assert taken is not None
    return taken[1]


def swapped(place: int, distance: int = 1) -> torch.Tensor:
    pages = torch.arange(1, PAGES + 1)
    pages[[place, place + distance]] = pages[[place + distance, place]]
    return pages


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_two_pages_that_changed_places_are_told_wherever_that_was(distance: int) -> None:
    digests = PageDigests()
    found = {digest(digests, swapped(place, distance)) for place in range(PAGES - distance)}
    assert len(found) == PAGES - distance


def test_the_weights_are_those_of_splitmix64() -> None:
    numbers = torch.tensor([1, 2, 3, 1 << 40, -1, -(1 << 63)])
    want = tape.mix(numbers.numpy().view(np.uint64)).view(np.int64)
    assert page_digests._mix(numbers).tolist() == want.tolist()


@pytest.mark.parametrize("format", [1, 2])
def test_tapes_of_older_formats_have_the_digests_of_then(format: int) -> None:
    made = digest(PageDigests(format), torch.arange(1, 41), 50, 3)
    assert made == OLD
    assert digest(PageDigests(), torch.arange(1, 41), 50, 3) != OLD
