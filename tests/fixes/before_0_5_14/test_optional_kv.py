"""optional-kv on SGLang's real custom op, layers, backend and pools; dynamo traces the real call.

SGLang registers the op for CUDA only. For the CPU it is registered here: the very function of
SGLang's source, for one more device.
"""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from real_backend import Rig

from g4debug.fixes.before_0_5_14 import optional_kv
from g4debug.fixes.before_0_5_14.optional_kv import OP, still_broken

OFF = {"G4DEBUG_FIX_OPTIONAL_KV": "0"}
PADDED = 32  # tokens of the graph; the batch has 20
pytestmark = pytest.mark.written_for("optional-kv")


@pytest.fixture(scope="module")
def cpu_ops(_sglang_imported):
    """Both ops also on the CPU."""
    from sglang.srt.layers import radix_attention
    from sglang.srt.utils import custom_op

    library = torch.library.Library("sglang", "FRAGMENT")
    found = {}

    def keep(fn=None, **options):
        if fn is None:
            return lambda fn: keep(fn, **options)
        found[fn.__name__] = fn
        return fn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_op, "register_custom_op", keep)
        again = types.ModuleType("again")
        exec(inspect.getsource(radix_attention), again.__dict__)
    library.impl("unified_attention_with_output", found["unified_attention_with_output"], "CPU")

    ours = {}
    real = custom_op.register_custom_op

    def spy(fn, **options):
        ours[fn.__name__] = fn
        return real(fn, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_op, "register_custom_op", spy)
        optional_kv._calls.clear()
        optional_kv.register_op()
    library.impl(OP, ours[OP], "CPU")
    yield
    library._destroy()


@pytest.fixture
def scene(cpu_ops):
    """A prefill of two requests that are in the pool: q of one layer, and what surrounds it."""

    class Scene:
        def __init__(self):
            self.rig = Rig()
            self.backend = self.rig.backend()
            requests = [self.rig.admit("a", 60), self.rig.admit("b", 90)]
            self.batch = self.rig.batch("extend", requests, self.backend)
            self.batch.num_token_non_padded_cpu = len(self.batch.out_cache_loc)
            self.backend.init_forward_metadata(self.batch)
            self.rig.forward(self.backend, self.batch)  # layers 0 to 4 have KV
            self.q = torch.randn(PADDED, self.rig.layers[0].tp_q_head_num, 8)

        def eager(self, layer):
            real = self.batch.num_token_non_padded_cpu
            return layer(self.q[:real], None, None, self.batch, save_kv_cache=False)

        def piecewise(self, layer, q=None, kv=(None, None), call=None):
            from sglang.srt.compilation import piecewise_context_manager as context

            with context.set_forward_context(self.batch, self.rig.layers, None, [], []):
                call = call or layer
                return call(self.q if q is None else q, *kv, self.batch, save_kv_cache=False)

    return Scene()


def test_without_the_fix_it_is_the_crash_of_the_gpu(arm, scene):
    arm(**OFF)
    with pytest.raises(TypeError, match="'NoneType' object is not subscriptable"):
        scene.piecewise(scene.rig.layers[0])


@pytest.mark.parametrize("number", [0, 2], ids=["sliding", "full"])
def test_the_same_numbers_as_eager(arm, scene, number):
    arm()
    layer = scene.rig.layers[number]
    wanted = scene.eager(layer)
    got = scene.piecewise(layer)
    real = scene.batch.num_token_non_padded_cpu
    assert got.shape == scene.q.shape
    assert torch.equal(got[:real].reshape(wanted.shape), wanted)
    assert wanted.abs().sum() > 0
    assert scene.batch.attn_backend is scene.backend
    assert len(scene.batch.out_cache_loc) == real


def test_a_call_with_kv_is_sglangs_own(arm, scene, monkeypatch):
    arm()
    seen = []
    monkeypatch.setitem(optional_kv._calls, "piecewise", lambda *a: seen.append(a))
    kv = [torch.randn(PADDED, 1, 8) for _ in "kv"]
    scene.piecewise(scene.rig.layers[0], kv=kv)
    assert not seen
    scene.piecewise(scene.rig.layers[0])
    assert len(seen) == 1


def test_an_error_of_the_backend_puts_it_back(arm, scene, monkeypatch):
    arm()

    def fail(*args, **kwargs):
        raise RuntimeError("the backend's own")

    monkeypatch.setattr(scene.backend, "forward_extend", fail)
    with pytest.raises(RuntimeError, match="the backend's own"):
        scene.piecewise(scene.rig.layers[0])
    assert scene.batch.attn_backend is scene.backend


def test_breakable_graphs_go_the_same_way(arm, scene, monkeypatch):
    from sglang.srt.layers import radix_attention

    monkeypatch.setattr(radix_attention, "is_in_breakable_cuda_graph", lambda: True)
    arm()
    layer = scene.rig.layers[0]
    real = scene.batch.num_token_non_padded_cpu
    wanted = scene.eager(layer)
    assert torch.equal(scene.piecewise(layer)[:real].reshape(wanted.shape), wanted)


def test_dynamo_traces_it_into_one_split_op(arm, scene):
    """As SGLang compiles a language model: whole graph, then cut at the split ops."""
    from sglang.srt.compilation.compilation_config import CompilationConfig

    arm()
    layer, graphs = scene.rig.layers[0], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        compiled = torch.compile(layer.forward, fullgraph=True, backend=backend)
        got = scene.piecewise(layer, call=compiled)
    real = scene.batch.num_token_non_padded_cpu
    assert torch.equal(got[:real].reshape(scene.eager(layer).shape), scene.eager(layer))
    (graph,) = graphs
    nodes = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    split = CompilationConfig([PADDED]).split_ops
    assert [n for n in nodes if n in split] == [f"sglang.{OP}"]


def test_it_is_registered_before_the_graphs_are_built(arm, scene, monkeypatch):
    from sglang.srt.model_executor.model_runner import ModelRunner

    arm()
    monkeypatch.setattr(optional_kv, "_calls", {})
    runner = ModelRunner.__new__(ModelRunner)
    runner.server_args = type("A", (), {"disable_piecewise_cuda_graph": True})()
    runner.init_piecewise_cuda_graphs()
    assert set(optional_kv._calls) == {"piecewise", "breakable"}


def test_the_probe(sglang):
    assert still_broken() is True
