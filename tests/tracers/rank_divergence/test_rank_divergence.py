"""What ranks say of a step, how it is compared, and when nothing is said."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4debug.findings.launch_memory import RING_BYTES
from g4debug.findings.record import Step
from g4debug.settings import Settings
from g4debug.tracers.rank_divergence import canary, digest, ring
from g4debug.tracers.rank_divergence.check import compare
from g4debug.tracers.rank_divergence.tracer import LOOK_EVERY, MISSING
from g4debug.trapping.trap import TrapError

MODES = ("DECODE", "EXTEND", "MIXED")
RIDS = st.lists(st.text(max_size=40), max_size=5).map(tuple)
NUMBERS = st.lists(st.integers(-(1 << 62), 1 << 62), max_size=400).map(tuple)
STEPS = st.builds(
    Step,
    step=st.integers(1, 1000),
    forward_mode=st.sampled_from(MODES),
    rids=RIDS,
    seq_lens=NUMBERS,
    rows=st.just(()),
    committed=NUMBERS,
)


def batch(outputs=(), loc=None, extend=None, spec=None, ending=()):
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(rid=f"r{i}", output_ids=list(ids), to_finish=i if i in ending else None)
            for i, ids in enumerate(outputs)
        ],
        forward_mode=SimpleNamespace(is_extend=lambda: extend is not None),
        prefix_lens=extend and extend[0],
        extend_lens=extend and extend[1],
        spec_info=spec,
        out_cache_loc=loc,
    )


PLAIN = Step(3, "DECODE", ("a", "b"), (5, 6), rows=(1, 2), committed=(4, 5), allocated=(64, 64))
TABLE = torch.arange(40).view(4, 10)


@given(STEPS, STEPS)
def test_equal_steps_are_equal_and_others_differ_in_what_differs(one, two):
    a, b = digest.of(one, batch(), None), digest.of(two, batch(), None)
    assert len(digest.split(a)) == len(digest.FIELDS)
    assert not compare(a, digest.of(one, batch(), None))
    expected = {
        name
        for name, field in (
            ("forward mode", "forward_mode"),
            ("sequence lengths", "seq_lens"),
            ("committed tokens", "committed"),
        )
        if getattr(one, field) != getattr(two, field)
    }
    if one.rids != two.rids and "\n".join(one.rids) != "\n".join(two.rids):
        expected.add("requests")
    assert {d.name for d in compare(a, b)} == expected


@pytest.mark.parametrize(
    ("name", "changed", "what"),
    [
        ("output tokens", {"outputs": ([1, 2], [3, 9])}, "2 (checksum"),
        ("output tokens", {"outputs": ([1, 2], [3])}, "1 (checksum"),
        ("ending requests", {"ending": (1,)}, "r1"),
        ("prefix lengths", {"extend": ([0, 64], [5, 6])}, "0, 64"),
        ("extend lengths", {"extend": ([0, 0], [5, 7])}, "5, 7"),
        ("out_cache_loc", {"loc": torch.tensor([70, 72])}, "70, 72"),
        ("spec_info", {"spec": SimpleNamespace(verified_id=torch.zeros(3))}, "verified_id 3"),
    ],
)
def test_what_the_batch_says_of_a_step(name, changed, what):
    usual = {
        "outputs": ([1, 2], [3, 4]),
        "loc": torch.tensor([70, 71]),
        "extend": ([0, 0], [5, 6]),
        "spec": SimpleNamespace(verified_id=torch.zeros(2)),
    }
    mine = digest.of(PLAIN, batch(**usual), TABLE)
    (found,) = compare(mine, digest.of(PLAIN, batch(**{**usual, **changed}), TABLE))
    assert found.name == name
    assert what in found.other
    assert found.mine != found.other


def test_the_locations_of_a_row_count_as_far_as_they_are_committed():
    other = TABLE.clone()
    other[1, 4:] += 1
    mine = digest.of(PLAIN, batch(), TABLE)
    assert not compare(mine, digest.of(PLAIN, batch(), other))
    other[1, 3] += 1
    (found,) = compare(mine, digest.of(PLAIN, batch(), other))
    assert found.name == "KV locations"


def test_no_token_is_in_a_digest():
    ids = [123_456_789_012, 987_654_321_098]
    said = digest.of(PLAIN, batch(outputs=(ids, ids)), TABLE)
    assert all(i.to_bytes(8, "little") not in said for i in ids)


def test_a_long_field_is_cut_and_still_compared_to_its_end():
    rids = tuple(f"request-{i:04d}" for i in range(300))
    one = dataclasses.replace(PLAIN, rids=rids)
    two = dataclasses.replace(PLAIN, rids=(*rids[:-1], "other"))
    a, b = (digest.of(s, batch(), TABLE) for s in (one, two))
    assert len(a) < ring.STEP_BYTES
    (found,) = compare(a, b)
    assert found.name == "requests"
    assert found.mine != found.other
    assert "… (hash " in found.mine
    with pytest.raises(ValueError, match="too many"):
        compare(a, a + b"x")


def test_what_is_half_written_or_gone_is_not_read():
    memory = memoryview(bytearray(RING_BYTES))
    assert ring.read(memory, 7) == (0, b"")
    assert ring.write(memory, 7, b"seven")
    assert ring.read(memory, 7) == (7, b"seven")
    assert ring.read(memory, 7 + ring.STEPS) == (7, b"seven")  # not what was asked for
    assert ring.write(memory, 7 + ring.STEPS, b"later")
    assert ring.read(memory, 7) == (7 + ring.STEPS, b"later")
    memory[(7 % ring.STEPS) * ring.STEP_BYTES + 16] ^= 1
    assert ring.read(memory, 7) == (-1, b"")
    assert not ring.write(memory, 8, bytes(ring.STEP_BYTES))


@pytest.fixture
def ranks(tmp_path):
    first, second, others = canary.pair(Settings(debug=True, debug_dir=tmp_path, max_dumps=0))
    yield first, second
    others.close()


def count(rank) -> int:
    return sum(c.count for c in rank.tracer.context.status.record().checked)


def test_who_comes_last_compares_and_nobody_waits(ranks):
    first, second = ranks
    for number in range(1, 4):
        first.step(number, ("a",))
    assert count(first) == 0  # the other one has written nothing yet
    second.step(1, ("a",))
    second.step(2, ("a",))
    with pytest.raises(TrapError) as caught:
        second.step(3, ("b",))
    assert count(second) == 3
    finding = caught.value.finding
    assert (finding.kind, finding.location.step) == ("ranks-differ", 3)
    assert "dp0/tp1/pp0 and dp0/tp0/pp0 differ in requests: b and a" in finding.headline
    # The other one sees it, too, as soon as it looks.
    with pytest.raises(TrapError, match="in step 3"):
        first.step(4, ("a",))


def test_a_rank_that_is_far_ahead_is_compared_again_later(ranks):
    first, second = ranks
    for number in range(1, 200):
        first.step(number, ("a",))
    second.step(1, ("other",))  # what the first one did then is gone
    for number in range(2, 200):
        if number < 200 - ring.STEPS:
            second.step(number, ("other",))
    assert count(second) == 0
    with pytest.raises(TrapError, match=f"in step {200 - ring.STEPS}"):
        second.step(200 - ring.STEPS, ("other",))


def test_a_rank_that_never_comes_is_told_of_until_it_is_there(ranks):
    first, _ = ranks
    first.scheduler.server_args.tp_size = 3  # of which two are there
    first.tracer.after_init(None, first.scheduler)
    limits = first.tracer.context.status.record

    for number in range(1, LOOK_EVERY):
        first.step(number, ("a",))
    assert MISSING not in [x.what for x in limits().limits], "it may still be starting"
    first.step(LOOK_EVERY, ("a",))
    assert MISSING in [x.what for x in limits().limits]
    first.tracer._expected = 1
    first.step(LOOK_EVERY + 1, ("a",))
    assert MISSING not in [x.what for x in limits().limits]


@pytest.mark.parametrize("field", ["dp_rank", "pp_rank"])
def test_ranks_of_other_batches_are_not_compared(ranks, field):
    first, second = ranks
    setattr(second.scheduler, field, 1)
    second.tracer.after_init(None, second.scheduler)
    for number in range(1, 4):
        first.step(number, ("a",))
        second.step(number, ("b",))
    assert count(first) == count(second) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"enable_dp_attention": True, "dp_size": 2}, "with DP attention on all ranks"),
        ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 4}, "never run with DP attention"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"attn_cp_size": 2}, "context parallelism"),
    ],
)
def test_what_it_was_never_run_with_it_does_not_judge(ranks, changes, says):
    rank, _ = ranks
    vars(rank.scheduler.server_args).update(changes)
    rank.tracer.after_init(None, rank.scheduler)
    assert says in rank.tracer.context.status.record().off
    rank.step(1, ("a",))
    assert not rank.tracer.mine


def test_one_rank_is_nothing_to_judge_and_no_limit(ranks):
    rank, _ = ranks
    rank.scheduler.server_args.tp_size = 1
    rank.tracer.after_init(None, rank.scheduler)
    told = rank.tracer.context.status.record()
    assert told.sound
    assert told.state.startswith("nothing to judge: there is one rank only")
    rank.step(1, ("a",))
    assert not rank.tracer.mine


def test_without_a_shared_memory_it_says_so(ranks):
    rank, _ = ranks
    rank.tracer.context.trap.others.memory = None
    rank.tracer.after_init(None, rank.scheduler)
    assert "share no memory" in rank.tracer.context.status.record().off


def test_a_device_is_not_asked_and_other_hosts_are_named(ranks):
    rank, _ = ranks
    rank.scheduler.req_to_token_pool.req_to_token = torch.zeros(4, 8, device="meta")
    rank.scheduler.server_args.nnodes = 2
    rank.tracer.after_init(None, rank.scheduler)
    limits = [x.what for x in rank.tracer.context.status.record().limits]
    assert "the ranks of one host only" in limits
    assert "not the KV locations themselves, but how many there are" in limits
    rank.step(1, ("a",))
    assert not rank.tracer.context.disabled


def test_the_cost_of_a_step_at_batch_64():
    """Without what only the CPU engine compares."""
    n = 64
    step = Step(
        9, "DECODE", tuple(f"{i:032x}" for i in range(n)), *((tuple(range(n)),)),
        rows=tuple(range(n)), committed=tuple(range(n)), allocated=tuple(range(n)),
        evicted=tuple(range(n)),
    )  # fmt: skip
    run = batch(outputs=[list(range(500))] * n)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        digest.of(step, run, None)
        times.append(time.perf_counter() - begin)
    assert sorted(times)[20] < 400e-6


def test_the_canary_bites(tmp_path):
    assert "another order" in canary.fire(tmp_path, torch.device("cpu"))
    assert list(tmp_path.glob("*.pt"))
