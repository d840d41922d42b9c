"""The toy mixture of experts: its checkpoint, and that SGLang's own loader and layers run it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from g4debug.cpu import attach, experts, models
from g4debug.cpu.geometry import TINY, TINY_MOE

E, INNER, HIDDEN = TINY_MOE.experts, TINY_MOE.expert_intermediate, TINY_MOE.hidden


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return models.write(TINY_MOE, tmp_path_factory.mktemp("models") / "moe")


def test_the_config_says_experts(written):
    target, assistant = (json.loads((path / "config.json").read_text()) for path in written)
    assert target["enable_moe_block"] is True
    assert (target["num_experts"], target["top_k_experts"]) == (8, 2)
    assert target["moe_intermediate_size"] == INNER
    assert assistant["text_config"]["enable_moe_block"] is False
    dense = TINY.target_config()
    assert not dense["enable_moe_block"]
    assert "num_experts" not in dense


def test_every_layer_has_router_experts_and_norms(written):
    tensors = {}
    for file in sorted(written[0].glob("*.safetensors")):
        tensors |= load_file(file)
    for layer in range(TINY_MOE.layers):
        prefix = f"model.layers.{layer}"
        assert tensors[f"{prefix}.router.proj.weight"].shape == (E, HIDDEN)
        assert tensors[f"{prefix}.experts.gate_up_proj"].shape == (E, 2 * INNER, HIDDEN)
        assert tensors[f"{prefix}.experts.down_proj"].shape == (E, HIDDEN, INNER)
        assert tensors[f"{prefix}.router.per_expert_scale"].shape == (E,)
        for norm in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1"):
            assert tensors[f"{prefix}.{norm}.weight"].shape == (HIDDEN,)
    drawn = tensors["model.layers.0.experts.down_proj"]
    assert not torch.equal(drawn[0], drawn[1])


def test_a_dense_model_has_none(tmp_path):
    from g4debug.cpu import weights

    names = [name for name, _ in weights.target_tensors(weights.Weights(TINY))]
    assert "model.layers.0.mlp.down_proj.weight" in names
    assert not [name for name in names if "expert" in name or "router" in name]


def test_the_stand_in_is_the_experts_formula(sglang):
    """Against an explicit loop: sum over a token's experts of w * down(gelu(gate x) * up x)."""
    from types import SimpleNamespace

    from sglang.srt.layers.moe.topk import StandardTopKOutput

    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    layer = SimpleNamespace(num_experts=4, w13_weight=draw(4, 2 * 6, 8), w2_weight=draw(4, 8, 6))
    method = SimpleNamespace(
        moe_runner_config=SimpleNamespace(
            activation="gelu", apply_router_weight_on_input=False, gemm1_alpha=None
        )
    )
    x, weight = draw(5, 8), torch.rand(5, 2, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)]).int()
    dispatch = SimpleNamespace(
        hidden_states=x, topk_output=StandardTopKOutput(weight, ids, torch.empty(0))
    )
    got = experts.forward_cpu(method, layer, dispatch).hidden_states
    expected = torch.zeros_like(x)
    for token in range(5):
        for slot in range(2):
            expert = int(ids[token, slot])
            gate, up = (layer.w13_weight[expert] @ x[token]).chunk(2)
            inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            expected[token] += weight[token, slot] * (layer.w2_weight[expert] @ inner)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_both_names_of_sglangs_method_are_replaced(sglang):
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod as Method

    ours = [s for s in attach.for_this_release() if s.replacement is experts.forward_cpu]
    if not ours:
        pytest.skip("this SGLang's own method takes Gemma-4's experts")
    assert len(ours) == 2
    assert Method.forward_cpu is Method.forward_native is experts.forward_cpu


def test_a_bias_is_loaded_as_its_weight_is(sglang):
    """gpt-oss' experts have biases, which SGLang before 0.5.15 narrows in a dimension too much."""
    weight, bias = torch.randn(E, HIDDEN, INNER), torch.randn(E, HIDDEN)
    for loaded in (weight, bias):
        parameter = torch.zeros_like(loaded)
        size = loaded.shape[-1]
        target, source = experts.narrowed(parameter, loaded, 0, 0, 2, size, True)
        target.copy_(source)
        assert torch.equal(parameter, loaded)


@pytest.mark.once("the toys are served on the newest release only")
def test_a_shared_expert_is_added_as_by_sglangs_kernel(sglang):
    """Against the formula in float64, and the kernel in Triton's interpreter."""
    from sglang.kernels.ops.elementwise import elementwise

    hidden, shared, routed = (torch.randn(5, HIDDEN) for _ in range(3))
    gate = torch.randn(HIDDEN)
    share = 1 / (1 + (-(hidden.double() @ gate.double())).exp())
    wanted = routed.double() + share[:, None] * shared.double()
    for add in (experts.fused_gate_sigmoid_mul_add, elementwise.fused_gate_sigmoid_mul_add):
        out = routed.clone()
        assert add(hidden, gate, shared, out) is None
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"got a tensor with the shape \(4, 64\), expected"):
        experts.fused_gate_sigmoid_mul_add(hidden, gate, shared[:4], routed)
