"""What of a scheduler's life gets on the tape: a stand-in for the scheduler, and the real hooks."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4debug.findings import tape
from g4debug.findings.tape import Abort, Flush, How, Recording, Ring, Why
from g4debug.findings.tape_record import data, shortened
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder.page_digests import EVERY
from g4debug.tracers.flight_recorder.taping import MANY, POLICY, STATES, Taping

PAGE = 16


class TokenizedGenerateReqInput(SimpleNamespace):
    pass


class AbortReq(SimpleNamespace):
    pass


class FlushCacheReqInput(SimpleNamespace):
    pass


class LoadSomething(SimpleNamespace):
    pass


class SchedulePolicy:
    pass


class FINISH_LENGTH:
    pass


class Mode(SimpleNamespace):
    def __hash__(self) -> int:
        return hash(self.name)

    def is_extend(self) -> bool:
        return self.name == "EXTEND"


EXTEND, DECODE = Mode(name="EXTEND"), Mode(name="DECODE")


class Server:
    """A scheduler as far as the tape looks at it, driven round by round."""

    def __init__(self, **settings: Any) -> None:
        self.context = Context.alone("flight-recorder", Settings(debug=True, **settings))
        self.taping = Taping(self.context)
        self.allocator = SimpleNamespace(
            size=640, free_pages=torch.arange(1, 41), available_size=lambda: self.free,
            get_kvcache=lambda: self.pool,
        )  # fmt: skip
        self.pool: Any = None
        self.free = 640
        self.idle = True
        self.scheduler = SimpleNamespace(
            page_size=PAGE,
            forward_ct=0,
            new_token_ratio=0.7,
            schedule_policy="fcfs",
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=None,
            server_args=SimpleNamespace(speculative_algorithm="NEXTN"),
            is_fully_idle=lambda: self.idle,
        )
        self.taping.begin(self.scheduler)

    def round(self, *messages: Any) -> None:
        self.taping.round(self.scheduler, list(messages))

    def rest(self, rounds: int = 1) -> None:
        """Rounds in which there is nothing to do."""
        for _ in range(rounds):
            self.round()
            self.taping.idle(self.scheduler)

    def step(self, mode: Mode, *reqs: Any, accepted: tuple[int, ...] = ()) -> None:
        batch = SimpleNamespace(reqs=list(reqs), forward_mode=mode, extend_num_tokens=9)
        self.taping.step(self.scheduler, batch)
        assert self.taping.launched(batch, self.scheduler) is batch
        result = SimpleNamespace(accept_lens=torch.tensor(accepted) if accepted else None)
        self.taping.result(None, self.scheduler, batch, result)

    def read(self) -> Recording:
        made = self.taping.tape()
        assert made is not None
        return tape.read(data(made), made.page, made.firsts)


def asked(rid: str, tokens: list[int], longest: int = 9, **more: Any) -> Any:
    params = SimpleNamespace(max_new_tokens=longest, ignore_eos=True)
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=tokens, sampling_params=params, return_logprob=False,
        logprob_start_len=-1, **more,
    )  # fmt: skip


@pytest.mark.parametrize("overlaps", [False, True])
def test_hashes_are_made_while_the_device_works(overlaps: bool) -> None:
    """Behind a launch; but a scheduler that overlaps sends the tokens of a result out first."""
    server = Server()
    server.taping.overlaps = overlaps
    made = []
    make = server.taping.hashes.make
    server.taping.hashes.make = lambda: (made.append(at), make())  # type: ignore[method-assign]
    batch = SimpleNamespace(reqs=[], forward_mode=EXTEND, extend_num_tokens=9)
    result = SimpleNamespace(accept_lens=None)
    for at in ("launch", "result"):
        server.round(asked(at, [1, 2, 3]))
        if at == "launch":
            server.taping.step(server.scheduler, batch)
            server.taping.launched(batch, server.scheduler)
        else:
            server.taping.result(None, server.scheduler, batch, result)
    assert made == ["result" if overlaps else "launch"]


def ended(rid: str, output: list[int]) -> Any:
    return SimpleNamespace(
        rid=rid, output_ids=output, finished_reason=FINISH_LENGTH(), finished=lambda: True
    )


def abort(rid: str) -> Any:
    return AbortReq(rid=rid, abort_all=False)


def sampled(**params: Any) -> Any:
    """A request with these sampling parameters."""
    request = asked("a", [1])
    vars(request.sampling_params).update(params)
    return request


def test_requests_verifies_and_ends() -> None:
    server = Server()
    a, b = SimpleNamespace(rid="a"), SimpleNamespace(rid="b")
    server.round(asked("a", list(range(20))), asked("b", list(range(16))))
    server.step(EXTEND, a, b)
    server.round()
    server.step(DECODE, a, b, accepted=(3, 1))
    server.round()
    server.step(DECODE, a, b, accepted=(2, 4))
    server.taping.released(ended("b", [7, 8, 9, 10, 11]))
    server.round()
    server.step(DECODE, a, accepted=(1,))
    read = server.read()
    one, two = read.requests.values()
    assert (one.round, one.prompt, one.longest, one.how) == (1, 20, 9, How.RUNNING)
    assert (list(one.accepted), list(two.accepted)) == ([3, 2, 1], [1, 4])
    assert (two.output, two.how) == (5, How.LENGTH)
    first = tape.hash_bytes(PAGE, PAGE, 0, True)
    assert one.hashes[:first] == two.hashes[:first]  # they begin alike
    assert (read.steps, read.begins.why) == (4, Why.START)


def test_a_request_that_stays_out_of_the_prefix_cache_is_known_by_its_host() -> None:
    server = Server()
    server.round(asked("a", [1], bootstrap_host="2.2.2.2"), asked("b", [1], bootstrap_host="x"))
    options = [r.options & tape.UNCACHED for r in server.read().requests.values()]
    assert options == [tape.UNCACHED, 0]


def test_what_a_request_asks_for_beside_its_tokens_is_on_the_tape() -> None:
    server = Server()
    plain, logprobs = asked("a", [1] * 5), asked("b", [1] * 5)
    plain.sampling_params.ignore_eos = False
    logprobs.return_logprob, logprobs.logprob_start_len = True, 3
    health = asked("HEALTH_CHECK_7", [1], longest=1)
    server.round(plain, logprobs, health)
    found = [(r.options, r.logprobs_from) for r in server.read().requests.values()]
    both = tape.IGNORES_EOS | tape.LOGPROBS
    assert found == [(0, -1), (both, 3), (tape.IGNORES_EOS | tape.HEALTH, -1)]


def test_prompts_that_the_prefix_cache_keeps_apart_have_other_hashes() -> None:
    """SGLang shares no page between requests of different ``extra_key`` or ``cache_salt``."""
    server = Server()
    salts: list[dict[str, str | None]] = [
        {}, {"extra_key": "x"}, {"cache_salt": "x"}, {"extra_key": "y"},
        {"extra_key": "x", "cache_salt": "x"}, {"extra_key": None}, {"extra_key": "x"},
    ]  # fmt: skip
    server.round(*(asked(f"r{n}", [1] * 40, **salt) for n, salt in enumerate(salts)))
    first = tape.hash_bytes(PAGE, PAGE, 0, True)
    hashes = [r.hashes[:first] for r in server.read().requests.values()]
    assert len({*hashes}) == 5
    assert (hashes[5], hashes[6]) == (hashes[0], hashes[1])


def test_of_idle_rounds_in_a_row_two_count() -> None:
    server = Server()
    server.rest(50)
    server.round(asked("a", [1]))
    assert server.read().requests[1].round == 3


def test_a_request_that_ends_while_it_waits_is_forgotten() -> None:
    server = Server()
    server.round(asked("a", [1]), abort("a"))
    server.rest(2)
    assert not server.taping.live
    assert server.read().requests[1].how is How.ABORT


def test_an_abort_is_of_each_request_whose_id_begins_so() -> None:
    server = Server()
    server.round(*(asked(rid, [1]) for rid in ("0-1", "0-2", "0-12")))
    server.round(abort("0-1"))
    server.round(abort("7"))
    aborts = [x for x in server.read().given if isinstance(x, Abort)]
    assert [(x.round, x.whose) for x in aborts] == [(2, 1), (2, 3), (3, tape.UNKNOWN)]


def test_an_abort_of_all_requests_is_of_none_in_particular() -> None:
    server = Server()
    server.round(asked("a", [1]), AbortReq(rid="", abort_all=True))
    server.rest()
    server.round(AbortReq(rid="a", abort_all=True))
    aborts = [x for x in server.read().given if isinstance(x, Abort)]
    assert [(x.round, x.whose) for x in aborts] == [(1, -1), (3, -1)]


@pytest.mark.parametrize("tracker", [False, True], ids=["of the scheduler", "of a tracker"])
def test_what_a_scheduler_counts_by_itself_is_taken_from_where_the_tape_begins(
    tracker: bool,
) -> None:
    """How many forwards there were, and which share of their longest output requests may take."""
    server = Server()
    counts = SimpleNamespace(init=0.7, min=0.1, decay=0.01)
    if tracker:
        server.scheduler.new_token_ratio_tracker = counts
    for forwards, ratio in ((3, 0.25), (1000, 0.5)):
        server.scheduler.forward_ct = forwards
        counts.current = ratio
        if not tracker:
            server.scheduler.new_token_ratio = ratio
        server.taping._start(Why.FLUSH)
        server.taping.ring.forget()
        begins = server.read().begins
        assert (begins.forwards, begins.ratio) == (forwards, ratio)


def test_after_a_flush_the_tape_begins_anew_and_what_was_before_goes() -> None:
    server = Server()
    a = SimpleNamespace(rid="a")
    server.round(asked("a", [1] * 40))
    server.step(EXTEND, a)
    server.taping.released(ended("a", [2]))
    server.rest(2)
    server.round(FlushCacheReqInput(timeout_s=None))
    server.round(asked("b", [1] * 40))
    read = server.read()
    assert read.begins.why is Why.START
    assert [type(x) for x in read.given][1] is Flush
    assert server.taping.tape().chunks[1:]
    for _ in range(2 * EVERY):
        server.step(DECODE, SimpleNamespace(rid="b"), accepted=(1,))
    read = server.read()
    assert (read.begins.why, read.begins.steps, list(read.requests)) == (Why.FLUSH, 1, [2])


def test_a_count_of_sglang_that_decides_is_taken_from_where_the_tape_begins() -> None:
    server = Server()
    server.scheduler.policy = SimpleNamespace(_waiting_prefix_refresh_calls=300)
    server.round(FlushCacheReqInput(timeout_s=None))
    server.round(asked("b", [1] * 40))
    for _ in range(2 * EVERY):
        server.step(DECODE, SimpleNamespace(rid="b"), accepted=(1,))
    read = server.read()
    assert (read.begins.why, read.refreshes) == (Why.FLUSH, 300)


@pytest.mark.parametrize(
    ("policy", "page", "check", "tokens", "carried"),
    [
        ("fcfs", 64, 32, 32, True),
        ("lof", 64, 32, 32, True),
        ("dfs-weight", 64, 32, 32, True),
        ("lpm", 1, 32, 32, True),
        ("lpm", 32, 32, 32, True),
        ("lpm", 64, 32, 32, False),
        ("lpm", 64, 32, 128, True),
        ("lpm", 64, -1, 32, True),
        ("lpm", 64, None, None, False),
        ("random", 1, 32, 32, False),
    ],
)
def test_schedule_policies_that_decide_by_what_is_on_the_tape(
    policy: str,
    page: int,
    check: int | None,
    tokens: int | None,
    carried: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """check, tokens: as they are in SGLang's module, whatever the environment says by now."""
    here = sys.modules[SchedulePolicy.__module__]
    for name, value in zip(POLICY[1:], (check, tokens), strict=True):
        monkeypatch.setattr(here, name, value, raising=False)
    server = Server()
    server.scheduler.policy = SchedulePolicy()
    server.scheduler.page_size, server.scheduler.schedule_policy = page, policy
    server.taping.begin(server.scheduler)
    assert server.taping.tape().scheduler[POLICY[1]] == check
    assert any(policy in limit for limit in server.taping.limits) != carried


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
@pytest.mark.parametrize(
    ("pool", "kind"),
    [("MHATokenToKVPool", "MHA"), ("MLATokenToKVPool", "MLA"), ("HybridLinearKVPool", STATES)],
)
def test_the_kind_of_its_pool_is_on_it_and_states_of_linear_layers_limit_it(
    pool: str, kind: str, sglang: Any
) -> None:
    server = Server()
    cls = getattr(importlib.import_module("sglang.srt.mem_cache.memory_pool"), pool)
    server.pool = cls.__new__(cls)
    server.taping.begin(server.scheduler)
    assert server.taping.tape().scheduler["kv_pool"] == kind
    assert any("linear layers" in limit for limit in server.taping.limits) == (kind == STATES)


def test_several_draft_paths_limit_it() -> None:
    server = Server()
    assert not server.taping.limits
    server.scheduler.server_args.speculative_eagle_topk = 4
    server.taping.begin(server.scheduler)
    assert [*server.taping.limits] == ["several draft paths (speculative_eagle_topk)"]


def test_a_flush_of_a_busy_server_is_none() -> None:
    server = Server()
    server.idle = False
    server.round(FlushCacheReqInput(timeout_s=None))
    server.round()
    assert server.taping.tape().chunks == (0,)


@pytest.mark.parametrize(
    ("busy", "seconds", "limited"), [(True, 5.0, True), (True, None, False), (False, 5.0, False)]
)
def test_a_flush_that_waits_until_the_server_is_idle_limits_it(
    busy: bool, seconds: float | None, limited: bool
) -> None:
    """When it flushes is not on the tape. One of an idle server waits for nothing."""
    server = Server()
    server.idle = not busy
    server.round(FlushCacheReqInput(timeout_s=seconds))
    assert any("flush" in limit for limit in server.taping.limits) == limited


def test_the_checksum_and_the_digests_tell_states_apart() -> None:
    def run(change: str) -> Recording:
        server = Server()
        for n in range(3 * EVERY):
            if n == 70:
                if change == "order":
                    server.allocator.free_pages = torch.arange(40, 0, -1)
                server.free -= change == "free"
            server.step(DECODE, SimpleNamespace(rid="a"))
        return server.read()

    plain, order, free = run(""), run("order"), run("free")
    assert plain.checksums == order.checksums
    assert plain.pages[EVERY] == order.pages[EVERY]
    assert plain.pages[2 * EVERY] != order.pages[2 * EVERY]
    assert plain.checksums[:70] == free.checksums[:70]
    assert all(x != y for x, y in zip(plain.checksums[70:80], free.checksums[70:80], strict=True))


def test_a_replay_makes_the_digests_of_the_tape_that_it_is_given() -> None:
    def replayed(format: int) -> tuple[int, dict[int, int]]:
        server = Server()
        server.taping.go_on(server.read().begins, format)
        for _ in range(EVERY):
            server.step(DECODE, SimpleNamespace(rid="a"))
        made = server.taping.tape()
        assert made is not None
        return made.format, server.read().pages

    formats = [replayed(format) for format in (2, tape.FORMAT)]
    assert [format for format, _ in formats] == [2, tape.FORMAT]
    assert formats[0][1].keys() == formats[1][1].keys()
    assert formats[0][1][EVERY] != formats[1][1][EVERY]


@pytest.mark.parametrize("compared", [True, False])
def test_the_tape_of_a_replay_counts_steps_from_its_beginning(compared: bool) -> None:
    """As the findings of its dumps do. To compare, it has digests where the server's tape has."""
    server = Server()
    for _ in range(50):
        server.step(DECODE, SimpleNamespace(rid="a"))
    server.taping._start(Why.FLUSH)
    server.taping.ring.forget()
    for _ in range(EVERY):
        server.step(DECODE, SimpleNamespace(rid="a"))
    recorded = server.read()
    assert (recorded.begins.steps, [*recorded.pages]) == (50, [14])
    server = Server()
    server.taping.go_on(recorded.begins, tape.FORMAT, compared)
    for _ in range(EVERY):
        server.step(DECODE, SimpleNamespace(rid="a"))
    made, replayed = server.taping.tape(), server.read()
    assert (made.begins, made.first, made.steps) == ("flush", 0, EVERY)
    assert replayed.checksums == recorded.checksums
    assert [*replayed.pages] == ([14] if compared else [1, 2, 4, 8, 16, 32, 64])
    assert not compared or replayed.pages == recorded.pages


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (asked("a", [1], lora_id="x"), "LoRA"),
        (asked("a", [1], mm_inputs=object()), "images"),
        (asked("a", [1], input_embeds=[[0.0]]), "embeddings in place of tokens"),
        (asked("a", [1], session_params=object()), "sessions"),
        (asked("a", [1], session_id="s"), "sessions"),
        (asked("a", [1], bootstrap_room=7), "disaggregation"),
        (asked("a", [1], multi_item_delimiter_indices=[1]), "several items in a prompt"),
        (asked("a", [1], custom_logit_processor="x"), "logit processors"),
        (sampled(json_schema="{}"), "grammars"),
        (sampled(regex="a+"), "grammars"),
        (sampled(ebnf="root ::= 'a'"), "grammars"),
        (sampled(structural_tag="{}"), "grammars"),
        (sampled(beam_width=2), "beam search"),
        (asked("a", [1], priority=tape.MOST_PRIORITY + 1), "priorities beyond"),
        (asked("a", [1], positional_embed_overrides=torch.zeros(2, 3)), "embeddings at positions"),
        (LoadSomething(), "the message LoadSomething"),
    ],
)
def test_what_cannot_be_on_a_tape_is_said(message: Any, what: str) -> None:
    server = Server()
    server.round(asked("b", [1]))
    server.round(asked("c", [1], lora_id=None, session_id=False, bootstrap_room=0))
    server.round(sampled(regex=None, beam_width=1))
    assert server.taping.tape().limits == ()
    server.round(message)
    (limit,) = server.taping.tape().limits
    assert what in limit
    (status,) = (p for p in server.context.recorder.status.records() if p.name == "tape")
    assert what in status.state


def served(server: Server, *requests: Any) -> None:
    """They come, run for a step and end, and then the server has nothing to do."""
    server.round(*requests)
    for one in requests:
        server.step(EXTEND, SimpleNamespace(rid=one.rid))
        server.taping.released(ended(one.rid, [2]))
    server.rest(2)


@pytest.mark.parametrize("flush", [False, True])
def test_a_limit_ends_where_the_tape_begins_anew(
    flush: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is over in the tape, in the status and in the log. What was before is gone."""
    server = Server()
    server.round(asked("a", [1] * 40, lora_id="x"))
    server.step(EXTEND, SimpleNamespace(rid="a"))
    assert server.taping.tape().limits
    server.taping.released(ended("a", [2]))
    if flush:
        server.round(FlushCacheReqInput(timeout_s=None))
        server.round()
    else:
        server.rest(2)
    served(server, asked("b", [1] * 40))
    made, read = server.taping.tape(), server.read()
    assert (made.limits, made.ended) == ((), ("LoRA adapters",))
    assert (read.begins.why, list(read.requests)) == (Why.FLUSH if flush else Why.IDLE, [2])
    assert all(p.sound for p in server.context.recorder.status.records() if p.name == "tape")
    assert caplog.messages == [
        "g4debug: the tape is limited: it cannot carry this: LoRA adapters",
        "g4debug: the tape is not limited any more: it has begun anew",
    ]


def test_a_limit_that_comes_again_and_again_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    for n in range(5):
        served(server, asked(f"a{n}", [1], lora_id="x"))
    assert server.taping.tape().limits == ()
    server.round(asked("a", [1], lora_id="x"))
    assert server.taping.tape().limits == ("LoRA adapters",)
    assert len(caplog.messages) == 2


def test_a_limit_lasts_as_long_as_its_request_runs() -> None:
    server = Server()
    server.round(asked("a", [1], lora_id="x"))
    server.idle = False
    server.rest(5)
    server.round(FlushCacheReqInput(timeout_s=None))
    server.round()
    assert server.taping.tape().limits == ("LoRA adapters",)


@pytest.mark.parametrize("runs", [False, True])
def test_a_limit_goes_with_the_part_of_the_tape_that_caused_it(
    runs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """But it stays while a request that may be the cause still runs where the rest begins."""
    server = Server()
    server.idle = False
    server.taping.ring = Ring(2048)
    server.taping._start(Why.START)
    server.round(asked("a", [1], lora_id="x"), asked("b", [1]))
    server.step(EXTEND, SimpleNamespace(rid="a"))
    if not runs:
        server.taping.released(ended("a", [2]))
        server.taping.released(ended("b", [2]))
    else:
        server.scheduler.running_batch.reqs = [
            SimpleNamespace(rid=rid, output_ids=[]) for rid in "ab"
        ]
    for n in range(60):
        server.round(asked(f"c{n}", [1] * 400))
        server.step(EXTEND, SimpleNamespace(rid=f"c{n}"))
        server.taping.released(ended(f"c{n}", [2]))
        server.taping._every()
    made = server.taping.tape()
    assert made.begins == "busy"
    assert made.limits == (("LoRA adapters",) if runs else ())
    status = [p for p in server.context.recorder.status.records() if p.name == "tape"]
    assert [x.why for p in status for x in p.limits] == list(made.limits)
    last = "g4debug: the tape is not limited any more: the part of it that had this is gone"
    assert (caplog.messages[-1] == last) != runs
    shorter = shortened(made, made.size - made.chunks[1])
    assert shorter.limits == made.limits


def test_a_limit_that_comes_again_stays_in_a_shortened_dump() -> None:
    server = Server()
    server.idle = False
    server.taping.ring = Ring(4096)
    server.taping._start(Why.START)
    for n in range(4):
        server.round(asked(f"a{n}", [1] * 400, lora_id="x" if n in (0, 3) else None))
        server.step(EXTEND, SimpleNamespace(rid=f"a{n}"))
        server.taping.released(ended(f"a{n}", [2]))
        server.taping._start(Why.BUSY)
    made = server.taping.tape()
    assert (made.limits, made.limits_at) == (("LoRA adapters",), (3,))
    assert shortened(made, made.size - made.chunks[3]).limits == ("LoRA adapters",)
    assert shortened(made, made.size - made.chunks[4]).limits == ()


@pytest.mark.parametrize("running", [True, False], ids=["one runs", "one comes before it"])
def test_a_flush_that_is_refused_is_no_new_beginning(running: bool) -> None:
    """Without a prefix cache all pages are free a moment later, but their order is as it was."""
    server = Server()
    request, flush = asked("a", [1] * 40), FlushCacheReqInput(timeout_s=None)
    if running:
        server.round(request)
        server.idle = False
        server.round(flush)
    else:
        server.round(request, flush)
    server.step(EXTEND, SimpleNamespace(rid="a"))
    server.taping.released(ended("a", [2]))
    server.idle = True
    server.round()
    assert server.taping.tape().chunks == (0,)


def test_a_session_that_is_open_keeps_its_limit() -> None:
    """It may hold pages while the server has no request."""
    server = Server()
    server.scheduler.session_controller = SimpleNamespace(sessions={"s": object()})
    served(server, asked("a", [1] * 40, session_params=object()))
    server.rest(3)
    assert server.taping.tape().limits == ("sessions",)
    server.scheduler.session_controller.sessions.clear()
    server.round(type("CloseSessionReqInput", (SimpleNamespace,), {})())
    server.rest(3)
    assert server.taping.tape().limits == ()
    assert "sessions" in server.taping.tape().ended


def test_what_has_changed_the_server_lasts() -> None:
    """Weights that were changed are passed with a flush; another setting of the server is not."""
    server = Server()
    for message in ("UpdateWeightFromDiskReqInput", "SetInternalStateReq"):
        server.round(type(message, (SimpleNamespace,), {})())
    assert len(server.taping.tape().limits) == 2
    server.rest(2)
    limits = server.taping.tape().limits
    assert limits == ("the message SetInternalStateReq",)
    (status,) = (p for p in server.context.recorder.status.records() if p.name == "tape")
    assert [x.why for x in status.limits] == list(limits)
    chunks = server.taping.tape().chunks
    served(server, asked("b", [1]))
    assert server.taping.tape().chunks == chunks  # nothing is dropped in vain


def test_pages_of_one_token_are_on_the_tape() -> None:
    server = Server()
    server.scheduler.page_size = 1
    server.taping.begin(server.scheduler)
    server.round(asked("a", [1] * 70), asked("b", [1] * 69 + [2]))
    server.taping.released(ended("a", [3, 4]))
    assert not server.taping.limits
    one, two = server.read().requests.values()
    assert (len(one.hashes), len(two.hashes)) == (4 * 72, 4 * 70)
    assert one.hashes[: 4 * 69] == two.hashes[: 4 * 69]
    assert one.hashes[4 * 69 : 4 * 70] != two.hashes[4 * 69 :]


def test_after_a_failure_there_is_no_tape_and_the_recorder_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An accept length that is no byte. A tape with a gap would be replayed to wrong words."""
    server = Server()
    hooked = server.taping.unless_failed(server.taping.result)
    one = SimpleNamespace(rid="a")
    server.round(asked("a", list(range(20))))
    server.step(EXTEND, one)
    batch = SimpleNamespace(reqs=[one], forward_mode=DECODE)
    for accepted in (-1, 2):
        result = SimpleNamespace(accept_lens=torch.tensor([accepted]))
        assert hooked("returned", server.scheduler, batch, result) == "returned"
    assert server.taping.tape() is None
    assert server.taping.part.is_off
    assert caplog.text.count("the tape is off") == 1
    assert not server.context.status.is_off


def test_its_memory_is_bounded() -> None:
    server = Server(tape=1)
    for n in range(6000):
        rid = f"r{n}"
        server.round(asked(rid, [n] * 600))
        server.step(EXTEND, SimpleNamespace(rid=rid))
        server.taping.released(ended(rid, [1, 2]))
    made = server.taping.tape()
    assert made.size < 1 << 20
    assert made.begins == "busy"
    read = server.read()
    assert 500 < len(read.requests) < 6000
    assert read.requests[6000].output == 2


def test_requests_that_sglang_lets_go_of_without_a_word_are_forgotten() -> None:
    """A server that is never idle: one request runs, others wait, are aborted or refused."""
    server = Server(tape=1)
    runs = SimpleNamespace(rid="runs", output_ids=[1, 2, 3])
    server.scheduler.running_batch.reqs = [runs]
    server.idle = False
    server.round(asked("lora", [1], lora_id="x"), abort("lora"))
    server.round(asked("runs", [7] * 40))
    for n in range(3000):
        waits = SimpleNamespace(rid=f"r{n}", output_ids=[])
        server.scheduler.waiting_queue = [waits]
        server.round(asked(waits.rid, [n] * 2000))
        server.step(DECODE, runs, accepted=(1,))
        server.round(abort(waits.rid))
    live = server.taping.live
    assert len(live) < 4 * MANY
    assert max(len(one.hashed[1]) for one in live.values() if one.hashed) < 4 * PAGE
    made, read = server.taping.tape(), server.read()
    assert made.size < 5 << 18
    assert made.limits == ()  # its cause is gone, and so is the part of the tape that had it
    assert {"runs", "r2999"} <= live.keys()
    assert read.requests[3002].how is How.RUNNING
    assert {one.how for one in read.requests.values()} == {How.RUNNING, How.ABORT}
    server.taping.released(ended("runs", [1, 2, 3]))
    assert "runs" not in live


def test_a_request_on_its_way_between_two_lists_is_not_forgotten() -> None:
    """It is in none of them for a moment."""
    server = Server()
    server.idle = False
    server.round(asked("a", [1] * 40))
    server.taping._start(Why.BUSY)
    server.taping._start(Why.BUSY)  # in the same round
    assert "a" in server.taping.live
    server.scheduler.running_batch.reqs = [SimpleNamespace(rid="a", output_ids=[])]
    server.round(asked("b", [1]))
    server.taping._start(Why.BUSY)
    server.scheduler.running_batch.reqs = []
    server.round(asked("c", [1]))
    server.taping._start(Why.BUSY)
    assert "a" in server.taping.live


def test_its_memory_is_bounded_where_no_step_comes() -> None:
    """A server that hangs is asked on and on."""
    server = Server(tape=1)
    server.idle = False
    for n in range(9000):
        server.round(asked(f"r{n}", [n] * 600))
    assert sum(map(len, server.taping.ring.chunks())) < 5 << 18
    server.step(EXTEND)
    assert server.read().steps == 1


def test_a_request_that_ends_while_another_thread_asks_ends_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    server.round(asked("a", [1] * 40), asked("b", [1]))
    chunks = server.taping.ring.chunks

    def in_between() -> list[bytes]:
        server.taping.released(ended("a", [1, 2, 3]))
        return chunks()

    monkeypatch.setattr(server.taping.ring, "chunks", in_between)
    made = server.taping.tape()
    assert made is not None
    one, two = tape.read(data(made), made.page, made.firsts).requests.values()
    assert (one.how, one.output, two.how) == (How.LENGTH, 3, How.RUNNING)


def test_variables_that_decide_are_on_it_or_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETRACT_DECODE_STEPS", "7")
    monkeypatch.setenv("SGLANG_OTHER", "7")
    assert Server().taping.tape().variables == {"SGLANG_RETRACT_DECODE_STEPS": "7"}
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "60")
    server = Server()
    (limit,) = server.taping.tape().limits
    assert "SGLANG_REQ_WAITING_TIMEOUT" in limit
    server.rest(3)
    assert server.taping.tape().limits
    server.scheduler._poll_timeout_aborts = list
    server.taping.limits.clear()
    server.taping.begin(server.scheduler)
    assert not server.taping.tape().limits
