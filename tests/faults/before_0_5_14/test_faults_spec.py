"""The speculation faults on SGLang's own batches: what they change, what they log, their count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_spec import TOKENS, batch, draft_input, extend_input, request, verify_input

from g4debug import discovery
from g4debug.faults.base import install_all
from g4debug.faults.grammar import parse
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks

pytestmark = pytest.mark.skipif(
    targets.absent("worker.seed_step") != (),
    reason="the v1 worker only; test_spec_lifecycle.py fires these faults on v2",
)
NAMES = (
    "accept-length",
    "double-bookkeeping",
    "seq-len-off-by-one",
    "spec-info-dropped",
    "spec-info-wrong-type",
    "stale-hidden-state",
    "verify-input-left",
)
ACCEPTED = [2, 4, 1]
WORKER = SimpleNamespace(speculative_num_draft_tokens=TOKENS)


class Worker:
    """Runs a fault's hooks around one decode step, as SGLang's worker would."""

    def __init__(self, plan: str) -> None:
        self.hooks = Hooks()
        (self.arm,) = install_all(parse(plan), self.hooks)
        self.batch = batch(request("a", 30), request("b", 70), request("c", 64))

    def _site(self, name, original):
        if name not in self.hooks.sites:
            return original
        return lambda *args: self.hooks._compose(name)(original, *args)

    def step(self):
        """One forward; returns the batch, and keeps what the verify made."""
        self._site("worker.forward", self._forward)(WORKER, self.batch)
        return self.batch

    def _forward(self, worker, running):
        running.spec_info = verify_input(len(running.reqs))
        _, self.output, _ = self._site("worker.verify", self._verify)(worker, running)
        live = [r for r in running.reqs if not r.finished()]
        if live:
            running.spec_info = self.output.draft_extend_input
            self._site("worker.extend_after_decode", self._extend)(worker, running)
        return "result"

    def _verify(self, worker, running):
        for r, n in zip(running.reqs, ACCEPTED, strict=True):
            r.output_ids.extend(range(100, 100 + n))
            r.kv_committed_len += n
            r.spec_verify_ct += 1
        running.seq_lens.add_(torch.tensor(ACCEPTED))
        running.seq_lens_cpu.add_(torch.tensor(ACCEPTED))
        self.fresh = extend_input(running, ACCEPTED)
        self.hidden = self.fresh.hidden_states
        output = SimpleNamespace(
            draft_extend_input=self.fresh,
            num_correct_drafts_per_req_cpu=[n - 1 for n in ACCEPTED],
        )
        return None, output, False

    def _extend(self, worker, running):
        self.seeded = running.spec_info.hidden_states
        self.made = draft_input(len(running.reqs))
        self.made_hidden = self.made.hidden_states
        running.spec_info = self.made


def finish(running):
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    for r in running.reqs:
        r.finished_reason = FINISH_LENGTH(1)


@pytest.mark.parametrize("name", NAMES)
def test_each_declares_its_tracer_and_fires_as_often_as_it_says(sglang, name):
    fault = discovery.load("fault", name)
    assert fault.caught_by == ("spec-lifecycle",)
    task = next(iter(fault.tasks))
    worker = Worker(f"seed=1;{name}=2*{task}")
    for _ in range(5):
        worker.step()
    assert len(worker.arm.schedule) == 2
    finish(worker.batch)
    worker = Worker(f"seed=1;{name}=1*{task}")
    finish(worker.batch)
    worker.step()
    assert worker.arm.schedule == []  # nobody goes on: nothing to spoil


def test_verify_input_left(sglang):
    worker = Worker("verify-input-left=1*on")
    assert type(worker.step().spec_info).__name__ == "FrozenKVMTPVerifyInput"
    assert worker.step().spec_info is worker.made
    worker = Worker("verify-input-left=1*finished")
    assert worker.step().spec_info is worker.made  # no opportunity, so the count is still there
    finish(worker.batch)
    assert type(worker.step().spec_info).__name__ == "FrozenKVMTPVerifyInput"
    assert "0 of 3 requests go on" in worker.arm.schedule[0]


def test_dropped_and_wrong_type(sglang):
    assert Worker("spec-info-dropped=1*on").step().spec_info is None
    worker = Worker("spec-info-wrong-type=1*on")
    assert worker.step().spec_info is worker.fresh


@pytest.mark.parametrize(("task", "length"), [("zero", 0), ("too-long", TOKENS + 1)])
def test_accept_length(sglang, task, length):
    worker = Worker(f"seed=2;accept-length=1*{task}")
    worker.step()
    (row,) = [
        i for i, n in enumerate(worker.output.num_correct_drafts_per_req_cpu) if n == length - 1
    ]
    assert worker.fresh.num_accept_tokens_cpu[row] == length
    assert worker.fresh.num_accept_tokens.tolist() == worker.fresh.num_accept_tokens_cpu
    assert f"accept length {ACCEPTED[row]} -> {length}" in worker.arm.schedule[0]


@pytest.mark.parametrize(
    ("task", "host", "device"), [("plus", 1, 1), ("minus", -1, -1), ("device", 0, 1)]
)
def test_seq_len(sglang, task, host, device):
    running = Worker(f"seq-len-off-by-one=1*{task}").step()
    right = torch.tensor([r.kv_committed_len for r in running.reqs])
    assert sorted((running.seq_lens_cpu - right).tolist(), key=abs) == [0, 0, host]
    assert sorted((running.seq_lens - right).tolist(), key=abs) == [0, 0, device]


def test_stale_hidden_state(sglang):
    worker = Worker("stale-hidden-state=1*on->1*draft")
    worker.step()
    first, first_made = worker.hidden, worker.made_hidden.clone()
    running = worker.step()
    assert torch.equal(worker.seeded, first)
    assert torch.equal(running.spec_info.hidden_states, first_made)
    running = worker.step()
    assert worker.seeded is worker.hidden
    assert running.spec_info.hidden_states is worker.made_hidden


@pytest.mark.parametrize("task", ["on", "kv", "output", "verify-ct"])
def test_double_bookkeeping(sglang, task):
    running = Worker(f"double-bookkeeping=1*{task}").step()
    rows = []
    for r, tokens, n in zip(running.reqs, (30, 70, 64), ACCEPTED, strict=True):
        kv, out, ct = (
            r.kv_committed_len - tokens - n,
            len(r.output_ids) - 1 - n,
            r.spec_verify_ct - 1,
        )
        rows.append((kv, out, ct))
        twice = (
            n * (task in ("on", "kv")),
            n * (task in ("on", "output")),
            task in ("on", "verify-ct"),
        )
        if any(rows[-1]):
            assert rows[-1] == tuple(int(x) for x in twice)
    assert sum(any(r) for r in rows) == 1
