"""yoco-fast-prefill on a real model, real pools and a real backend: same answers, fewer rows."""

from __future__ import annotations

import random
from types import SimpleNamespace

import arguments
import pytest
import releases
import torch
from real_model import served

from g4debug import discovery
from g4debug.cpu.geometry import TINY
from g4debug.fixes.paths.yoco_fast_prefill import cut as yoco_cut
from g4debug.fixes.paths.yoco_fast_prefill import fix as yoco_fast_prefill
from g4debug.fixes.paths.yoco_fast_prefill import giving_up
from g4debug.fixes.paths.yoco_fast_prefill import plan as yoco_plan

SWITCH = "SGLANG_GEMMA4_YOCO"
FIRST = TINY.layers - TINY.kv_shared
# float32, logprobs: a product of one row adds in another order than one of many, and the toy
# model's attention (logits of standard deviation 16) makes more of it.
CLOSE = {"rtol": 0, "atol": 1e-4}
pytestmark = pytest.mark.written_for("yoco-fast-prefill")


@pytest.fixture(scope="module")
def model(_sglang_imported):
    from g4debug.cpu.models import tiny_models

    with served(tiny_models()[0], disable_overlap_schedule=True) as made:
        yield made


@pytest.fixture
def rows(model, arm, monkeypatch):
    """Armed; the rows that each decoder layer computed, forward by forward."""
    from sglang.srt.models import gemma4_causal

    layer = gemma4_causal.Gemma4DecoderLayer
    seen: list[dict[int, int]] = []
    real = layer.forward

    def spy(self, positions, hidden_states, per_layer_input, forward_batch, **kwargs):
        if self.layer_id == 0:
            seen.append({})
        assert len(positions) == len(hidden_states)
        assert per_layer_input is None or len(per_layer_input) == len(hidden_states)
        seen[-1][self.layer_id] = len(hidden_states)
        return real(self, positions, hidden_states, per_layer_input, forward_batch, **kwargs)

    layer.forward = spy  # innermost; the fixture `sglang` puts SGLang's own back
    monkeypatch.setattr(giving_up, "off", False)
    monkeypatch.setattr(yoco_fast_prefill.base, "_said", set())
    arm(**{SWITCH: "1"})
    yield seen
    layer.forward = real
    model.clear()


def tokens(n, seed=0):
    rng = random.Random(1000 * seed + n)
    return [2, *(rng.randrange(4, TINY.vocab) for _ in range(n - 1))][:n]


def plain(model, batch):
    """The forward of SGLang alone: no facts, no cut."""
    forward_batch = model.forward_batch(batch)
    vars(forward_batch).pop(yoco_plan.FACTS, None)
    return model.forward(forward_batch)


def decide(model, forward_batch, backend=None):
    """How many rows the path keeps of each request, or why it computes all."""
    if backend is not None and hasattr(forward_batch, "attn_backend"):
        forward_batch.attn_backend = backend
    with model.context(backend):
        return yoco_fast_prefill.decide(model.text, forward_batch)


def logprobs(logits):
    return torch.log_softmax(logits.float(), -1)


def same(got, wanted, requests=slice(None)):
    a, b = logprobs(got.next_token_logits)[requests], logprobs(wanted.next_token_logits)[requests]
    torch.testing.assert_close(a, b, **CLOSE)
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def cut_rows(seen):
    """Rows of the KV-shared layers in the last forward; None if the layers were not called."""
    found = {seen[-1].get(n) for n in range(FIRST, TINY.layers)}
    assert len(found) == 1
    return found.pop()


def test_the_last_row_of_each_prompt_is_enough(model, rows):
    batch = model.batch([model.request(tokens(n)) for n in (300, 1, 90, 2)])
    got = model.forward(model.forward_batch(batch))
    assert rows[-1] == {n: 393 if n < FIRST else 4 for n in range(TINY.layers)}
    same(got, plain(model, batch))
    assert rows[-1] == dict.fromkeys(range(TINY.layers), 393)


def test_a_request_with_prompt_logprobs_keeps_its_rows_the_others_do_not(model, rows):
    batch = model.batch(
        [
            model.request(tokens(200)),
            model.request(tokens(90), return_logprob=True, logprob_start=40),
            model.request(tokens(150)),
        ]
    )
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 1 + 50 + 1
    wanted = plain(model, batch)
    same(got, wanted)
    assert len(got.input_token_logprobs) == 50
    torch.testing.assert_close(got.input_token_logprobs, wanted.input_token_logprobs, **CLOSE)


def test_output_logprobs_alone_keep_no_more(model, rows):
    batch = model.batch([model.request(tokens(100), return_logprob=True)])
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 1
    same(got, plain(model, batch))


def test_a_chunk_that_is_not_the_last_calls_no_shared_layer(model, rows):
    request = model.request(tokens(300))
    first = model.forward(model.forward_batch(model.batch([model.take(request, 128)])))
    assert cut_rows(rows) is None
    assert first.next_token_logits.isfinite().all()
    second = model.batch([model.take(request, 300)])
    got = model.forward(model.forward_batch(second))
    assert rows[-1][0] == 172
    assert cut_rows(rows) == 1
    whole = model.batch([model.request(tokens(300))])
    same(got, plain(model, whole))


def test_a_chunk_beside_whole_prompts(model, rows):
    chunked = model.request(tokens(300))
    model.take(chunked, 64)
    requests = [model.request(tokens(70)), chunked, model.request(tokens(33))]
    batch = model.batch(requests)
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 2
    same(got, plain(model, batch), [0, 2])


def test_a_chunk_with_prompt_logprobs_keeps_the_rows_of_its_chunk(model, rows):
    request = model.request(tokens(300), return_logprob=True, logprob_start=100)
    batch = model.batch([model.take(request, 128)])
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 28
    wanted = plain(model, batch)
    torch.testing.assert_close(got.input_token_logprobs, wanted.input_token_logprobs, **CLOSE)


def test_the_last_chunk_counts_as_such_while_the_one_before_is_not_yet_processed(model, rows):
    """Overlap scheduling: the count of chunks is counted down after the next batch was made."""
    request = model.request(tokens(100))
    model.count_chunks(request, 1)
    batch = model.batch([request])
    model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 1


def test_prefix_hits(model, rows):
    request = model.request(tokens(130))
    model.forward(model.forward_batch(model.batch([model.take(request, 128)])))
    other = model.request(tokens(80, seed=1))
    batch = model.batch([model.take(request, 130), other])  # 128 of 130 are there
    got = model.forward(model.forward_batch(batch))
    assert rows[-1][0] == 82
    assert cut_rows(rows) == 2
    same(got, plain(model, batch))


def test_one_token_prompts_have_nothing_to_cut(model, rows):
    batch = model.batch([model.request(tokens(1)), model.request([7])])
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 2
    assert not yoco_fast_prefill.base._said
    same(got, plain(model, batch))


def test_frozen_kv_mtp_reads_each_requests_last_hidden_state(model, rows):
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.frozen_kv_mtp_utils import select_last_extend_hidden

    batch = model.batch([model.request(tokens(n)) for n in (120, 60)], "FROZEN_KV_MTP")
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 2
    wanted = plain(model, batch)
    worker = SimpleNamespace(extend_lens=[120, 60], batch_size=lambda: 2)
    torch.testing.assert_close(
        select_last_extend_hidden(worker, got.hidden_states),
        select_last_extend_hidden(worker, wanted.hidden_states),
        rtol=0, atol=5e-3,
    )  # fmt: skip
    same(got, wanted)
    # What nobody reads is zero, every time.
    assert not got.hidden_states[:119].any()
    assert got.hidden_states.shape == wanted.hidden_states.shape


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE", "STANDALONE"])
def test_other_readers_of_hidden_states_get_all_rows(model, rows, algorithm):
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    batch = model.batch([model.request(tokens(50))], algorithm)
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 50
    assert torch.equal(got.hidden_states, plain(model, batch).hidden_states)


def test_a_request_that_returns_hidden_states_gets_them(model, rows):
    asking = model.request(tokens(50), return_hidden_states=True)
    batch = model.batch([asking, model.request(tokens(60))], "FROZEN_KV_MTP")
    model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 110


def test_captured_layers_before_the_cut_are_whole_and_inside_of_it_stop_it(
    model, rows, monkeypatch
):
    batch = model.batch([model.request(tokens(40))])
    monkeypatch.setattr(model.text, "layers_to_capture", [2, FIRST])
    forward_batch = model.prepare(model.forward_batch(batch))
    hidden, aux = model.text_of(forward_batch)
    assert cut_rows(rows) == 1
    assert [len(t) for t in (hidden, *aux)] == [40, 40, 40]
    assert aux[1].abs().sum(-1).all()
    monkeypatch.setattr(model.text, "layers_to_capture", [FIRST + 1])
    assert "captured" in decide(model, forward_batch)


def test_decode_and_verify_are_never_cut(model, rows):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE):
        made = SimpleNamespace(forward_mode=mode)
        target = SimpleNamespace(is_draft_worker=False)
        assert yoco_plan.after_init_new(made, None, None, target) is made
        assert decide(model, made) == "no prefill of the target"


def test_the_draft_is_left_alone(model, rows):
    batch = model.batch([model.request(tokens(40))])
    forward_batch = model.forward_batch(batch)
    vars(forward_batch).pop(yoco_plan.FACTS)
    draft = SimpleNamespace(is_draft_worker=True)
    yoco_plan.after_init_new(forward_batch, None, batch, draft)
    assert not hasattr(forward_batch, yoco_plan.FACTS)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("lora_ids", ["a"], "LoRA"),
        ("global_num_tokens_cpu", [40], "DP or CP"),
        ("attn_cp_metadata", object(), "DP or CP"),
        ("tbo_split_seq_index", 0, "two-batch"),
        ("multi_item_delimiter_indices", [None], "multi-item"),
        ("encoder_lens", torch.ones(1), "cross-attention"),
        ("padded_static_len", 64, "padded"),
        ("extend_seq_lens_cpu", [39], "padded"),
        ("return_pooled_hidden_states", True, "hidden states"),
    ],
)
def test_what_makes_a_batch_ineligible(model, rows, field, value, reason):
    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    assert decide(model, forward_batch) == [1]
    setattr(forward_batch, field, value)
    assert reason in decide(model, forward_batch)


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("pp_size", 2, "pipeline"),
        ("enable_return_routed_experts", True, "routed-experts"),
        ("enable_deterministic_inference", True, "forbids that sums depend on the batch size"),
        ("rl_on_policy_target", "fsdp", "exactly SGLang's own numbers"),
    ],
)
def test_what_makes_a_server_ineligible(model, rows, monkeypatch, argument, value, reason):
    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    arguments.put(monkeypatch, argument, value)
    assert reason in decide(model, forward_batch)


def test_other_attention_backends_are_left_alone(model, rows, monkeypatch):
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    assert "not triton or trtllm_mha" in decide(model, forward_batch, SimpleNamespace())
    other = SimpleNamespace(needs_cpu_seq_lens=False)
    hybrid = HybridAttnBackend(model.runner, model.backend, other)
    assert decide(model, forward_batch, hybrid) == [1]
    with monkeypatch.context() as patch:
        patch.setattr(model.backend, "enable_deterministic", True, raising=False)
        assert "deterministic" in decide(model, forward_batch, hybrid)
    monkeypatch.setattr(model.backend, "_translate_kv_loc", object(), raising=False)
    assert "share their memory" in decide(model, forward_batch, hybrid)


@pytest.mark.parametrize(
    ("shared", "wanted"), [("001", 2), ("000", "no KV-shared"), ("010", "not the model's last")]
)
def test_where_a_model_is_cut(shared, wanted):
    layers = [SimpleNamespace(is_kv_shared_layer=c == "1") for c in shared]
    text = torch.nn.Module()
    text.layers = [SimpleNamespace(self_attn=layer) for layer in layers]
    found = yoco_fast_prefill.first_shared_layer(text)
    assert found == wanted if isinstance(wanted, int) else wanted in found


def test_the_switch_of_the_seed(model, arm):
    from sglang.srt.models import gemma4_causal

    before = gemma4_causal.Gemma4TextModel.forward
    arm(**{SWITCH: "0"})
    assert gemma4_causal.Gemma4TextModel.forward is before
    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    assert not hasattr(forward_batch, yoco_plan.FACTS)
    model.clear()


def test_prompts_beside_decodes(model, rows):
    """A mixed batch: each decode is a prompt of which all but one token is there."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    decoding = model.request(tokens(100))
    model.forward(model.forward_batch(model.batch([model.take(decoding, 99)])))
    batch = model.batch([model.request(tokens(50, seed=1)), model.take(decoding, 100)])
    batch.forward_mode = ForwardMode.MIXED
    got = model.forward(model.forward_batch(batch))
    assert rows[-1][0] == 51
    assert cut_rows(rows) == 2
    same(got, plain(model, batch))


def test_a_layer_that_leaves_a_sum_to_the_next_one_is_not_cut(model, rows, monkeypatch, caplog):
    """No Gemma-4 layer does up to 0.5.23. If one did, no rows of a half sum could be taken."""
    batch = model.batch([model.request(tokens(n)) for n in (100, 30)])
    wanted = plain(model, batch)
    monkeypatch.setattr(yoco_cut.forwards, "is_whole", lambda *args: False)
    for _ in range(2):
        got = model.forward(model.forward_batch(batch))
        assert torch.equal(got.next_token_logits, wanted.next_token_logits)
    assert cut_rows(rows) == 130
    said = [r for r in caplog.records if "leaves a sum to the next one" in r.message]
    assert len(said) == 1


def test_what_a_layer_left_is_whole_or_not(model):
    if not releases.has("sglang.srt.layers.layer_boundary"):
        pytest.skip("a batch keeps no residual here")
    from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

    hidden, batch = torch.ones(2, 3), SimpleNamespace(residual_stream=None)
    residual_batch.start(batch)
    assert yoco_cut.forwards.is_whole(hidden, batch)  # no layer ran yet
    residual_batch.set_written(hidden, batch)
    assert yoco_cut.forwards.is_whole(hidden, batch)
    assert not yoco_cut.forwards.is_whole(hidden.clone(), batch)
    batch.residual_stream.pending = object()
    assert not yoco_cut.forwards.is_whole(hidden, batch)


# --- metadata ------------------------------------------------------------------------------


def snapshot(backend):
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(backend.forward_metadata).items()
    }


def same_metadata(backend, before, metadata):
    assert backend.forward_metadata is metadata
    for name, value in snapshot(backend).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name]), name
        else:
            assert value == before[name], name


def test_metadata_and_batch_are_as_before_afterwards(model, rows):
    batch = model.batch([model.request(tokens(n)) for n in (100, 30)])
    forward_batch = model.prepare(model.forward_batch(batch))
    before, metadata = snapshot(model.backend), model.backend.forward_metadata
    fields = dict(vars(forward_batch))
    model.text_of(forward_batch)
    assert cut_rows(rows) == 2
    same_metadata(model.backend, before, metadata)
    assert vars(forward_batch).keys() == fields.keys()
    assert all(vars(forward_batch)[name] is value for name, value in fields.items())


@pytest.mark.parametrize("number", [FIRST, TINY.layers - 1])
def test_an_exception_in_a_shared_layer_leaves_nothing_behind(model, rows, monkeypatch, number):
    batch = model.batch([model.request(tokens(n)) for n in (100, 30)])
    forward_batch = model.prepare(model.forward_batch(batch))
    before, metadata = snapshot(model.backend), model.backend.forward_metadata

    def fail(*args, **kwargs):
        assert model.backend.forward_metadata is not metadata
        raise RuntimeError("the layer's own")

    with monkeypatch.context() as patch:
        patch.setattr(model.text.layers[number].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="the layer's own"):
            model.text_of(forward_batch)
    same_metadata(model.backend, before, metadata)
    assert not hasattr(forward_batch, yoco_fast_prefill.CUT)
    same(model.forward(model.forward_batch(batch)), plain(model, batch))


def test_a_cut_that_cannot_be_made_falls_back_and_says_so_once(model, rows, monkeypatch, caplog):
    batch = model.batch([model.request(tokens(n)) for n in (100, 30)])
    wanted = plain(model, batch)

    def fail(*args, **kwargs):
        raise ValueError("made up")

    monkeypatch.setattr(yoco_cut, "cut_batch", fail)
    for _ in range(2):
        got = model.forward(model.forward_batch(batch))
        assert torch.equal(got.next_token_logits, wanted.next_token_logits)
    assert cut_rows(rows) == 130
    said = [r for r in caplog.records if "off in this process" in r.message]
    assert len(said) == 1
    assert "made up" in said[0].exc_text


def test_the_metadata_of_the_cut_are_made_while_the_first_layers_run(model, rows, monkeypatch):
    """SGLang waits for the GPU there. Nothing is made of a prefill of which no row goes on."""
    ran, real = [], yoco_cut.cut_metadata

    def spy(backend, batch):
        ran.append(sorted(rows[-1]))
        return real(backend, batch)

    monkeypatch.setattr(yoco_cut, "cut_metadata", spy)
    model.forward(model.forward_batch(model.batch([model.request(tokens(100))])))
    assert ran == [list(range(yoco_cut.AT))]
    assert cut_rows(rows) == 1
    chunked = model.request(tokens(200))
    model.forward(model.forward_batch(model.batch([model.take(chunked, 64)])))
    assert len(ran) == 1
    assert cut_rows(rows) is None


def test_with_other_ranks_an_error_of_the_cut_is_raised(model, rows, monkeypatch):
    """The others have cut their rows; test_yoco_ranks.py has two real ranks."""
    batch = model.batch([model.request(tokens(n)) for n in (100, 30)])
    forward_batch = model.forward_batch(batch)
    group = SimpleNamespace(world_size=2, rank_in_group=1)
    monkeypatch.setattr(giving_up.base, "ranks", lambda: group)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(yoco_cut, "cut_metadata", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"rank 1 of 2 .*tried to allocate") as told:
        model.forward(forward_batch)
    assert "G4DEBUG_FIX_YOCO_FAST_PREFILL=0" in str(told.value)
    assert not giving_up.off
    monkeypatch.setattr(yoco_cut, "cut_metadata", lambda *args: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        model.forward(model.forward_batch(batch))


def test_an_error_in_the_question_for_a_graph_leaves_the_graph(model, rows, monkeypatch, caplog):
    monkeypatch.setattr(yoco_fast_prefill, "_eager_rows", 39)
    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    runner = SimpleNamespace(model_runner=model.runner)
    with monkeypatch.context() as patch, model.context():
        patch.setattr(yoco_fast_prefill, "batch_limit", lambda batch: 1 / 0)
        assert yoco_fast_prefill.around_can_run(lambda *a: True, runner, forward_batch)
    assert sum("off in this process" in r.message for r in caplog.records) == 1
    # It stays with the graph: the path is off.
    with model.context():
        assert yoco_fast_prefill.around_can_run(lambda *a: True, runner, forward_batch)


def test_facts_that_cannot_be_read_are_no_facts(model, rows, monkeypatch):
    batch = model.batch([model.request(tokens(40)), model.request(tokens(20))])
    forward_batch = model.forward_batch(batch)
    vars(forward_batch).pop(yoco_plan.FACTS)
    target = SimpleNamespace(is_draft_worker=False)
    fewer = SimpleNamespace(reqs=batch.reqs[:1])
    assert yoco_plan.after_init_new(forward_batch, None, fewer, target) is forward_batch
    assert not hasattr(forward_batch, yoco_plan.FACTS)
    assert not giving_up.off  # the next batch may be another
    strange = SimpleNamespace(reqs=[None, None])
    assert yoco_plan.after_init_new(forward_batch, None, strange, target) is forward_batch
    assert not hasattr(forward_batch, yoco_plan.FACTS)
    assert giving_up.off


def test_the_page_table_guard_agrees_with_the_cut_tables(model, arm, monkeypatch):
    """Every tracer armed, page tables compared with req_to_token; a cut table that lies is found.

    The backend is older than the tracer here, so the tracer is shown it.
    """
    from sglang.srt.layers.attention import trtllm_mha_backend

    from g4debug.trapping.trap import TrapError

    monkeypatch.setattr(giving_up, "off", False)
    arm(SGLANG_TRTLLM_MHA_DEBUG="1", **{SWITCH: "1"})
    model.backend.__init__(model.runner)
    tables = []
    real = trtllm_mha_backend.flashinfer.prefill.trtllm_batch_context_with_kv_cache

    def spy(**arguments):
        tables.append(len(arguments["block_tables"]))
        return real(**arguments)

    monkeypatch.setattr(
        trtllm_mha_backend.flashinfer.prefill, "trtllm_batch_context_with_kv_cache", spy
    )
    chunked = model.request(tokens(200))
    batch = model.batch([model.request(tokens(150)), model.take(chunked, 64)])
    model.forward(model.forward_batch(batch))
    assert tables == [2] * FIRST + [1] * TINY.kv_shared

    real_metadata = yoco_cut.cut_metadata

    def wrong(backend, cut):
        metadata = real_metadata(backend, cut)
        metadata.page_table = metadata.page_table.roll(1, 1)
        return metadata

    monkeypatch.setattr(yoco_cut, "cut_metadata", wrong)
    with pytest.raises(TrapError, match="page-table"):
        model.forward(model.forward_batch(batch))
    model.clear()


# --- CUDA graphs of a prefill -------------------------------------------------------------------


def prefill_graphs(forward_batch):
    """SGLang's own ways to say that a graph of a prefill runs, of those that this release has."""
    if releases.has("sglang.srt.compilation.piecewise_context_manager"):
        from sglang.srt.compilation import piecewise_context_manager as module

        yield module.set_forward_context(forward_batch, [], None, [], [])
        return
    from sglang.srt.model_executor.runner_backend_utils import tc_piecewise_cuda_graph as module

    yield module.set_tc_piecewise_forward_context(forward_batch, [], None, [], [])
    if releases.has("sglang.srt.model_executor.runner_utils.prefill_graph"):
        from sglang.srt.model_executor.runner_utils import prefill_graph

        yield prefill_graph.prefill_graph_scope(full_graph=False)


def test_inside_of_a_graph_nothing_is_cut(model, rows):
    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    for inside in prefill_graphs(forward_batch):
        with inside:
            assert "CUDA graph" in decide(model, forward_batch)
        assert decide(model, forward_batch) == [1]


def test_dynamo_traces_through_the_wrappers_and_sees_no_cut():
    """As SGLang compiles a language model for piecewise graphs: the whole graph or an error."""
    calls = []

    def layer(self, positions, hidden_states, per_layer_input, forward_batch, **kwargs):
        return hidden_states * 2, None

    def text(self, input_ids, positions, forward_batch):
        hidden = yoco_fast_prefill.around_layer(
            layer, self, positions, input_ids, None, forward_batch
        )
        return hidden[0]

    def backend(graph, example):
        calls.append(graph)
        return graph.forward

    class Batch:  # has facts, as a batch that SGLang made for a prefill
        pass

    batch = Batch()
    setattr(batch, yoco_plan.FACTS, yoco_plan.Facts((False,), False))
    self = SimpleNamespace(layer_id=0)
    compiled = torch.compile(
        lambda x: yoco_fast_prefill.around_model(text, self, x, x, batch),
        fullgraph=True, backend=backend,
    )  # fmt: skip
    with torch._dynamo.config.patch(disable=False):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("threshold", "graph"), [(0, True), (39, False), (40, True)], ids=["never", "spares", "less"]
)
def test_from_how_many_spared_rows_on_a_graph_is_not_replayed(
    model, rows, monkeypatch, threshold, graph
):
    monkeypatch.setattr(yoco_fast_prefill, "_eager_rows", threshold)
    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    runner = SimpleNamespace(model_runner=model.runner)
    can_run = yoco_fast_prefill.around_can_run
    with model.context():
        assert can_run(lambda *a: True, runner, forward_batch) is graph
        assert can_run(lambda *a: False, runner, forward_batch) is False
    said = [text for _, text in yoco_fast_prefill.base._said if "SGLang's CUDA graph" in text]
    assert len(said) == graph


def test_the_graphs_of_other_models_are_left_alone(model, rows):
    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    other = SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Linear(1, 1)))
    assert yoco_fast_prefill.around_can_run(lambda *a: True, other, forward_batch)


def test_a_prefill_that_is_not_replayed_is_cut_in_a_compiled_model(model, rows):
    """SGLang puts a trampoline before the forward when it builds piecewise graphs."""
    if not releases.has("sglang.srt.compilation.compile"):
        pytest.skip("this SGLang has no such trampoline")
    from sglang.srt.compilation.compile import install_torch_compiled

    forward_batch = model.forward_batch(model.batch([model.request(tokens(40))]))
    install_torch_compiled(model.text, backend_factory=lambda graph, example: graph)
    try:
        assert "forward" in vars(model.text)
        model.forward(forward_batch)
    finally:
        del model.text.forward
    assert rows[-1][0] == 40
    assert rows[-1][max(rows[-1])] == 1


def test_it_is_around_the_other_paths_of_a_layer():
    """They must get the rows that are left, not cut what they have fused."""
    from g4debug.fixes import base
    from g4debug.hooking.hooks import Hooks

    hooks = Hooks()
    others = [name for name in ("ple-tail", "triple-rmsnorm") if _is_here(name)]
    base.apply_all(hooks, dict.fromkeys([*others, yoco_fast_prefill.ID], True), {})
    assert hooks.owners("gemma4.layer")[-1] == yoco_fast_prefill.ID
    inside = set(hooks.owners("gemma4.layer")) | set(hooks.owners("gemma4.next_stream"))
    assert inside >= set(others)


def _is_here(name):
    return discovery.load("fix", name).is_for_this_release
