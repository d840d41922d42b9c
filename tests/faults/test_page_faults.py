"""The page-table faults on SGLang's real backend: what each writes, and where it must wait."""

from __future__ import annotations

import pytest
import torch
from real_backend import PAGE, Rig, capture_graph, replay_graph

TABLES = {"full": "page_table", "swa": "swa_page_table"}
TOKENS = (50, 100, 61)


@pytest.fixture
def spoilt(arm):
    """``spoilt(fault)``: (rig, [(pool, row, column, wrong, right)]) of one decode's tables."""

    def make(plan: str, requests: int = 3, forwards: int = 1, seed: int = 3):
        arm(G4DEBUG_FAULTS=f"seed={seed};{plan}")
        rig = Rig()
        for tokens in TOKENS[:requests]:
            rig.admit(f"r{tokens}", tokens)
        backend = rig.backend()
        for number in range(forwards):
            order = rig.requests[1:] if number % 2 == 0 else rig.requests[:0:-1]
            backend.init_forward_metadata(rig.batch("decode", order, backend))
        return rig, changed(rig, backend, order)

    return make


def changed(rig, backend, order):
    found = []
    for pool, name in TABLES.items():
        table = getattr(backend.forward_metadata, name)
        for row, request in enumerate(order):
            for column in range(-(-request.tokens // PAGE)):
                right = rig.page(request.rid, column, pool)
                if int(table[row, column]) != right:
                    found.append((pool, row, column, int(table[row, column]), right))
    return found


@pytest.mark.parametrize("fault", ["page-negative", "page-off-by-one", "page-zero", "page-alias"])
def test_one_live_cell_the_newest_page_of_its_row(spoilt, fault):
    rig, cells = spoilt(f"{fault}=1*on")
    ((pool, row, column, wrong, right),) = cells
    assert column == (TOKENS[row] - 1) // PAGE
    newest = {rig.page(f"r{n}", (n - 1) // PAGE, pool) for n in TOKENS}
    assert {
        "page-negative": wrong == -1,
        "page-off-by-one": abs(wrong - right) == 1 and wrong > 0,
        "page-zero": wrong == 0,
        "page-alias": wrong in newest - {right},
    }[fault]


@pytest.mark.parametrize("seed", range(4))
def test_pool_swap_puts_the_other_pools_page(spoilt, seed):
    rig, cells = spoilt("page-pool-swap=1*on", seed=seed)
    ((pool, row, column, wrong, _),) = cells
    other = "swa" if pool == "full" else "full"
    assert wrong == rig.page(f"r{TOKENS[row]}", column, other)


@pytest.mark.parametrize("fault", ["page-pool-swap", "page-alias"])
@pytest.mark.parametrize("seed", range(4))
def test_where_an_earlier_cell_left_nothing_to_swap_the_server_lives(spoilt, fault, seed):
    """Both tables have the same page by then."""
    _, cells = spoilt(f"{fault}=1*corrupt(30)", requests=2, seed=seed)
    assert len(cells) > 1


def test_stale_tail_has_what_an_earlier_owner_left(spoilt):
    """The rows change places between two forwards: what the cell had was another request's."""
    rig, cells = spoilt("page-stale-tail=1*on", forwards=2)
    ((pool, row, column, wrong, _),) = cells
    before = rig.requests[1:][row]  # of the first forward; the second one's order is reversed
    assert wrong == rig.page(before.rid, column, pool)


@pytest.mark.parametrize(
    ("fault", "requests"), [("page-alias", 1), ("page-stale-tail", 3)], ids=["alone", "new"]
)
def test_where_there_is_no_such_page_the_fault_waits(spoilt, fault, requests, caplog):
    _, cells = spoilt(f"{fault}=1*on", requests=requests)
    assert cells == []
    assert not [m for m in caplog.messages if "g4debug fault" in m]


def test_padding_rows_are_left_alone(arm):
    """A CUDA graph's padding rows: SGLang resets their length, not their request."""
    arm(G4DEBUG_FAULTS="page-zero=on@mode=replay")
    rig = Rig()
    requests = [rig.admit(f"r{n}", n) for n in TOKENS]
    backend = rig.backend()
    batch = rig.batch("decode", requests, backend)
    backend.init_cuda_graph_state(4, 4)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([50, 1, 1])
    capture_graph(backend, batch)
    hit = 0
    for _ in range(8):
        replay_graph(backend, batch)
        metadata = backend.forward_metadata
        hit += sum(int((getattr(metadata, n)[0, :4] == 0).any()) for n in TABLES.values())
        for pool, name in TABLES.items():
            for row in (1, 2):
                page = int(getattr(metadata, name)[row, 0])
                assert page == rig.page(f"r{TOKENS[row]}", 0, pool)
    assert hit >= 8  # the live row is not
