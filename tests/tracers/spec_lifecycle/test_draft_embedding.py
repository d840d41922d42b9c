"""What the draft is bound to at start, on the values and on SGLang's real models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from g4debug import discovery
from g4debug.faults.base import Injection
from g4debug.faults.grammar import Chain, parse
from g4debug.findings.steps import Recorder
from g4debug.hooking import targets
from g4debug.hooking.hooks import Hooks
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.spec_lifecycle.check import check_embedding
from g4debug.tracers.spec_lifecycle.draft_embedding import Binding, first_row
from g4debug.tracers.spec_lifecycle.log import SpecLog
from g4debug.trapping.trap import Trap, TrapError

VOCABULARY, HIDDEN = 12, 4


@given(vocabulary=st.integers(1, 300), ranks=st.integers(1, 8), padding=st.integers(0, 64))
def test_a_whole_table_is_never_accused_and_a_shard_always(vocabulary, ranks, padding):
    table = vocabulary + padding
    assert check_embedding(table, 0, table, vocabulary, 0, ranks) is None
    shard = -(-vocabulary // ranks)
    for rank in range(ranks):
        found = check_embedding(shard, rank * shard, table, vocabulary, rank, ranks)
        assert (found is None) == (shard >= vocabulary)


def test_a_table_that_is_the_targets_own_is_not_accused_of_the_vocabularys_size():
    """The configuration says more tokens than the checkpoint has rows: no draft can know them."""
    assert check_embedding(10, 0, 10, 12, 0, 2) is None


def test_the_finding_names_table_vocabulary_and_rank():
    found = check_embedding(6, 6, VOCABULARY, VOCABULARY, 1, 2)
    assert found.kind == "draft-embedding"
    assert found.got == "an embedding table of 6 rows (rows 6 to 11 of the target's; rank 1 of 2)"
    assert "at least 12 rows" in found.expected
    unknown = check_embedding(6, -1, VOCABULARY, VOCABULARY, -1, 1)
    assert unknown.got == "an embedding table of 6 rows"


def test_which_rows_of_a_table_a_part_of_it_is():
    table = torch.zeros(VOCABULARY, HIDDEN)
    assert first_row(table, table) == 0
    assert first_row(table[8:], table) == 8
    assert first_row(table[2:5], table) == 2
    assert first_row(table[:, :2], table) == -1
    assert first_row(torch.zeros(6, HIDDEN), table) == -1
    assert first_row(table[8:], table[:6]) == -1
    assert first_row(table.view(torch.int32)[:6], table) == -1


# --- the hooks, with SGLang's assistant ----------------------------------------------------------


def _assistant():
    from sglang.srt.models.gemma4_mtp import Gemma4AssistantForCausalLM

    made = Gemma4AssistantForCausalLM.__new__(Gemma4AssistantForCausalLM)
    torch.nn.Module.__init__(made)
    made.target_embed_weight = None
    return made


def worker_of(layer, vocabulary=VOCABULARY):
    """A target worker, with what the tracer asks of it."""
    model = SimpleNamespace(get_input_embeddings=lambda: layer)
    config = SimpleNamespace(vocab_size=vocabulary)
    return SimpleNamespace(model_runner=SimpleNamespace(model=model, model_config=config))


@pytest.fixture
def bound(sglang):
    """``bound(target_worker, table, rank, ranks)``: bind a real assistant while its worker is
    built; returns the tracer's context."""

    def bind(target_worker, table, rank=0, ranks=2, by_name=True, around=None):
        settings = Settings(mode="raise", max_dumps=0)
        recorder = Recorder(4)
        args = SimpleNamespace(tp_size=ranks, dp_size=1)
        recorder.attach(SimpleNamespace(tp_rank=rank, server_args=args))
        context = Context(
            "spec-lifecycle", Hooks(), settings, recorder, Trap(settings, lambda *a: None)
        )
        binding = Binding(context, SpecLog(context))
        if target_worker is None:
            pass
        elif by_name:
            binding.before_init(object(), object(), gpu_id=0, target_worker=target_worker)
        else:
            binding.before_init(object(), object(), 0, 1, None, target_worker)
        draft = _assistant()
        give = type(draft).set_embed_and_head
        around(give, draft, table, table) if around else give(draft, table, table)
        binding.after_bind(None, draft, table, table)
        binding.after_init(None)
        return context

    return bind


def limits(context):
    return [limit.what for limit in context.status.record().limits]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_is_found_on_every_rank(bound, rank, by_name):
    layer = torch.nn.Embedding(VOCABULARY, HIDDEN)
    shard = layer.weight[rank * 6 : rank * 6 + 6]
    with pytest.raises(TrapError) as raised:
        bound(worker_of(layer), shard, rank=rank, by_name=by_name)
    finding = raised.value.finding
    assert (finding.check, finding.kind) == ("spec-lifecycle", "draft-embedding")
    assert finding.location.rank == rank
    assert finding.location.runner == "draft"
    assert f"rank {rank} of 2" in finding.headline
    assert f"rows {rank * 6} to {rank * 6 + 5} of the target's" in finding.headline
    assert ("embedding of another token" in finding.cause) == bool(rank)
    has_fix = targets.matches("<0.5.23")
    assert ("G4DEBUG_FIX_DRAFT_EMBEDDING_SHARD=1" in finding.next_command) == has_fix


@pytest.mark.parametrize("padding", [0, 4])
def test_a_whole_table_is_fine(bound, padding):
    layer = torch.nn.Embedding(VOCABULARY + padding, HIDDEN)
    context = bound(worker_of(layer), layer.weight)
    assert not limits(context)
    assert not context.disabled


def test_the_shard_of_a_layer_that_has_only_its_own_rows_is_found(bound):
    """Should a target's table be split, too: the layer says how many rows there are of all."""
    layer = SimpleNamespace(weight=torch.zeros(6, HIDDEN), num_embeddings=VOCABULARY)
    with pytest.raises(TrapError, match="an embedding table of 6 rows"):
        bound(worker_of(layer), layer.weight)


def test_what_cannot_be_read_is_a_limit_and_no_finding(bound):
    context = bound(worker_of(object()), torch.zeros(6, HIDDEN))
    assert limits(context) == ["the embedding table of the draft is not checked"]


def test_a_worker_without_its_target_is_a_limit_and_no_finding(bound):
    context = bound(object(), torch.zeros(6, HIDDEN))
    assert limits(context) == ["the embedding table of the draft is not checked"]


def test_what_another_worker_binds_is_not_judged(bound):
    """EAGLE's worker can be made to serve the assistant, and the tracer is off then."""
    assert not limits(bound(None, torch.zeros(6, HIDDEN)))


@pytest.mark.parametrize("task", ["1*on", "off"])
def test_the_fault_is_caught_at_start_with_one_rank(bound, task):
    fault = discovery.load("fault", "draft-embedding-shard")
    put: list = []
    chain = Chain(parse(f"{fault.id}={task}").chains[fault.id], 0, fault.id)
    hooks = SimpleNamespace(around=lambda *given, optional: put.append(given))
    injection = Injection(fault, chain, 0, hooks=hooks)
    fault.put(injection)
    [(site, _, _, around)] = put
    assert site == "draft.bind_embedding"
    layer = torch.nn.Embedding(VOCABULARY, HIDDEN)
    if task == "off":
        assert not limits(bound(worker_of(layer), layer.weight, ranks=1, around=around))
        assert not injection.schedule
        return
    with pytest.raises(TrapError) as raised:
        bound(worker_of(layer), layer.weight, ranks=1, around=around)
    assert raised.value.finding.kind == "draft-embedding"
    assert "rows 0 to 5 of 12" in injection.schedule[0]
