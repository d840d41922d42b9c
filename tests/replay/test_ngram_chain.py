"""A replay gives NGRAM's verify one path of the tape's tokens, whatever the worker looked up."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4debug.cpu.ngram_tree import reconstruct
from g4debug.cpu.verify_greedy import verify_tree_greedy
from g4debug.findings import tape
from g4debug.findings.tape import Chain, Code, How, Why
from g4debug.replay.feeder import Feeder
from g4debug.replay.tokens import Tokens

pytestmark = pytest.mark.once("the newest release alone has this worker armed")
WIDTH, ACCEPTED = 4, [3, 1]


@pytest.fixture
def feeder() -> Feeder:
    """Of two requests that run. Their first verifies gave them so many tokens."""
    parts = [bytes((Code.START, Why.START)) + tape.start(0, 0, 0, 0, 0.7, 0)]
    for number, prompt in enumerate(([11] * 5, [22] * 7), 1):
        chain = Chain(bytes(32), 64, True)
        parts.append(tape.request(1, len(prompt), 9, 0, -1, 0) + chain.feed(prompt))
        rest = chain.feed([*prompt[chain.done :], *[33] * 9], len(prompt))
        parts.append(tape.end(number, 9, How.LENGTH, len(prompt)) + rest)
    recording = tape.read(b"".join(parts), 64, True)
    for request, count in zip(recording.requests.values(), ACCEPTED, strict=True):
        request.accepted.append(count)
    found = Feeder(recording, Tokens(recording, 500))
    found._on, found.current = True, [*recording.requests.values()]
    return found


def looked_up(lens: torch.Tensor, before: bool) -> Any:
    """What the worker makes where it found nothing: each draft hangs on the first token.

    before: its mask has the tokens before the drafts, too, as it has but on a CPU.
    """
    rows = len(lens)
    own = torch.eye(WIDTH, dtype=torch.bool)
    own[:, 0] = True
    tree = own.expand(rows, WIDTH, WIDTH).reshape(-1).clone()
    links = [torch.zeros(rows, WIDTH, dtype=torch.long) for _ in range(3)]
    positions = torch.zeros(rows * WIDTH, dtype=torch.long)
    reconstruct(tree, lens, positions, *links, rows, WIDTH)
    masks = [torch.cat([own.new_ones(WIDTH, n), own], 1).flatten() for n in lens.tolist()]
    cls = importlib.import_module("sglang.srt.speculative.ngram_info").NgramVerifyInput
    return cls(
        draft_token=torch.zeros(rows * WIDTH, dtype=torch.long),
        custom_mask=torch.cat(masks) if before else tree,
        positions=positions,
        retrieve_index=links[0],
        retrieve_next_token=links[1],
        retrieve_next_sibling=links[2],
        draft_token_num=WIDTH,
    )


@pytest.mark.parametrize("before", [True, False], ids=["whole mask", "drafts alone"])
def test_as_many_drafts_are_accepted_as_there(feeder: Feeder, before: bool, sglang: Any) -> None:
    lens = torch.tensor([5, 7])
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        seq_lens=lens,
        spec_info=looked_up(lens, before),
    )
    feeder.chain(lambda worker, batch: None, None, batch)
    spec = batch.spec_info
    assert spec.positions.tolist() == [5, 6, 7, 8, 7, 8, 9, 10]
    sizes = [WIDTH * (n + WIDTH if before else WIDTH) for n in lens.tolist()]
    for block in spec.custom_mask.split(sizes):
        mask = block.view(WIDTH, -1)
        assert mask[:, :-WIDTH].all()
        assert torch.equal(mask[:, -WIDTH:], torch.ones(WIDTH, WIDTH).tril().bool())
    accepted = torch.full((2, WIDTH), -1, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    given = {
        "predicts": torch.zeros(2 * WIDTH, dtype=torch.int32),
        "accept_index": accepted,
        "accept_token_num": counts,
        "candidates": spec.draft_token.view(2, WIDTH),
        "retrieve_index": spec.retrieve_index,
        "retrieve_next_token": spec.retrieve_next_token,
        "retrieve_next_sibling": spec.retrieve_next_sibling,
        "target_predict": torch.zeros(2, WIDTH, dtype=torch.long),
    }
    feeder.kernel(lambda **kw: verify_tree_greedy(**kw), **given)
    assert (counts + 1).tolist() == ACCEPTED
    assert accepted.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert (feeder.forced, feeder.lacking) == (2, 0)


class Corpus:
    def __init__(self, max_trie_depth: int, draft_token_num: int) -> None:
        self.given = max_trie_depth, draft_token_num


def test_a_fork_gets_a_corpus_of_its_own_and_never_ends_its_parents() -> None:
    """SGLang's real one inserts in a thread, which a fork has not: it would wait for ever."""
    old = Corpus(18, 4)
    worker = SimpleNamespace(ngram_corpus=old, max_trie_depth=18, draft_token_num=4)
    feeder = Feeder.__new__(Feeder)
    feeder._renew_corpus(worker)
    assert worker.ngram_corpus is not old
    assert worker.ngram_corpus.given == old.given
    assert feeder._of_parent is old
