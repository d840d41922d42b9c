"""Free lists in another order have other digests, and older tapes keep theirs."""

from __future__ import annotations

import operator
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


class Lists(SimpleNamespace):
    """An allocator's lists, as many as there are, each with two pages."""

    def digest(self) -> int:
        digests = PageDigests()
        digests.look(self, 7)
        taken = digests.take()
        assert taken is not None
        return taken[1]


def both_pools() -> Lists:
    def pool(*pages: int) -> SimpleNamespace:
        free, released = torch.tensor(pages[:2]), torch.tensor(pages[2:])
        return SimpleNamespace(free_pages=free, release_pages=released)

    return Lists(
        full_attn_allocator=pool(1, 2, 3, 4),
        swa_attn_allocator=pool(1, 2, 3, 4),
        full_to_swa_index_mapping=torch.tensor([0, 5, 6]),
    )


@pytest.mark.parametrize(
    "changed",
    [
        "full_attn_allocator.free_pages", "full_attn_allocator.release_pages",
        "swa_attn_allocator.free_pages", "swa_attn_allocator.release_pages",
        "full_to_swa_index_mapping",
    ],
)  # fmt: skip
def test_each_list_is_in_the_digest(changed: str) -> None:
    """The free lists of both pools, and which SWA page belongs to which page of the full pool."""
    lists = both_pools()
    before, tensor = lists.digest(), operator.attrgetter(changed)(lists)
    assert both_pools().digest() == before
    tensor[:] = tensor.flip(0)
    assert lists.digest() != before


def test_the_same_pages_in_another_list_have_another_digest() -> None:
    one, other = both_pools(), both_pools()
    one.full_attn_allocator.free_pages[0] = 9
    other.swa_attn_allocator.free_pages[0] = 9
    assert one.digest() != other.digest()


def test_the_weights_are_those_of_splitmix64() -> None:
    numbers = torch.tensor([1, 2, 3, 1 << 40, -1, -(1 << 63)])
    want = tape.mix(numbers.numpy().view(np.uint64)).view(np.int64)
    assert page_digests._mix(numbers).tolist() == want.tolist()


@pytest.mark.parametrize("format", [1, 2])
def test_tapes_of_older_formats_have_the_digests_of_then(format: int) -> None:
    made = digest(PageDigests(format), torch.arange(1, 41), 50, 3)
    assert made == OLD
    assert digest(PageDigests(), torch.arange(1, 41), 50, 3) != OLD
