"""The page ledger, fed by SGLang's own allocators through the real hooks."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from real_backend import FULL, PAGE, SWA, Rig
from releases import free_list, story

from g4debug import plugin
from g4debug.findings.steps import Recorder
from g4debug.hooking import targets
from g4debug.ledger import shadow as shadows
from g4debug.ledger.books import DEPTH, PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import KEPT

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]


@pytest.fixture
def armed(arm):
    """A rig, and the ledger that watches its allocators: (rig, ledger)."""
    arm(G4DEBUG_TRACE="page-table")
    rig = Rig()
    return rig, plugin.in_force.ledger


def agree(rig: Rig, ledger: Ledger) -> None:
    """The ledger, the shadow and SGLang's own lists say the same of every page."""
    for name, allocator in (
        ("full", rig.allocator.full_attn_allocator),
        ("swa", rig.allocator.swa_attn_allocator),
    ):
        free = set(free_list(allocator))
        held = set(range(1, allocator.num_pages + 1)) - free
        assert set(ledger.pools[name].held.nonzero()[0].tolist()) == held
    full = ledger.pools["full"]
    mapping = rig.allocator.full_to_swa_index_mapping[:-1].view(-1, PAGE)[:, 0] // PAGE
    words = ledger.shadow[:-1]
    for page in range(1, full.pages):
        expected = int(mapping[page]) if full.held[page] else shadows.FREE
        assert int(words[page]) == expected, page
        assert not full.held[page] or int(full.partner[page]) == int(mapping[page])
    assert int(ledger.shadow[-1]) == 1
    assert not ledger.broken


def pages_of(rig: Rig, request) -> list[int]:
    row = rig.req_to_token.req_to_token[request.req_pool_idx]
    return [int(row[i]) // PAGE for i in range(0, request.tokens, PAGE)]


def test_what_is_handed_out_and_taken_back(armed):
    rig, ledger = armed
    agree(rig, ledger)
    request = rig.admit("a", 3 * PAGE + 1)
    agree(rig, ledger)
    pages = pages_of(rig, request)
    full = ledger.pools["full"]
    assert full.position[pages].tolist() == [0, PAGE, 2 * PAGE, 3 * PAGE]
    tokens = rig.req_to_token.req_to_token[request.req_pool_idx, : request.tokens]
    rig.allocator.free_swa(tokens[: 2 * PAGE])
    agree(rig, ledger)
    rig.allocator.free(tokens)
    agree(rig, ledger)
    kinds = [e.kind for e in ledger.history("full", pages[0])]
    assert kinds[-2:] == ["extend", "free"]
    assert ledger.history("full", pages[0])[-1].pages[0] == pages[0]
    swa = [e for e in ledger.last_events() if e.pool == "swa"]
    assert story(swa)[-3:] == ["extend", "evict", "free"]
    assert "test_ledger.py" in ledger.last_events()[-1].caller


def test_only_the_first_token_of_a_page_is_news(armed):
    rig, ledger = armed
    request = rig.admit("a", PAGE - 1)
    before = len(ledger.last_events())
    row = rig.req_to_token.req_to_token[request.req_pool_idx]
    last = row[PAGE - 2 : PAGE - 1].to(torch.int64)
    lengths = torch.tensor([PAGE])
    found = rig.allocator.alloc_decode(lengths, lengths, last)
    assert len(ledger.last_events()) == before  # the page was there already
    lengths = torch.tensor([PAGE + 1])
    found = rig.allocator.alloc_decode(lengths, lengths, found)
    assert [e.kind for e in ledger.last_events()[before:]] == ["decode", "decode"]
    assert ledger.pools["full"].position[int(found[0]) // PAGE] == PAGE
    agree(rig, ledger)


def test_a_request_that_goes_on_in_a_free_page_does_not_make_it_look_held(armed):
    """In the same allocation another row gets a page, and that one is held."""
    rig, ledger = armed
    going_on, growing = rig.admit("a", 3 * PAGE + 2), rig.admit("b", 3 * PAGE)
    rows = [rig.req_to_token.req_to_token[r.req_pool_idx].to(torch.int64) for r in rig.requests[1:]]
    rig.allocator.free(rows[0][3 * PAGE : going_on.tokens])
    inner = rig.allocator.full_attn_allocator
    inner.free_pages = inner.free_pages.roll(-1)  # b does not get this one
    lengths = torch.tensor([going_on.tokens + 1, growing.tokens + 1])
    last = torch.stack([rows[0][going_on.tokens - 1], rows[1][growing.tokens - 1]])
    found = rig.allocator.alloc_decode(lengths, lengths, last)
    agree(rig, ledger)
    assert not ledger.pools["full"].held[int(found[0]) // PAGE]
    assert ledger.pools["full"].held[int(found[1]) // PAGE]


def test_the_request_of_each_page(armed):
    from types import SimpleNamespace

    rig, ledger = armed
    ledger.batch = ledger.allocating = SimpleNamespace(
        reqs=[SimpleNamespace(rid="x"), SimpleNamespace(rid="y")]
    )
    zero, lengths = torch.zeros(2, dtype=torch.int64), torch.tensor([2 * PAGE, PAGE])
    last = torch.tensor([-1, -1])
    found = rig.allocator.alloc_extend(zero, zero, lengths, lengths, last, 3 * PAGE)
    pages = (found[::PAGE] // PAGE).tolist()
    assert [ledger.owner("full", p) for p in pages] == ["x", "x", "y"]
    assert ledger.history("full", pages[2])[-1].request == "y"
    assert ledger.owner("full", 10_000) == "" == ledger.owner("none", 1)


def test_an_swa_page_that_moves_to_another_full_page(armed):
    rig, ledger = armed
    a, b = rig.admit("a", PAGE), rig.admit("b", PAGE)
    mine, other = (
        rig.req_to_token.req_to_token[r.req_pool_idx, :PAGE].to(torch.int64) for r in (a, b)
    )
    mapping = rig.allocator.full_to_swa_index_mapping
    rig.allocator.free_swa(other)
    rig.allocator.set_full_to_swa_mapping(other, mapping[mine])
    rig.allocator.set_full_to_swa_mapping(mine, torch.zeros_like(mine))
    agree(rig, ledger)
    rig.allocator.free(mine)
    rig.allocator.free(other)
    agree(rig, ledger)


def test_a_deferred_free_is_entered_when_it_happens(armed):
    rig, ledger = armed
    request = rig.admit("a", 2 * PAGE)
    tokens = rig.req_to_token.req_to_token[request.req_pool_idx, : request.tokens].clone()
    before = story(ledger.last_events())
    rig.allocator.free_group_begin()
    rig.allocator.free(tokens)
    assert story(ledger.last_events()) == before
    assert ledger.pools["full"].held[pages_of(rig, request)].all()
    assert ledger.pools["swa"].held[1:3].all()
    rig.allocator.free_group_end()
    agree(rig, ledger)
    assert not ledger.pools["full"].held[pages_of(rig, request)].any()


def test_exhaustion_is_an_event(armed):
    rig, ledger = armed
    zero, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([FULL])
    assert rig.allocator.swa_attn_allocator.alloc(SWA + PAGE) is None
    assert "no room for" in ledger.last_events()[-1].note
    assert rig.allocator.alloc_extend(zero, zero, lengths, lengths, lengths - 1, FULL) is None
    agree(rig, ledger)


@pytest.mark.skipif(
    targets.path("pool.backup_state") is None,
    reason="this SGLang's allocators cannot go back to a saved state",
)
def test_backup_and_restore(armed):
    rig, ledger = armed
    saved = rig.allocator.backup_state()
    mapping = rig.allocator.full_to_swa_index_mapping.clone()
    rig.admit("a", 3 * PAGE)
    rig.allocator.restore_state(saved)
    rig.allocator.full_to_swa_index_mapping.copy_(mapping)
    agree(rig, ledger)


def test_clear(armed):
    rig, ledger = armed
    rig.admit("a", 3 * PAGE)
    rig.allocator.clear()
    assert not ledger.pools["full"].held.any()
    agree(rig, ledger)


def test_a_listener_sees_the_state_before_the_event(armed):
    rig, ledger = armed
    seen = []
    ledger.listen(lambda pool, event, pages: seen.append((event.kind, pool.held[pages].tolist())))
    request = rig.admit("a", PAGE)
    rig.allocator.free(rig.req_to_token.req_to_token[request.req_pool_idx, :PAGE])
    assert [held for kind, held in seen if kind != "unmap"] == [[False], [False], [True], [True]]


def test_a_bug_of_ours_gives_up_the_ledger_and_not_the_server(armed, caplog):
    rig, ledger = armed

    def listener(*args):
        raise KeyError("ours")

    ledger.listen(listener)
    request = rig.admit("a", PAGE)  # SGLang's allocator goes on
    assert request.req_pool_idx is not None
    assert "KeyError" in ledger.broken
    assert int(ledger.shadow[-1]) == 0
    assert caplog.text.count("the page ledger is off") == 1
    assert ledger.recorder.status.part("ledger").record().off.startswith("it failed in ")


class Arrival:
    """Stands for torch.cuda.Event: a copy arrives when the test says so."""

    here = False

    def query(self):
        return self.here

    def synchronize(self):
        self.here = True


def far(ledger, monkeypatch):
    """Let index tensors be far away, as on CUDA, and copies arrive at once: the events made."""
    made = []

    class Event(Arrival):
        here = True

        def __init__(self):
            made.append(self)

        def record(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(ledger, "is_far", lambda indices: True)
    return made


@pytest.fixture
def delayed(armed, monkeypatch):
    """Pages that are handed out reach the host later, as on CUDA: (rig, ledger, arrivals)."""
    rig, ledger = armed
    arrivals = []

    def sent():
        arrivals.append(Arrival())
        return arrivals[-1]

    def each_alone(*args, **kwargs):
        with monkeypatch.context() as only_here:
            only_here.setattr(ledger, "is_far", lambda indices: True)
            post(*args, **kwargs)
        ledger.transport.send()

    post = ledger.post
    monkeypatch.setattr(ledger.transport, "_event", sent)
    monkeypatch.setattr(ledger, "post", each_alone)
    return rig, ledger, arrivals


def test_what_arrives_later_is_entered_in_order(delayed):
    rig, ledger, arrivals = delayed
    a = rig.admit("a", 2 * PAGE)
    full = ledger.pools["full"]
    assert not full.held[pages_of(rig, a)].any()
    arrivals[0].here = True
    ledger.settle()
    assert full.held[pages_of(rig, a)].all()
    assert not full.partner[pages_of(rig, a)].any()  # its SWA pages are still on their way
    tokens = rig.req_to_token.req_to_token[a.req_pool_idx, : a.tokens]
    rig.allocator.free(tokens)  # waits for all of it
    agree(rig, ledger)


def test_what_arrives_late_counts_for_the_step_in_which_it_was_handed_out(delayed):
    rig, ledger, _ = delayed
    recorder = ledger.recorder
    recorder.prepare_step()
    a = rig.admit("a", PAGE)
    recorder.step, recorder.preparing = 1, False
    recorder.prepare_step()  # step 2 is being prepared when the first one's pages arrive
    ledger.settle(wait=True)
    (page,) = pages_of(rig, a)
    assert [e.step for e in ledger.history("full", page)] == [1]
    rig.allocator.free(rig.req_to_token.req_to_token[a.req_pool_idx, : a.tokens])
    assert [e.step for e in ledger.history("full", page)] == [1, 2]


def test_what_the_device_had_copied_before_it_died(delayed):
    from g4debug.ledger.index_transport import NOT_YET

    rig, ledger, _ = delayed
    a, b = rig.admit("a", PAGE), rig.admit("b", PAGE)
    late = list(ledger.transport.waiting)[3:]  # a's: full, SWA and the mapping
    for pending in late:
        ledger.transport._buffers.words[pending.words] = NOT_YET
    ledger.transport.salvage()
    full = ledger.pools["full"]
    assert full.held[pages_of(rig, a)].all()
    assert not full.held[pages_of(rig, b)].any()
    ledger.settle(wait=True)  # nothing is left that could be waited for
    assert not ledger.broken


def test_a_finding_leaves_the_ledger_whole(armed):
    """A hand-out happened and is entered; a free that is stopped is not."""
    from g4debug.findings.record import Finding, Location
    from g4debug.trapping.trap import TrapError

    rig, ledger = armed

    def listener(pool, event, pages):
        raise TrapError(Finding("c", "k", "s", "h", Location(), "e", "g"), None, "")

    a = rig.admit("a", PAGE)
    ledger.listen(listener)
    with pytest.raises(TrapError):
        rig.allocator.free(rig.req_to_token.req_to_token[a.req_pool_idx, :PAGE])
    ledger.listeners.clear()
    agree(rig, ledger)
    ledger.listen(listener)
    zero, lengths = torch.zeros(2, dtype=torch.int64), torch.tensor([2 * PAGE, PAGE])
    inner = rig.allocator.full_attn_allocator
    with pytest.raises(TrapError):
        inner.alloc_extend(zero, zero, lengths, lengths, zero - 1, 3 * PAGE)
    free = set(inner.free_pages.tolist())
    held = set(range(1, inner.num_pages + 1)) - free
    assert set(ledger.pools["full"].held.nonzero()[0].tolist()) == held
    assert not ledger.broken


def test_history_is_bounded():
    ledger = Ledger(Recorder(1))
    pool = ledger.pools["full"] = PoolLedger("full", 4, PAGE)
    for _ in range(DEPTH + 5):
        ledger.enter(pool, "alloc", np.array([1]), holds=True)
    assert len(ledger.history("full", 1)) == DEPTH
    ledger.enter(pool, "alloc", np.array([2]), holds=True)
    for _ in range(KEPT):
        ledger.enter(pool, "alloc", np.array([3]), holds=True)
    assert ledger.history("full", 1) == ledger.history("full", 2) == ()  # forgotten, not wrong


@pytest.mark.parametrize("unless_free", [False, True])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("with_swa", [False, True])
def test_the_shadows_kernel_and_its_reference_agree(with_swa, begins, unless_free):
    """Indices outside the pool, page 0 and negative ones are skipped, never written."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(-40, 40 * PAGE, (2500,), generator=generator)
    swa = torch.randint(0, 9 * PAGE, (2500,), generator=generator) if with_swa else None
    if swa is not None:  # one SWA page for each page, as allocators have it
        swa = (indices // PAGE) * 7 % 9 * PAGE
    one, two = shadows.new(30, "cpu"), shadows.new(30, "cpu")
    held = set(range(1, 30))
    if unless_free:
        held = set(range(1, 30, 2))
        one[1:-1:2] = two[1:-1:2] = 3
    shadows.reference(one, indices, PAGE, shadows.HELD, swa, begins, unless_free)
    shadows._mark_kernel[(3,)](
        two, indices, indices if swa is None else swa, len(indices), PAGE, 30, shadows.HELD,
        HAS_SWA=swa is not None, BEGINS=begins, UNLESS_FREE=unless_free,
        BLOCK=shadows.BLOCK,
    )  # fmt: skip
    assert torch.equal(one, two)
    assert (one[1:-1] != shadows.FREE).any()
    marked = {p for p in range(1, 30) if int(one[p]) != shadows.FREE}
    if unless_free:
        assert marked == held
        assert any(int(one[p]) != 3 for p in held)
    elif begins:
        first = {t // PAGE for t in indices.tolist() if t % PAGE == 0}
        assert marked == first & held
    assert int(one[0]) == shadows.FREE
    assert int(one[-1]) == 1
    shadows.mark(one, indices[:0], PAGE)


def test_pages_that_sequences_go_on_in_are_not_copied_at_every_step(armed, monkeypatch):
    """As on CUDA: one look in LOOK steps, and at once where the last page known is not held."""
    from types import SimpleNamespace

    from g4debug.ledger.alloc_hooks import LOOK

    rig, ledger = armed
    monkeypatch.setattr(ledger, "is_far", lambda indices: True)
    posted = []

    def at_once(*args, **kwargs):
        posted.append(1)
        with monkeypatch.context() as here:
            here.setattr(ledger, "is_far", lambda indices: False)
            post(*args, **kwargs)

    post = ledger.post
    monkeypatch.setattr(ledger, "post", at_once)
    ledger.batch = ledger.allocating = SimpleNamespace(reqs=[SimpleNamespace(rid="a")])
    request = rig.admit("a", 1)
    row = rig.req_to_token.req_to_token[request.req_pool_idx]
    last = row[:1].to(torch.int64)
    posted.clear()
    looks = []
    for length in range(2, PAGE + 1):  # within the page
        lengths = torch.tensor([length])
        last = rig.allocator.alloc_decode(lengths, lengths, last)
        looks.append(len(posted))
        posted.clear()
    assert sum(n > 0 for n in looks) == (PAGE - 1) // LOOK
    assert set(looks) == {0, 2}  # both pools, or none
    # The next page is allocated and given back, as verify does with what was rejected.
    lengths = torch.tensor([PAGE + 1])
    spare = rig.allocator.alloc_decode(lengths, lengths, last)
    rig.allocator.free(spare)
    posted.clear()
    lengths = torch.tensor([PAGE])
    rig.allocator.alloc_decode(lengths, lengths, last - 1)
    assert posted  # a look, no finding: it goes on in the page before
    posted.clear()
    rig.allocator.alloc_decode(lengths, lengths, last - 1)
    assert not posted  # and that is known now
    assert not [e for e in ledger.last_events() if e.kind in ("use", "mismatch")]


@pytest.mark.parametrize(
    ("pages", "loose"),
    [
        ((5, 6, 5), []),
        ((), []),
        ((5, 4), [4]),
        ((0,), [0]),
        ((-1, 5), [-1]),
        ((10, 99), [10, 99]),
    ],
)
def test_which_pages_are_not_held(pages, loose):
    pool = PoolLedger("full", pages=10, page_size=4)
    pool.held[[5, 6, 9]] = True
    assert pool.not_held(np.array(pages, dtype=np.int64)).tolist() == loose


def test_a_step_is_sent_in_one_copy_whose_event_is_used_again(armed, monkeypatch):
    """Each copy and each event is an operation of the host, and a step may post dozens of times."""
    rig, ledger = armed
    made = far(ledger, monkeypatch)
    a = rig.admit("a", 2 * PAGE)
    assert len(ledger.transport.waiting) > 1
    assert not made
    ledger.settle()
    assert len(made) == 1
    agree(rig, ledger)
    for rid in "bcd":
        rig.admit(rid, PAGE)
        ledger.settle(wait=True)
    rig.allocator.free(rig.req_to_token.req_to_token[a.req_pool_idx, : a.tokens])
    ledger.settle(wait=True)
    assert len(made) == 1
    agree(rig, ledger)


def test_what_is_posted_is_of_that_moment(armed, monkeypatch):
    """SGLang may give the row to another request, and clear the mapping, before it is sent."""
    _, ledger = armed
    far(ledger, monkeypatch)
    row, mapping, found = torch.arange(8), torch.arange(100, 120), []
    ledger.post(row[::2], lambda words: found.append(words.tolist()), mapping)
    ledger.post(row[:2], lambda words: found.append(words.tolist()))
    row.zero_()
    mapping.zero_()
    ledger.settle(wait=True)
    assert found == [[0, 2, 4, 6, 100, 102, 104, 106], [0, 1]]


def test_more_than_there_is_room_for_is_entered_in_order(armed, monkeypatch):
    from g4debug.ledger import index_transport as module

    _, ledger = armed
    far(ledger, monkeypatch)
    monkeypatch.setattr(module, "STAGING", 8)
    found = []
    for n in (3, 4, 5, 20, 1, 8, 2):
        ledger.post(torch.full((n,), n), lambda words: found.append(words.tolist()))
    ledger.settle(wait=True)
    assert found == [[n] * n for n in (3, 4, 5, 20, 1, 8, 2)]


def test_what_is_gathered_is_entered_while_the_forward_runs(armed, monkeypatch):
    """Without overlap scheduling the host has time only then. What frees pages does not wait."""
    rig, ledger = armed
    made = far(ledger, monkeypatch)
    monkeypatch.setattr(ledger.transport, "_beside", lambda ready: nullcontext())
    full, ledger.transport.gathers = ledger.pools["full"], True
    a = rig.admit("a", 2 * PAGE)
    assert not full.held[pages_of(rig, a)].any()
    assert not made  # nothing was asked of the device
    ledger.transport.before_forward()
    assert len(made) == 1
    ledger.transport.meanwhile()
    assert full.held[pages_of(rig, a)].all()
    assert len(made) == 2  # one event before the forward, and one for all copies
    agree(rig, ledger)
    ledger.transport.before_forward()
    ledger.transport.meanwhile()  # nothing was allocated
    assert len(made) == 2
    b = rig.admit("b", PAGE)
    page = int(pages_of(rig, b)[0])
    rig.allocator.free(rig.req_to_token.req_to_token[b.req_pool_idx, :PAGE])
    ledger.settle(wait=True)
    agree(rig, ledger)
    kinds = [e.kind for e in ledger.history("full", page)]
    assert kinds.index("extend") < kinds.index("free")


@pytest.mark.skipif(
    targets.path("pool.release") is not None, reason="this release frees the pools one by one"
)
def test_indices_that_are_freed_in_both_pools_are_read_once(armed, monkeypatch):
    """On a GPU each reading is a copy that waits for the device."""
    from g4debug.ledger import free_hooks

    rig, ledger = armed
    read = []

    def on_host(indices):
        read.append(indices.numel())
        return indices.to(torch.int64).numpy()

    a = rig.admit("a", 2 * PAGE)
    monkeypatch.setattr(free_hooks, "on_host", on_host)
    rig.allocator.free(rig.req_to_token.req_to_token[a.req_pool_idx, : a.tokens])
    agree(rig, ledger)
    assert len(read) <= 2  # the indices of the full pool, and those of the SWA pool
