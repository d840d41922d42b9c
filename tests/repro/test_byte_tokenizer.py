"""repro/harness/byte_tokenizer.py: text comes back as it was, and the model's own end is an end."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

REPRO = Path(__file__).parents[2] / "repro"
GEMMA = {"text_config": {"vocab_size": 300}, "eos_token_id": [1, 106]}
LLAMA = {"vocab_size": 400, "eos_token_id": 399}


@pytest.mark.parametrize("config", [GEMMA, LLAMA], ids=["gemma", "llama"])
def test_text_comes_back_and_the_models_end_is_an_end(config, monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(REPRO))
    byte_tokenizer = importlib.import_module("harness.byte_tokenizer")
    model, folder = tmp_path / "model", tmp_path / "made"
    model.mkdir()
    folder.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("the model's own")
    target = byte_tokenizer.beside(model, folder)
    assert (target / "config.json").is_symlink()
    assert (model / "tokenizer.json").read_text() == "the model's own"
    made = transformers.PreTrainedTokenizerFast.from_pretrained(target)
    text = "SWA page 17, freed in step 3: Übersicht\n"
    assert made.decode(made.encode(text, add_special_tokens=False)) == text
    assert len(made) == config.get("vocab_size", 300)
    end = config["eos_token_id"]
    assert made.eos_token_id == (end[0] if isinstance(end, list) else end)
