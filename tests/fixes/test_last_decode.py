"""last-decode, on SGLang's own prefix cache: what the last request of a batch lets go of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_parked_chunk import WINDOW, Waiting

from g4debug.fixes.base import state_of

pytestmark = pytest.mark.written_for("last-decode")


class Batch:
    """A decode batch that has its pages as soon as ``wanted`` tokens can be evicted."""

    def __init__(self, waiting: Waiting, steps: int = 1, requests: int = 1, wanted: int = 1):
        self.tree_cache, self.wanted, self.asked = waiting.tree, wanted, 0
        waiting.request.put(decode_batch_idx=steps)
        self.reqs = [waiting.request, *[SimpleNamespace()] * (requests - 1)]

    def check(self, selected=None) -> bool:
        from g4debug.fixes.last_decode import around_check

        def sglangs(batch, selected_indices=None):
            self.asked += 1
            return batch.tree_cache.swa_evictable_size() >= self.wanted

        return around_check(sglangs, self, selected)


@pytest.fixture
def waiting(sglang):
    return Waiting(16, 704, tree=True, chunks=(704,))


def test_the_last_request_lets_go_of_what_is_behind_its_window(waiting):
    assert waiting.tree.swa_evictable_size() == 0
    batch = Batch(waiting)
    assert batch.check()
    assert waiting.tree.swa_protected_size() == -(-WINDOW // 16) * 16
    assert waiting.tree.full_protected_size() == 704
    waiting.unlock()
    assert waiting.tree.swa_protected_size() == waiting.tree.full_protected_size() == 0
    waiting.tree.sanity_check()


def test_it_is_asked_for_once_and_no_more_is_found(waiting):
    batch = Batch(waiting, wanted=10_000)
    assert not batch.check()
    assert not batch.check()
    assert batch.asked == 3


@pytest.mark.parametrize("given", [{"steps": 0}, {"requests": 2}])
def test_before_the_second_decode_step_and_beside_others_it_does_nothing(waiting, given):
    batch = Batch(waiting, **given)
    assert not batch.check()
    assert waiting.tree.swa_protected_size() == 704


def test_when_the_others_were_retracted_it_is_the_last(waiting):
    batch = Batch(waiting, requests=2)
    assert batch.check([0])


def test_a_lock_that_was_released_is_left_alone(waiting):
    waiting.tree.dec_swa_lock_only(waiting.request.last_node, waiting.request.swa_uuid_for_lock)
    waiting.request.put(swa_prefix_lock_released=True)
    Batch(waiting, wanted=10_000).check()
    assert waiting.tree.swa_protected_size() == 0


def test_it_is_in_force_by_default(arm):
    arm()
    assert state_of("last-decode") == "applied"
