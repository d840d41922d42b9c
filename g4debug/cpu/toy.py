"""A toy of another model than Gemma-4: its config, and weights that are drawn by their names.

The weights are random: no toy has learned anything. They are chosen so that each answer depends on
the whole context, and on which key a head attends to: a wrong page gives other tokens. A draft has
some of the target's weights, so that it guesses better than by chance.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from g4debug.cpu import models

HIDDEN: Final = 64
INNER: Final = 128  # of an MLP
HEADS: Final = 4
KV_HEADS: Final = 2
DIM: Final = 32  # of a head
WINDOW: Final = 128
VOCAB: Final = 512
MAX_POSITION: Final = 4096
# "swa": two pools, one of them for the sliding layers. "full": one for all layers. "mla": one for
# MLA's compressed vectors. "hybrid-linear": one for layers that attend, and states.
Pool = Literal["full", "swa", "mla", "hybrid-linear"]
# Of a checkpoint's tensors, those with a row for each word.
WORDS: Final = ("model.embed_tokens.weight", "lm_head.weight")
# What most config.json say in the same words.
CONFIG: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Draw:
    """How a tensor is drawn: normally distributed.

    `rounded`: to bfloat16, in which SGLang keeps it on one of two backends. `like`: the name of a
    tensor with the same numbers, '' for none. `passes`: (row, column, count, gain) of diagonals to
    which the gain is added, so that it passes on so many of the numbers that it is given.
    """

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    rounded: bool = False
    like: str = ""
    passes: tuple[tuple[int, int, int, float], ...] = ()


# Of `passes`: all of the first hidden vector that a tensor is given.
WHOLE: Final = ((0, 0, HIDDEN, 1.0),)


@dataclass(frozen=True)
class Size:
    """What a replay chooses of a toy: the words that there are, and the longest sequence in tokens.

    window: the tokens that a sliding layer sees, of a model that has some.
    """

    vocab: int
    context: int
    window: int = WINDOW


@dataclass(frozen=True)
class Toy:
    """A model that the CPU engine serves. `id`: its file's name, with - for _.

    `pool`: how SGLang 0.5.23 keeps its KV. `models` writes the target, and behind it the draft if
    it has one, once, and returns their folders; `sized` does so for another size, if it can be
    made. `arguments` are SGLang's for this model, `draft` those for its draft. `served` is the
    name by which clients ask for it.
    """

    id: str
    about: str
    pool: Pool
    models: Callable[[], tuple[Path, ...]]
    served: str
    backends: tuple[str, ...] = ("trtllm_mha", "triton")
    arguments: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] = field(default_factory=dict)
    sized: Callable[[Size], tuple[Path, ...]] | None = None


@dataclass(frozen=True)
class Draft:
    """A draft for a toy. `id`: its file's name.

    `arguments` are SGLang's, beside the algorithm, which has the draft's name. `models` writes its
    checkpoint, once, and returns the folder; a draft that needs none returns nothing. `sized`
    writes it for a target of another size. `targets`: the toys with which it was run. `runs_as`:
    the draft whose algorithm it has, if SGLang has no name of its own for it.
    """

    id: str
    about: str
    arguments: Mapping[str, Any]
    models: Callable[[], tuple[Path, ...]] = tuple
    sized: Callable[[Size], tuple[Path, ...]] = lambda size: ()
    targets: tuple[str, ...] = ("llama",)
    runs_as: str = ""


USUAL: Final = Size(VOCAB, MAX_POSITION)
CHAIN: Final[Mapping[str, Any]] = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def drawn_draft(
    id: str, about: str, config: Mapping[str, Any], weights: Mapping[str, Draw], **more: Any
) -> Draft:
    """A draft with one path, whose weights are drawn. config: what it adds to ``CONFIG``."""
    sized = _writer(f"draft-{id}", config, weights)
    return Draft(id, about, CHAIN, lambda: sized(USUAL), sized, **more)


def drawn(
    id: str,
    about: str,
    config: Mapping[str, Any],
    weights: Mapping[str, Draw],
    pool: Pool = "full",
    **more: Any,
) -> Toy:
    """A toy without a draft, whose weights are drawn. config: what it adds to ``CONFIG``."""
    sized = _writer(id, config, weights)
    return Toy(id, about, pool, lambda: sized(USUAL), f"g4debug-{id}", sized=sized, **more)


def _writer(
    name: str, config: Mapping[str, Any], weights: Mapping[str, Draw]
) -> Callable[[Size], tuple[Path, ...]]:
    def write(size: Size) -> tuple[Path, ...]:
        whole, drawn = {**CONFIG, **config}, dict(weights)
        folder = models.kept() / name
        if size != USUAL:
            folder = models.kept() / f"{name}-{size.vocab}-{size.context}"
            if "sliding_window" in whole:
                folder = folder.with_name(f"{folder.name}-{size.window}")
                whole["sliding_window"] = size.window
                if "sliding_window_size" in whole:  # MiMo-V2's, without the query itself
                    whole["sliding_window_size"] = size.window - 1
            # "draft_vocab_size" is there with a head of its own.
            for key in {"vocab_size", "draft_vocab_size"} & whole.keys():
                whole[key] = size.vocab
            whole["max_position_embeddings"] = size.context
            drawn |= {
                n: replace(draw, shape=(size.vocab, *draw.shape[1:]))
                for n, draw in weights.items()
                if n in WORDS
            }
        stamp = {"config": whole, "weights": {n: [*_plain(d)] for n, d in drawn.items()}}
        models.write_once(
            folder,
            stamp,
            lambda: [models.Checkpoint("target", whole, _numbers(drawn), size.vocab, size.context)],
        )
        return (folder / "target",)

    return write


def _plain(draw: Draw) -> Iterator[Any]:
    """As JSON gives it back. What only drafts have is named only where it is there."""
    for name, value in asdict(draw).items():
        if name not in ("like", "passes") or value:
            yield list(value) if isinstance(value, tuple) else value


def _numbers(weights: Mapping[str, Draw]) -> Iterator[tuple[str, Any]]:
    """Each tensor has its own generator, so that the order does not matter."""
    import torch

    for name, draw in weights.items():
        seed = zlib.crc32((draw.like or name).encode())
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn(*draw.shape, generator=generator) * draw.std + draw.mean
        for row, column, count, gain in draw.passes:
            tensor[row : row + count, column : column + count].diagonal().add_(gain)
        yield name, tensor.bfloat16().float() if draw.rounded else tensor


# --- parts that several models have, by the names of Llama's checkpoints


def matrix(rows: int, columns: int, gain: float = 1.0) -> Draw:
    """A projection that makes a vector of length ``gain`` times as long as before."""
    return Draw((rows, columns), gain / math.sqrt(columns))


def norm(size: int = HIDDEN, mean: float = 1.0) -> Draw:
    return Draw((size,), 0.1, mean)


def ends(tied: bool = False, mean: float = 1.0) -> dict[str, Draw]:
    """The embedding, the last norm, and the head, which one that is ``tied`` has not."""
    found = {"model.embed_tokens.weight": Draw((VOCAB, HIDDEN), 1.0), "model.norm.weight": norm()}
    if tied:
        return found | {"model.norm.weight": norm(mean=mean)}
    return found | {"lm_head.weight": matrix(VOCAB, HIDDEN)}


def attention(prefix: str, sharpness: float = 2.0, out: str = "o_proj") -> dict[str, Draw]:
    """``sharpness`` of Q and of K: how far a head prefers one key to the others."""
    return {
        f"{prefix}.q_proj.weight": matrix(HEADS * DIM, HIDDEN, sharpness),
        f"{prefix}.k_proj.weight": matrix(KV_HEADS * DIM, HIDDEN, sharpness),
        f"{prefix}.v_proj.weight": matrix(KV_HEADS * DIM, HIDDEN),
        f"{prefix}.{out}.weight": matrix(HIDDEN, HEADS * DIM),
    }


def mlp(
    prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Draw]:
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": matrix(INNER, HIDDEN),
        f"{prefix}.{up}.weight": matrix(INNER, HIDDEN),
        f"{prefix}.{down}.weight": matrix(HIDDEN, INNER),
    }
