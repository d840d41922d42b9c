"""fused-router, ple-tail and triple-rmsnorm in SGLang's real layer, on and off.

On the CPU a path runs only where it is forced on: its kernels are then Triton's interpreter's.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import arguments
import pytest
import real_layer
import releases
import torch

from g4debug import plugin
from g4debug.cpu.geometry import TINY, TINY_MOE
from g4debug.fixes.base import Fix
from g4debug.fixes.paths import base, fused_router, ple_tail, triple_rmsnorm
from g4debug.hooking import targets

PATHS = {m.ID: m for m in (fused_router, ple_tail, triple_rmsnorm)}
GEOMETRY = {"fused-router": TINY_MOE, "ple-tail": TINY, "triple-rmsnorm": TINY_MOE}
KERNELS = {
    "fused-router": ("fused_router",),
    "ple-tail": ("rmsnorm_add", "gelu_mul"),
    "triple-rmsnorm": ("triple_rmsnorm",),
}
OFF = {f"G4DEBUG_FIX_{p.upper().replace('-', '_')}": "0" for p in PATHS}
WRITTEN = {p: pytest.mark.written_for(p) for p in PATHS}
EACH = [pytest.param(p, marks=mark) for p, mark in WRITTEN.items()]


def on(*paths: str) -> dict[str, str]:
    return OFF | {f"G4DEBUG_FIX_{p.upper().replace('-', '_')}": "1" for p in paths}


@pytest.fixture(scope="module")
def process(_sglang_imported, tmp_path_factory):
    from g4debug.cpu.models import write

    target, _ = write(TINY, tmp_path_factory.mktemp("models") / "tiny")
    with real_layer.one_process(str(target)):
        yield


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched."""
    from g4debug.fixes.paths.kernels import fused_router, gelu_mul, rmsnorm_add, triple_rmsnorm

    modules = (fused_router, gelu_mul, rmsnorm_add, triple_rmsnorm)
    return real_layer.count_launches(monkeypatch, modules)


class Experts(torch.nn.Module):
    """Stands in for the experts, which are one op for dynamo on CUDA, and untraceable here."""

    def forward(self, x, logits):
        return x * logits.sigmoid().sum(-1, keepdim=True)


def run(geometry, tokens=real_layer.TOKENS, **other):
    return hidden(real_layer.layer(geometry, **other)(**real_layer.inputs(geometry, tokens)))


def hidden(out):
    """The hidden states that a layer returns; up to 0.5.21 there is a residual, which is None."""
    if isinstance(out, tuple):
        out, none = out
        assert none is None
    return out


@pytest.mark.parametrize("path", EACH)
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_layer_computes_the_same(process, arm, launches, path, tokens):
    from sglang.srt.plugins.hook_registry import HookRegistry

    own = run(GEOMETRY[path], tokens)
    assert not launches
    HookRegistry.reset()
    arm(**on(path))
    ours = run(GEOMETRY[path], tokens)
    # float32 on both sides; the sums are in another order.
    torch.testing.assert_close(ours, own, rtol=2e-5, atol=2e-6)
    assert set(launches) == set(KERNELS[path])
    assert sum(launches.values()) == (3 if path == "ple-tail" else 1)


@WRITTEN["fused-router"]
@WRITTEN["triple-rmsnorm"]
def test_both_paths_of_a_layer_with_experts(process, arm, launches):
    own = run(TINY_MOE)
    arm(**on("fused-router", "triple-rmsnorm"))
    torch.testing.assert_close(run(TINY_MOE), own, rtol=2e-5, atol=2e-6)
    assert launches == {"fused_router": 1, "triple_rmsnorm": 1}


@pytest.mark.parametrize("path", EACH)
def test_on_a_cpu_a_server_that_asked_for_all_is_sglangs_own(process, arm, launches, path):
    own = run(GEOMETRY[path])
    arm(G4DEBUG_FIXES="all")
    assert torch.equal(run(GEOMETRY[path]), own)
    assert not launches


@pytest.mark.parametrize("path", EACH)
def test_the_kill_switch(process, arm, launches, path):
    assert path not in owners(arm, {})
    needed = PATHS[path].FIX.still_broken()
    assert (path in owners(arm, {"G4DEBUG_FIXES": "all"})) is needed
    assert path not in owners(arm, {"G4DEBUG_FIXES": "all", **OFF})
    run(GEOMETRY[path])
    assert not launches


def owners(arm, switches):
    """Who hooks anything in this SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    arm(**switches)
    hooks = plugin.in_force.hooks
    return {owner for site in hooks.sites for owner in hooks.owners(site)}


@pytest.mark.parametrize("path", EACH)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("enable_deterministic_inference", True),
        ("rl_on_policy_target", "fsdp"),
        ("enable_torch_compile", True),
        ("debug_tensor_dump_output_folder", "somewhere"),
    ],
)
def test_servers_that_refuse(process, arm, launches, monkeypatch, caplog, path, argument, value):
    arm(**on(path))
    monkeypatch.setattr(base, "_said", set())
    arguments.put(monkeypatch, argument, value)
    with caplog.at_level(logging.INFO, "g4debug"):
        layer = real_layer.layer(GEOMETRY[path])
        real_layer.layer(GEOMETRY[path], 1)
    if argument not in ("enable_deterministic_inference", "rl_on_policy_target"):
        layer(**real_layer.inputs(GEOMETRY[path]))
    assert not launches
    (text,) = caplog.messages  # once, not for each layer
    assert text.startswith(f"g4debug: {path}: not used: --{argument.replace('_', '-')}")
    assert text.endswith("(first: layer 0)")


@WRITTEN["ple-tail"]
@WRITTEN["triple-rmsnorm"]
def test_layers_that_are_not_theirs(process, arm, launches):
    """Experts and a per-layer embedding at once (no released Gemma-4): SGLang's way."""
    both = replace(TINY_MOE, ple=16)
    own = run(both)
    arm(**on("ple-tail", "triple-rmsnorm"))
    assert torch.equal(run(both), own)
    assert not launches
    plain = replace(TINY, ple=0)
    run(plain)  # 31B: neither
    assert not launches


@pytest.mark.parametrize(
    ("path", "what"),
    [
        pytest.param("ple-tail", "per-layer embedding", marks=WRITTEN["ple-tail"]),
        pytest.param("triple-rmsnorm", "experts", marks=WRITTEN["triple-rmsnorm"]),
    ],
)
def test_a_model_that_has_nothing_for_a_path_says_so(process, arm, monkeypatch, caplog, path, what):
    arm(**on(path))
    theirs, without = GEOMETRY[path], {"ple-tail": TINY_MOE, "triple-rmsnorm": TINY}[path]
    caplog.set_level(logging.INFO, "g4debug")
    for models, said in (
        ((without, without), f"not used: this model has no {what} (first: layer 0)"),
        ((theirs, without), "active (first: layer 0)"),  # the second one is a draft
    ):
        monkeypatch.setattr(base, "_said", set())
        caplog.clear()
        for geometry in models:
            real_layer.layer(geometry)
        assert caplog.messages == [f"g4debug: {path}: {said}"]


@WRITTEN["ple-tail"]
def test_no_per_layer_input_is_sglangs_way(process, arm, launches):
    arm(**on("ple-tail"))
    layer = real_layer.layer(TINY)
    out = hidden(layer(**real_layer.inputs(TINY) | {"per_layer_input": None}))
    assert out.shape == (real_layer.TOKENS, TINY.hidden)
    assert not launches


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("post_attention_layernorm", "cast_x_before_out_mul", True),
        ("pre_feedforward_layernorm", "variance_size_override", 32),
        ("pre_feedforward_layernorm_2", "variance_epsilon", 1e-3),
        ("router.norm", "scale_shift", 1.0),
        ("router.norm", "with_scale", True),
    ],
)
def test_norms_that_the_triple_kernel_is_not(process, name, attribute, value):
    layer = real_layer.layer(TINY_MOE)
    assert triple_rmsnorm.limit(layer) == ""
    setattr(layer.get_submodule(name), attribute, value)
    assert "expected" in triple_rmsnorm.limit(layer)


def test_norms_that_the_tail_is_not(process):
    layer = real_layer.layer(TINY)
    assert ple_tail.limit(layer) == ""
    layer.post_per_layer_input_norm.scale_shift = 1.0
    assert "post_per_layer_input_norm" in ple_tail.limit(layer)


@WRITTEN["triple-rmsnorm"]
def test_the_input_of_a_layer_with_experts_is_left_alone(process, arm):
    arm(**on("triple-rmsnorm"))
    given = real_layer.inputs(TINY_MOE)
    before = given["hidden_states"].clone()
    real_layer.layer(TINY_MOE)(**given)
    assert torch.equal(given["hidden_states"], before)


def test_what_the_router_kernel_does_not_take_is_sglangs(launches):
    calls = []
    route = fused_router.routing(lambda *a: calls.append(a), torch.ones(8))
    route(None, torch.zeros(2, 8, dtype=torch.float64), 2, True)
    route(None, torch.zeros(2, 2, 8), 2, True)
    assert len(calls) == 2
    assert not launches


@pytest.mark.parametrize("newer", [False, True], ids=["0.5.12", "0.5.13"])
def test_the_routers_scale_of_both_releases(newer):
    from g4debug.fixes.paths._gemma4_layer import router_scale

    scale = torch.tensor([2.0, 4.0])
    router = SimpleNamespace(norm=SimpleNamespace(weight=torch.ones(2)))
    if newer:
        router._scale_fused = False
        router.fuse_scale = lambda: router.norm.weight.copy_(scale)
    else:
        router._fused_scale = None
        router.fuse_scale = lambda: setattr(router, "_fused_scale", scale)
    assert torch.equal(router_scale(router), scale)


@pytest.mark.parametrize("path", EACH)
def test_dynamo_traces_it_into_ops_that_it_does_not_look_into(process, arm, path):
    """As SGLang compiles a language model for piecewise CUDA graphs: one whole graph, and no guard
    on the number of tokens."""
    if path != "fused-router" and releases.has("sglang.srt.layers.layer_boundary"):
        pytest.skip("dynamo cannot trace the layer of this SGLang, with the path or without")
    arm(**on(path))
    geometry, graphs = GEOMETRY[path], []
    layer = real_layer.layer(geometry)
    layer(**real_layer.inputs(geometry))  # SGLang warms up, too, before it compiles
    part = layer.moe.topk.topk_config.custom_routing_function if path == "fused-router" else layer
    if path == "triple-rmsnorm":
        layer.moe = Experts()

    def backend(graph, example):
        graphs.append(graph)
        return graph

    def given(tokens):
        if path != "fused-router":
            made = real_layer.inputs(geometry, tokens)
            for tensor in made.values():
                if isinstance(tensor, torch.Tensor):
                    torch._dynamo.mark_dynamic(tensor, 0)
            return made
        logits = torch.randn(tokens, geometry.experts, generator=torch.Generator().manual_seed(1))
        torch._dynamo.mark_dynamic(logits, 0)
        return {"hidden_states": None, "gating_output": logits, "topk": 2, "renormalize": True}

    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        compiled = torch.compile(part, fullgraph=True, backend=backend)
        for tokens in (5, 9):
            got, right = compiled(**given(tokens)), part(**given(tokens))
            if isinstance(got, tuple):
                got, right = got[0], right[0]
            torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)
    (graph,) = graphs
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    ops = [n.partition(".")[2] for n in names if n.startswith("g4debug.")]
    wanted = {f"{kernel}_op" for kernel in KERNELS[path]}
    assert {o.partition(".")[0] for o in ops} >= wanted


@pytest.mark.parametrize("path", PATHS)
def test_the_declaration(sglang, path):
    fix = PATHS[path].FIX
    assert isinstance(fix, Fix)
    has = {"fused-router": "<0.5.13", "ple-tail": ""}.get(path, "<0.5.16")
    assert fix.still_broken() is targets.matches(has)
    assert "CUDA" in fix.eligible
