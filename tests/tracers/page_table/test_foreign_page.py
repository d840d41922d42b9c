"""A row of req_to_token that names another request's page, on SGLang's real pools and backend."""

from __future__ import annotations

import pytest
import releases
import torch
from real_backend import PAGE
from served_rows import ARMED, TOKENS, Serving, in_release, it_row, late, release, row_of, running

from g4debug.dumps import reading
from g4debug.ledger.owners import DOUBTS, EVERYTHING, both, place
from g4debug.trapping.trap import TrapError


@pytest.fixture
def serving(arm):
    def make(mode="raise", cached=0):
        folder = arm(**ARMED, G4DEBUG_MODE=mode)
        return Serving(cached), folder

    return make


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
def test_it_is_told_in_that_forward_and_the_right_one_is_blamed(serving, mode):
    it, _ = serving()
    it.forward(mode)  # sound so far
    mine, theirs = it.rig.page("b", 5), it.rig.page("a", 1)
    it.write("b", 5, theirs)
    finding, record = it.found(mode)
    assert finding.kind == "foreign-page"
    assert (finding.location.request, finding.location.column) == ("b", 5)
    row, owner_row = row_of(it.requests["b"]), row_of(it.requests["a"])
    assert f"page {theirs}" in finding.headline
    assert f"of request a for tokens {5 * PAGE}..{6 * PAGE - 1}" in finding.headline
    assert f"because row {row} of req_to_token names it" in finding.headline
    assert "handed out to request a for tokens 16..31" in finding.owner
    assert f"row {owner_row} of request a names it in column 1" in finding.owner
    assert f"Page {mine} was handed out for these tokens and is still held" in finding.cause
    assert "who wrote it is not known" in finding.cause
    assert finding.expected.endswith(f": full-pool page {mine}")
    assert {e.pages[0] for e in record.events} == {theirs}
    assert "contain" not in finding.next_command


def test_a_request_without_a_page_for_these_tokens(serving):
    """The other cause: nothing was ever handed out to it there."""
    it, _ = serving()
    mine, theirs = it.rig.page("b", 5), it.rig.page("a", 1)
    it.write("b", 5, theirs)
    pool = it.ledger.pools["full"]
    pool.owner[mine] = "somebody else"
    finding, _ = it.found()
    assert "knows of no page that was handed out to this request" in finding.cause


def test_the_kernels_table_is_not_changed_for_it(serving):
    clean, folder = serving("contain")
    clean.write("b", 5, clean.rig.page("a", 1))
    clean.ledger.owners.give_up("a test")
    torch.manual_seed(1)
    right = clean.forward()
    it = Serving()
    it.write("b", 5, it.rig.page("a", 1))
    torch.manual_seed(1)
    outputs = it.forward()
    assert [reading.read(p).finding.kind for p in folder.glob("*.pt")].count("foreign-page") >= 1
    for output, same in zip(outputs, right, strict=True):
        assert torch.equal(output, same)


# --- what is nobody's business --------------------------------------------------------------


def shared_prefix(it):
    """The prefix cache lent the page to both."""
    it.write("b", 0, it.rig.page("a", 0))
    it.requests["b"].put(cache_protected_len=PAGE)


def of_a_session(it):
    it.write("b", 5, it.rig.page("a", 1))
    it.requests["b"].session = object()


def an_unknown_hand_out(it):
    """As HiCache loads back: no request is known for the page."""
    page = it.rig.page("a", 1)
    it.ledger.owners.pages[page] = 0
    it.write("b", 5, page)


def another_sglang(it):
    """An SGLang in which requests do not say how much of them is the prefix cache's."""
    it.requests["b"].put(cache_protected_len=None)
    it.write("b", 5, it.rig.page("a", 1))


def a_ledger_that_gave_up(it):
    it.write("b", 5, it.rig.page("a", 1))
    it.ledger.give_up("a test")


HARMLESS = [shared_prefix, of_a_session, an_unknown_hand_out, another_sglang, a_ledger_that_gave_up]


@pytest.mark.parametrize("happens", HARMLESS)
def test_where_the_owner_is_not_certain_it_is_not_judged(serving, happens):
    it, folder = serving()
    happens(it)
    it.protect()
    it.forward()
    assert not list(folder.glob("*.pt"))


def stale_length(it):
    """SGLang moved pages into the prefix cache after the batch was looked at."""
    it.write("b", 0, it.rig.page("a", 0))
    it.requests["b"].put(cache_protected_len=PAGE)  # and protect() is not called


def not_in_the_owners_row(it):
    """Our books say a's, SGLang's rows do not: our books are wrong."""
    page = it.rig.page("b", 5)
    it.ledger.owners.pages[page] = place(row_of(it.requests["a"]), 5)
    it.ledger.pools["full"].owner[page] = "a"


def its_own_of_an_earlier_row(it):
    """It came back in another row and kept its pages."""
    page = it.rig.page("b", 5)
    it.ledger.owners.pages[page] = place(row_of(it.requests["a"]), 5)


def missed(it):
    """Something happened to the free list of the full pool that no hook saw."""
    allocator = it.rig.allocator.full_attn_allocator
    allocator.free_pages = allocator.free_pages.clone()


def of_a_request_that_ended_unseen(it):
    """Its free and the page's next hand-out were both missed; its row still has its old cells."""
    missed(it)
    request = it.requests.pop("a")
    page = it.rig.page("a", 1)
    it.rig.req_to_token.free_slots.append(row_of(request))
    request.put(req_pool_idx=None, kv_allocated_len=0)
    it.write("b", 5, page)


def of_a_tail_that_was_given_back_unseen(it):
    """The same of a request that runs on, and is shorter now."""
    missed(it)
    page = it.rig.page("a", 2)
    it.requests["a"].put(kv_committed_len=2 * PAGE, kv_allocated_len=2 * PAGE)
    it.write("b", 5, page)


SUSPECTED = [
    stale_length,
    not_in_the_owners_row,
    its_own_of_an_earlier_row,
    of_a_request_that_ended_unseen,
    of_a_tail_that_was_given_back_unseen,
]


@pytest.mark.parametrize("happens", SUSPECTED)
def test_a_suspicion_that_sglang_does_not_confirm_is_no_finding(serving, happens, caplog):
    it, folder = serving()
    torch.manual_seed(1)
    right = it.forward()
    happens(it)
    torch.manual_seed(1)
    for output, same in zip(it.forward(), right, strict=True):
        if happens in (not_in_the_owners_row, its_own_of_an_earlier_row):
            assert torch.equal(output, same)  # what is only suspected changes nothing
    it.forward()
    assert not list(folder.glob("*.pt"))
    said = [m for m in caplog.messages if "do not confirm it" in m]
    assert len(said) == 1  # then it is forgotten
    assert not it.ledger.broken


def test_who_is_wrong_too_often_is_given_up(serving, caplog):
    it, folder = serving()
    owners = it.ledger.owners
    for _ in range(DOUBTS):
        owners.pages[it.rig.page("b", 5)] = place(row_of(it.requests["a"]), 5)
        it.forward()
    assert "were not confirmed" in owners.given_up
    assert any("not whose page a row of req_to_token names" in m for m in caplog.messages)
    it.write("b", 5, it.rig.page("a", 1))
    it.forward()
    assert not list(folder.glob("*.pt"))


def test_a_suspicion_does_not_hide_what_is_certain(serving):
    """Both are in one table, and the suspicion is the first of them and not confirmed."""
    it, _ = serving()
    it.ledger.owners.pages[it.rig.page("b", 4)] = place(row_of(it.requests["a"]), 4)
    batch = it.rig.batch("decode", it.rig.requests[1:], it.backend)
    it.backend.init_forward_metadata(batch)
    it.backend.forward_metadata.swa_page_table[1, 6] = 10**6
    with pytest.raises(TrapError) as error:
        it.rig.forward(it.backend, batch)
    assert error.value.finding.kind == "out-of-range"


def test_a_new_owner_in_the_same_row(serving):
    """b goes, d gets its row and its pages."""
    it, folder = serving()
    b = it.requests.pop("b")
    rig = it.rig
    old = next(r for r in rig.requests if r.rid == "b")
    rig.allocator.free(it_tokens := it_row(it, b, old.tokens))
    assert len(it_tokens) == old.tokens
    rig.req_to_token.free_slots.insert(0, row_of(b))
    rig.requests.remove(old)
    it.admit("d", 90, 0)
    it.name_rows()
    it.protect()
    it.forward()
    assert not list(folder.glob("*.pt"))
    it.write("d", 4, rig.page("c", 1))
    finding, _ = it.found()
    assert finding.kind == "foreign-page"
    assert finding.location.request == "d"


def test_rows_that_never_ran_are_not_judged(serving):
    it, _ = serving()
    owners = it.ledger.owners
    known = {row_of(r) for r in it.requests.values()}
    rest = [int(n) for i, n in enumerate(owners.protected) if i not in known]
    assert set(rest) == {both(EVERYTHING, EVERYTHING)}


# --- the release of the request whose row is wrong ---------------------------------------------


def test_a_release_frees_no_page_of_a_request_that_runs(serving):
    it, _ = serving()
    running(it)
    page = it.rig.page("a", 1)
    it.write("b", 5, page)
    row = row_of(it.requests["b"])
    with pytest.raises(TrapError) as error:
        release(it, "b")
    finding = error.value.finding
    assert finding.kind == "foreign-free"
    assert f"FULL page {page} of request a, which still runs, is freed" in finding.headline
    assert "by the release of request b" in finding.headline
    assert finding.location.request == "b"
    assert f"page {page} is held by a" in finding.owner
    assert f"column 5 of its row {row} of req_to_token names it" in finding.cause
    assert it.ledger.pools["full"].held[page]


def test_a_release_that_frees_what_its_row_does_not_name(serving):
    it, _ = serving()
    running(it)
    with pytest.raises(TrapError) as error:
        release(it, "b", it_row(it, it.requests["a"], 50))
    assert error.value.finding.kind == "foreign-free"
    assert "its row of req_to_token does not name it" in error.value.finding.cause


def grouped(it, rid):
    """A decode's results are processed in a free group: frees wait for its end."""
    it.rig.allocator.free_group_begin()
    release(it, rid)
    it.rig.allocator.free_group_end()


def test_a_release_in_a_free_group_is_judged_too(serving):
    it, _ = serving()
    running(it)
    page = it.rig.page("a", 1)
    it.write("b", 5, page)
    with pytest.raises(TrapError) as error:
        grouped(it, "b")
    assert error.value.finding.kind == "foreign-free"
    assert error.value.finding.location.request == "b"
    assert it.ledger.pools["full"].held[page]


def test_a_release_whose_indices_reach_the_host_later_is_judged_too(serving, monkeypatch):
    """As on CUDA, where nothing waits for the device."""
    it, _ = serving()
    running(it)
    it.write("b", 5, it.rig.page("a", 1))
    copies = late(it, monkeypatch)

    def arrives():
        release(it, "b")
        it.ledger.settle(wait=True)

    with pytest.raises(TrapError) as error:
        arrives()
    assert copies
    assert error.value.finding.kind == "foreign-free"
    assert error.value.finding.location.request == "b"


def test_a_page_that_changed_hands_unseen_is_nobody_elses(serving):
    """a gave back its tail and b got the page; both were missed. a's row has its old cell."""
    it, folder = serving()
    running(it)
    page = it.rig.page("a", 2)
    it.requests["a"].put(kv_committed_len=2 * PAGE, kv_allocated_len=2 * PAGE)
    it.write("b", 5, page)
    release(it, "b")
    assert not list(folder.glob("*.pt"))


def segments(it, rid):
    """As a prefix cache does from 0.5.18 on: the indices of whole pages of the row."""
    tokens = it_row(it, it.requests[rid], TOKENS[rid])

    def free(*args):
        it.rig.allocator.free_segment(tokens, start_pos=0)

    in_release(it, rid, free)


def grouped_segments(it, rid):
    it.rig.allocator.free_group_begin()
    segments(it, rid)
    it.rig.allocator.free_group_end()


def test_full_pages_alone_are_judged_too(serving):
    """The SWA pages that b evicted are gone. From 0.5.21 on its full pages are freed alone."""
    it, _ = serving()
    if not hasattr(it.rig.allocator, "free_full"):
        pytest.skip("this release frees no full pages alone")
    running(it)
    page = it.rig.page("a", 1)
    it.write("b", 1, page)
    it.rig.allocator.free_swa(it_row(it, it.requests["a"], 3 * PAGE))

    def free(*args):
        it.rig.allocator.free_full(it_row(it, it.requests["b"], 3 * PAGE)[PAGE:])

    it.rig.allocator.free_group_begin()
    with pytest.raises(TrapError) as error:
        in_release(it, "b", free)
    assert error.value.finding.kind == "foreign-free"
    assert it.ledger.pools["full"].held[page]


CALLS = [release, grouped]
if releases.targets.path("swa.free_segment") is not None:
    CALLS += [segments, grouped_segments]


@pytest.mark.parametrize("call", CALLS)
def test_contain_keeps_the_owners_page(serving, call):
    it, folder = serving("contain")
    running(it)
    page = it.rig.page("a", 1)
    swa = it.rig.page("a", 1, "swa")
    it.write("b", 5, page)
    call(it, "b")
    (record,) = [reading.read(p) for p in folder.glob("*.pt")]
    assert record.finding.kind == "foreign-free"
    assert record.events[-1].stopped
    for name, number in (("full", page), ("swa", swa)):
        assert number not in releases.free_list(getattr(it.rig.allocator, f"{name}_attn_allocator"))
        assert it.ledger.pools[name].held[number]
    assert it.rig.page("a", 1, "swa") == swa  # and its mapping is left


def finished(it):
    it.requests["a"].finished = lambda: True


def lent(it):
    it.requests["a"].put(cache_protected_len=2 * PAGE)


def moved(it):
    it.write("a", 1, 5)


def own(it):
    it.ledger.pools["full"].owner[it.rig.page("a", 1)] = "b"


@pytest.mark.parametrize("happens", [finished, lent, moved, own])
def test_frees_that_are_not_judged(serving, happens):
    it, folder = serving()
    running(it)
    it.write("b", 5, it.rig.page("a", 1))
    happens(it)
    release(it, "b")
    assert not list(folder.glob("*.pt"))


def test_its_own_release_and_its_own_eviction_are_nobodys_business(serving):
    it, folder = serving()
    running(it)
    release(it, "a")
    it.rig.allocator.free(it_row(it, it.requests["c"], 61))  # no release: rejected drafts, say
    assert not list(folder.glob("*.pt"))
