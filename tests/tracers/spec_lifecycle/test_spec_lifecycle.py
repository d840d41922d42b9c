"""spec-lifecycle on speculative decoding v2: SGLang's own classes, step by step, and its faults."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from g4debug import discovery, speculation
from g4debug.faults.base import install_all
from g4debug.faults.grammar import GrammarError, parse
from g4debug.findings.steps import Recorder
from g4debug.hooking import req_kv, targets
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle import canary, draft_kv_pool, tracer
from g4debug.tracers.spec_lifecycle.copies import Copies
from g4debug.tracers.spec_lifecycle.rehearsal import TOKENS, Classes, Rehearsal
from g4debug.tracers.spec_lifecycle.tracer import (
    RUN_ON_GPU,
    SpecLifecycle,
    follows_values,
    install,
)
from g4debug.trapping.trap import Trap, TrapError

pytestmark = pytest.mark.skipif(
    targets.path("worker.seed_step") is not None or targets.sglang_version() is None,
    reason="speculative decoding v2 only: SGLang 0.5.14 and later",
)
CPU = torch.device("cpu")
EVENTS = ("forward", "draft", "verify", "draft_extend")
SITES = (
    "draft.tree",
    "verify.kernel",
    "verify.sample",
    "runner.sample",
    "runner.sampler",
    "worker.target_forward",
    "scheduler.process_result",
    "batch.prepare_for_extend",
    "cache.release",
    "forward_batch.init_new",
    "future.inputs",
    "future.resolve_lens",
    "future.gather",
    "worker.forward",
    "worker.draft",
    "worker.draft_forward",
    "worker.verify",
    "future.publish",
    "worker.draft_extend",
    "future.stash",
    "scheduler.run_batch",
    "scheduler.stream_output",
    "batch.prepare_for_decode",
    "batch.merge",
    "batch.filter",
    "scheduler.init",
    "worker.init",
    "draft.bind_embedding",
)


class Server:
    """The tracer, and faults if any, around a rehearsal with requests a, b and c."""

    def __init__(self, plan: str = "", overlap: bool = True) -> None:
        self.hooks = Hooks()
        self.faults = install_all(parse(plan), self.hooks) if plan else ()
        settings = Settings(mode="raise", max_dumps=0)
        self.recorder = Recorder(4)
        trap = Trap(settings, lambda *a: None)
        context = Context("spec-lifecycle", self.hooks, settings, self.recorder, trap)
        self.tracer = SpecLifecycle(context)
        self.tracer.install()
        self.rehearsal = Rehearsal(self.site, Classes(), CPU)
        self.batch = self.rehearsal.batch(
            *(
                self.rehearsal.request(rid, row, n)
                for rid, row, n in zip("abc", (3, 1, 2), (30, 70, 64), strict=True)
            )
        )
        self.recorder.count()
        self.rehearsal.prefill(self.batch)
        self.waiting = []

    def site(self, name, function):
        if name not in self.hooks.sites:
            return function
        # One chain for each function, as SGLang has it.
        return functools.partial(self.hooks._compose(name), function)

    def step(self, accepted=(1, 4, 2), finished=()):
        """Launch a step, then process the result of the step before, as the overlap loop does."""
        self.recorder.count()
        self.waiting.append(self.rehearsal.run(self.batch, accepted))
        while len(self.waiting) > 1:
            self.rehearsal.process(*self.waiting.pop(0), finished=finished)

    def steps(self, count):
        for _ in range(count):
            self.step()

    def drain(self):
        while self.waiting:
            self.rehearsal.process(*self.waiting.pop(0))

    def join(self, rid, row, tokens):
        """A new request is prefilled and merged."""
        batch = self.rehearsal.batch(self.rehearsal.request(rid, row, tokens))
        self.recorder.count()
        self.rehearsal.prefill(batch)
        self.merge(batch)

    def merge(self, other):
        self.site("batch.merge", type(self.batch).merge_batch)(self.batch, other)

    def filter(self, **kwargs):
        self.site("batch.filter", type(self.batch).filter_batch)(self.batch, **kwargs)

    def findings(self):
        return self.tracer.log.history.transitions()


def test_sound_steps_are_silent_one_ahead(sglang):
    server = Server()
    for accepted in ((1, 1, 1), (TOKENS, 1, 2), (3, TOKENS, 1)):
        server.step(accepted)
    server.drain()
    assert [req_kv.committed(r) for r in server.batch.reqs] == [38, 76, 68]
    names = [t.site for t in server.findings()]
    assert names[-6:] == ["draft", "verify", "draft-extend", "end", "result", "result"]
    assert all(t.ok for t in server.findings())


def test_merges_filters_and_a_finish_inside_a_verify_are_silent(sglang):
    server = Server()
    server.step()
    server.join("d", 5, 40)
    server.step((1, 2, 3, 4))
    b = server.batch.reqs[1]
    # b ends in the step before, which is processed while it is already in the next one.
    server.step((2, 2, 2, 2), finished=[b])
    server.filter()
    assert [r.rid for r in server.batch.reqs] == ["a", "c", "d"]
    server.step((1, 1, 1))
    server.join("e", 1, 9)  # b's row
    server.step((1, 1, 1, 4))
    server.drain()
    server.filter(keep_indices=[])
    assert all(t.ok for t in server.findings())


def test_requests_that_end_after_their_batch_was_formed_are_silent(sglang):
    """A grammar lets SGLang 0.5.15 process the last result between the two."""
    server = Server()
    server.step()
    _, b, c = server.batch.reqs
    server.rehearsal.process(*server.waiting.pop(), finished=[b, c])
    server.step((1, 2, 3))  # with b and c, which have no rows any more
    server.drain()
    server.filter()
    server.join("d", 1, 20)  # b's row
    server.step((4, 2))
    server.step((1, 2))
    server.drain()
    assert [r.rid for r in server.batch.reqs] == ["a", "d"]
    assert all(t.ok for t in server.findings())


def test_a_retracted_request_comes_back_in_another_row(sglang):
    server = Server()
    server.step()
    server.step()
    c = server.batch.reqs[2]
    server.filter(keep_indices=[0, 1])
    c.is_retracted, c.retraction_count = True, 1
    server.step((1, 1))
    server.step((1, 1))
    c.is_retracted = False
    for name, value in (("req_pool_idx", 7), ("kv_committed_len", 66), ("kv_allocated_len", 66)):
        setattr(req_kv.holder(c, name), name, value)
    del c.output_ids[2:]
    batch = server.rehearsal.batch(c)
    server.recorder.count()
    server.rehearsal.prefill(batch)
    server.merge(batch)
    server.step((1, 4, 4))
    server.drain()
    assert all(t.ok for t in server.findings())


def test_an_idle_batch_of_dp_attention_is_left_alone(sglang):
    server = Server()
    idle = server.rehearsal.batch()
    idle.forward_mode = server.rehearsal.classes.Mode.IDLE
    t = server.tracer
    t.before_resolve_lens(None, idle)
    t.before_gather(None, idle)
    t.before_forward(server.rehearsal.worker, idle, on_publish=lambda lens: None)
    t.before_draft(None, idle)
    t.before_verify(None, idle)
    t.before_publish(None, torch.empty(0), torch.empty(0))
    t.after_forward(None, None, idle)
    t.after_run_batch(None, None, idle)
    server.step()


def test_a_grammar_that_ends_gives_fewer_tokens(sglang):
    server = Server()
    server.step()
    a, processor = server.batch.reqs[0], server.rehearsal.classes.Processor

    def cut(self, result, batch):
        """What SGLang's own does; of request a it keeps one token."""
        kept = []
        for i, r in enumerate(batch.reqs):
            n = 1 if r is a else int(result.accept_lens[i])
            kept.append([int(t) for t in result.next_token_ids[i * TOKENS : i * TOKENS + n]])
            req_kv.holder(r, "kv_committed_len").kv_committed_len += n
            r.spec_verify_ct += 1
        return kept

    server.step((4, 4, 2))
    a.grammar = SimpleNamespace()
    server.rehearsal.classes.Processor = SimpleNamespace(_resolve_spec_v2_tokens=cut)
    server.step((1, 1, 1), finished=[a])  # processes the step before, in which a's grammar ended
    server.rehearsal.classes.Processor = processor
    server.step((1, 1, 1))
    assert len(a.output_ids) == 3
    assert all(t.ok for t in server.findings())


def test_without_a_grammar_fewer_tokens_are_found(sglang):
    server = Server()
    original = server.rehearsal.classes.Processor._resolve_spec_v2_tokens

    def short(self, result, batch):
        kept = original(self, result, batch)
        return [kept[0], kept[1][:-1], kept[2]]

    server.step()
    server.rehearsal.classes.Processor = SimpleNamespace(_resolve_spec_v2_tokens=short)
    with pytest.raises(TrapError, match=r"accepted tokens = 3 \(-1\) for request b"):
        server.step()


@pytest.mark.parametrize("places", [None, 3])
def test_a_draft_without_places_or_with_one_for_each_token_is_silent(sglang, places):
    server = Server()
    server.rehearsal.places = None if places is None else torch.zeros(places)
    server.steps(2)
    assert all(t.ok for t in server.findings())


def test_a_draft_with_the_prefills_places_is_found_before_its_forward(sglang):
    """SGLang 0.5.14 without CUDA graphs (#29616), which dies of it one line later."""
    server = Server()
    server.step()
    server.rehearsal.places = torch.zeros(164)
    with pytest.raises(TrapError) as error:
        server.step()
    finding = error.value.finding
    assert (finding.kind, finding.site) == ("draft-places", "worker.draft_forward")
    assert "the draft's forward has 164 places in out_cache_loc, expected None" in finding.headline
    assert finding.location.runner == "draft"
    natural = targets.matches("<0.5.15")
    assert ("frozen_kv_mtp_worker_v2.py" in finding.cause) == natural
    assert ("#29616" in finding.reference) == natural


DRILLS = [
    (name, drill)
    for name in discovery.names("fault")
    if discovery.load("fault", name).caught_by == ("spec-lifecycle",)
    # One strikes at start, see test_draft_embedding.py, the others where something is sampled and
    # in a prefill.
    and name not in ("draft-embedding-shard", "sampled-token", "prefill-input")
    for drill in (*discovery.load("fault", name).drills,)
] + [("seq-len-off-by-one", "1*device")]
KINDS = {
    "accept-length=1*zero": ("accept-length", "result.resolve"),
    "accept-length=1*too-long": ("accept-length", "result.resolve"),
    "allocated-len=1*on": ("allocated-len", "batch.prepare_for_decode"),
    "bonus-token=1*on": ("bonus-token", "result.resolve"),
    "double-bookkeeping=1*on": ("bookkeeping", "result.resolve"),
    "double-bookkeeping=1*kv": ("bookkeeping", "result.resolve"),
    "double-bookkeeping=1*output": ("bookkeeping", "result.resolve"),
    "double-bookkeeping=1*verify-ct": ("bookkeeping", "result.resolve"),
    "future-length=1*plus": ("seq-len", "future.resolve_lens"),
    "future-length=1*minus": ("seq-len", "future.resolve_lens"),
    "future-row=1*publish": ("future-row", "future.publish"),
    "future-row=1*stash": ("future-row", "future.stash"),
    "future-row=1*read": ("future-row", "future.resolve_lens"),
    "future-row=1*lost": ("future-row", "scheduler.run_batch"),
    "publish-order=1*early": ("publish-order", "future.publish"),
    "publish-order=1*twice": ("publish-order", "future.publish"),
    "publish-order=1*never": ("publish-order", "worker.forward"),
    "seq-len-off-by-one=1*plus": ("seq-len", "result.resolve"),
    "seq-len-off-by-one=1*minus": ("seq-len", "result.resolve"),
    "seq-len-off-by-one=1*device": ("seq-len", "result.resolve"),
    "spec-info-dropped=1*on": ("spec-info-dropped", "scheduler.run_batch"),
    "spec-info-wrong-type=1*on": ("wrong-type", "worker.draft_extend"),
    "stale-hidden-state=1*on": ("stale-hidden-state", "worker.draft_extend"),
    "stale-hidden-state=1*draft": ("stale-hidden-state", "worker.draft"),
    "verify-input=1*bonus": ("verify-input", "result.resolve"),
    "verify-input=1*draft": ("verify-input", "result.resolve"),
    "verify-input=1*positions": ("verify-input", "result.resolve"),
    "verify-input=1*rows": ("verify-input", "result.resolve"),
    "verify-result=1*length": ("verify-result", "result.resolve"),
    "verify-result=1*token": ("verify-result", "result.resolve"),
    "verify-result=1*rows": ("verify-result", "result.resolve"),
    "verify-input-left=1*on": ("verify-input-left", "scheduler.run_batch"),
}


@pytest.mark.parametrize(("name", "drill"), DRILLS)
def test_each_fault_is_caught_in_its_own_step(sglang, name, drill):
    if discovery.load("fault", name).absent:
        pytest.skip(discovery.load("fault", name).absent)
    server = Server(f"seed=1;{name}={drill}")
    (injection,) = server.faults
    with pytest.raises(TrapError) as error:
        server.steps(4)
    assert len(injection.schedule) == 1
    finding = error.value.finding
    assert (finding.kind, finding.site) == KINDS[f"{name}={drill}"]
    # The clock of the faults counts as the recorder does. A result is processed one step later.
    fired = int(injection.schedule[0].rpartition("[step ")[2].partition(":")[0])
    later = finding.site == "result.resolve" and name == "double-bookkeeping"
    assert finding.location.step == fired - later
    assert finding.cause
    assert finding.next_command in ("g4debug doctor", "<your launch command> --disable-cuda-graph")


def test_a_fault_that_this_release_cannot_have_is_refused_at_start(sglang):
    with pytest.raises(GrammarError, match="no worker that task finished is for"):
        Server("verify-input-left=1*finished")


def spoil_values(server, change):
    """Launch a step, change what the host will find, and process the result."""
    server.recorder.count()
    launched = server.rehearsal.run(server.batch, (1, 4, 2))
    change(server)
    server.rehearsal.process(*launched)


def counts(name, by):
    def change(server):
        request = server.batch.reqs[1]
        if name == "output_ids":
            request.output_ids.append(request.output_ids[-1])
        else:
            owner = req_kv.holder(request, name)
            setattr(owner, name, getattr(owner, name) + by)

    return change


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (counts("spec_verify_ct", 1), "bookkeeping"),
        (counts("output_ids", 1), "bookkeeping"),
        (counts("kv_committed_len", 1), "bookkeeping"),
        (counts("kv_committed_len", -2), "bookkeeping"),
    ],
)
def test_what_changes_between_two_results_is_found(sglang, change, kind):
    server = Server()
    spoil_values(server, lambda s: None)
    with pytest.raises(TrapError) as error:
        spoil_values(server, change)
    finding = error.value.finding
    assert (finding.kind, finding.location.request, finding.location.row) == (kind, "b", 1)


def test_a_token_that_is_put_out_twice_does_not_leave(sglang):
    server = Server()
    server.recorder.count()
    batch, result = server.rehearsal.run(server.batch, (1, 4, 2))
    kept = server.site(
        "result.resolve", server.rehearsal.classes.Processor._resolve_spec_v2_tokens
    )(server.rehearsal.processor, result, batch)
    for request, tokens in zip(batch.reqs, kept, strict=True):
        request.output_ids.extend(tokens)
    batch.reqs[2].output_ids.extend(kept[2])
    with pytest.raises(TrapError, match=r"output_ids = 5 \(\+2\) for request c"):
        server.site("scheduler.stream_output", lambda *a: None)(None, batch.reqs, False)


def test_a_row_of_two_live_requests(sglang):
    server = Server()
    server.step()
    with pytest.raises(TrapError, match="row 2 of the FutureMap written for two requests"):
        server.join("d", 2, 40)


def test_hidden_states_that_are_written_over_in_the_future_map(sglang):
    server = Server()
    server.step()
    server.rehearsal.future_map.hidden_states_buf[2] = 0
    with pytest.raises(TrapError, match="written to since then") as error:
        server.step()
    assert error.value.finding.site == "future.gather"


@pytest.mark.parametrize("side", ["batch", "other"])
def test_a_merge_of_a_batch_without_draft_input(sglang, side):
    server = Server()
    server.step()
    other = server.rehearsal.batch(server.rehearsal.request("d", 5, 40))
    server.rehearsal.prefill(other)
    (server.batch if side == "batch" else other).spec_info = None
    with pytest.raises(TrapError) as error:
        server.merge(other)
    assert (error.value.finding.kind, error.value.finding.site) == (
        "spec-info-dropped",
        "batch.merge",
    )


def test_a_filter_that_leaves_rows(sglang):
    server = Server()
    server.step()
    server.batch.spec_info.filter_batch = lambda **kwargs: None
    server.batch.reqs[0].is_retracted = True
    with pytest.raises(TrapError, match="future_indices has 3 rows, should have 2 rows"):
        server.filter(keep_indices=[1, 2])


def test_what_a_server_does_that_was_not_run_is_said_and_not_judged(sglang, caplog):
    server = Server()
    algorithm = server.rehearsal.classes.algorithm
    arguments = SimpleNamespace(disaggregation_mode="decode", pp_size=2, enable_mixed_chunk=True,
                                enable_dp_attention=True)  # fmt: skip
    scheduler = SimpleNamespace(spec_algorithm=algorithm, server_args=arguments)
    server.tracer.after_scheduler_init(None, scheduler)
    assert "disaggregated" in caplog.text
    assert "pipeline parallelism" in caplog.text
    assert "mixed-chunk" in caplog.text
    assert "DP attention" in caplog.text
    server.step()
    spoil_values(server, counts("kv_committed_len", 1))


def scheduler_of(server, algorithm, **arguments):
    kind = type(server.rehearsal.classes.algorithm)
    return SimpleNamespace(
        spec_algorithm=kind.from_string(algorithm),
        server_args=SimpleNamespace(**arguments),
        is_generation=True,
    )


def test_without_a_draft_the_sampled_tokens_are_followed(sglang, caplog):
    server = Server()
    server.tracer.after_scheduler_init(None, scheduler_of(server, None))
    told = server.tracer.context.status.record()
    assert told.sound
    assert told.nothing == "no draft, because this server runs none"
    assert server.tracer.sampled.judging


@pytest.mark.parametrize("argument", ["enable_hisparse", "dllm_algorithm", "enable_mixed_chunk"])
def test_they_are_not_followed_where_that_was_not_run(sglang, caplog, argument):
    server = Server()
    server.tracer.after_scheduler_init(None, scheduler_of(server, None, **{argument: True}))
    assert "sampled tokens are not followed to the output" in caplog.text
    assert not server.tracer.sampled.judging


def test_servers_with_another_draft_are_left_alone(sglang, caplog):
    server = Server()
    known = {adapter.name for adapter in speculation.adapters()}
    other = next(name for name in ("EAGLE", "DFLASH") if name not in known)
    server.tracer.after_scheduler_init(None, scheduler_of(server, other))
    assert "which g4debug does not know, so there is nothing to check" in caplog.text
    assert not server.tracer.sampled.judging


def test_a_worker_that_was_never_run_here_is_not_judged_at_all(sglang, caplog, monkeypatch):
    server = Server()
    monkeypatch.setattr(speculation.Adapter, "is_judged", lambda *a: False)
    server.tracer.after_scheduler_init(None, scheduler_of(server, "FROZEN_KV_MTP"))
    assert "FROZEN_KV_MTP was never run with this tracer on the CPU engine" in caplog.text
    spoil_values(server, counts("kv_committed_len", 1))


def test_nothing_is_kept_alive(sglang):
    server = Server()
    for _ in range(20):
        server.step()
    server.drain()
    _, result = server.rehearsal.run(server.batch, (1, 1, 1))
    kept = [weakref.ref(result), weakref.ref(result.logits_output.hidden_states)]
    del result
    gc.collect()
    assert [k() for k in kept] == [None, None]


def test_a_release_with_v2_is_followed_by_its_sites(sglang):
    hooks, settings = Hooks(), Settings(max_dumps=0)
    install(Context("t", hooks, settings, Recorder(1), Trap(settings, lambda *a: None)))
    here = {site for site in (*draft_kv_pool.SITES, "result.resolve") if targets.path(site)}
    others = {site for what in EVENTS for site in speculation.sites(what)}
    assert set(hooks.sites) == {*SITES, *here, *others}


def test_the_canary_bites_with_sglangs_own_classes(sglang, tmp_path: Path):
    assert canary.fire(tmp_path, CPU).endswith("of a step of speculative decoding v2")


# --- on a GPU, where the values are followed only if it is asked for -----------------------------


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        ({}, False),
        ({"cpu": True}, True),
        ({"mode": "contain"}, False),
        ({"mode": "log"}, True),
        ({"not_run_on_this_release": True}, True),
    ],
)
def test_on_a_gpu_values_are_followed_where_a_finding_stops_nothing(monkeypatch, changes, follows):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert follows_values(Settings(**{"mode": "raise", **changes})) is follows


def test_there_only_what_was_run_there_is_read_and_sound_steps_are_silent(sglang, monkeypatch):
    read, start = set(), Copies.start_all

    def start_all(copies, tensors):
        read.update(tensors)
        start(copies, tensors)

    monkeypatch.setattr(Copies, "start_all", start_all)
    monkeypatch.setattr(tracer, "follows_values", lambda settings: False)
    server = Server()
    for accepted in ((1, 1, 1), (TOKENS, 1, 2), (3, TOKENS, 1)):
        server.step(accepted)
    server.drain()
    assert all(t.ok for t in server.findings())
    assert read == {reading.key for reading in RUN_ON_GPU}


@pytest.mark.parametrize(
    ("algorithm", "off"),
    [
        (None, "this server does not speculate; on a GPU the rest "),
        ("DFLASH", "DFLASH is run here by NoneType, which g4debug does not know, so"),
    ],
)
def test_there_what_is_not_followed_is_not_nothing(sglang, monkeypatch, algorithm, off):
    """Of a server without a draft a mode that only reports follows the sampled tokens."""
    monkeypatch.setattr(tracer, "follows_values", lambda settings: False)
    server = Server()
    server.tracer.after_scheduler_init(None, scheduler_of(server, algorithm))
    told = server.tracer.context.status.record()
    assert not told.sound
    assert told.off.startswith(off)
    assert told.declined is (algorithm is None)  # a worker that is not known is another matter
    assert not server.tracer.sampled.judging


@pytest.mark.parametrize(("arguments", "sound"), [({}, True), ({"enable_pdmux": True}, False)])
def test_there_the_limits_of_a_draft_are_documented(sglang, monkeypatch, arguments, sound):
    monkeypatch.setattr(tracer, "follows_values", lambda settings: False)
    server = Server()
    server.tracer.after_scheduler_init(None, scheduler_of(server, "FROZEN_KV_MTP", **arguments))
    told = server.tracer.context.status.record()
    assert len(told.limits) >= 3
    assert (told.sound, told.off) == (sound, "")


def test_there_the_lengths_are_checked_as_before(sglang, monkeypatch):
    monkeypatch.setattr(tracer, "follows_values", lambda settings: False)
    server = Server("seq-len-off-by-one=1*device@at=2")
    with pytest.raises(TrapError, match=r"seq_lens on the device = 32 \(\+1\)"):
        server.steps(4)
