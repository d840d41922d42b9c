"""The faults of a prefill's input, an output and a key, at the calls that they change."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from releases import Request

from g4debug import discovery
from g4debug.faults.base import Injection
from g4debug.faults.grammar import Chain, parse
from g4debug.hooking import targets

pytestmark = pytest.mark.usefixtures("sglang")


class Sites:
    """The hooks of one fault, by the site at which it puts them."""

    def __init__(self, plan: str) -> None:
        name = plan.partition("=")[0]
        self.at = {}
        fault = discovery.load("fault", name)
        self.injection = Injection(fault, Chain(parse(plan).chains[name], 3, name), 3, hooks=self)
        fault.put(self.injection)

    def before(self, site, order, name, hook, **options):
        self.at[site] = hook

    after = around = before


def batch(mode):
    """Two requests that go on."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SimpleNamespace(
        reqs=[
            Request(
                rid, output_ids=[7, 9], sampling_params=SimpleNamespace(max_new_tokens=99),
                is_retracted=False,
            )
            for rid in ("a", "b")
        ],
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        forward_mode=SimpleNamespace(is_decode=lambda: mode == "DECODE"),
    )  # fmt: skip


def made(mode="EXTEND"):
    """A ForwardBatch of them: one token of the first one, and three of the second."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), extend_seq_lens_cpu=[1, 3],
        extend_seq_lens=torch.tensor([1, 3]), input_ids=torch.tensor([5, 6, 7, 8]),
    )  # fmt: skip


TARGET, DRAFT = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)


@pytest.mark.parametrize(("task", "lens"), [("token", 3), ("more", 4), ("less", 2)])
def test_a_prefill_is_given_something_else(task, lens):
    sites = Sites(f"prefill-input=1*{task}")
    hook, right, got = sites.at["forward_batch.init_new"], made(), made()
    kept = got.extend_seq_lens, got.input_ids
    for given in (made("DECODE"), made()):  # a decode, and a draft's prefill
        runner = TARGET if given.forward_mode.name == "DECODE" else DRAFT
        hook(given, batch("EXTEND"), runner)
        assert torch.equal(given.input_ids, right.input_ids)
    hook(got, batch("EXTEND"), TARGET)
    other = (got.input_ids != right.input_ids).nonzero().flatten().tolist()
    assert got.extend_seq_lens.tolist() == [1, lens]
    assert len(other) == (task == "token")
    assert 0 not in other  # a single token is left alone
    assert torch.equal(kept[0], right.extend_seq_lens)  # the batch may have the same tensors
    assert torch.equal(kept[1], right.input_ids)
    assert len(sites.injection.schedule) == 1


def test_a_token_changes_in_the_answer_many_steps_later():
    sites = Sites("sampled-token=1*past")
    hook, one = sites.at["scheduler.run_batch"], batch("DECODE")
    one.reqs[0].output_ids = list(range(5, 12))
    hook(None, one)
    assert one.reqs[0].output_ids == list(range(5, 12))  # its first token is not old enough
    one.reqs[0].output_ids.append(12)
    hook(None, one)
    assert one.reqs[0].output_ids == [4, *range(6, 13)]
    hook(None, one)
    assert one.reqs[0].output_ids[0] == 4  # once


def test_a_token_is_put_into_an_output_once_more():
    sites = Sites("sampled-token=1*twice")
    hook, one = sites.at["scheduler.process_result"], batch("EXTEND")
    hook(None, None, one)
    assert [r.output_ids for r in one.reqs] == [[7, 9], [7, 9]]
    one = batch("DECODE")
    hook(None, None, one)
    assert sorted(r.output_ids for r in one.reqs) == [[7, 9], [7, 9, 9]]


class Tree:
    """Inserts what a request hands over, as SGLang's trees do, by a method that can be hooked."""

    page_size = 4

    def __init__(self) -> None:
        self.keys = []

    def insert(self, params):
        self.keys.append(params.key)

    def finished(self, request):
        from sglang.srt.mem_cache.radix_cache import RadixKey

        for tokens in (array("q", range(9)), array("q", range(4))):
            self.insert(SimpleNamespace(key=RadixKey(tokens, None)))


@pytest.mark.parametrize("task", ["token", "namespace"])
def test_the_key_of_an_insert_is_another_one(task):
    sites = Sites(f"insert-other-key=1*{task}")
    (site,) = [s for s in sites.at if s.startswith("tree.radix") and targets.path(s)]
    hook, tree, request = sites.at[site], Tree(), Request("a")
    hook(Tree.finished, tree, request)  # it goes on
    request.finished = lambda: True
    hook(Tree.finished, tree, request)
    hook(Tree.finished, tree, request)
    kept = [(key.extra_key, list(key.token_ids)) for key in tree.keys]
    (n,) = [n for n, it in enumerate(kept) if it not in ((None, [*range(9)]), (None, [*range(4)]))]
    space, tokens = kept[n]
    assert n == 2
    if task == "token":
        assert [i for i, token in enumerate(tokens) if token != i] == [4]
        assert space is None
    else:
        assert tokens == [*range(9)]
        assert space is not None
    assert "insert" not in vars(tree)
