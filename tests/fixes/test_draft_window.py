"""draft-window: what SGLang's own function gives back behind a window, with the fix and without."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from real_backend import PAGE, WINDOW, Rig
from releases import kv_of

from g4debug.fixes.base import state_of
from g4debug.fixes.draft_window import around_evict

pytestmark = pytest.mark.written_for("draft-window")
RADIUS = WINDOW - 1  # sliding_window_size


def without_prefix_cache() -> dict[str, bool]:
    """The argument of SGLang's function that says so: each release has another one."""
    from sglang.srt.mem_cache.common import free_swa_out_of_window_slots

    names = {"supports_prefix_sharing": False, "is_chunk_cache": True, "drop_page_margin": True}
    known = inspect.signature(free_swa_out_of_window_slots).parameters
    return {n: value for n, value in names.items() if n in known}


def evicted(length: int, fixed: bool, frozen: bool | None = True, decode: bool = True) -> int:
    """How many tokens of a request lose their SWA pages, of which ``length`` have KV."""
    from sglang.srt.mem_cache.common import free_swa_out_of_window_slots

    rig = Rig()
    request = rig.admit("r", length)
    if kv_of(request) is request:
        request.cache_protected_len = request.swa_evicted_seqlen = 0
    batch = SimpleNamespace(
        spec_algorithm=(
            None if frozen is None else SimpleNamespace(is_frozen_kv_mtp=lambda: frozen)
        ),
        forward_mode=SimpleNamespace(is_decode=lambda: decode),
    )

    def sglangs(batch, req, pre_len):
        free_swa_out_of_window_slots(
            req, pre_len, sliding_window_size=RADIUS, page_size=PAGE,
            req_to_token_pool=rig.req_to_token, token_to_kv_pool_allocator=rig.allocator,
            **without_prefix_cache(),
        )  # fmt: skip

    (around_evict if fixed else lambda call_next, *args: call_next(*args))(
        sglangs, batch, request, length
    )
    row = rig.req_to_token.req_to_token[request.req_pool_idx, :length].long()
    return int((rig.allocator.full_to_swa_index_mapping[row] <= 0).sum())


# Nothing is in flight: all these tokens have KV, and the scheduler knows it.
@pytest.mark.parametrize("length", range(50, 60))
def test_the_drafts_window_keeps_its_pages(sglang, length):
    oldest = length - 1 - RADIUS  # that the draft reads, at the last token's position
    assert evicted(length, fixed=True) <= oldest
    assert (evicted(length, fixed=False) <= oldest) == (length != PAGE + RADIUS)


def test_other_servers_and_prefills_are_left_alone(sglang):
    length = PAGE + RADIUS
    assert evicted(length, fixed=False) == PAGE
    assert evicted(length, fixed=True, frozen=False) == PAGE
    assert evicted(length, fixed=True, frozen=None) == PAGE
    assert evicted(length, fixed=True, decode=False) == PAGE


def test_it_is_in_force_by_default(arm):
    arm()
    assert state_of("draft-window") == "applied"
