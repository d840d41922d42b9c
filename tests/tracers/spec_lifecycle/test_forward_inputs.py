"""The rows, lengths and positions that a forward is given, on plain numbers and by the hooks."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4debug.findings.steps import Recorder
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.check import check_batch_rows, check_positions
from g4debug.tracers.spec_lifecycle.forward_inputs import SITE, ForwardInputs
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.trapping.trap import Trap, TrapError

SIZE = 9
pytestmark = pytest.mark.skipif(
    targets.path("worker.seed_step") is not None or targets.sglang_version() is None,
    reason="the tracer of SGLang 0.5.14 and later",
)


@given(rows=st.lists(st.integers(1, SIZE - 1), min_size=1, unique=True), data=st.data())
def test_each_request_has_its_row(rows, data):
    rids = [f"r{i}" for i in range(len(rows))]
    assert check_batch_rows(rids, rows, rows, SIZE) is None
    at = data.draw(st.integers(0, len(rows) - 1))
    wrong = data.draw(st.integers(-3, SIZE + 3).filter(lambda n: n != rows[at]))
    got = [*rows[:at], wrong, *rows[at + 1 :]]
    found = check_batch_rows(rids, rows, got, SIZE)
    assert (found.kind, found.row, bool(found.off)) == ("forward-row", at, not 0 <= wrong < SIZE)
    if wrong in rows:
        assert rids[rows.index(wrong)] in found.got
    # A request that has ended may have any row, but one of the table.
    ended = [*rows[:at], -1, *rows[at + 1 :]]
    assert (check_batch_rows(rids, ended, got, SIZE) is None) == (0 <= wrong < SIZE)


def test_where_there_are_more_rows_than_requests_only_the_table_counts():
    assert check_batch_rows(["a"], [3], [3, 3, 0], SIZE) is None
    assert check_batch_rows(["a"], [3], [3, 3, SIZE], SIZE).row == 2


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1), data=st.data())
def test_each_token_has_its_position(spans, data):
    right = [n for first, count in spans for n in range(first, first + count)]
    every = range(len(spans))
    assert check_positions(spans, right, every, "x") is None
    row = data.draw(st.sampled_from(every))
    column = data.draw(st.integers(0, spans[row][1] - 1))
    at, by = sum(count for _, count in spans[:row]) + column, data.draw(st.sampled_from((-1, 1, 7)))
    wrong = [*right[:at], right[at] + by, *right[at + 1 :]]
    found = check_positions(spans, wrong, every, "x")
    assert (found.row, found.off) == (row, by)
    assert found.column == (column if spans[row][1] > 1 else -1)
    assert check_positions(spans, wrong, [i for i in every if i != row], "x") is None
    assert check_positions(spans, right[1:], every, "x") is None  # another check's


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request(rid, row, committed):
    return Request(
        rid=rid, req_pool_idx=row, kv_committed_len=committed, finished_reason=None,
        is_retracted=False, kv_allocated_len=64, output_ids=array("q", ()),
        origin_input_ids=array("q", range(100 * row, 100 * row + committed)),
    )  # fmt: skip


def mode(name):
    return SimpleNamespace(name=name, is_extend=lambda: name != "DECODE")


class Step:
    """A step of requests a and b, whose forward is made by ``init_new``."""

    def __init__(self, name="DECODE", speculates=False, draft=False):
        self.hooks, self.recorder = Hooks(), Recorder(4)
        settings = Settings(mode="raise", max_dumps=0)
        trap = Trap(settings, lambda *a: None)
        context = Context("spec-lifecycle", self.hooks, settings, self.recorder, trap)
        self.tracer = ForwardInputs(context, SpecLog(context))
        self.tracer.judging = True
        self.tracer.install()
        pool = SimpleNamespace(req_to_token=torch.zeros(SIZE, 64, dtype=torch.int32))
        self.batch = SimpleNamespace(
            forward_mode=mode(name),
            reqs=[request("a", 3, 12), request("b", 1, 7)],
            req_pool_indices=torch.tensor([3, 1]),
            seq_lens=torch.tensor([12, 7]),
            seq_lens_cpu=torch.tensor([12, 7]),
            req_to_token_pool=pool,
            out_cache_loc=torch.tensor([5, 7]),
            token_to_kv_pool_allocator=SimpleNamespace(full_to_swa_index_mapping=torch.zeros(65)),
            spec_algorithm=SimpleNamespace(is_none=lambda: not speculates),
        )
        extend = name == "EXTEND"
        self.made = SimpleNamespace(
            forward_mode=mode(name),
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=self.batch.seq_lens,
            out_cache_loc=self.batch.out_cache_loc,
            positions=torch.tensor([10, 11, 4, 5, 6] if extend else [11, 6]),
            extend_prefix_lens_cpu=[10, 4] if extend else None,
            extend_seq_lens_cpu=[2, 3] if extend else None,
            input_ids=torch.tensor([310, 311, 104, 105, 106] if extend else [9, 9]),
            extend_prefix_lens=torch.tensor([10, 4]) if extend else None,
            extend_seq_lens=torch.tensor([2, 3]) if extend else None,
            extend_start_loc=torch.tensor([0, 2]) if extend else None,
        )
        self.runner = SimpleNamespace(is_draft_worker=draft)

    def run(self):
        def forward():
            init = self.hooks._compose(SITE)
            init(lambda batch, runner: self.made, self.batch, self.runner)

        def resolve(future_map, batch):
            forward()

        def run_batch(scheduler, batch):
            self.hooks._compose("future.resolve_lens")(resolve, None, batch)

        self.recorder.count()
        self.hooks._compose("scheduler.run_batch")(run_batch, None, self.batch)

    def told(self):
        with pytest.raises(TrapError) as e:
            self.run()
        return e.value.finding


@pytest.mark.parametrize("name", ["DECODE", "EXTEND", "TARGET_VERIFY"])
@pytest.mark.parametrize("draft", [False, True])
def test_a_sound_forward_is_silent(name, draft):
    Step(name, draft=draft, speculates=name == "TARGET_VERIFY").run()


@pytest.mark.parametrize("name", ["DECODE", "EXTEND", "TARGET_VERIFY"])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("row", [-1, 0, 1, 2, SIZE])
def test_a_row_is_told_before_it_is_used(name, draft, row):
    step = Step(name, draft=draft, speculates=True)
    step.made.req_pool_indices = torch.tensor([row, 1])
    found = step.told()
    assert (found.kind, found.location.row, found.site) == ("forward-row", 0, SITE)
    step = Step(name, draft=draft, speculates=True)
    step.batch.req_pool_indices = torch.tensor([row, 1])
    found = step.told()
    assert (found.kind, found.site) == ("forward-row", "future.resolve_lens")


def test_without_overlap_a_row_is_told_before_tokens_are_taken_by_it():
    step = Step()

    def run_batch(scheduler, batch):
        batch.req_pool_indices = torch.tensor([3, SIZE])
        step.hooks._compose("future.inputs")(lambda batch, future_map: None, batch, None)

    with pytest.raises(TrapError) as e:
        step.hooks._compose("scheduler.run_batch")(run_batch, None, step.batch)
    found = e.value.finding
    assert (found.kind, found.location.row, found.site) == ("forward-row", 1, "future.inputs")


def test_where_the_host_has_no_lengths_what_is_committed_counts():
    step = Step()
    step.batch.seq_lens_cpu = None
    step.run()
    step.made.seq_lens = torch.tensor([12, 8])
    assert step.told().kind == "seq-len"


@pytest.mark.parametrize("name", ["DECODE", "EXTEND", "TARGET_VERIFY"])
@pytest.mark.parametrize("length", [0, -1, 11, 13, 1 << 20])
def test_a_length_is_told(name, length):
    step = Step(name, speculates=name == "TARGET_VERIFY")
    step.made.seq_lens = torch.tensor([length, 7])
    found = step.told()
    assert (found.kind, found.location.row) == ("seq-len", 0)


@pytest.mark.parametrize(
    ("host", "committed", "blamed"),
    [
        (20, 12, "seq_lens_cpu = 20 (+8) for request a (row 0), should be 12"),
        (12, 12, "seq_lens = 13 (+1) for request a (row 0), should be 12"),
        (20, 30, "seq_lens = 13 (-7) for request a (row 0), should be 20"),
    ],
)
def test_a_third_length_tells_which_of_two_is_wrong(host, committed, blamed):
    step = Step()
    step.batch.seq_lens_cpu[0] = host
    step.batch.reqs[0].kv_committed_len = committed
    if (host, committed) != (20, 12):
        step.made.seq_lens = torch.tensor([13, 7])
    found = step.told()
    assert blamed in found.headline
    nobody = "does not agree with seq_lens_cpu: one of them was computed wrong, or was changed"
    assert (nobody in found.cause) == (host == 20 and committed == 30)


@pytest.mark.parametrize("of", ["batch", "made"])
def test_a_place_that_the_pool_has_not_is_told_before_it_is_looked_up(of):
    step = Step()
    getattr(step, of).out_cache_loc = torch.tensor([5, 65])
    found = step.told()
    assert (found.kind, found.location.row, found.location.column) == ("forward-place", 1, 1)
    step = Step()
    getattr(step, of).out_cache_loc = torch.tensor([5, 64])
    step.run()


@pytest.mark.parametrize("name", ["DECODE", "EXTEND", "TARGET_VERIFY"])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("token", [0, 3, 6])
@pytest.mark.parametrize("slot", [65, 1 << 20, -66])
def test_a_token_in_a_slot_that_the_pool_has_not_is_told_before_it_is_looked_up(
    name, draft, token, slot
):
    step = Step(name, speculates=name == "TARGET_VERIFY", draft=draft)
    step.batch.req_to_token_pool.req_to_token[1, token] = slot
    found = step.told()
    assert (found.kind, found.location.row, found.location.column) == ("forward-place", 1, token)


@pytest.mark.parametrize(("row", "token"), [(1, 7), (2, 0)])
def test_what_is_in_a_row_behind_its_sequence_is_nobodys(row, token):
    step = Step()
    step.batch.req_to_token_pool.req_to_token[row, token] = 1 << 20
    step.run()


@pytest.mark.parametrize("name", ["DECODE", "EXTEND"])
@pytest.mark.parametrize("position", [0, -1, 7, 12, 1 << 20])
def test_a_position_is_told(name, position):
    step = Step(name)
    step.made.positions[1] = position
    found = step.told()
    assert found.kind == "position"
    assert (found.location.row, found.location.column) == ((0, 1) if name == "EXTEND" else (1, -1))


@pytest.mark.parametrize(("at", "row", "column"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (4, 1, 2)])
def test_a_token_of_a_prefill_that_is_not_the_requests_is_told(at, row, column):
    step = Step("EXTEND")
    step.made.input_ids[at] = 7
    found = step.told()
    assert (found.kind, found.location.row, found.location.column) == ("sampled-token", row, column)
    assert found.cause.startswith(
        "input_ids was changed between the request and the target's forward"
    )
    assert "7" not in found.headline  # it is a token of a prompt


def test_tokens_of_two_requests_that_are_exchanged_are_told():
    step = Step("EXTEND")
    step.made.input_ids = torch.tensor([104, 105, 310, 311, 106])
    assert step.told().kind == "sampled-token"


@pytest.mark.parametrize("name", ["multimodal_inputs", "input_embeds"])
def test_what_is_given_in_place_of_tokens_is_not_compared(name):
    step = Step("EXTEND")
    step.made.input_ids[0] = 7
    setattr(step.batch.reqs[0], name, object())
    step.run()
    step.made.input_ids[2] = 7
    assert step.told().location.row == 1


@pytest.mark.parametrize("name", ["extend_prefix_lens", "extend_seq_lens", "extend_start_loc"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("by", [-1, 1])
def test_numbers_of_a_prefill_that_differ_on_the_device_are_told(name, row, by):
    step = Step("EXTEND")
    getattr(step.made, name)[row] += by
    found = step.told()
    assert (found.kind, found.location.row) == ("seq-len", row)
    assert found.cause.startswith(f"{name} was changed between ")


@pytest.mark.parametrize("by", [-1, 1])
def test_prefixes_on_the_host_that_do_not_fit_the_lengths_accuse_neither(by):
    step = Step("EXTEND")
    step.made.extend_prefix_lens_cpu[0] += by
    found = step.told()
    assert (found.kind, found.location.row) == ("seq-len", 0)
    assert found.cause.startswith("seq_lens does not agree with the host's lists of prefixes")


def test_a_request_that_ended_is_not_judged_but_by_its_row():
    step = Step()
    step.batch.reqs[1].finished_reason = "length"
    step.batch.reqs[1].req_pool_idx, step.batch.reqs[1].kv_committed_len = None, 0
    step.run()


def test_what_is_made_outside_of_a_step_is_left_alone():
    step = Step()
    step.made.req_pool_indices = torch.tensor([99, 99])
    step.hooks._compose(SITE)(lambda batch, runner: step.made, step.batch, step.runner)
