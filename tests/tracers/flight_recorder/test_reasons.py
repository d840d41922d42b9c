"""What the reasons claim beyond SGLang's figures: a deadlock, and the order of the queue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.tracers.flight_recorder import admission, reasons, shares
from g4debug.tracers.flight_recorder.admission import Refusal
from g4debug.tracers.flight_recorder.shares import Share, Shares
from g4debug.tracers.flight_recorder.work import Place, Work


def request(rid: str) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, req_pool_idx=None)


@pytest.fixture
def scheduler(monkeypatch):
    refused = Refusal("SWA pool: needs 512, has 64", admission.SWA, 449, 513, 768)
    monkeypatch.setattr(admission, "refusal", lambda *_: refused)
    monkeypatch.setattr(shares, "shares", lambda *_: Shares((), 0, 0, 64, 0))
    monkeypatch.setattr(reasons, "state_of", lambda _: None)  # whatever other tests have armed
    return SimpleNamespace(waiting_queue=[], schedule_policy="fcfs", enable_lora=False)


def test_who_waits_for_a_prompt_that_goes_on_is_in_no_deadlock(scheduler):
    waits, chunk = Work(request("waits"), Place.QUEUE), Work(request("long"), Place.CHUNK)
    scheduler.waiting_queue = [waits.request]
    items = [chunk, waits]
    assert not reasons.of(scheduler, waits, items, steps=True).deadlock
    found = reasons.of(scheduler, waits, items, steps=False)
    assert found.deadlock
    assert found.verdict.startswith("A deadlock. It lacks 449 tokens of the SWA pool, no request")


def test_a_deadlock_is_only_where_it_is_known_who_holds_the_memory(scheduler, monkeypatch):
    waits = Work(request("waits"), Place.QUEUE)
    scheduler.waiting_queue = [waits.request]

    def verdict(rest: int, sessions: int = 0) -> reasons.Reason:
        monkeypatch.setattr(shares, "shares", lambda *_: Shares((), 0, 0, 64, rest, sessions))
        return reasons.of(scheduler, waits, [waits], steps=False)

    assert verdict(rest=448).deadlock  # it would not do if all of it came back
    lost = verdict(rest=449)
    assert not lost.deadlock
    assert "449 tokens belong to no request and no prefix cache" in lost.verdict
    assert "pool-leak" in lost.verdict
    session = verdict(rest=0, sessions=2)
    assert not session.deadlock
    assert "each of 2 open sessions keeps memory until it is closed" in session.verdict


def test_a_pool_that_is_too_small_is_a_deadlock_whoever_holds_it(scheduler, monkeypatch):
    refused = Refusal("SWA pool: needs 800, has 64", admission.SWA, 736, 800, 768)
    monkeypatch.setattr(admission, "refusal", lambda *_: refused)
    monkeypatch.setattr(shares, "shares", lambda *_: Shares((), 0, 0, 64, 704, 1))
    waits = Work(request("waits"), Place.QUEUE)
    scheduler.waiting_queue = [waits.request]
    found = reasons.of(scheduler, waits, [waits], steps=True)
    assert (found.deadlock, found.never) == (True, True)
    assert "No step can free enough" in found.verdict


def never(scheduler, monkeypatch, in_force: bool, **refused) -> Work:
    """A request that the whole pool has no room for. in_force: the fix for that."""
    told = Refusal("a pool: needs 257, has 256", refused.pop("pool"), 1, 257, 256, **refused)
    monkeypatch.setattr(admission, "refusal", lambda *_: told)
    monkeypatch.setattr(reasons, "state_of", lambda _: "applied" if in_force else "off")
    waits = Work(request("waits"), Place.QUEUE)
    scheduler.waiting_queue = [waits.request]
    return waits


@pytest.mark.parametrize(
    ("refused", "fix"),
    [
        ({"pool": admission.SWA}, "idle-admission"),
        ({"pool": admission.FULL, "by_page": True}, "ignore-eos-admission"),
    ],
)
def test_who_is_admitted_by_a_fix_as_soon_as_nothing_runs_is_in_no_deadlock(
    scheduler, monkeypatch, refused, fix
):
    runs = Work(request("runs"), Place.RUNS)
    waits = never(scheduler, monkeypatch, True, **refused)
    found = reasons.of(scheduler, waits, [runs, waits], steps=True)
    assert (found.deadlock, found.never, found.fix) == (False, False, fix)
    assert found.verdict.endswith(
        f"The fix {fix} admits the request all the same, once nothing else runs."
    )
    # It did not.
    assert reasons.of(scheduler, waits, [waits], steps=False).never
    waits = never(scheduler, monkeypatch, False, **refused)
    assert reasons.of(scheduler, waits, [runs, waits], steps=True).never


def test_no_fix_is_named_for_what_a_page_less_would_not_admit(scheduler, monkeypatch):
    waits = never(scheduler, monkeypatch, False, pool=admission.FULL)
    found = reasons.of(scheduler, waits, [waits], steps=False)
    assert (found.deadlock, found.fix) == (True, "")


@pytest.mark.parametrize(
    ("server", "fix"),
    [
        ({}, "idle-admission"),
        ({"disaggregation_mode": "prefill"}, ""),
        ({"pp_size": 2}, ""),
        ({"enable_flexkv": True}, ""),
    ],
)
def test_a_fix_is_named_only_where_it_acts(scheduler, monkeypatch, server, fix):
    refused = Refusal("SWA pool", admission.SWA, 736, 800, 768)
    monkeypatch.setattr(admission, "refusal", lambda *_: refused)
    scheduler.server_args = SimpleNamespace(**server)
    waits = Work(request("waits"), Place.QUEUE)
    scheduler.waiting_queue = [waits.request]
    assert reasons.of(scheduler, waits, [waits], steps=False).fix == fix


@pytest.mark.parametrize(
    ("server", "fix"),
    [
        ({}, "parked-chunk"),
        ({"disaggregation_mode": "prefill"}, ""),
        ({"pp_size": 2}, ""),
        ({"enable_flexkv": True}, "parked-chunk"),
    ],
)
def test_parked_chunk_is_named_only_where_it_acts(scheduler, monkeypatch, server, fix):
    refused = Refusal("SWA pool: needs 512, has 64", admission.SWA, 1, 65, 768)
    monkeypatch.setattr(admission, "refusal", lambda *_: refused)
    parked = Work(request("long"), Place.CHUNK)
    held = Shares((Share(parked, 704, behind=576),), 0, 0, 64, 0)
    monkeypatch.setattr(shares, "shares", lambda *_: held)
    scheduler.server_args = SimpleNamespace(**server)
    found = reasons.of(scheduler, parked, [parked], steps=False)
    assert (found.like, found.fix) == (reasons.PARKED, fix)


def test_sessions_that_keep_memory_between_turns_are_counted(monkeypatch):
    """A slot whose row a request uses is that request's."""
    slots = {n: SimpleNamespace(req_pool_idx=row) for n, row in enumerate((None, 3, 4))}
    wrapped = SimpleNamespace(tree_cache=SimpleNamespace(slots=slots))
    inside = SimpleNamespace(tree_cache=SimpleNamespace(session=SimpleNamespace(slots=slots)))
    uses = Work(SimpleNamespace(rid="turn", req_pool_idx=4), Place.RUNS)
    for scheduler in (wrapped, inside):
        assert shares._between_turns(scheduler, []) == 2
        assert shares._between_turns(scheduler, [uses]) == 1


class Node:
    """Of a prefix cache in Python, with one pool."""

    def __init__(self, id: int, parent: Node | None, tokens: int, lock_ref: int) -> None:
        self.id, self.parent, self.lock_ref = id, parent, lock_ref
        self.key = self.value = range(tokens)


def test_locked_nodes_are_named_with_the_requests_below_them():
    root = Node(0, None, 0, 1)
    shared = Node(1, root, 64, 2)
    leaf, free = Node(2, shared, 192, 1), Node(3, shared, 500, 0)

    def at(rid: str, node: Node, row: int | None = 1) -> Work:
        return Work(SimpleNamespace(rid=rid, last_node=node, req_pool_idx=row), Place.RUNS)

    items = [at("a", shared), at("b", leaf), at("queued", free, None)]
    tree = SimpleNamespace(root_node=root)
    nodes = shares.locked_nodes(tree, "full", items)
    held = Shares((), 500, 256, 0, 0, nodes=nodes)
    assert list(held.words(None))[1] == (
        "of those locked, 192 in node 2, locked 1 time, with b at or below it; 64 in node 1, "
        "locked 2 times, with a, b at or below it"
    )
    many = Shares((), 0, 256, 0, 0, nodes=nodes * 3)
    assert list(many.words(None))[1].endswith("; 2 more nodes")
    native = SimpleNamespace(tree_core=SimpleNamespace())
    assert shares.locked_nodes(native, "full", items) is None
    told = list(Shares((), 0, 256, 0, 0, nodes=None).words(None))
    assert told[1] == "the cache, which is in Rust, does not tell which of its nodes are locked"


class RustTree:
    """Of the unified cache in Rust: it shows the path to a node by its id, and no locks."""

    sliding_window_size = 100

    def __init__(self) -> None:
        self.tree_core = SimpleNamespace(collect_path_info=self._path)

    def _path(self, ids: tuple[int, ...]) -> list[list[SimpleNamespace]]:
        if ids == (9,):
            raise KeyError(9)  # it was evicted
        ends = {1: 64, 2: 256, 3: 320}
        found, begin = [], 0
        for id, end in ends.items():
            if id <= ids[0]:
                length = end - begin
                found.append(
                    SimpleNamespace(
                        node_id=id, path_start=begin, path_end=end, full_value_len=length
                    )
                )
                begin = end
        return [found]


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_nodes_of_the_tree_in_rust_are_named_without_their_locks(pool):
    items = [
        Work(SimpleNamespace(rid=rid, last_node=node, req_pool_idx=row), Place.RUNS)
        for rid, node, row in (("a", 2, 1), ("b", 3, 2), ("queued", 3, None), ("evicted", 9, 3))
    ]
    nodes = shares.locked_nodes(RustTree(), pool, items)
    told = list(Shares((), 0, 320, 0, 0, nodes=nodes).words(None))[1]
    # A window of 100 tokens does not reach node 1 from either request's end.
    assert told.startswith(
        "the cache, which is in Rust, does not show its locks; by SGLang's rule the requests that "
        "have begun lock at most 192 in node 2, with a, b at or below it; "
    )
    assert "64 in node 3, with b at or below it" in told
    assert ("in node 1, with a, b at or below it" in told) == (pool == "full")


@pytest.mark.parametrize("lora", [False, True])
def test_only_without_adapters_the_first_stops_all_others(scheduler, lora):
    scheduler.enable_lora = lora
    scheduler.waiting_queue = [request("first"), request("second")]
    item = Work(scheduler.waiting_queue[1], Place.QUEUE)
    line = reasons.of(scheduler, item, [item], steps=True).line
    assert "The first is first: SWA pool: needs 512" in line
    assert ("passes over one whose LoRA adapter has no place" in line) is lora
