"""kv-writes on any attention backend, on MLA's pool and on that of a hybrid with linear layers."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from g4debug.backends.parts import parts
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.kv_writes.tracer import KvWritesTracer
from g4debug.trapping.trap import TrapError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
PAGE, PAGES, LENGTHS = 4, 9, (6, 9)


def backend_class():
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    found = type("SomebodysBackend", (AttentionBackend,), {"__init__": lambda self: None})
    found.__abstractmethods__ = frozenset()  # older releases have some
    return found


def mla_pool():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=torch.float32, kv_lora_rank=8,
        qk_rope_head_dim=4, layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def mha_pool():
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool((PAGES - 1) * PAGE, PAGE, torch.float32, 1, 8, 2, "cpu", False)


def hybrid_pool():
    """As HybridLinearKVPool: the layers with attention have a pool in it."""
    return SimpleNamespace(full_kv_pool=mha_pool())


class It:
    """A decode of two requests."""

    def __init__(self, folder, pool):
        self.tracer = KvWritesTracer(
            Context.alone("kv-writes", Settings(debug=True, debug_dir=folder))
        )
        table = torch.zeros(3, 4 * PAGE, dtype=torch.int32)
        table[1:] = torch.arange(PAGE, PAGES * PAGE).view(2, -1)
        self.pool, self.inner = pool, getattr(pool, "full_kv_pool", pool)
        backend = backend_class()
        self.leaf, self.backend = backend(), backend()
        self.backend.list_of_parts = [self.leaf, self.leaf]
        for each in (self.leaf, self.backend):
            each.req_to_token_pool = SimpleNamespace(req_to_token=table)
            each.token_to_kv_pool = pool
        self.runner = SimpleNamespace(
            server_args=SimpleNamespace(disable_overlap_schedule=True),
            page_size=PAGE,
            attn_backend=self.backend,
            token_to_kv_pool=pool,
        )
        self.layer = SimpleNamespace(layer_id=0)
        self.batch = SimpleNamespace(
            forward_mode=SimpleNamespace(
                name="DECODE", is_decode=lambda: True, is_target_verify=lambda: False
            ),
            batch_size=2,
            spec_info=None,
            req_pool_indices=torch.tensor([1, 2]),
            seq_lens=torch.tensor(LENGTHS),
            out_cache_loc=torch.tensor([int(table[r + 1, n - 1]) for r, n in enumerate(LENGTHS)]),
        )
        self.tracer.after_runner_attention(None, self.runner)
        self.tracer.before_run_batch()
        self.around_write = self.tracer._around_write()

    def write(self, *args):
        self.around_write(lambda *args: None, self.inner, self.layer, self.batch.out_cache_loc)

    def attention(self, write=True):
        def call(backend, *args):
            if write:
                self.write()

        given = (None, "K", "V", self.layer, self.batch)
        self.tracer.around_attention(call, self.leaf, *given)

    def counted(self):
        tally = self.tracer.context.status.tallies.get("locations")
        return 0 if tally is None else tally.count

    def limits(self):
        (found,) = self.tracer.context.recorder.status.records()
        return [limit.what for limit in found.limits]


@pytest.fixture(params=[mla_pool, mha_pool, hybrid_pool])
def it(request, tmp_path, sglang):
    return It(tmp_path, request.param())


def test_the_parts_of_a_backend(it):
    assert set(map(id, parts(it.backend))) == {id(it.backend), id(it.leaf)}
    assert it.tracer.backends.known == {id(it.backend), id(it.leaf)}


def test_a_layers_write_is_judged(it):
    it.attention()
    assert (it.counted(), it.limits()) == (2, [])
    it.batch.out_cache_loc[1] += 1
    with pytest.raises(TrapError, match="kv-writes"):
        it.attention()


def test_a_write_outside_of_a_layers_attention_is_judged(it):
    """As MLA's model writes in a prefill."""

    def model(runner, batch):
        it.write()
        it.attention(write=False)

    it.tracer.around_model(model, it.runner, it.batch)
    assert (it.counted(), it.limits()) == (2, [])
    it.batch.out_cache_loc[0] = 99 * PAGE
    with pytest.raises(TrapError, match="slot 396"):
        it.tracer.around_model(model, it.runner, it.batch)


def test_a_write_outside_of_which_the_layer_is_not_known_is_told_and_the_next_is_judged(it):
    """As SWAKVPool passes it on to its two pools."""

    def model(runner, batch):
        it.around_write(lambda *args: None, it.inner, None, batch.out_cache_loc)
        it.attention(write=False)

    it.tracer.around_model(model, it.runner, it.batch)
    assert (it.counted(), it.limits()) == (0, ["some writes in decode forwards are not judged"])
    it.attention()
    assert it.counted() == 2


def test_of_a_layer_whose_write_is_not_seen_it_is_told(it):
    for _ in range(3):
        it.attention(write=False)
    assert it.counted() == 0
    assert it.limits() == ["some writes in decode forwards are not judged"]
    assert it.tracer.rests("DECODE")
    assert not it.tracer.rests("EXTEND"), "nothing was said of prefills: a blind one is to be told"


@pytest.mark.parametrize("hooked", [True, False])
def test_a_pool_that_is_not_known_is_told_of(it, hooked):
    it.inner.__class__ = type("PackedPool", (type(it.inner),), {})
    it.tracer._prepare(it.inner)
    it.attention(write=hooked)
    assert it.counted() == 0
    assert it.limits() == ["writes into a PackedPool are not judged"]
    assert it.tracer.rests("DECODE")
    assert not it.tracer.rests("EXTEND")


def test_a_failure_of_ours_is_said_as_what_it_is_and_ends_no_forward(it, monkeypatch):
    def fail(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(it.tracer, "_safe", fail)
    it.attention()
    it.attention()
    assert it.limits() == ["its hook checked is off"]
    it.layer = SimpleNamespace(layer_id=1)  # of which no write was seen
    del it.batch.out_cache_loc
    it.attention(write=False)
    assert "its hook missed is off" in it.limits()


def test_a_pool_that_gets_its_size_after_the_graphs_is_told_of(it):
    it.runner.token_to_kv_pool = SimpleNamespace(post_capture_active=True)
    it.tracer.after_scheduler_init(
        None, SimpleNamespace(tp_worker=SimpleNamespace(model_runner=it.runner))
    )
    (limit,) = it.tracer.context.status.record().limits
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in limit.why
