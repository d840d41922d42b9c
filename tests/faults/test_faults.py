"""The two faults on SGLang's real backend: where they bite, what they log, what they refuse."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from real_backend import PAGE, Rig, capture_graph, draft_worker, dummy_pool, replay_graph

from g4debug import discovery
from g4debug.backends.trtllm_mha import ADAPTER
from g4debug.cpu import fault as device
from g4debug.faults import page_oob, tables
from g4debug.faults.base import Injection, install_all, recreated_bugs, replay
from g4debug.faults.grammar import Chain, GrammarError, parse
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks


def bad_cells(backend) -> set[tuple[str, int, int, int]]:
    """Cells that page-oob wrote: (table, row, column, value)."""
    found = set()
    metadata = backend.forward_metadata
    for name in ("page_table", "swa_page_table"):
        table = getattr(metadata, name)
        if table is not None:
            for row, column in (table >= page_oob.FAR).nonzero().tolist():
                # Behind a row's length SGLang 0.5.14 and later leave what was in that memory.
                if column * PAGE < int(metadata.cache_seqlens_int32[row]):
                    found.add((name, row, column, int(table[row, column])))
    return found


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("page-oob=of", "page-oob has no task 'of'; valid: off, on, corrupt"),
        ("page-oob=corrupt(x)", "number of cells"),
        ("page-oob=1*on->corrupt(0)", "number of cells"),
        ("page-oob=corrupt(-1)", "number of cells"),
        ("page-oob=on(3)", "on takes no argument"),
        ("page-oob=on@layer=3", "no selector @layer; valid: @at, @rank, @step, @mode, @runner"),
        ("stale-swa-state=corrupt(1)", "no task 'corrupt'; valid: off, on"),
        ("stale-swa-state=on@mode=decode", "no selector @mode; valid: @at, @rank, @step, @runner"),
        ("page-oob=on@rank=tp1", "@rank=tp1: expected a tensor-parallel rank, from 0"),
    ],
)
def test_what_a_fault_cannot_do_is_refused_at_start(plan, says):
    with pytest.raises(GrammarError) as error:
        install_all(parse(plan), Hooks())
    assert says in str(error.value)


def test_a_fault_may_strike_one_rank_only():
    """Until its rank is known, which is while the scheduler starts, it strikes none."""

    def injection(scheduler):
        fault = discovery.load("fault", "page-oob")
        made = Injection(fault, Chain(parse("page-oob=2*on@rank=1").chains[fault.id], 0, "x"), 7)
        made.clock.attach(scheduler)
        return made

    assert injection(SimpleNamespace(tp_rank=0)).fire() is None
    starting = SimpleNamespace()
    one = injection(starting)
    assert one.fire() is None
    starting.tp_rank = 1
    assert one.fire() is not None
    one.log("struck")
    assert replay(7, one.schedule) == "seed=7;page-oob=1*on@at=2@rank=1"


def test_a_fault_that_this_release_cannot_have_is_refused_at_start(monkeypatch):
    monkeypatch.setitem(targets.SITES, "future.publish", (("", None),))
    with pytest.raises(GrammarError, match=r"publish-order cannot be injected here: SGLang .* has"):
        install_all(parse("publish-order=1*early"), Hooks())


STRESS = ("abort-request", "delayed-step", "forced-retract", "radix-evict", "slow-grammar")


def test_every_fault_says_who_must_catch_it():
    tracers, fixes = discovery.names("tracer"), discovery.names("fix")
    for name in discovery.names("fault"):
        fault = discovery.load("fault", name)
        # Stress breaks nothing: every tracer must stay silent.
        assert fault.caught_by or name in STRESS
        assert set(fault.caught_by) <= set(tracers)
        assert fault.recreates in ("", *fixes)
        assert set(fault.arguments) <= set(fault.tasks)
        for drill in (*fault.drills, *fault.plain_drills):
            for action in parse(f"{name}={drill}").chains[name]:
                assert action.task in fault.tasks
    assert recreated_bugs(parse("stale-swa-state=on;page-oob=on")) == {
        "swa-state-swap": "stale-swa-state"
    }


@pytest.fixture
def rig_with(arm):
    def make(plan, **environ):
        arm(G4DEBUG_FAULTS=plan, **environ)
        rig = Rig()
        for tokens in (50, 100, 61):
            rig.admit(f"r{tokens}", tokens)
        return rig, rig.backend()

    return make


def run(rig, backend, *modes, worker=None):
    """Bad cells after each metadata of these modes; a draft's are made in its worker's view."""
    cells = []
    for mode in modes:
        batch = rig.batch(mode, rig.requests[1:], backend)
        with nullcontext() if worker is None else worker._target_kv_pool_view(batch):
            backend.init_forward_metadata(batch)
        cells.append(bad_cells(backend))
    return cells


def test_page_oob_writes_a_live_cell_and_says_which(rig_with, caplog):
    rig, backend = rig_with("seed=7;page-oob=4*on")
    cells = run(rig, backend, *["decode"] * 6)
    assert [len(c) for c in cells] == [1, 1, 1, 1, 0, 0]
    said = [m for m in caplog.messages if "g4debug fault (seed=7) page-oob #" in m]
    assert len(said) == 4
    for number, (line, (cell,)) in enumerate(zip(said, cells[:4], strict=True), 1):
        name, row, column, value = cell
        kind = "full" if name == "page_table" else "swa"
        assert f"#{number}: target decode: {kind} table row {row} column {column} = {value}" in line
        tokens = rig.requests[1:][row].tokens
        assert column == (tokens - 1) // 16  # the newest page
    assert {c[0] for found in cells[:4] for c in found} == {"page_table", "swa_page_table"}


def test_the_cell_it_writes_is_one_that_the_kernel_reads(rig_with):
    rig, backend = rig_with("seed=1;page-oob=on")
    for mode in ("decode", "target_verify", "extend"):
        device.clear()
        rig.step(backend, mode, rig.requests[1:])
        assert device.pending() is not None


def test_a_seed_repeats_itself(rig_with):
    runs = {}
    for seed in (3, 4):
        for again in (1, 2):
            arm = Injection(
                page_oob.FAULT, Chain(parse("page-oob=on").chains["page-oob"], seed, "x"), seed
            )
            rig, backend = rig_with("")
            found = []
            for _ in range(6):
                backend.init_forward_metadata(rig.batch("decode", rig.requests[1:], backend))
                of = tables.tables_of(ADAPTER, backend, None, None)
                tables.corrupt(of, arm, "decode", "target", page_oob.out_of_range)
                found.append(bad_cells(backend))
            runs[seed, again] = found
    assert runs[3, 1] == runs[3, 2]
    assert runs[4, 1] == runs[4, 2]
    assert runs[3, 1] != runs[4, 1]


def test_page_oob_of_some_modes_and_runners_only(rig_with):
    rig, target = rig_with("page-oob=on@mode=target_verify@runner=target")
    draft = rig.backend(draft=True)
    modes = ("decode", "target_verify", "extend")
    assert [len(c) for c in run(rig, target, *modes)] == [0, 1, 0]
    found = run(rig, draft, *modes, worker=draft_worker(rig, draft))
    assert [len(c) for c in found] == [0, 0, 0]


def test_corrupt_takes_a_number_of_cells(rig_with, caplog):
    rig, backend = rig_with("page-oob=1*corrupt(5)")
    run(rig, backend, "decode")
    assert len([m for m in caplog.messages if "page-oob #" in m]) == 5


def test_page_oob_at_graph_replay(rig_with):
    """The static tables that a CUDA graph reads, right before it is replayed."""
    rig, backend = rig_with("page-oob=1*on@mode=replay")
    batch = rig.batch("decode", rig.requests[1:], backend)
    backend.init_cuda_graph_state(4, 4)
    capture_graph(backend, batch)
    assert bad_cells(backend) == set()
    replay_graph(backend, batch)
    assert len(bad_cells(backend)) == 1
    replay_graph(backend, batch)
    assert bad_cells(backend) == set()  # it fired once


def test_stale_swa_state_is_the_drafts_only(rig_with, caplog):
    rig, target = rig_with("stale-swa-state=on", G4DEBUG_FIX_SWA_STATE_SWAP="0")
    draft = rig.backend(draft=True)
    assert (draft.use_sliding_window_kv_pool, draft._swa_kv_pool) == (False, None)
    assert (target.use_sliding_window_kv_pool, target._swa_kv_pool) == (True, rig.pool)
    assert any("stale-swa-state #1: draft backend" in m for m in caplog.messages)


@pytest.mark.parametrize("broken", [False, True])
def test_stale_swa_state_is_what_breaks_the_device(rig_with, broken):
    plan = "stale-swa-state=on" if broken else "stale-swa-state=off"
    rig, _ = rig_with(plan, G4DEBUG_FIX_SWA_STATE_SWAP="0")
    draft = rig.backend(draft=True)
    worker = draft_worker(rig, draft)
    batch = rig.batch("decode", rig.requests[1:], draft, pool=dummy_pool())
    worker._init_frozen_kv_metadata(batch)
    with worker._target_kv_pool_view(batch):
        rig.forward(draft, batch, save=False)
    assert (device.pending() is not None) is broken
    if broken:
        assert device.pending().page > 320 // 16  # a full-pool page in a SWA layer


def test_a_selector_value_that_never_matches_is_refused(sglang):
    plan = parse("page-oob=on@mode=decod")
    with pytest.raises(GrammarError, match=r"@mode=decod never matches; valid: .*decode.*replay"):
        install_all(plan, Hooks())


def test_a_schedule_replays_the_very_same_firings():
    """With a probability and draws: the replay fires at the same opportunities, draws the same."""

    def run(plan: str) -> tuple[list[str], list[tuple[int, int]]]:
        parsed = parse(plan)
        arm = Injection(
            page_oob.FAULT, Chain(parsed.chains["page-oob"], parsed.seed, "page-oob"), 5
        )
        drawn = []
        for _ in range(400):
            if arm.fire(mode="decode", runner="target") is not None:
                drawn.append((arm.opportunities, arm.random.randrange(10**6)))
                arm.log(f"drew {drawn[-1]}")
                arm.log("a second line of the same firing")
        return arm.schedule, drawn

    schedule, drawn = run("seed=5;page-oob=2%3*corrupt(2)@mode=decode->5%2*on->off")
    assert len(drawn) == 5
    again, redrawn = run(replay(5, schedule))
    assert redrawn == drawn
    assert again == schedule
    assert replay(5, schedule).startswith("seed=5;page-oob=1*corrupt(2)@at=")
