"""The toy models: how they are found, written, and asked for by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from g4debug import cpu, discovery
from g4debug.cli import cpu_server
from g4debug.cpu import drafts, models, server, toy, toys

DRAWN = [name for name in discovery.names("toy") if name != server.DEFAULT]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def target(name: str) -> dict[str, torch.Tensor]:
    (folder,) = toys.load(name).models()
    return load_file(next(folder.glob("*.safetensors")))


@pytest.mark.parametrize("name", DRAWN)
def test_a_toy_is_written_once_and_says_the_same_each_time(name, tmp_path):
    first = target(name)
    (folder,) = toys.load(name).models()
    written = (folder / "config.json").stat().st_mtime_ns
    toys.load(name).models()
    assert (folder / "config.json").stat().st_mtime_ns == written
    (models.kept() / name / models.STAMP).write_text("{}")  # as of another g4debug
    again = target(name)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert json.loads((folder / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("draft", ["", "eagle3"])
def test_a_replay_gets_a_toy_with_more_words_and_longer_sequences(draft):
    found = drafts.load(draft, "llama") if draft else toys.load("llama")
    usual = found.models()
    (folder,) = found.sized(toy.Size(vocab=704, context=9000))
    assert found.models() == usual != (folder,)
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"]) == (704, 9000)
    assert config.get("draft_vocab_size", 704) == 704
    assert load_file(next(folder.glob("*.safetensors")))["lm_head.weight"].shape == (704, 64)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == 704


def test_a_replay_gets_a_toy_with_another_window():
    found = toys.load("gemma-3")
    folders = {found.sized(toy.Size(704, 9000, window))[0] for window in (128, 256)}
    windows = {json.loads((f / "config.json").read_text())["sliding_window"] for f in folders}
    assert windows == {128, 256}


def test_numbers_for_bfloat16_are_exact_in_it():
    found = target("gpt-oss")
    for name in found:
        exact = torch.equal(found[name], found[name].bfloat16().float())
        assert exact == name.endswith(".sinks"), name


def test_another_draw_is_another_stamp():
    def write(std: float) -> float:
        made = toy.drawn("x", "", {}, {"a": toy.Draw((2, 3), std)})
        return float(load_file(next(made.models()[0].glob("*.safetensors")))["a"].abs().sum())

    assert write(1.0) == pytest.approx(write(2.0) / 2)


def test_gemma_4_is_served_unless_another_is_asked_for():
    plain, named = server.engine_arguments(), server.engine_arguments(model="gemma-4")
    assert {**plain, "nccl_port": 0} == {**named, "nccl_port": 0}
    assert plain["speculative_algorithm"] == "NEXTN"
    assert "speculative_algorithm" not in server.engine_arguments(model="llama")
    command = server.command(model="llama")
    assert command[command.index("--served-model-name") + 1] == "g4debug-llama"


@pytest.mark.parametrize(
    ("name", "model"),
    [(n, m) for n in discovery.names("draft") for m in discovery.load("draft", n).targets],
)
def test_a_draft_takes_the_place_of_the_toys_own(name, model):
    algorithm = {"multi-layer-eagle": "EAGLE"}.get(name, name.upper())
    found = server.engine_arguments(model=model, draft=name)
    assert found["speculative_algorithm"] == algorithm
    assert found["speculative_num_draft_tokens"] == 4
    folders = drafts.load(name, model).models()
    assert found.get("speculative_draft_model_path") == (str(folders[0]) if folders else None)
    command = server.command(model=model, draft=name)
    assert command[command.index("--speculative-algorithm") + 1] == algorithm


def test_a_draft_has_numbers_of_its_target():
    (folder,) = drafts.load("standalone", "llama").models()
    draft, whole = load_file(next(folder.glob("*.safetensors"))), target("llama")
    assert draft.keys() < whole.keys()
    assert all(torch.equal(draft[name], whole[name]) for name in draft)
    (folder,) = drafts.load("eagle", "llama").models()
    draft = load_file(next(folder.glob("*.safetensors")))
    name = "layers.0.self_attn.q_proj.weight"
    assert torch.equal(draft[name], whole[f"model.{name}"])
    mean = draft["fc.weight"][:, : toy.HIDDEN].diagonal().mean()
    assert float(mean) == pytest.approx(1, abs=0.05)
    (folder,) = drafts.load("eagle3", "llama").models()
    draft = load_file(next(folder.glob("*.safetensors")))
    name = "mlp.gate_proj.weight"
    assert torch.equal(draft[f"midlayer.{name}"], whole[f"model.layers.0.{name}"])
    assert torch.equal(draft["lm_head.weight"], whole["lm_head.weight"])


def test_a_draft_that_is_not_there_or_not_for_this_target_is_refused(tmp_path):
    with pytest.raises(cpu.CpuEngineError, match=r"got the draft 'egale', expected one of eagle,"):
        server.engine_arguments(model="llama", draft="egale")
    with pytest.raises(cpu.CpuEngineError, match=r"for the model 'gpt-oss', expected .* llama"):
        server.engine_arguments(model="gpt-oss", draft="eagle")
    with pytest.raises(cpu.CpuEngineError, match=r"got the draft 'eagle' and --model-path"):
        server.command([f"--model-path={tmp_path}"], draft="eagle")


def test_an_unknown_toy_is_refused_with_those_that_there_are():
    with pytest.raises(cpu.CpuEngineError, match=r"got the model 'lama', expected one of .*llama"):
        server.engine_arguments(model="lama")


def test_a_folder_is_still_a_model_of_the_users(tmp_path, monkeypatch):
    """SGLang takes --model for --model-path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert cpu_server._model("mine") is None
    assert cpu_server._model("somebody/llama") is None
    assert cpu_server._model("llama") == "llama"
    assert cpu_server._model("lama") == "lama"  # which is refused
    assert cpu_server._model(None) == server.DEFAULT
