"""The spec-lifecycle tracer on SGLang's own batches, requests and spec_info types."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from real_spec import STEPS, TOKENS, batch, draft_input, extend_input, request, verify_input

from g4debug.dumps import reading
from g4debug.findings.steps import Recorder
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle import canary, draft_kv_pool
from g4debug.tracers.spec_lifecycle.before_0_5_14.tracer import SpecLifecycleV1
from g4debug.tracers.spec_lifecycle.hidden_states import Custody
from g4debug.tracers.spec_lifecycle.log import HISTORY, History
from g4debug.tracers.spec_lifecycle.tracer import install
from g4debug.trapping.trap import Trap, TrapError

pytestmark = pytest.mark.skipif(
    targets.path("worker.seed_step") is None,
    reason="the v1 worker only: SGLang before 0.5.14; test_spec_lifecycle.py has the other",
)
SITES = (
    "worker.target_extend",
    "worker.target_forward",
    "worker.select_extended",
    "worker.draft",
    "worker.verify",
    "worker.extend_after_decode",
    "worker.select_verified",
    "worker.seed_step",
    "worker.forward",
    "batch.merge",
    "batch.filter",
    "scheduler.init",
    "scheduler.stream_output",
    "worker.init",
    "draft.bind_embedding",
)
WORKER = SimpleNamespace(topk=1, speculative_num_steps=STEPS)
ARMED = {
    "G4DEBUG_TRACE": "spec-lifecycle",
    "G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0",
    "G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0",
}


@pytest.fixture
def tracer(sglang):
    settings = Settings(mode="raise", max_dumps=0)
    recorder = Recorder(4)
    context = Context(
        "spec-lifecycle", Hooks(), settings, recorder, Trap(settings, lambda *a: None)
    )
    return SpecLifecycleV1(context)


class Step:
    """One decode step, hand-over by hand-over; ``spoil`` changes something at a named place."""

    def __init__(self, tracer, running, accepted):
        self.tracer, self.batch, self.accepted = tracer, running, accepted

    def run(self, at="", spoil=lambda step: None):
        t, b = self.tracer, self.batch

        def now(place):
            if place == at:
                spoil(self)

        now("draft")
        t.before_draft(WORKER, b)
        self.verify_input = verify_input(len(b.reqs))
        t.after_draft(self.verify_input, WORKER, b)
        b.spec_info = self.verify_input
        now("before-verify")
        t.before_verify(WORKER, b)
        for r, n in zip(b.reqs, self.accepted, strict=True):
            r.output_ids.extend([7] * n)
            r.kv_committed_len += n
            r.spec_verify_ct += 1
        b.seq_lens.add_(torch.tensor(self.accepted))
        b.seq_lens_cpu.add_(torch.tensor(self.accepted))
        self.extend = extend_input(b, self.accepted)
        self.output = SimpleNamespace(
            draft_extend_input=self.extend,
            num_correct_drafts_per_req_cpu=[n - 1 for n in self.accepted],
        )
        now("verify")
        t.after_verify((None, self.output, False), WORKER, b)
        b.spec_info = self.extend
        now("extend")
        t.before_extend_after_decode(WORKER, b)
        t.before_select_verified(WORKER, self.extend)
        last = torch.tensor(self.accepted).cumsum(0) - 1
        self.seed = self.extend.input_ids[last], self.extend.hidden_states[last]
        t.after_select_verified(self.seed, WORKER, self.extend)
        now("seed")
        t.before_seed(WORKER, b, *self.seed)
        b.spec_info = draft_input(len(b.reqs))
        t.after_seed(None, WORKER, b, *self.seed)
        now("end")
        t.after_forward(None, WORKER, b)
        now("stream")
        t.before_stream_output(None, b.reqs)


def a_step(tracer, running=None, accepted=(1, 4, 2)):
    running = running or batch(request("a", 30), request("b", 70), request("c", 64))
    return Step(tracer, running, list(accepted))


def test_sound_steps_with_merges_and_filters_are_silent(arm, caplog):
    """The batch's own methods, hooked as in a server."""
    folder = arm(**ARMED)
    running = batch(request("a", 30), request("b", 70, done=True))
    for n in range(5):
        joins = batch(request(f"c{n}", 64))
        running.merge_batch(joins)
        running.filter_batch(v1_spec_info_filtered=True)
    assert [r.rid for r in running.reqs] == ["a", *(f"c{n}" for n in range(5))]
    running.filter_batch(keep_indices=[0, 2])  # a retraction
    running.filter_batch(keep_indices=[])
    assert not folder.exists()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_sound_steps_are_silent(tracer):
    running = batch(request("a", 30), request("b", 70), request("c", 64))
    for accepted in ((1, 1, 1), (TOKENS, 1, 2), (3, TOKENS, 1)):
        Step(tracer, running, list(accepted)).run()
    path = [(t.site, t.before, t.after) for t in tracer.log.history.transitions()][-5:]
    assert path == [
        ("draft", "draft-input", "verify-input"),
        ("verify", "verify-input", "verify-input"),
        ("extend-after-decode", "verify-input", "draft-extend-input"),
        ("seed", "draft-extend-input", "draft-input"),
        ("end", "draft-input", "draft-input"),
    ]


def put(spec):
    def spoil(step):
        step.batch.spec_info = spec(step)

    return spoil


def count(name, by):
    def spoil(step):
        if name == "output_ids":
            step.batch.reqs[1].output_ids.append(7)
        else:
            setattr(step.batch.reqs[1], name, getattr(step.batch.reqs[1], name) + by)

    return spoil


def length(tensor, by):
    def spoil(step):
        getattr(step.batch, tensor)[1] += by

    return spoil


def accept(n):
    def spoil(step):
        step.output.num_correct_drafts_per_req_cpu[1] = n - 1

    return spoil


def hidden_of(attribute):
    def spoil(step):
        owner = getattr(step, attribute) if attribute != "batch" else step.batch.spec_info
        owner.hidden_states = owner.hidden_states.clone()

    return spoil


def write_hidden(step):
    step.batch.spec_info.hidden_states.mul_(2)


def other_seed(step):
    step.seed = step.seed[0], step.seed[1].clone()


FAULTY = [
    ("draft", put(lambda s: verify_input(3)), "verify-input-left", "worker.draft", -1),
    ("draft", put(lambda s: None), "spec-info-dropped", "worker.draft", -1),
    ("draft", put(lambda s: extend_input(s.batch, [1] * 3)), "wrong-type", "worker.draft", -1),
    ("draft", put(lambda s: draft_input(2)), "wrong-shape", "worker.draft", -1),
    ("draft", length("seq_lens_cpu", 1), "seq-len", "worker.draft", 1),
    ("draft", length("seq_lens_cpu", -1), "seq-len", "worker.draft", 1),
    ("draft", length("seq_lens", 1), "seq-len", "worker.draft", 1),
    ("draft", count("kv_committed_len", 2), "seq-len", "worker.draft", 1),
    ("before-verify", put(lambda s: verify_input(3)), "wrong-type", "worker.verify", -1),
    ("before-verify", put(lambda s: draft_input(3)), "wrong-type", "worker.verify", -1),
    ("verify", accept(0), "accept-length", "worker.verify", 1),
    ("verify", accept(TOKENS + 1), "accept-length", "worker.verify", 1),
    ("verify", accept(3), "bookkeeping", "worker.verify", 1),  # it was 4
    ("verify", count("kv_committed_len", 1), "bookkeeping", "worker.verify", 1),
    ("verify", count("output_ids", 1), "bookkeeping", "worker.verify", 1),
    ("verify", count("spec_verify_ct", 1), "bookkeeping", "worker.verify", 1),
    ("verify", length("seq_lens_cpu", 1), "seq-len", "worker.verify", 1),
    (
        "extend",
        put(lambda s: extend_input(s.batch, [1, 4, 2])),
        "wrong-type",
        "worker.extend_after_decode",
        -1,
    ),
    ("extend", hidden_of("extend"), "stale-hidden-state", "worker.select_verified", -1),
    ("extend", write_hidden, "stale-hidden-state", "worker.select_verified", -1),
    ("seed", other_seed, "stale-hidden-state", "worker.seed_step", -1),
    ("end", hidden_of("batch"), "stale-hidden-state", "worker.forward", -1),
    ("end", write_hidden, "stale-hidden-state", "worker.forward", -1),
    ("end", put(lambda s: s.verify_input), "verify-input-left", "worker.forward", -1),
    ("end", put(lambda s: s.extend), "wrong-type", "worker.forward", -1),
    ("end", put(lambda s: None), "spec-info-dropped", "worker.forward", -1),
    ("end", count("spec_verify_ct", 1), "bookkeeping", "worker.forward", 1),
    ("stream", count("output_ids", 1), "bookkeeping", "scheduler.stream_output", 1),
    ("stream", count("kv_committed_len", 4), "bookkeeping", "scheduler.stream_output", 1),
]


@pytest.mark.parametrize(("at", "spoil", "kind", "site", "row"), FAULTY)
def test_what_is_spoiled_is_found_where_it_is_handed_over(tracer, at, spoil, kind, site, row):
    running = batch(request("a", 30), request("b", 70), request("c", 64))
    a_step(tracer, running).run()
    with pytest.raises(TrapError) as error:
        a_step(tracer, running).run(at, spoil)
    finding = error.value.finding
    assert (finding.check, finding.kind, finding.site) == ("spec-lifecycle", kind, site)
    assert finding.location.row == row
    assert finding.location.request == ("b" if row == 1 else "")
    assert finding.cause
    assert finding.reference
    launch = finding.next_command.endswith(("<your launch command>", "-graph", "-schedule"))
    assert launch == (kind != "spec-info-dropped")
    assert launch or finding.next_command == "g4debug doctor"


def test_hidden_states_of_the_step_before_are_stale_in_the_verify_too(tracer):
    running = batch(request("a", 30))
    first = Step(tracer, running, [2])
    first.run()

    def again(step):
        step.extend.hidden_states = first.extend.hidden_states

    with pytest.raises(TrapError, match="those of the step before"):
        Step(tracer, running, [2]).run("verify", again)


def everyone_finished(step_batch, spec):
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    for r in step_batch.reqs:
        r.finished_reason = FINISH_LENGTH(1)
    step_batch.spec_info = spec


def test_a_verify_input_that_stays_is_found_at_the_merge_not_before(arm):
    """Seed PR #22, as SGLang 0.5.12 reaches it, on its own merge_batch."""
    from sglang.srt.speculative.frozen_kv_mtp_worker import FrozenKVMTPWorker

    folder = arm(**ARMED)
    running, left = batch(request("a", 30)), verify_input(1)
    # The worker's forward, hooked; what it does inside is not the point here.
    hooked = FrozenKVMTPWorker.forward_batch_generation
    everyone_finished(running, left)
    with pytest.raises(AttributeError):  # there is no worker: SGLang's own error goes through
        hooked(SimpleNamespace(), running)
    running.filter_batch(v1_spec_info_filtered=True)
    assert running.reqs == []  # dropped with its verify input, and nobody minds
    running = batch(request("a", 30), spec=left)
    everyone_finished(running, left)
    with pytest.raises(TrapError) as error:
        running.merge_batch(batch(request("b", 40)))
    finding = error.value.finding
    assert (finding.kind, finding.site) == ("verify-input-left", "batch.merge")
    (path,) = folder.glob("*")
    last = reading.read(path).transitions[-1]
    assert (last.site, last.before, last.ok) == ("merge", "verify-input", False)


def test_without_the_tracer_that_merge_is_sglangs_attribute_error(arm):
    arm(G4DEBUG_FIX_SPEC_BATCH_GUARDS="0", G4DEBUG_FIX_IDLE_DRAFT_INPUT="0")
    running = batch(request("a", 30), spec=verify_input(1))
    with pytest.raises(AttributeError, match="no attribute 'merge_batch'"):
        running.merge_batch(batch(request("b", 40)))


def test_the_finding_of_that_merge_names_the_step_and_the_fix(tracer):
    running, left = batch(request("a", 30), request("b", 9)), verify_input(2)
    everyone_finished(running, left)
    tracer.context.recorder.step = 17
    tracer.after_forward(None, WORKER, running)  # no finding where it is left
    tracer.context.recorder.step = 18
    with pytest.raises(TrapError) as error:
        tracer.batches.before_merge(running, batch(request("c", 40)))
    finding = error.value.finding
    assert "every request of the batch (2) finished in the verify of step 17" in finding.cause
    assert finding.reference.startswith("fix idle-draft-input (in sglang 0.5.13")
    assert finding.next_command == "G4DEBUG_FIX_IDLE_DRAFT_INPUT=1 <your launch command>"


def test_what_the_guards_would_repair_is_found_all_the_same(arm):
    arm(**{**ARMED, "G4DEBUG_FIX_SPEC_BATCH_GUARDS": "1"})
    running = batch(request("a", 30), spec=verify_input(1))
    with pytest.raises(TrapError) as error:
        running.merge_batch(batch(request("b", 40)))
    # They are in force already: the next step is to see the server go on with them.
    assert error.value.finding.next_command.startswith("G4DEBUG_MODE=log ")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_merge_with_rows_that_are_not_the_live_requests(arm, rows):
    arm(**ARMED)
    running = batch(request("a", 30), request("b", 9), spec=draft_input(rows))
    with pytest.raises(TrapError, match="expected: 2 rows"):
        running.merge_batch(batch(request("c", 40)))


def test_other_servers_are_left_alone(arm):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    folder = arm(**ARMED)
    running, joins = batch(request("a", 30)), batch(request("b", 30))
    for b in (running, joins):
        b.spec_algorithm, b.spec_info = SpeculativeAlgorithm.NONE, None
    running.merge_batch(joins)
    assert len(running.reqs) == 2
    assert not folder.exists()


def test_a_release_with_the_v1_worker_is_followed_by_its_sites(sglang):
    hooks, settings = Hooks(), Settings(max_dumps=0)
    install(Context("t", hooks, settings, Recorder(1), Trap(settings, lambda *a: None)))
    here = {site for site in draft_kv_pool.SITES if targets.path(site) is not None}
    assert set(hooks.sites) == {*SITES, *here}


def test_the_history_is_bounded_and_nothing_is_kept_alive(tracer):
    running = batch(request("a", 30))
    for _ in range(20):
        Step(tracer, running, [1]).run()
    assert len(tracer.log.history.transitions()) == HISTORY
    import weakref

    step = Step(tracer, running, [1])
    step.run()
    kept = [weakref.ref(step.verify_input), weakref.ref(step.extend)]
    kept.append(weakref.ref(step.extend.hidden_states))
    del step
    gc.collect()
    assert [k() for k in kept] == [None] * 3
    assert History().transitions() == ()


def test_hidden_states_in_inference_mode_are_followed_by_identity(sglang):
    with torch.inference_mode():
        custody, spec = Custody(), draft_input(2)
        custody.hold(spec)
        assert custody.check_held(spec) is None
        spec.hidden_states = spec.hidden_states.clone()
        assert custody.check_held(spec).kind == "stale-hidden-state"


def test_the_canary_bites(tmp_path: Path):
    assert "verify input" in canary.fire(tmp_path, torch.device("cpu"))


def test_dp_attention_was_never_run_so_it_is_off(tracer):
    scheduler = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_frozen_kv_mtp=lambda: True),
        server_args=SimpleNamespace(enable_dp_attention=True),
    )
    tracer.after_scheduler_init(None, scheduler)
    assert "DP attention" in tracer.context.status.record().off
    scheduler.server_args.enable_dp_attention = False
    fresh = SpecLifecycleV1(tracer.context)
    assert fresh.after_scheduler_init("made", scheduler) == "made"
