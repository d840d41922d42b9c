"""early-swa-free where SGLang evicts only once in a while: it fires in a step without an eviction.

The batch's ``maybe_evict_swa`` and the allocator are SGLang's own.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE, WINDOW, Rig

from g4debug import plugin
from g4debug.hooking import targets

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
    pytest.mark.skipif(
        targets.sglang_version() is None or targets.path("batch.maybe_evict_swa") is None,
        reason="this SGLang evicts a page as soon as it has left the window",
    ),
]
TOKENS = 7 * PAGE + 5


def a_decode(rig, ahead):
    """A batch of one request that decodes, with room for ``ahead`` more tokens."""
    from sglang.srt.managers import schedule_batch

    admitted = rig.admit("a", TOKENS + ahead)
    request = SimpleNamespace(
        rid="a", seqlen=TOKENS + 1, decode_batch_idx=3, swa_evicted_seqlen=0,
        req_pool_idx=admitted.req_pool_idx, kv_allocated_len=TOKENS + ahead,
        kv=SimpleNamespace(
            req_pool_idx=admitted.req_pool_idx, kv_allocated_len=TOKENS + ahead, holds_kv=True,
            get_evicted_seqlen=lambda kind: 0, cache_protected_len=0,
        ),
    )  # fmt: skip
    batch = schedule_batch.ScheduleBatch.__new__(schedule_batch.ScheduleBatch)
    batch.reqs, batch.req_to_token_pool, batch.forward_iter = [request], rig.req_to_token, 3
    batch.forward_mode = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False)
    batch.token_to_kv_pool_allocator = rig.allocator
    batch.tree_cache = SimpleNamespace(
        sliding_window_size=WINDOW, swa_retain_window=WINDOW, page_size=PAGE,
        supports_swa=lambda: True, supports_auxiliary_swa=lambda: False,
        is_chunk_cache=lambda: False, supports_prefix_sharing=lambda: True,
    )  # fmt: skip
    return batch, request


def mapped(rig, request):
    row = rig.req_to_token.req_to_token[request.req_pool_idx]
    return [int(rig.allocator.full_to_swa_index_mapping[row[p * PAGE]]) > 0 for p in range(8)]


@pytest.fixture(autouse=True)
def _arguments(sglang, monkeypatch):
    """The server's arguments, which some releases ask for here."""
    from sglang.srt.managers import schedule_batch

    arguments = SimpleNamespace(chunked_prefill_size=64, page_size=PAGE)
    monkeypatch.setattr(schedule_batch, "get_global_server_args", lambda: arguments, raising=False)


@pytest.mark.parametrize("ahead", [1, 2])
def test_it_takes_the_windows_oldest_page_in_a_step_without_an_eviction(arm, ahead):
    arm(G4DEBUG_FAULTS="early-swa-free=1*on")
    rig = Rig()
    batch, request = a_decode(rig, ahead)
    batch.maybe_evict_swa()
    first = (TOKENS - WINDOW) // PAGE
    assert mapped(rig, request) == [page != first for page in range(8)]
    batch.maybe_evict_swa()  # once
    assert mapped(rig, request) == [page != first for page in range(8)]


def test_not_a_page_that_has_left_the_window_when_the_step_runs(arm):
    """The tokens under way may reach so far that the page is no longer needed."""
    arm(G4DEBUG_FAULTS="early-swa-free=1*on")
    rig = Rig()
    batch, request = a_decode(rig, PAGE)
    batch.maybe_evict_swa()
    assert all(mapped(rig, request))


def test_not_before_the_prefill_has_ended(arm):
    arm(G4DEBUG_FAULTS="early-swa-free=1*on")
    rig = Rig()
    batch, request = a_decode(rig, 1)
    request.decode_batch_idx = 0
    batch.maybe_evict_swa()
    assert all(mapped(rig, request))
    assert plugin.in_force is not None
