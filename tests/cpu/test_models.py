"""The toy checkpoints: files, shapes, and the algebra that the module's docstring claims."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import multiprocessing
import os
import time

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from g4debug.cpu import models
from g4debug.cpu.weights import Weights

# As E4B_256, every number its own so that a swapped one shows: 12 layers, 4 mirrored, r != d.
MIDDLE = dataclasses.replace(
    models.E4B_256,
    vocab=1024,
    hidden=64,
    intermediate=96,
    pattern="sssssf" * 2,
    kv_shared=6,
    heads=4,
    head_dim=48,
    swa_head_dim=40,
    ple=12,
    assistant_hidden=32,
    assistant_intermediate=24,
    centroids=64,
    centroid_top_k=8,
    max_position=512,
)


def tensors(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(folder / file, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    assert set(found) == set(index["weight_map"])
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return models.write(MIDDLE, tmp_path_factory.mktemp("models") / "middle")


def test_written_shapes_follow_the_config(written):
    target, assistant = tensors(written[0]), tensors(written[1])
    assert target["lm_head.weight"].shape == (1024, 64)
    assert target["model.embed_tokens_per_layer.weight"].shape == (1024, 12 * 12)
    for layer, dim in ((0, 40), (5, 48), (11, 48)):
        prefix = f"model.layers.{layer}"
        assert target[f"{prefix}.self_attn.q_proj.weight"].shape == (4 * dim, 64)
        assert target[f"{prefix}.self_attn.k_proj.weight"].shape == (2 * dim, 64)
        assert target[f"{prefix}.self_attn.o_proj.weight"].shape == (64, 4 * dim)
        assert target[f"{prefix}.self_attn.q_norm.weight"].shape == (dim,)
        assert target[f"{prefix}.mlp.down_proj.weight"].shape == (64, 96)
    assert assistant["pre_projection.weight"].shape == (32, 128)
    assert assistant["post_projection.weight"].shape == (64, 32)
    assert assistant["model.layers.3.self_attn.q_proj.weight"].shape == (4 * 48, 32)
    assert assistant["model.layers.0.mlp.gate_proj.weight"].shape == (24, 32)
    assert not any(name.startswith("model.layers.4.") for name in assistant)
    ordering = assistant["masked_embedding.token_ordering"]
    assert sorted(ordering.tolist()) == list(range(1024))
    dtypes = {t.dtype for t in target.values()}
    assert dtypes == {torch.bfloat16}
    assert all(t.isfinite().all() for t in (*target.values(), *assistant.values()))


def test_configs_use_the_convention_that_sglang_reads(written):
    target = json.loads((written[0] / "config.json").read_text())
    assert (target["head_dim"], target["swa_head_dim"]) == (48, 40)
    assert target["moe_intermediate_size"]
    assistant = json.loads((written[1] / "config.json").read_text())
    text = assistant["text_config"]
    assert (text["head_dim"], text["global_head_dim"]) == (40, 48)  # SGLang swaps these itself
    assert text["layer_types"] == target["layer_types"][-4:]
    assert assistant["backbone_hidden_size"] == target["hidden_size"]


def test_the_e4b_preset_is_the_real_shape():
    config = models.E4B_256.target_config()
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17, 23, 29, 35, 41]
    assert config["num_kv_shared_layers"] == 18
    assert [models.E4B_256.kv_owner(i) for i in (23, 24, 40, 41)] == [23, 22, 22, 23]


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": "ssfx"},
        {"assistant_layers": 7},
        {"centroids": 100},
        {"assistant_hidden": 65},
        {"kv_heads": 3},
    ],
)
def test_an_impossible_geometry_is_refused(change):
    with pytest.raises(ValueError, match="Geometry: "):
        dataclasses.replace(MIDDLE, **change)


def test_writing_again_does_nothing_and_another_seed_rewrites(tmp_path):
    folder = tmp_path / "m"
    target, _ = models.write(models.TINY, folder)
    before = (target / "config.json").stat().st_mtime_ns
    first = tensors(target)["lm_head.weight"]
    models.write(models.TINY, folder)
    assert (target / "config.json").stat().st_mtime_ns == before
    models.write(models.TINY, folder, seed=1)
    assert not torch.equal(first, tensors(target)["lm_head.weight"])
    models.write(models.TINY, folder)
    assert torch.equal(first, tensors(target)["lm_head.weight"])
    assert {p.name for p in tmp_path.iterdir()} == {"m", "m.lock"}


def test_a_strangers_directory_is_not_deleted(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="choose an empty directory"):
        models.write(models.TINY, tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_tokenizer_is_one_word_per_token(written):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(written[0] / "tokenizer.json"))
    assert tokenizer.encode("w4 w1023 nonsense").ids == [4, 1023, 3]
    assert tokenizer.decode([4, 17]) == "w4 w17"


def test_shards_stay_below_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "SHARD_BYTES", 100_000)
    target, _ = models.write(models.TINY, tmp_path / "m")
    sizes = [p.stat().st_size for p in target.glob("*.safetensors")]
    assert len(sizes) > 3
    largest = max(t.nbytes for t in tensors(target).values())
    assert max(sizes) < max(100_000, largest) + 10_000  # a header, and tensors larger than a shard


@settings(max_examples=examples(20), deadline=None)
@given(steps=st.integers(-600, 600))
def test_shift_rotates_each_token_to_its_successor(steps):
    w = Weights(MIDDLE)
    u = w.token_features()
    torch.testing.assert_close(u.norm(dim=1), torch.ones(len(u)))
    torch.testing.assert_close(u @ w.shift(steps).T, u.roll(-steps, 0), atol=2e-4, rtol=0)


def test_left_alone_the_head_says_the_next_token_on_the_cycle():
    w = Weights(MIDDLE)
    said = (w.embedding_core() @ w.head_core().T).argmax(1)
    cycle = w._cycle.tolist()
    assert [said[t].item() for t in cycle] == [*cycle[1:], cycle[0]]


def test_everything_the_target_writes_lies_in_the_span_of_the_basis(written):
    target = {name: t.double() for name, t in tensors(written[0]).items()}
    basis = Weights(MIDDLE).basis.double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(32).double(), atol=1e-5, rtol=0)
    writers = ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")
    written_by = [n for n in target if n.endswith(writers) or n == "model.embed_tokens.weight"]
    assert {n.rpartition(".layers.")[2].partition(".")[0] for n in written_by} == {
        "model", *(str(i) for i in range(MIDDLE.layers))
    }  # fmt: skip
    for name, tensor in target.items():
        if name in written_by:
            vectors = tensor if name.startswith("model.embed") else tensor.T
            outside = vectors - vectors @ basis.T @ basis
            assert outside.norm() < 0.01 * vectors.norm(), name  # bfloat16


def rms(x, weight):
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight


def mlp_branch(t, prefix, x):
    """Norm, gated MLP, norm: one branch of a Gemma-4 layer, written out."""
    h = rms(x, t[f"{prefix}.pre_feedforward_layernorm.weight"])
    gate = torch.nn.functional.gelu(h @ t[f"{prefix}.mlp.gate_proj.weight"].T, approximate="tanh")
    out = gate * (h @ t[f"{prefix}.mlp.up_proj.weight"].T) @ t[f"{prefix}.mlp.down_proj.weight"].T
    return rms(out, t[f"{prefix}.post_feedforward_layernorm.weight"])


def test_the_assistant_is_the_targets_last_layers_in_the_basis(tmp_path):
    geometry = dataclasses.replace(MIDDLE, dtype="float32")
    folders = models.write(geometry, tmp_path / "m")
    target, assistant = tensors(folders[0]), tensors(folders[1])
    basis = Weights(geometry).basis
    c = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)) * math.sqrt(2)
    x = c @ basis
    for i, layer in enumerate(geometry.mirrored):
        small, large = f"model.layers.{i}", f"model.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj"):
            got = rms(c, assistant[f"{small}.input_layernorm.weight"])
            want = rms(x, target[f"{large}.input_layernorm.weight"])
            torch.testing.assert_close(
                got @ assistant[f"{small}.self_attn.{part}.weight"].T,
                want @ target[f"{large}.self_attn.{part}.weight"].T,
                atol=1e-4,
                rtol=1e-4,
            )
        torch.testing.assert_close(
            mlp_branch(assistant, small, c) @ basis, mlp_branch(target, large, x),
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip
        o = torch.randn(5, 4 * geometry.dim(layer), generator=torch.Generator().manual_seed(i))
        name = "post_attention_layernorm.weight"
        torch.testing.assert_close(
            rms(o @ assistant[f"{small}.self_attn.o_proj.weight"].T, assistant[f"{small}.{name}"])
            @ basis,
            rms(o @ target[f"{large}.self_attn.o_proj.weight"].T, target[f"{large}.{name}"]),
            atol=1e-4,
            rtol=1e-4,
        )
    h = rms(c, assistant["model.norm.weight"])
    torch.testing.assert_close(
        h @ assistant["model.embed_tokens.weight"].T,
        rms(x, target["model.norm.weight"]) @ target["lm_head.weight"].T,
        atol=1e-3, rtol=1e-3,
    )  # fmt: skip


def test_the_centroid_head_finds_the_row():
    w = Weights(MIDDLE)
    head, ordering = w.head_core(), w.token_ordering()
    blocks = head[ordering].view(MIDDLE.centroids, -1, 32).mean(1)
    centroids = torch.nn.functional.normalize(blocks, dim=1)
    u = w.token_features()
    top = (u @ centroids.T).topk(MIDDLE.centroid_top_k, dim=1).indices
    place = torch.empty(MIDDLE.vocab, dtype=torch.long)
    place[ordering] = torch.arange(MIDDLE.vocab)
    wanted = place[(u @ head.T).argmax(1)] // (MIDDLE.vocab // MIDDLE.centroids)
    assert (top == wanted[:, None]).any(1).float().mean() > 0.99


def test_of_several_processes_one_writes(tmp_path):
    """Each that wrote would take the folder away from under one that reads it already."""
    folder, told = tmp_path / "m", tmp_path / "told"
    told.mkdir()

    def checkpoints():
        (told / str(os.getpid())).touch()
        time.sleep(0.3)
        return ()

    write = functools.partial(models.write_once, folder, {"stamp": 1}, checkpoints)
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=write) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    assert len(list(told.iterdir())) == 1
    assert models._stamp_of(folder) == {"stamp": 1}
