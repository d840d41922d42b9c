"""yoco-fast-prefill on SGLang's triton backend, the one that prefills on a H200, interpreted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_model import served
from test_yoco_fast_prefill import FIRST, SWITCH, cut_rows, plain, rows, same, tokens

from g4debug.cpu.geometry import TINY
from g4debug.fixes.paths.yoco_fast_prefill import cut as yoco_cut
from g4debug.fixes.paths.yoco_fast_prefill import forwards, giving_up
from g4debug.trapping.trap import TrapError

__all__ = ["rows"]  # a fixture
pytestmark = pytest.mark.written_for("yoco-fast-prefill")


@pytest.fixture(scope="module")
def model(_sglang_imported):
    from g4debug.cpu.models import tiny_models

    with served(
        tiny_models()[0], disable_overlap_schedule=True, attention_backend="triton"
    ) as made:
        yield made


def metadata_of(backend):
    """Clones of the metadata and of the buffers that they are views of."""
    found = {**vars(backend.forward_metadata), **vars(backend)}
    return {k: v.clone() for k, v in found.items() if isinstance(v, torch.Tensor)}


def test_mixed_prompts_a_window_and_a_chunk(model, rows):
    """150 tokens are more than the window of 128; the chunk keeps no row."""
    chunked = model.request(tokens(60))
    requests = [
        model.request(tokens(150)),
        model.take(chunked, 20),
        model.request(tokens(33), return_logprob=True, logprob_start=30),
        model.request(tokens(1)),
    ]
    batch = model.batch(requests)
    forward_batch = model.prepare(model.forward_batch(batch))
    before, metadata = metadata_of(model.backend), model.backend.forward_metadata
    model.text_of(forward_batch)
    assert rows[-1][0] == 204
    assert cut_rows(rows) == 1 + 3 + 1
    assert model.backend.forward_metadata is metadata
    after = metadata_of(model.backend)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    same(model.forward(model.forward_batch(batch)), plain(model, batch), [0, 2, 3])


def test_the_mask_of_image_tokens_is_cut_with_the_rows(model, rows, monkeypatch):
    """``prepare_attn_masks`` of gemma4_mm: all tokens of an image see each other.

    The first request keeps rows that lie inside of an image, the second only its last row.
    """
    batch = model.batch(
        [
            model.request(tokens(24), return_logprob=True, logprob_start=16),
            model.request(tokens(20)),
        ]
    )

    def prepared(forward_batch):
        model.prepare(forward_batch)
        masks = []
        for length, (begin, end) in ((24, (18, 23)), (20, (4, 9))):
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            mask[begin:end, begin:end] = True
            masks.append(mask.flatten())
        model.backend.forward_metadata.custom_mask = torch.cat(masks)
        model.backend.forward_metadata.mask_indptr = torch.tensor([0, 576, 976])
        return forward_batch

    def hidden(forward_batch):
        return model.text_of(prepared(forward_batch))

    got = hidden(model.forward_batch(batch))
    assert cut_rows(rows) == 8 + 1
    whole = model.forward_batch(batch)
    del whole.g4debug_yoco_facts
    wanted = hidden(whole)
    assert rows[-1][FIRST] == 44
    kept = [*range(16, 24), 43]
    torch.testing.assert_close(got[kept], wanted[kept], rtol=0, atol=5e-3)
    # The mask matters: without it the rows inside of the image are others.
    monkeypatch.setattr(yoco_cut, "cut_mask", lambda *args: None)
    without = hidden(model.forward_batch(batch))
    assert (without[18:22] - wanted[18:22]).abs().max() > 0.05
    torch.testing.assert_close(without[43], wanted[43], rtol=0, atol=5e-3)


def modes(model, monkeypatch):
    """Which of the backend's forwards are called, one entry for each layer, in order."""
    called = []
    for name in ("forward_decode", "forward_extend"):
        real = getattr(model.backend, name)

        def seen(*args, real=real, name=name, **kwargs):
            called.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(model.backend, name, seen)
    return called


def test_single_rows_are_a_decode_step(model, rows, monkeypatch):
    """A window, a chunk, a prefix of the cache, and a prompt of one token: the last rows of all."""
    first, chunked = model.request(tokens(150)), model.request(tokens(60))
    batch = model.batch([first, model.take(chunked, 20), model.request(tokens(1))])
    wanted = plain(model, batch)
    called = modes(model, monkeypatch)
    forward_batch = model.prepare(model.forward_batch(batch))
    mode, before, metadata = (
        forward_batch.forward_mode,
        metadata_of(model.backend),
        model.backend.forward_metadata,
    )
    model.text_of(forward_batch)
    shared = len(model.text.layers) - FIRST
    assert called == ["forward_extend"] * FIRST + ["forward_decode"] * shared
    assert forward_batch.forward_mode is mode
    assert getattr(forward_batch, "attn_backend", model.backend) is model.backend
    assert model.backend.forward_metadata is metadata
    after = metadata_of(model.backend)
    assert all(torch.equal(after[name], before[name]) for name in before)
    same(model.forward(model.forward_batch(batch)), wanted, [0, 2])


def test_the_prefill_side_of_a_hybrid_makes_the_decode_step(model, rows, monkeypatch):
    """Its other side runs a server's decodes, and has no metadata for this one."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    batch = model.batch([model.request(tokens(150)), model.request(tokens(40))])
    wanted = plain(model, batch)
    other = SimpleNamespace(needs_cpu_seq_lens=False)  # it has nothing else that could be called
    hybrid = HybridAttnBackend(model.runner, model.backend, other)
    called = modes(model, monkeypatch)
    monkeypatch.setattr(model.runner, "attn_backend", hybrid)
    got = model.forward(model.forward_batch(batch))
    assert cut_rows(rows) == 2
    assert called.count("forward_decode") == len(model.text.layers) - FIRST
    same(got, wanted)


def test_with_prompt_logprobs_the_rows_stay_a_prefill(model, rows, monkeypatch):
    batch = model.batch(
        [model.request(tokens(33), return_logprob=True, logprob_start=30), model.request([7, 8])]
    )
    called = modes(model, monkeypatch)
    got = model.forward(model.forward_batch(batch))
    assert called == ["forward_extend"] * len(model.text.layers)
    same(got, plain(model, batch), [0, 1])


def test_the_decode_step_sees_the_whole_window_and_sglangs_own_one_key_less(model, rows):
    """SGLang's sliding_window_size is the window less one.

    TRIAGE.md, 'The triton backend decodes with one key less than the window'.
    """
    forward_batch = model.prepare(model.forward_batch(model.batch([model.request(tokens(150))])))
    _, step = yoco_cut.cut_batch(forward_batch, [1])
    yoco_cut.as_decode(step)
    forwards.plan_slots(model.backend, step)
    metadata = yoco_cut.cut_metadata(model.backend, step)
    assert int(metadata.window_kv_indptr[1]) == TINY.window
    assert model.backend.sliding_window_size == TINY.window - 1
    model.backend.init_forward_metadata(step)
    assert int(model.backend.forward_metadata.window_kv_indptr[1]) == TINY.window - 1


@pytest.mark.parametrize("lists", [None, "kv_indices", "window_kv_indices"])
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_the_page_table_guard_judges_the_cut_lists(model, arm, monkeypatch, lists, step):
    """Every tracer armed: sound lists are silent, and a list whose slots are exchanged is told.

    The rows are a decode step, or with prompt logprobs a prefill. The backend is older than the
    tracer here, so the tracer is shown it.
    """
    monkeypatch.setattr(giving_up, "off", False)
    arm(SGLANG_TRTLLM_MHA_DEBUG="1", **{SWITCH: "1"})
    model.backend.__init__(model.runner)
    asked = {"return_logprob": True, "logprob_start": 140} if step == "prefill" else {}
    chunked = model.request(tokens(200))
    batch = model.batch([model.request(tokens(150), **asked), model.take(chunked, 64)])
    called = modes(model, monkeypatch)
    real = yoco_cut.cut_metadata

    def lying(backend, cut):
        metadata = real(backend, cut)
        if lists is not None:
            found = getattr(metadata, lists)
            found.copy_(found.roll(1))
        return metadata

    monkeypatch.setattr(yoco_cut, "cut_metadata", lying)
    try:
        if lists is None:
            model.forward(model.forward_batch(batch))
            assert called.count("forward_decode") == (TINY.kv_shared if step == "decode" else 0)
        else:
            with pytest.raises(TrapError, match="page-table"):
                model.forward(model.forward_batch(batch))
    finally:
        model.clear()
