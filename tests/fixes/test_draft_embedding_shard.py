"""draft-embedding-shard on SGLang's real models, the one that gives and the one that gets.

tests/cpu/test_tensor_parallel_engine.py runs two real ranks with it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang_of import sglang_of

from g4debug.fixes.draft_embedding_shard import after_get, around_bind, still_broken
from g4debug.hooking import targets

pytestmark = pytest.mark.written_for("draft-embedding-shard")
VOCABULARY, HIDDEN = 10, 4
MODEL = "sglang/srt/models/gemma4_causal.py"


@pytest.fixture
def on_rank(sglang, monkeypatch):
    """``on_rank(rank, ranks)``: (target, draft), real models without layers, on this rank."""
    from sglang.srt.models import gemma4_causal
    from sglang.srt.models.gemma4_mtp import Gemma4AssistantForCausalLM

    def made(rank, ranks):
        here = SimpleNamespace(tp_rank=rank, tp_size=ranks)
        for name, answer in (
            ("get_tensor_model_parallel_rank", rank),
            ("get_tensor_model_parallel_world_size", ranks),
            ("get_parallel", here),
        ):
            if hasattr(gemma4_causal, name):
                monkeypatch.setattr(gemma4_causal, name, lambda answer=answer: answer)
        target = blank(gemma4_causal.Gemma4ForCausalLM)
        target.pp_group = SimpleNamespace(world_size=1)
        target.model = torch.nn.Module()
        target.model.embed_tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        target.lm_head = target.model.embed_tokens
        draft = blank(Gemma4AssistantForCausalLM)
        draft.target_embed_weight = None
        return target, draft

    return made


def blank(cls):
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    return model


def bind(target, draft, fixed):
    """Do the same as SGLang's worker when it is built; the table that the draft then has."""
    embed, head = target.get_embed_and_head()
    if fixed:
        embed, head = after_get((embed, head), target)
        around_bind(type(draft).set_embed_and_head, draft, embed, head)
    else:
        draft.set_embed_and_head(embed, head)
    return draft.target_embed_weight


@pytest.mark.parametrize("ranks", [2, 3])
def test_sglang_binds_the_draft_to_the_rows_of_its_rank(on_rank, ranks):
    for rank in range(ranks):
        target, draft = on_rank(rank, ranks)
        bound = bind(target, draft, fixed=False)
        assert len(bound) < VOCABULARY
        ids = torch.arange(VOCABULARY)
        with pytest.raises(IndexError):
            torch.nn.functional.embedding(ids, bound)
        if rank:  # and what is not out of range is another token's
            assert not torch.equal(bound[:1], target.model.embed_tokens.weight[:1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_with_the_fix_every_rank_has_the_whole_table(on_rank, ranks):
    for rank in range(ranks):
        target, draft = on_rank(rank, ranks)
        assert bind(target, draft, fixed=True) is target.model.embed_tokens.weight


def test_a_draft_that_knows_its_rows_gets_them_as_before(on_rank):
    """EAGLE3's: it is handed what ``get_embed_and_head`` returns, not through the assistant."""
    target, _ = on_rank(1, 2)
    plain = target.get_embed_and_head()
    embed, head = after_get(target.get_embed_and_head(), target)
    assert torch.equal(embed, plain[0])
    assert torch.equal(head, plain[1])


def test_with_one_rank_it_is_the_very_tensor_that_sglang_gives(on_rank):
    target, draft = on_rank(0, 1)
    assert bind(target, draft, fixed=True) is target.get_embed_and_head()[0]
    assert not vars(target.model.embed_tokens.weight)


def test_still_broken_reads_the_installed_source():
    assert still_broken()
    assert targets.path("draft.bind_embedding") is not None


def test_still_broken_on_other_sources(tmp_path):
    model = "class Gemma4ForCausalLM:\n"
    shard = "    def _shard_weight(self, weight): ...\n"
    get = "    def get_embed_and_head(self{}):\n        return self.{}\n"
    broken = get.format("", "_shard_weight(self.model.embed_tokens.weight), None")
    whole = get.format("", "model.embed_tokens.weight, None")
    asks = get.format(", draft", "_shard_weight(self.model.embed_tokens.weight, draft=draft), None")
    for name, text, answer in (
        ("broken", model + shard + broken, True),
        ("whole", model + whole, False),
        ("asks", model + shard + asks, False),
    ):
        with sglang_of(tmp_path / name, {MODEL: text}):
            assert still_broken() is answer
