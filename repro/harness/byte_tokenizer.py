"""A tokenizer with a token for each byte, so that answers of a toy model can match a grammar."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

# Written here; all other files of a model are linked.
OURS = ("tokenizer.json", "tokenizer_config.json")


def beside(model: Path, folder: Path) -> Path:
    """A copy of ``model``, made of links, with a tokenizer of bytes for its own vocabulary.

    model: a folder with a config.json. The copy is a new folder below ``folder``, so that several
    processes may each make one.
    """
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    end = config.get("eos_token_id", text.get("eos_token_id", 1))
    ends = end if isinstance(end, list) else [end]
    target = Path(tempfile.mkdtemp(prefix="target-", dir=folder))
    for file in model.iterdir():
        if file.name not in OURS:
            (target / file.name).symlink_to(file)
    _save(target, text["vocab_size"], ends[0])
    return target


def _save(target: Path, vocabulary: int, end: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from g4debug.cpu.geometry import SPECIAL_TOKENS

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL_TOKENS, *letters]
    words += [f"unused{i}" for i in range(len(words), vocabulary)]
    words[end] = "<eos>" if end < len(SPECIAL_TOKENS) else "<end>"
    special = dict.fromkeys((*SPECIAL_TOKENS, words[end]))
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    made.save(str(target / OURS[0]))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": words[end],
        "bos_token": "<bos>",
        "unk_token": "<unk>",
    }
    (target / OURS[1]).write_text(json.dumps(settings, indent=1))
