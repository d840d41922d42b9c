"""When the flight recorder says by itself that a server stands or a request starves, and when not.

The reasons are SGLang's figures: test_admission.py. Real servers: test_standing_engine.py.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
from turning import LIMIT, STEPS, Request, Server

from g4debug.replay import child
from g4debug.tracers.flight_recorder import reasons, work
from g4debug.tracers.flight_recorder.reasons import Reason
from g4debug.tracers.flight_recorder.standing import Standing
from g4debug.tracers.flight_recorder.work import Place


@pytest.fixture
def server(monkeypatch, tmp_path):
    return Server(monkeypatch, tmp_path / "dumps")


def test_a_parked_chunk_is_told_once_and_stops_nothing(server, caplog):
    server.has.chunked_req = Request("long", 704)
    server.turn(LIMIT - 2)
    assert server.told == []
    with caplog.at_level(logging.ERROR):
        server.turn(3 * LIMIT)
    assert server.told == ["hang: 1"]
    (found,) = server.findings()
    assert found.location.request == "long"
    assert "has begun no step for" in found.headline
    assert "(0 requests waiting, 1 begun)" in found.headline
    assert "request long is a prompt between two of its chunks for 2" in found.got
    assert "704 tokens computed" in found.got
    assert "G4DEBUG_HANG_SECONDS" in found.expected
    assert caplog.text.count("the scheduler hangs") == 1
    stands, waits = server.flight.standing.live()
    assert "it stands: no step for" in stands
    assert waits[0].startswith("request long waits 7")


@pytest.mark.parametrize(
    ("settings", "off"),
    [
        ({"fixes": "none"}, True),
        ({"switches": {"parked-chunk": False}}, True),
        ({"fixes": "none", "switches": {"parked-chunk": True}}, False),
        ({}, False),
    ],
)
def test_a_fix_that_is_off_is_named(monkeypatch, tmp_path, settings, off):
    reason = Reason("SWA pool", verdict="A deadlock.", fix="parked-chunk")
    monkeypatch.setattr(reasons, "of", lambda *_: reason)
    server = Server(monkeypatch, tmp_path / "dumps", **settings)
    server.has.chunked_req = Request("long", 704)
    server.turn(2 * LIMIT)
    (found,) = server.findings()
    assert ("G4DEBUG_FIX_PARKED_CHUNK=1 turns it on" in found.cause) is off


def test_of_tensor_parallel_ranks_the_first_one_tells(server, monkeypatch):
    """All others see the same, and doctor shows it of each."""
    leads = [False]
    monkeypatch.setattr(server.context.trap.others, "leads", lambda: leads[0])
    server.has.chunked_req = Request("long", 704)
    server.turn(3 * LIMIT)
    assert server.told == []
    stands, waits = server.flight.standing.live()
    assert "it stands: no step for" in stands
    assert waits[0].startswith("request long waits")
    server.has.chunked_req = None
    server.step()
    leads[0] = True
    server.has.chunked_req = Request("long", 704)
    server.turn(3 * LIMIT)
    assert server.told == ["hang: 1"]


def test_a_second_stand_still_is_told_again(server):
    request = server.has.chunked_req = Request("long", 704)
    server.turn(2 * LIMIT)
    server.step(0.1, request)
    assert server.flight.standing.live()[1] == []
    server.turn(2)
    assert server.flight.standing.live()[0] == ""
    server.turn(2 * LIMIT)
    server.has.chunked_req = None  # the client aborts
    server.turn(2)
    server.has.waiting_queue.append(Request("next"))
    server.turn(LIMIT - 2)
    assert server.told == ["hang: 2"]
    server.turn(LIMIT)
    assert server.told == ["hang: 3"]
    assert len(server.findings()) == 3


def test_a_server_that_stands_again_and_again_leaves_dumps_for_other_findings(server, caplog):
    request = server.has.chunked_req = Request("long", 704)
    for _ in range(12):
        server.turn(2 * LIMIT)
        server.step(0.1, request)
    assert server.told == ["hang: 12"]
    assert "of a finding that was told before" in caplog.text
    (found, *_), before = server.findings(), len(server.findings())
    assert before == 4
    server.context.trap.tell(dataclasses.replace(found, check="kv-allocator", kind="double-free"))
    assert len(server.findings()) == before + 1


def test_an_id_that_a_client_has_chosen_floods_and_steers_nothing(server, caplog):
    """The status of doctor has room for 1 MiB, and goes away if it is more."""
    evil = Request("\x1b[2Ja\nERROR forged" + "x" * (2 << 20))
    server.has.waiting_queue.append(evil)
    server.turn(2 * LIMIT)
    (line,) = server.flight.standing.live()[1]
    (found,) = server.findings()
    for text in (line, found.headline, found.got, found.cause, caplog.text):
        assert "\x1b" not in text
        assert "\nERROR forged" not in text
        assert len(text) < 5000
    assert found.location.request.startswith("\x1b[2Ja\n")  # as in the rest of the dump


@pytest.mark.parametrize("mode", ["raise", "contain", "log"])
def test_no_mode_stops_the_server(monkeypatch, tmp_path, mode):
    server = Server(monkeypatch, tmp_path / "dumps", mode)
    server.has.waiting_queue.append(Request("a"))
    server.turn(2 * LIMIT)
    assert server.told == ["hang: 1"]
    assert not server.context.trap.others.ending


def test_an_idle_server_and_a_request_that_has_just_come(server):
    server.turn(5 * LIMIT)
    server.has.waiting_queue.append(Request("a"))
    server.turn(LIMIT - 1)
    assert server.told == []


def test_requests_that_come_and_go_unserved_but_never_long(server):
    """Clients that give up: nobody has waited for long."""
    for n in range(20):
        server.has.waiting_queue[:] = [Request(f"r{n}")]
        server.turn(LIMIT / 4)
    assert server.told == []


def test_a_pause_of_any_length(server):
    request = Request("a", 50)
    server.has.running_batch.reqs.append(request)
    server.has.waiting_queue.append(Request("b"))
    server.step(0.1, request)
    server.has._engine_paused = True
    server.turn(10 * LIMIT)
    server.has._engine_paused = False
    server.turn(LIMIT - 2)
    assert server.told == []
    server.turn(LIMIT)
    assert server.told == ["hang: 1"]


@pytest.mark.parametrize("minutes", [5, 60])
def test_a_step_that_compiles_for_minutes_and_a_stopped_process(server, minutes):
    request = Request("a")
    server.has.waiting_queue.append(request)
    server.step(minutes * 60, request)
    server.turn(1)
    server.now += minutes * 60  # SIGSTOP, or weights that are loaded between two rounds
    server.turn(LIMIT - 5)
    assert server.told == []


def _received(*entries: tuple[str, bool], **more) -> SimpleNamespace:
    """SGLang's queue of requests that come from another server. True: that one is ready."""
    queue = [SimpleNamespace(req=Request(rid), waiting_for_input=ready) for rid, ready in entries]
    return SimpleNamespace(queue=queue, retracted_queue=[], **more)


def test_a_request_that_no_memory_is_found_for_before_its_transfer_is_told(server):
    server.has.disagg_decode_prealloc_queue = _received(("r", True))
    assert [w.place for w in work.of(server.has)] == [Place.ROOM]
    server.turn(LIMIT - 2)
    assert server.told == []
    server.turn(3 * LIMIT)
    assert server.told == ["hang: 1"]
    (found,) = server.findings()
    assert found.location.request == "r"
    assert "waits for memory of this server" in found.got


@pytest.mark.parametrize("what", ["handshake", "transfer", "storage"])
def test_memory_that_may_become_free_without_a_step_is_waited_for(server, what):
    """A transfer may be in host memory, of which the request's row tells nothing."""
    also = [("other", False)] if what == "handshake" else []
    server.has.disagg_decode_prealloc_queue = _received(("r", True), *also)
    if what == "transfer":
        entry = SimpleNamespace(req=Request("t"), waiting_for_input=True)
        server.has.disagg_decode_transfer_queue = SimpleNamespace(queue=[entry])
    server.has.enable_decode_hicache = what == "storage"
    server.turn(10 * LIMIT)
    assert server.told == []


def test_a_request_that_waits_for_memory_before_its_transfer_does_not_starve(server):
    """Those that were received before it begin later than it came to wait for memory."""
    server.has.disagg_decode_prealloc_queue = _received(("r", True))
    for n in range(3 * STEPS):
        if n % 10 == 0:
            server.has.running_batch.reqs = [Request(f"run-{n}")]
        server.step(0.3, *server.has.running_batch.reqs)
    assert server.told == []


def test_a_grammar_that_compiles_and_another_server_of_disaggregation(server):
    server.has.grammar_manager.grammar_queue.append(Request("g"))
    entry = SimpleNamespace(req=Request("p"))
    server.has.disagg_decode_prealloc_queue = SimpleNamespace(queue=[entry], retracted_queue=[])
    server.has.disaggregation_mode = SimpleNamespace(value="decode")
    server.turn(5 * LIMIT)
    assert server.told == []
    assert len(server.flight.standing.live()[1]) == 2
    assert list(work.outside(server.has)) == ["the other server (disaggregation)"]
    server.has.disagg_decode_prealloc_queue.retracted_queue.append(Request("r"))
    server.turn(2 * LIMIT)
    assert server.told == ["hang: 1"]
    assert server.findings()[0].location.request == "r"


def test_what_was_never_run_is_said(server):
    assert list(work.limits(server.has)) == []
    server.has.enable_hierarchical_cache = True
    ((what, why),) = work.limits(server.has)
    assert what == "hangs: none is called a deadlock"
    assert why.endswith("and this was never run so")
    server.has.enable_hicache_storage = True
    assert next(what for what, _ in work.limits(server.has)) == "hangs: not of every request"


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ({"enable_hisparse": True}, "it was never run so"),
        ({"dllm_config": object()}, "the queue of a diffusion model is not looked at"),
        ({"mm_receiver": object()}, "requests whose images another server encodes is not looked"),
        ({"server_args": SimpleNamespace(enable_pdmux=True)}, "split by layers (pdmux)"),
        ({"server_args": SimpleNamespace(enable_dp_attention=True)}, "it was never run so"),
    ],
)
def test_a_queue_that_is_not_looked_at_is_said(server, has, said):
    vars(server.has).update(has)
    what, why = next(work.limits(server.has))
    assert what.startswith("hangs: ")
    assert said in why


def test_a_step_that_our_hook_did_not_see(server):
    """SGLang's own count has grown, so it is our hook that is dead."""
    server.has.running_batch.reqs.append(Request("a", 9))
    for _ in range(10 * LIMIT):
        server.has.forward_ct += 1
        server.turn(1)
    assert server.told == []


def test_batches_of_nobody_are_no_steps(server):
    """A rank of DP attention runs them while others serve, and its own request stands."""
    server.has.waiting_queue.append(Request("a"))
    for _ in range(3 * LIMIT):
        server.empty_step(1)
    assert server.told == ["hang: 1"]
    (found,) = server.findings()
    assert found.location.request == "a"


def test_batches_of_nobody_on_a_rank_that_has_nothing_to_do(server):
    for _ in range(3 * STEPS):
        server.empty_step(1)
    request = Request("a")
    server.has.running_batch.reqs.append(request)
    for _ in range(LIMIT):
        server.empty_step(0.5)
        server.step(0.5, request)
    assert server.told == []


def test_batches_of_nobody_starve_nobody(server):
    """The steps that a chunk waits are steps of requests."""
    decodes, waits = Request("decodes", 60), Request("waits", 576)
    server.has.running_batch.reqs.append(decodes)
    server.has.chunked_req = waits
    server.turn(1)
    for _ in range(STEPS - 5):
        server.step(0.1, decodes)
        server.empty_step(0.1)
    assert server.told == []
    serve(server, decodes, steps=STEPS)
    assert server.told == ["starved: 1"]


def test_a_request_that_has_ended_is_no_work(server):
    request = Request("a", 9)
    request.finished_reason = "length"
    server.has.running_batch.reqs.append(request)
    server.turn(5 * LIMIT)
    assert server.told == []


def test_sigterm_to_a_server_that_said_so_leaves_no_second_dump(server):
    server.has.waiting_queue.append(Request("a"))
    server.turn(LIMIT + 2)
    server.flight.on_sigterm()
    assert server.told == ["hang: 1"]


def test_all_work_and_where_it_is():
    a, b, c, d, e = (Request(x) for x in "abcde")
    stage = SimpleNamespace(reqs=[b])
    scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[a, c]),
        running_mbs=[stage, SimpleNamespace(reqs=[a])],
        chunked_req=c,
        waiting_queue=[d],
        grammar_manager=SimpleNamespace(grammar_queue=[e]),
        disagg_prefill_inflight_queue=[Request("f")],
    )
    assert [(w.request.rid, w.place) for w in work.of(scheduler)] == [
        ("c", Place.CHUNK), ("a", Place.RUNS), ("b", Place.RUNS), ("d", Place.QUEUE),
        ("e", Place.GRAMMAR), ("f", Place.PEER),
    ]  # fmt: skip
    scheduler._engine_paused = True
    assert work.of(scheduler) == []


def test_what_disaggregation_and_hisparse_keep_apart():
    scheduler = SimpleNamespace(
        disagg_decode_prealloc_queue=SimpleNamespace(
            queue=[],
            retracted_queue=[],
            pending_reqs=[SimpleNamespace(req=Request("asks"))],
            held_rebootstrap_reqs=[Request("held")],
        ),
        hisparse_coordinator=SimpleNamespace(ack_staging_queue=[SimpleNamespace(req=Request("s"))]),
    )
    assert [(w.request.rid, w.place) for w in work.of(scheduler)] == [
        ("asks", Place.PEER), ("held", Place.HELD), ("s", Place.STAGING),
    ]  # fmt: skip


# -- starvation --------------------------------------------------------------------------------


def serve(server, *requests: Request, steps: int = STEPS) -> None:
    for _ in range(steps):
        server.step(0.3, *requests)


def test_a_long_queue_is_no_starvation(server):
    """First come, first served: it waits for thousands of steps, and nobody overtakes it."""
    queue = [Request(f"r{n}") for n in range(20)]
    server.has.waiting_queue += queue
    server.turn(1)
    for n in range(10):
        server.has.running_batch.reqs[:] = [server.has.waiting_queue.pop(0)]
        server.has.waiting_queue.append(Request(f"later{n}"))
        serve(server, *server.has.running_batch.reqs)
    assert server.told == []


@pytest.mark.parametrize("batch", ["last_batch", "mbs"])
def test_who_is_on_the_way_between_two_batches_overtakes_nobody(server, batch):
    """After its prefill a request is in SGLang's last batch only, for a round. A look there must
    not take it for one that has gone, and in the next round for one that has just come."""
    server.has.waiting_queue += [Request(f"r{n}") for n in range(20)]
    server.turn(1)
    for _ in range(5):
        served = server.has.waiting_queue.pop(0)
        served.kv_committed_len = 50
        between = SimpleNamespace(reqs=[served])
        setattr(server.has, batch, [between] if batch == "mbs" else between)
        server.has.running_batch.reqs[:] = []
        server.step(2)
        server.step(2)  # its look sees it nowhere else
        setattr(server.has, batch, None)
        server.has.running_batch.reqs[:] = [served]
        serve(server, served)
    assert server.told == []


def test_who_is_first_seen_on_its_way_came_before_those_behind_it(server):
    """They came together since the last look; SGLang has noted when each of them came."""
    first, second, third = (Request(name) for name in ("first", "second", "third"))
    for n, request in enumerate((first, second, third), 1):
        request.time_stats = SimpleNamespace(wait_queue_entry_time=float(n))
    server.has.waiting_queue += [second, third]
    server.has.last_batch = SimpleNamespace(reqs=[first])
    server.step(2)
    server.step(2)
    server.has.last_batch = None
    server.has.running_batch.reqs[:] = [first]
    serve(server, first, steps=2 * STEPS)
    assert server.told == []


def test_a_batch_that_is_on_its_way_is_no_work(server):
    """Of pipeline ranks SGLang keeps the last batch of each, on an idle server, too."""
    server.has.last_mbs = [SimpleNamespace(reqs=[Request("aborted")])]
    server.turn(3 * LIMIT)
    assert server.told == []


def test_a_request_that_others_overtake(server):
    starves = Request("unlike")
    server.has.waiting_queue.append(starves)
    server.turn(1)
    for n in range(4):
        newer = Request(f"newer{n}")
        server.has.waiting_queue.append(newer)
        server.turn(1)
        server.has.waiting_queue.remove(newer)
        server.has.running_batch.reqs[:] = [newer]
        serve(server, newer)
    assert server.told == ["starved: 1"]
    (found,) = server.findings()
    assert found.location.request == "unlike"
    assert "request unlike made no progress for 1" in found.headline
    assert "requests that came later are served before it" in found.cause
    serve(server, starves, steps=5)


@pytest.mark.parametrize("overtakes", [True, False])
@pytest.mark.parametrize("replayed", [False, True])
def test_at_low_traffic_so_many_steps_would_take_hours(server, monkeypatch, overtakes, replayed):
    """In a replay seconds say nothing of the server, which was faster, or slower."""
    monkeypatch.setattr(Standing, "long", Standing.long)  # it is put back
    if replayed:
        child.take_time()
    """A step in ten seconds: 5,000 of them are half a day."""
    waits, other = Request("unlike"), Request("other")
    for request in (waits, other) if overtakes else (other, waits):
        server.has.waiting_queue.append(request)
        server.turn(1)
    server.has.waiting_queue.remove(other)
    server.has.running_batch.reqs[:] = [other]
    for _ in range(57):
        server.step(0.3, other)
        server.turn(10)
    assert server.told == []
    for _ in range(3):
        server.step(0.3, other)
        server.turn(10)
    assert server.told == (["starved: 1"] if overtakes and not replayed else [])
    if server.told:
        (found,) = server.findings()
        assert found.location.request == "unlike"
        assert "or within 10 minutes where others overtake it" in found.expected


@pytest.mark.parametrize(("batch", "told"), [(0, []), (10, ["starved: 1"])])
@pytest.mark.parametrize("low_first", [False, True])
def test_a_job_of_low_priority_waits_by_the_policy(server, batch, told, low_first):
    """Those of a higher one are served first, for hours; of the same priority nobody waits so."""
    server.has.enable_priority_scheduling = True
    server.has.schedule_low_priority_values_first = low_first
    sign = -1 if low_first else 1
    job, newer = Request("batch-job"), [Request(f"newer{n}") for n in range(5)]
    for request in (job, *newer):
        request.priority = sign * 10
    job.priority = sign * batch
    server.has.waiting_queue.append(job)
    server.turn(1)
    for request in newer:
        server.has.waiting_queue.append(request)
        server.turn(1)
        server.has.waiting_queue.remove(request)
        server.has.running_batch.reqs[:] = [request]
        for _ in range(STEPS):
            server.step(2, request)
    assert server.told == told
    (line,) = (w for w in server.flight.standing.live()[1] if "batch-job" in w)
    assert ("as the server's policy wants" in line) is (told == [])


@pytest.mark.parametrize(("longest", "told"), [(64, []), (8, ["starved: 1"])])
@pytest.mark.parametrize("policy", ["lof", "lpm"])
def test_a_short_answer_waits_by_the_policy_lof_and_by_no_other(server, policy, longest, told):
    """Longer answers are served first, for hours; of the same length nobody waits so."""
    server.has.schedule_policy = policy
    short, newer = Request("short"), [Request(f"newer{n}") for n in range(5)]
    for request in (short, *newer):
        request.sampling_params = SimpleNamespace(max_new_tokens=longest)
    short.sampling_params = SimpleNamespace(max_new_tokens=8)
    server.has.waiting_queue.append(short)
    server.turn(1)
    for request in newer:
        server.has.waiting_queue.append(request)
        server.turn(1)
        server.has.waiting_queue.remove(request)
        server.has.running_batch.reqs[:] = [request]
        for _ in range(STEPS):
            server.step(2, request)
    assert server.told == (told if policy == "lof" else ["starved: 1"])
    (line,) = (w for w in server.flight.standing.live()[1] if "short" in w)
    by_policy = "only requests of longer answers have overtaken it, as the server's policy wants"
    assert (by_policy in line) is (server.told == [])


def test_a_queue_that_its_policy_sorts_hides_nobody_who_is_overtaken(server):
    """All came between two looks; the policy puts the first of them behind the others."""
    came = [Request("unlike"), *(Request(f"newer{n}") for n in range(4))]
    for n, request in enumerate(came):
        request.time_stats = SimpleNamespace(wait_queue_entry_time=1.0 + n)
    server.has.waiting_queue += came[1:] + came[:1]
    server.turn(1)
    for newer in came[1:]:
        server.has.waiting_queue.remove(newer)
        server.has.running_batch.reqs[:] = [newer]
        serve(server, newer)
    assert server.told == ["starved: 1"]
    (found,) = server.findings()
    assert found.location.request == "unlike"


def test_a_chunk_that_waits_while_another_request_decodes(server):
    decodes = Request("decodes", 60)
    server.has.running_batch.reqs.append(decodes)
    server.has.chunked_req = Request("parked", 576)
    server.turn(1)
    serve(server, decodes, steps=STEPS - 5)
    assert server.told == []
    serve(server, decodes, steps=3 * STEPS)
    assert server.told == ["starved: 1"]
    assert server.findings()[0].location.request == "parked"
    server.has.chunked_req.kv_committed_len += 64
    serve(server, decodes, steps=STEPS - 5)
    assert server.told == ["starved: 1"]


def test_a_long_prefill_that_decodes_wait_for(server):
    """Steps of a prompt in chunks: the decode stands for fewer of them than the limit."""
    decodes, long = Request("decodes", 60), Request("long", 64)
    server.has.running_batch.reqs.append(decodes)
    server.has.chunked_req = long
    server.turn(1)
    serve(server, long, steps=STEPS - 10)
    serve(server, decodes, steps=10)
    assert server.told == []


def test_progress_again_after_a_retraction_is_not_starvation(server):
    """A retracted request is computed anew, up to where it was, and then goes on."""
    again, other = Request("again", 90), Request("other", 5)
    server.has.running_batch.reqs += [again, other]
    server.turn(1)
    serve(server, again, other, steps=10)
    again.kv_committed_len = 0
    serve(server, other, steps=STEPS - 20)
    again.kv_committed_len = 96  # its prefill, in one step
    serve(server, again, other, steps=STEPS + 50)
    assert server.told == []


def test_a_prompt_that_is_computed_anew_in_chunks_goes_on(server):
    """Each of its steps is progress, although it has had more before."""
    again, other = Request("again", 1000), Request("other", 5)
    server.has.running_batch.reqs[:] = [again, other]
    server.turn(1)
    again.kv_committed_len = 0
    server.has.running_batch.reqs[:] = [other]
    server.has.waiting_queue[:] = [again]
    serve(server, other, steps=10)
    server.has.waiting_queue.clear()
    server.has.chunked_req = again
    for _ in range(3 * STEPS):
        server.step(0.3, again, other)
    assert server.told == []


def test_a_request_that_is_retracted_again_and_again_starves(server):
    """It is computed anew each time, and never gets further than it was."""
    again, other = Request("again", 90), Request("other", 5)
    server.has.running_batch.reqs[:] = [again, other]
    server.turn(1)
    for _ in range(10):
        again.kv_committed_len = 0
        serve(server, other, steps=STEPS // 4)
        again.kv_committed_len = 80
        serve(server, other, steps=STEPS // 4)
    assert server.told == ["starved: 1"]
    assert server.findings()[0].location.request == "again"


def test_the_next_request_that_starves_is_told_in_full_later(server, caplog):
    """The log and a dump name each of them, but not more often than in twice the time before."""
    for n in range(3):
        parked, decodes = Request(f"parked-{n}", 576), Request("decodes", 60)
        server.has.chunked_req, server.has.running_batch.reqs[:] = parked, [decodes]
        serve(server, decodes, steps=2 * STEPS)
    assert server.told == ["starved: 3"]
    assert [f.location.request for f in server.findings()] == ["parked-0", "parked-1", "parked-2"]
    assert all(f"request parked-{n} made no progress" in caplog.text for n in range(3))
    for n in range(3, 7):
        server.has.chunked_req = Request(f"parked-{n}", 576)
        serve(server, decodes, steps=STEPS + 70)
    assert server.told == ["starved: 4"]


@pytest.mark.parametrize("never", [True, False])
def test_the_first_of_the_queue_that_can_never_fit_is_told_while_others_run(
    server, monkeypatch, never
):
    """Nobody overtakes it: SGLang stops at it, and asks for none behind it."""
    asked = []

    def of(scheduler, item, items, steps):
        asked.append(item.request.rid)
        return Reason("SWA pool: needs 640, has 512", deadlock=never, never=never)

    monkeypatch.setattr(reasons, "of", of)
    decodes = Request("decodes", 60)
    server.has.running_batch.reqs.append(decodes)
    server.has.waiting_queue += [Request("too-long"), Request("behind")]
    server.turn(1)
    for _ in range(3 * LIMIT):
        server.step(1, decodes)
    assert server.told == (["starved: 1"] if never else [])
    assert asked == ["too-long"] * 2  # once in LIMIT; if it never fits, once, and for the finding
    if never:
        (found,) = server.findings()
        assert found.location.request == "too-long"
        assert found.expected == "a pool that has room for it once all others have ended"


@pytest.mark.parametrize(("busy", "later"), [(0.02, 10), (0.0, 1)])
def test_a_look_at_a_long_queue_is_made_less_often(server, busy, later):
    """Not if it took long because others had the machine."""
    server.has.waiting_queue += [Request(str(n)) for n in range(3)]
    real = server.flight.standing.waits.look

    def slow(*args):
        real(*args)
        server.now += 0.02
        server.busy += busy

    server.flight.standing.waits.look = slow
    server.turn(1, each=1)
    assert server.flight.standing._due - server.now == pytest.approx(later)


def overtake(server, number: int) -> None:
    """Somebody who has come later begins, and is served for many steps."""
    newer = Request(f"newer{number}")
    server.has.waiting_queue.append(newer)
    server.turn(1)
    server.has.waiting_queue.remove(newer)
    server.has.running_batch.reqs[:] = [newer]
    serve(server, newer)


@pytest.mark.parametrize("place", ["grammar", "peer"])
def test_who_comes_into_the_queue_late_waits_for_its_turn_there(server, place):
    """Its grammar took minutes, or the other server did. In the queue nobody overtakes it."""
    late = Request("late")
    server.has.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=[])
    outside = {
        "grammar": server.has.grammar_manager.grammar_queue,
        "peer": server.has.disagg_prefill_bootstrap_queue.queue,
    }[place]
    outside.append(late)
    server.turn(1)
    for n in range(3):
        overtake(server, n)
    outside.clear()
    server.has.waiting_queue += [Request("first"), late]
    serve(server, *server.has.running_batch.reqs, steps=STEPS - 10)
    assert server.told == []
    assert server.flight.standing.waits.all[id(late)].loop > server.flight.progress.loop - 40
    for n in range(3, 5):
        overtake(server, n)
    assert server.told == ["starved: 1"]


def test_a_retracted_request_waits_for_its_turn(server):
    """SGLang puts it behind all others, which come first then, and it begins anew."""
    retracted, queue = Request("retracted", 90), [Request(f"r{n}") for n in range(8)]
    server.has.running_batch.reqs[:] = [retracted]
    server.has.waiting_queue += queue
    server.turn(1)
    retracted.kv_committed_len = 0
    server.has.waiting_queue.append(retracted)
    for _ in queue:
        server.has.running_batch.reqs[:] = [server.has.waiting_queue.pop(0)]
        serve(server, *server.has.running_batch.reqs, steps=STEPS // 2)
    server.has.waiting_queue.clear()
    server.has.running_batch.reqs[:] = [retracted]
    retracted.kv_committed_len = 30  # the first chunk of what it had
    other = Request("other", 4)
    serve(server, other, steps=STEPS // 2)
    assert server.told == []
    serve(server, other)
    assert server.told == ["starved: 1"]


def test_a_retracted_request_that_is_overtaken_starves(server):
    retracted = Request("retracted", 90)
    server.has.running_batch.reqs[:] = [retracted]
    server.turn(1)
    retracted.kv_committed_len = 0
    server.has.waiting_queue.append(retracted)
    for n in range(4):
        overtake(server, n)
    assert server.told == ["starved: 1"]


@pytest.mark.parametrize(
    ("queue", "holds", "told"),
    [
        ("disagg_prefill_inflight_queue", True, []),
        ("disagg_decode_transfer_queue.queue", True, []),
        ("disagg_prefill_bootstrap_queue.queue", False, ["hang: 1"]),
    ],
)
def test_memory_that_a_transfer_holds_is_for_the_other_server_to_free(server, queue, holds, told):
    """A decode server that is slow lets its prefill server wait, and SGLang ends that by itself."""
    sent = Request("sent", 64 * holds)
    sent.req_pool_idx = 0 if holds else None
    name, _, inside = queue.partition(".")
    held = [sent]
    setattr(server.has, name, SimpleNamespace(**{inside: held}) if inside else held)
    server.has.waiting_queue.append(Request("next"))
    server.turn(2 * LIMIT)
    assert server.told == told
    held.clear()
    server.turn(2 * LIMIT)
    assert server.told == ["hang: 1"]


def test_what_doctor_shows_of_a_long_queue_is_read_less_often(server):
    """The status is told once in a second, in the scheduler's own loop."""
    server.has.waiting_queue += [Request(str(n)) for n in range(3)]
    server.turn(LIMIT + 5)
    look, looks = server.flight.standing.waits.look, []

    def slow(*args):
        look(*args)
        looks.append(server.now)
        server.busy += 0.02

    server.flight.standing.waits.look = slow
    server.flight.standing._due = server.now + 1000
    for _ in range(9):
        server.now += 1
        server.flight.progress.came_round()
        stands, told = server.flight.standing.live()
        assert "it stands: no step for" in stands
        assert told[0].startswith("request 0 waits")
    assert len(looks) == 1
    assert told[-1] == "this is as of 8 s ago"
    server.now += 2
    assert len(server.flight.standing.live()[1]) == 3
    assert len(looks) == 2
