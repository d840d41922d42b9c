"""What is no finding, and said all the same: a forgotten pause, and waits for somebody else."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from turning import LIMIT, STEPS, Request, Server

from g4debug.tracers.flight_recorder import work
from g4debug.tracers.flight_recorder.outside_waits import PATIENCE
from g4debug.tracers.flight_recorder.work import Place


@pytest.fixture
def server(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    return Server(monkeypatch, tmp_path / "dumps")


def test_a_forgotten_pause_is_said_with_its_length_and_who_waits(server, caplog):
    server.turn(2)
    server.has.waiting_queue += [Request(str(n)) for n in range(12)]
    server.has._engine_paused = True
    server.turn(599)
    assert caplog.text == ""
    server.turn(3001)
    (line,) = server.flight.standing.live()[1]
    assert "the engine has been paused for 3,600 s (pause_generation), and 12 requests wait" in line
    assert "until somebody calls continue_generation" in line
    assert caplog.text.count("the engine has been paused for 600 s") == 1
    assert caplog.text.count("paused") == 1
    assert server.told == []
    server.has._engine_paused = False
    server.turn(2)
    server.has._engine_paused = True  # another one
    server.turn(700)
    assert "the engine has been paused for 700 s" in server.flight.standing.live()[1][0]
    assert caplog.text.count("paused") == 2


def test_a_pause_in_which_nobody_waits_is_only_shown(server, caplog):
    server.has._engine_paused = True
    server.turn(3600)
    assert caplog.text == ""
    assert "and no request waits" in server.flight.standing.live()[1][0]


def test_who_is_on_the_way_to_its_next_batch_waits_for_the_end_of_a_pause_too(server):
    """A pause in place leaves SGLang's last batch as it is, behind a prefill."""
    ended = Request("ended")
    ended.finished_reason = "stop"
    server.has.last_batch = SimpleNamespace(reqs=[Request("prefilled"), ended])
    server.has._engine_paused = True
    server.turn(2)
    assert "and 1 request waits" in server.flight.standing.live()[1][0]


def test_of_tensor_parallel_ranks_the_first_one_warns(server, monkeypatch, caplog):
    monkeypatch.setattr(server.context.trap.others, "leads", lambda: False)
    server.has.waiting_queue.append(Request("a"))
    server.has._engine_paused = True
    server.turn(700)
    server.has._engine_paused = False
    server.has.waiting_queue.clear()
    server.has.grammar_manager.grammar_queue.append(Request("g"))
    server.turn(700)
    assert caplog.text == ""
    assert "for a grammar to be compiled" in server.flight.standing.live()[1][0]


def test_requests_that_a_pause_has_retracted_wait_too(server):
    held = SimpleNamespace(queue=[], retracted_queue=[], held_rebootstrap_reqs=[Request("h")])
    server.has.disagg_decode_prealloc_queue = held
    server.has._engine_paused = True
    server.turn(2)
    assert "and 1 request waits" in server.flight.standing.live()[1][0]


# -- storage -------------------------------------------------------------------------------------


class Cache:
    """SGLang's prefix cache with a storage behind it."""

    def __init__(self, **more) -> None:
        vars(self).update(more)

    def check_prefetch_progress(self, request) -> bool:
        raise AssertionError("this asks the other ranks")


@pytest.mark.parametrize("switch", ["enable_hicache_storage", "enable_lmcache"])
@pytest.mark.parametrize("cache", [Cache(ongoing_prefetch={}), Cache(_external_flows={}), None])
def test_with_a_storage_a_queue_that_stands_is_told(server, switch, cache):
    """sglang #36458 and the like stand with a storage, too."""
    setattr(server.has, switch, True)
    server.has.tree_cache = cache
    server.has.waiting_queue.append(Request("a"))
    server.turn(2 * LIMIT)
    assert server.told == ["hang: 1"]
    assert list(work.outside(server.has)) == ["its prefix from storage"]


@pytest.mark.parametrize("where", ["ongoing_prefetch", "_external_flows", "staged", "ticket", "?"])
def test_a_request_whose_prefix_is_under_way_is_not_judged(server, where, caplog):
    server.has.enable_hicache_storage = True
    request = Request("a")
    request.cache_request_handle = "handle of a"
    flows = {"handle of a": object()}
    server.has.tree_cache = {
        "ongoing_prefetch": Cache(ongoing_prefetch=flows),
        "_external_flows": Cache(_external_flows={"a": object()}),
        "staged": Cache(
            ongoing_prefetch={}, buffer_pipeline=SimpleNamespace(staged_prefetches=flows)
        ),
        "ticket": Cache(
            ongoing_prefetch={},
            cache_controller=SimpleNamespace(
                pp_prefetch_decisions={"a": SimpleNamespace(name="TICKETED")}
            ),
        ),
        "?": Cache(),  # one that we do not know
    }[where]
    server.has.waiting_queue.append(request)
    server.turn(PATIENCE - 5)
    assert server.told == []
    assert caplog.text == ""
    assert [w.place for w in work.of(server.has)] == [Place.STORAGE]
    server.turn(10)
    assert server.told == []
    assert "request a has waited 330 s for a prefix from storage" in caplog.text
    assert "request a has waited 33" in server.flight.standing.live()[1][0]


def test_what_it_waited_for_storage_is_no_wait_in_the_queue(server):
    """Its prefix came after a minute; in the next round it may be admitted. Then it stands."""
    server.has.enable_hicache_storage = True
    request = Request("a")
    server.has.tree_cache = cache = Cache(ongoing_prefetch={"a": object()})
    server.has.waiting_queue.append(request)
    server.turn(60)
    cache.ongoing_prefetch.clear()
    server.turn(LIMIT - 3)
    assert server.told == []
    server.turn(6)
    assert server.told == ["hang: 1"]
    assert "request a waits in the queue for 2" in server.findings()[0].got


def test_a_request_that_waits_for_storage_does_not_starve(server):
    """Those that came later begin meanwhile; then it is its turn."""
    server.has.enable_hicache_storage = True
    slow, newer = Request("slow"), Request("newer")
    server.has.tree_cache = cache = Cache(ongoing_prefetch={"slow": object()})
    server.has.waiting_queue.append(slow)
    server.turn(1)
    server.has.running_batch.reqs[:] = [newer]
    for _ in range(3 * STEPS):
        server.step(3, newer)
    cache.ongoing_prefetch.clear()
    for _ in range(STEPS - 5):
        server.step(3, newer)
    assert server.told == []
    waits = server.flight.standing.waits.all
    assert waits[id(slow)].order < waits[id(newer)].order  # it kept its place in the queue


# -- the other server, and a grammar -------------------------------------------------------------


def test_a_transfer_that_never_ends_is_warned_of(server, caplog):
    """sglang #31205: it holds memory, so those behind it are not judged."""
    request = Request("sent")
    request.req_pool_idx, request.kv_allocated_len = 3, 704
    server.has.disagg_prefill_inflight_queue = [request]
    server.has.waiting_queue.append(Request("behind"))
    server.turn(PATIENCE - 2)
    assert caplog.text == ""
    server.turn(3600)
    assert server.told == []
    line = server.flight.standing.live()[1][0]
    assert "request sent has waited 3,9" in line
    assert "for the other server of disaggregation; it holds 704 tokens of KV" in line
    assert "1 waits in the queue, maybe for these, and no hang is told meanwhile" in line
    assert caplog.text.count("request sent has waited") == 1  # once for each request


def test_many_of_them_flood_no_log(server, caplog):
    queue = server.has.disagg_prefill_inflight_queue = []
    for n in range(100):
        queue.append(Request(f"r{n}"))
        server.turn(40)
    assert 2 <= caplog.text.count("for the other server") <= 5
    line = server.flight.standing.live()[1][0]
    assert "request r0 has waited" in line
    assert "and 9" in line
    queue.clear()
    server.turn(2)
    assert server.flight.standing.live()[1] == []


def test_a_grammar_that_is_compiled_for_ever_is_warned_of(server, caplog):
    server.has.grammar_manager.grammar_queue.append(Request("g"))
    server.turn(PATIENCE - 2)
    assert caplog.text == ""
    server.turn(5)
    assert "request g has waited 330 s for a grammar to be compiled" in caplog.text
    assert server.told == []


def test_one_that_goes_on_waits_for_nobody(server, caplog):
    """A prefill that has been sent, and another one in its place."""
    for n in range(5):
        server.has.disagg_prefill_inflight_queue = [Request(f"r{n}")]
        server.turn(200)
    assert caplog.text == ""
