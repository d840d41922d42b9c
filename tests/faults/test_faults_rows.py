"""The faults of rows and of single slots, on SGLang's real allocator and request table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_backend import PAGE, Rig
from releases import Request, kv_of

from g4debug import discovery
from g4debug.faults.base import Injection
from g4debug.faults.grammar import Chain, parse

pytestmark = pytest.mark.usefixtures("sglang")
TOKENS = {"a": 50, "b": 100, "c": 61}
LENT = {"a": 0, "b": 2 * PAGE, "c": 0}  # tokens that the prefix cache lent


class Batch:
    """Three requests that decode, and what a fault does to them."""

    def __init__(self, plan: str) -> None:
        name = plan.partition("=")[0]
        fault = discovery.load("fault", name)
        chain = Chain(parse(plan).chains[name], 3, name)
        self.injection = Injection(fault, chain, 3, hooks=self)
        self.hook = None
        fault.put(self.injection)
        self.rig = Rig()
        requests = []
        for rid, tokens in TOKENS.items():
            request = Request(
                rid, output_ids=[1], sampling_params=SimpleNamespace(max_new_tokens=99),
                is_retracted=False, kv_committed_len=tokens, kv_allocated_len=tokens + 4,
                cache_protected_len=tokens // PAGE * PAGE,
                cached_tokens=LENT[rid],
            )  # fmt: skip
            request.put(req_pool_idx=self.rig.admit(rid, tokens + 4).req_pool_idx)
            requests.append(request)
        self.batch = SimpleNamespace(
            reqs=requests, req_to_token_pool=self.rig.req_to_token, enable_overlap=False,
            token_to_kv_pool_allocator=self.rig.allocator, spec_algorithm=None,
            seq_lens_cpu=torch.tensor(list(TOKENS.values())),
            req_pool_indices=torch.tensor([kv_of(r).req_pool_idx for r in requests]),
            forward_mode=SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False),
        )  # fmt: skip

    def before(self, site, order, name, hook, **options):
        assert site == "scheduler.run_batch"
        self.hook = lambda run, *args: (hook(*args), run(*args))

    def around(self, site, order, name, hook, **options):
        assert site == "scheduler.run_batch"
        self.hook = hook

    def pages(self, row):
        at = kv_of(self.batch.reqs[row]).req_pool_idx
        tokens = list(TOKENS.values())[row]
        return (self.rig.req_to_token.req_to_token[at, :tokens:PAGE] // PAGE).tolist()

    def run(self):
        """What ``(request, column)`` had and has; and the rows that the forward was given."""
        table, mapping = self.rig.req_to_token.req_to_token, self.mapping
        before = table.clone(), mapping.clone(), [self.pages(r) for r in range(3)]
        given = []
        self.hook(lambda _, batch: given.append(batch.req_pool_indices.tolist()), None, self.batch)
        cells = (table != before[0]).nonzero().tolist()
        slots = (mapping != before[1]).nonzero().flatten().tolist()
        return before, cells, slots, given[0]

    @property
    def mapping(self):
        return self.rig.allocator.full_to_swa_index_mapping


@pytest.mark.parametrize("task", ["other", "own", "order"])
def test_a_wrong_page_in_the_middle_of_a_row(task):
    it = Batch(f"row-wrong-page=2*{task}")
    (_, _, pages), cells, slots, _ = it.run()
    (row,) = {r for r, _ in cells}
    number = [kv_of(r).req_pool_idx for r in it.batch.reqs].index(row)
    columns = sorted({c // PAGE for _, c in cells})
    had, has = pages[number], it.pages(number)
    assert not slots
    assert 0 < columns[0] < len(had) - 1
    if task == "other":
        others = [page for n, theirs in enumerate(pages) if n != number for page in theirs]
        assert has[columns[0]] in others
    else:
        assert has[columns[0]] in had
        assert (sorted(had) == sorted(has)) is (task == "order")
    assert len(columns) == (2 if task == "order" else 1)
    assert len(it.injection.schedule) == 1


def test_another_page_than_the_prefix_cache_lent():
    it = Batch("lent-row-page=1*on")
    (_, _, pages), cells, slots, _ = it.run()
    (row,) = {r for r, _ in cells}
    (column,) = {c // PAGE for _, c in cells}
    assert not slots
    assert row == kv_of(it.batch.reqs[1]).req_pool_idx  # nobody else was lent a page
    assert it.pages(1)[column] in (pages[0][column], pages[2][column])
    assert pages[1][column] not in it.pages(1)


@pytest.mark.parametrize("task", ["other", "zero", "shift"])
def test_one_slot_of_the_mapping_in_the_middle_of_a_page(task):
    it = Batch(f"swa-mapping-slot=1*{task}")
    (_, mapping, _), cells, (slot,), _ = it.run()
    assert not cells
    assert slot % PAGE
    others, right = mapping[mapping > 0].tolist(), int(mapping[slot])
    mates = [s for s in range(right // PAGE * PAGE, right // PAGE * PAGE + PAGE) if s != right]
    assert int(it.mapping[slot]) in {"other": others, "zero": [0], "shift": mates}[task]


def test_all_slots_of_a_page_of_the_mapping_are_moved_inside_of_it():
    it = Batch("swa-mapping-slot=1*page")
    (_, mapping, _), cells, slots, _ = it.run()
    assert not cells
    assert len(slots) > 1
    (page,) = {slot // PAGE for slot in slots}
    had, has = (m[page * PAGE : page * PAGE + PAGE] for m in (mapping, it.mapping))
    assert torch.equal(torch.where(had > 0, had // PAGE * PAGE + (had + 1) % PAGE, 0), has)


@pytest.mark.parametrize(
    ("task", "row", "wrong"), [("on", 1, 4 * PAGE), ("less", 0, 2 * PAGE), ("far", 1, 8 * PAGE)]
)
def test_a_request_counts_wrongly_what_the_prefix_cache_has(task, row, wrong):
    it = Batch(f"protected-page=1*{task}")
    kv_of(it.batch.reqs[1]).cache_protected_len = 3 * PAGE  # only it has whole pages of its own
    it.run()
    assert [kv_of(r).cache_protected_len for r in it.batch.reqs] == [
        wrong if n == row else 3 * PAGE for n in range(3)
    ]


def test_the_row_of_a_running_request_is_free():
    it = Batch("row-free=2*on")
    free = list(it.rig.req_to_token.free_slots)
    it.run()
    (row,) = it.rig.req_to_token.free_slots[len(free) :]
    assert row in it.batch.req_pool_indices.tolist()
    assert free == it.rig.req_to_token.free_slots[:-1]


def test_two_rows_of_a_batch_for_one_step():
    it = Batch("batch-rows=2*on")
    right = it.batch.req_pool_indices.tolist()
    _, cells, slots, given = it.run()
    assert not cells
    assert not slots
    assert sorted(given) == sorted(right)
    assert sum(a != b for a, b in zip(given, right, strict=True)) == 2
    assert it.batch.req_pool_indices.tolist() == right


@pytest.mark.parametrize("task", ["own", "other"])
def test_two_pages_of_the_mapping_are_exchanged(task):
    it = Batch(f"swa-mapping-exchange=1*{task}")
    (_, mapping, pages), cells, slots, _ = it.run()
    assert not cells
    changed = sorted({slot // PAGE for slot in slots})
    assert len(changed) == 2
    assert len(slots) == 2 * PAGE
    had, has = (m[: len(m) // PAGE * PAGE].view(-1, PAGE)[changed] for m in (mapping, it.mapping))
    assert torch.equal(had.flip(0), has)
    owners = {row for row, held in enumerate(pages) for page in held if page in changed}
    assert len(owners) == (1 if task == "own" else 2)


def test_nothing_is_exchanged_where_no_second_request_has_two_pages():
    it = Batch("swa-mapping-exchange=1*other")
    it.batch.seq_lens_cpu = torch.tensor([50, 2 * PAGE - 1, PAGE])
    _, cells, slots, _ = it.run()
    assert (cells, slots) == ([], [])
    assert it.injection.schedule == []
