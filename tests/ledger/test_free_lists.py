"""Whether the hooks missed a call of an allocator, on lists as SGLang keeps them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from g4debug.ledger.free_lists import FreeLists, lists_of

pytestmark = pytest.mark.once("the code is ours alone")


class Allocator(SimpleNamespace):
    """It makes a new tensor whenever pages leave a list or come back to it."""

    def take(self) -> None:
        self.free_pages = self.free_pages[1:]

    def free(self) -> None:
        self.release_pages = torch.cat((self.release_pages, self.free_pages[:1]))


def made(**more: object) -> tuple[Allocator, FreeLists]:
    allocator = Allocator(free_pages=torch.arange(1, 9), release_pages=torch.arange(0), **more)
    return allocator, FreeLists(allocator)


def seen(allocator: Allocator, lists: FreeLists, call: str, entered: bool = True) -> None:
    """A call of the allocator that passes by our hooks."""
    lists.begins()
    getattr(allocator, call)()
    lists.called += 1
    lists.ends()
    lists.entered += entered


def test_calls_that_all_pass_by_are_missed_by_nobody():
    allocator, lists = made()
    assert not lists.missed
    for call in ("take", "free", "take"):
        before = lists_of(allocator)
        seen(allocator, lists, call)
        assert all(a is b for a, b in zip(lists.before, before, strict=True))
        assert not lists.missed
    assert lists.gaps == 0


@pytest.mark.parametrize("call", ["take", "free"])
def test_a_call_that_did_not_pass_by_is_missed_at_once_and_for_good(call):
    allocator, lists = made()
    seen(allocator, lists, "take")
    getattr(allocator, call)()
    assert lists.missed
    assert lists.gaps == 0, "the next call finds the gap"
    seen(allocator, lists, "take")
    assert (lists.gaps, lists.missed) == (1, True)
    seen(allocator, lists, "take")
    assert (lists.gaps, lists.missed) == (1, True)


def test_an_event_on_its_way_to_the_host_counts_as_missed_until_it_is_entered():
    allocator, lists = made()
    seen(allocator, lists, "take", entered=False)
    assert lists.missed
    lists.entered += 1
    assert not lists.missed


def test_a_list_that_is_overwritten_in_place_is_no_missed_event():
    """Then the ledger is right, and the list is the finding."""
    allocator, lists = made()
    allocator.free_pages[0] = 99
    assert not lists.missed


def test_a_restored_list_is_no_gap():
    allocator, lists = made()
    kept = allocator.free_pages
    seen(allocator, lists, "take")
    allocator.free_pages = kept
    lists.begins()
    lists.ends(restored=True)
    assert (lists.gaps, lists.missed) == (0, False)


def test_what_is_cleared_begins_anew():
    allocator, lists = made()
    allocator.take()
    seen(allocator, lists, "take")
    assert lists.missed
    lists.forget()
    assert (lists.gaps, lists.missed) == (0, False)


def test_pages_that_wait_to_be_sorted_are_lists_too():
    allocator, lists = made(staged_pages=[torch.tensor([3])])
    assert len(lists_of(allocator)) == 3
    allocator.staged_pages = [*allocator.staged_pages, torch.tensor([4])]
    assert lists.missed
    allocator.release_pages = None
    assert len(lists_of(allocator)) == 3
