"""Our reading of a config and our pool solve, against SGLang's own, to the page."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import releases
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import A4B_26B, DENSE_31B, folder
from real_configurator import model_config
from real_configurator import solve as sglang_solve

from g4debug.cpu.geometry import E4B_256, TINY
from g4debug.hooking import targets
from g4debug.pools import config, solve
from g4debug.pools.config import ConfigError, KVGeometry

DTYPES = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}


@st.composite
def configs(draw):
    """A config.json of either kind, with keys left out now and then."""
    types = draw(st.lists(st.sampled_from(list(config.LAYER_TYPES)), min_size=1, max_size=12))
    types = ["sliding_attention", *types, "full_attention"]
    number = st.sampled_from
    text = {
        "model_type": "gemma4_text",
        "num_hidden_layers": len(types),
        "layer_types": types,
        "hidden_size": 256,
        "num_attention_heads": 16,
        "moe_intermediate_size": 128,
        "sliding_window": draw(number([128, 512, 1024])),
        "num_experts": draw(number([None, 8])),
        "num_kv_shared_layers": draw(number([0, 1])),
        "dtype": draw(number(["bfloat16", "float32"])),
        "num_key_value_heads": draw(number([1, 2, 4, 8, 16])),
        "head_dim": draw(number([32, 128, 256, 512])),
    }
    # The transformers of 0.5.23 lets nobody read the head size of a config whose layers differ in
    # it, and SGLang reads it of such a config that is not nested: it does not load there.
    nested = releases.has("transformers.integrations.heterogeneity") or draw(st.booleans())
    optional = {
        "global_head_dim": [64, 256, 512],
        "num_global_key_value_heads": [None, 1, 2, 4],
        "v_head_dim": [64, 512],
    }
    if not nested:
        optional = {
            "swa_head_dim": [32, 256],
            "swa_v_head_dim": [32, 256],
            "swa_num_key_value_heads": [1, 4, 8],
            "v_head_dim": [64, 512],
        }
    for key, values in optional.items():
        if draw(st.booleans()):
            text[key] = draw(number(values))
    if "num_global_key_value_heads" in text:
        text["attention_k_eq_v"] = True  # or later releases take no notice of it
    for key in ("num_key_value_heads", "head_dim", "sliding_window"):
        if draw(st.integers(0, 9)) == 0:
            del text[key]
    if nested:
        architectures = ["Gemma4ForConditionalGeneration"]
        return {"architectures": architectures, "model_type": "gemma4", "text_config": text}
    return {"architectures": ["Gemma4ForCausalLM"], **text}


@settings(
    max_examples=examples(120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    config_json=configs(),
    ratio=st.floats(0.01, 1.0).map(lambda x: round(x, 3)),
    memory=st.integers(1 << 24, 1 << 38),
    page=st.sampled_from([1, 16, 64, 128]),
    tp=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_any_geometry(sglang, monkeypatch, config_json, ratio, memory, page, tp, dtype):
    import torch

    with tempfile.TemporaryDirectory() as place:
        model = folder(Path(place) / "m", config_json)
        real = model_config(model)
        mine = config.read(model)
    assert mine.full_layers == len(real.full_attention_layer_ids)
    assert mine.swa_layers == len(real.swa_attention_layer_ids)
    assert mine.window == real.hf_text_config.sliding_window
    assert mine.experts == (real.hf_text_config.num_experts or 0)
    assert f"torch.{mine.dtype}" == str(real.dtype)
    pools = solve.solve(mine, solve.Memory(memory, page, tp, DTYPES[dtype]), ratio)
    arguments = (monkeypatch, real, getattr(torch, dtype), ratio, memory, page, tp)
    if not pools.full:
        with pytest.raises(RuntimeError, match="Not enough memory"):
            sglang_solve(*arguments)
    else:
        assert (pools.full, pools.swa) == sglang_solve(*arguments)


@pytest.mark.parametrize("geometry", [TINY, E4B_256], ids=["tiny", "E4B"])
def test_the_toy_models_with_their_kv_shared_layers(sglang, monkeypatch, tmp_path, geometry):
    """KV-shared layers are counted by SGLang like any other."""
    import torch

    model = folder(tmp_path, geometry.target_config())
    mine = config.read(model)
    assert mine.kv_shared == geometry.kv_shared > 0
    assert mine.full_layers + mine.swa_layers == geometry.layers
    for ratio in (0.15, 0.8):
        expected = sglang_solve(
            monkeypatch, model_config(model), torch.bfloat16, ratio, 1 << 33, 64
        )
        pools = solve.solve(mine, solve.Memory(1 << 33), ratio)
        assert (pools.full, pools.swa) == expected


LAYERS = ["sliding_attention", "full_attention"] * 3
PLAIN = {
    "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "sliding_window": 128, "vocab_size": 64, "intermediate_size": 64,
    "torch_dtype": "bfloat16", "max_position_embeddings": 256,
}  # fmt: skip
OTHER_MODELS = {
    "gpt_oss": ({"layer_types": LAYERS, "num_local_experts": 4}, "GptOssForCausalLM", 128),
    "llama4": (
        {"attention_chunk_size": 64, "model_type": "llama4_text"},
        "Llama4ForConditionalGeneration", 65,
    ),
}  # fmt: skip


@pytest.mark.skipif(not targets.matches(">=0.5.23"), reason="earlier releases lack some of them")
@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_other_models_with_a_swa_pool(sglang, monkeypatch, tmp_path, kind):
    import torch

    text, architecture, window = OTHER_MODELS[kind]
    if "model_type" in text:
        plain = {k: v for k, v in PLAIN.items() if k != "sliding_window"}
        made = {"model_type": kind, "text_config": {**plain, **text}, "torch_dtype": "bfloat16"}
    else:
        made = {"model_type": kind, **PLAIN, **text}
    model = folder(tmp_path, {"architectures": [architecture], **made})
    mine, real = config.read(model), model_config(model)
    assert mine.full_layers == len(real.full_attention_layer_ids)
    assert mine.swa_layers == len(real.swa_attention_layer_ids)
    assert mine.window == window
    assert not mine.gemma
    for ratio in (0.15, 0.8):
        expected = sglang_solve(monkeypatch, real, torch.bfloat16, ratio, 1 << 30, 64)
        pools = solve.solve(mine, solve.Memory(1 << 30), ratio)
        assert (pools.full, pools.swa) == expected


def test_layers_of_unlike_size_and_a_pattern_in_place_of_types():
    mimo = {
        **PLAIN, "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash",
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1], "v_head_dim": 16, "swa_head_dim": 24,
        "swa_v_head_dim": 8, "swa_num_key_value_heads": 2,
    }  # fmt: skip
    assert config.parse(mimo, "m") == KVGeometry(
        "m", 2, 4, 4, 48, 2, 32, 129, "bfloat16", gemma=False
    )
    step = {
        **PLAIN, "architectures": ["Step3p5ForCausalLM"], "layer_types": [*LAYERS, "a draft's"],
        "num_key_value_heads": None, "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_groups": 1},
    }  # fmt: skip
    assert config.parse(step, "s") == KVGeometry(
        "s", 3, 3, 2, 64, 1, 64, 129, "bfloat16", gemma=False
    )
    with pytest.raises(ConfigError, match="expected the kind of each of 6 layers"):
        config.parse({**mimo, "hybrid_layer_pattern": [0, 2]})
    for change in ({"hybrid_layer_pattern": [[]]}, {"hybrid_layer_pattern": 1, "layer_types": 3}):
        with pytest.raises(ConfigError, match="expected the kind of each of 6 layers"):
            config.parse({**mimo, **change})
    with pytest.raises(ConfigError, match="got v_head_dim='many', expected a whole number"):
        config.parse({**step, "v_head_dim": "many"})


def test_the_published_models():
    assert config.parse(A4B_26B, "26B") == KVGeometry(
        "26B", 5, 25, 2, 1024, 8, 512, 1024, "bfloat16", experts=128
    )
    assert config.parse(DENSE_31B, "31B") == KVGeometry(
        "31B", 10, 50, 4, 1024, 16, 512, 1024, "bfloat16"
    )


def test_the_pools_never_take_more_than_there_is():
    geometry = config.parse(A4B_26B)
    for ratio in (0.01, 0.15, 0.8, 1.0):
        memory = solve.Memory(10**10)
        pools = solve.solve(geometry, memory, ratio)
        used = solve.bytes_of(geometry, memory, pools)
        page = 64 * solve.cell_bytes(geometry, memory, 1.0)
        assert 10**10 - 2 * page <= used <= 10**10  # each pool is rounded down


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan")])
def test_a_ratio_that_sglang_refuses(ratio):
    with pytest.raises(ValueError, match="expected 0 < ratio <= 1"):
        solve.solve(config.parse(A4B_26B), solve.Memory(1 << 30), ratio)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "got model_type 'llama'"),
        ({"architectures": ["LlamaForCausalLM"]}, "expected gemma4 or gemma4_text with one of"),
        ({"text_config": None}, "got no text_config"),
        ({"text_config": {"head_dim": "x"}}, "got head_dim='x', expected a whole number from 1"),
        ({"text_config": {"sliding_window": 0}}, "got sliding_window=0"),
        ({"text_config": {"head_dim": True}}, "got head_dim=True"),
        ({"text_config": {"layer_types": ["mamba"]}}, "got layer_types=['mamba']"),
        ({"text_config": {"layer_types": ["full_attention"]}}, "got no sliding layer"),
        ({"text_config": {"layer_types": 3}}, "got layer_types=3"),
    ],
)
def test_a_config_that_cannot_be_used(change, words):
    with pytest.raises(ConfigError) as caught:
        config.parse({**A4B_26B, **change})
    assert words in str(caught.value)


def test_a_file_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read .*the folder that holds it"):
        config.read(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        config.read(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="got list, expected a JSON object"):
        config.read(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        config.read(file)
    file.write_text(json.dumps(A4B_26B))
    assert config.read(file) == config.read(tmp_path)
