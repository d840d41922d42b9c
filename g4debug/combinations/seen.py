"""The combination that a server runs: the class of its model, its attention backends, its draft.

A tracer knows nothing of a model's name. What it depends on is in which pools the KV is, what
attention reads there, and who drafts. So models with equal answers to that are one class. All is
asked of the objects that SGLang has made, because the arguments of a server say less: 0.5.23 keeps
NEXTN as it was typed, and chooses a backend by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from g4debug import speculation
from g4debug.backends import phases
from g4debug.combinations.beside import beside
from g4debug.hooking.resolved import server_argument
from g4debug.speculation import multi_layer_eagle

MHA, SINKS, MLA = "MHA", "MHA with sinks", "MLA"
LINEAR, ENCODER = "hybrid linear", "encoder attention"
NO_WINDOW, SWA_POOL, ONE_POOL = "no window", "windows in an SWA pool", "windows without an SWA pool"
CHUNKS = "chunked windows (irope)"
NO_DRAFT, LAYERED = "no draft", multi_layer_eagle.NAME
ONE_PATH, TREE = "one path", "a tree"
NO_KV = "no KV of its own"
# The names of a layer's parameter with a number for each head that joins the softmax.
_SINKS = ("sinks", "attention_sink_bias")


@dataclass(frozen=True)
class Combination:
    """What a server runs. A field is '' as long as it is not known, and then fits everything.

    architecture: SGLang's name of the model's class. attention: one of the kinds above; before the
    weights are there, how it begins. window: one of the kinds above. pool: the class of the KV
    pool, and of its parts. backends: the attention backends, that of the prefills first; () if they
    are not known. draft: as SGLang calls the algorithm. paths: of a draft, one or a tree.
    draft_pool: the class of the draft's own KV pool, or that it has none. beside: what else there
    is, of :data:`g4debug.combinations.beside.ASKED`.
    """

    architecture: str = ""
    attention: str = ""
    window: str = ""
    pool: str = ""
    backends: tuple[str, ...] = ()
    draft: str = ""
    paths: str = ""
    draft_pool: str = ""
    beside: tuple[str, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """What is not known, and must be of a server that is complete."""
        drafts = self.draft not in ("", NO_DRAFT)
        found: dict[str, object] = {
            "the kind of attention": self.attention,
            "the windows": self.window,
            "the KV pool": self.pool,
            "the attention backends": self.backends,
            "the draft": self.draft,
            "whether the draft has one path": self.paths or not drafts,
            "the draft's KV pool": self.draft_pool or not drafts,
        }
        return tuple(what for what, known in found.items() if not known)

    def __str__(self) -> str:
        """``LlamaForCausalLM (MHA, no window, MHATokenToKVPool) on triton, draft EAGLE (a tree,
        MHATokenToKVPool)``. What is beside it follows, as ``, with LoRA``.
        """
        kind = ", ".join(x for x in (self.attention, self.window, self.pool) if x)
        text = self.architecture or "a model"
        text += f" ({kind})" if kind else ""
        text += f" on {' and '.join(self.backends)}" if self.backends else ""
        drafts = self.draft if self.draft in ("", NO_DRAFT) else f"draft {self.draft}"
        of_draft = (self.paths, "" if self.draft_pool == NO_KV else self.draft_pool)
        drafts += f" ({', '.join(filter(None, of_draft))})" if any(of_draft) else ""
        text += f", {drafts}" if drafts else ""
        return text + (f", with {' and '.join(self.beside)}" if self.beside else "")


def planned(scheduler: Any, model_config: Any) -> Combination:
    """What is known before the weights are loaded, which may take minutes."""
    arch = getattr(getattr(model_config, "attention_arch", None), "name", "")
    # Where the config has a window, only the layers tell whether they use it.
    sizes = ("is_hybrid_swa", "sliding_window_size", "attention_chunk_size")
    windows = [getattr(model_config, name, True) for name in sizes]
    args = getattr(scheduler, "server_args", None)
    return Combination(
        architecture=_architecture(model_config),
        attention=arch if arch in (MHA, MLA) and not _is_linear(model_config) else "",
        window="" if any(windows) else NO_WINDOW,
        draft=_draft(scheduler),
        paths=_paths(scheduler),
        beside=() if args is None else beside(args),
    )


def running(scheduler: Any) -> Combination:
    """What a scheduler runs that is complete."""
    runner = getattr(getattr(scheduler, "tp_worker", None), "model_runner", None)
    args = getattr(scheduler, "server_args", None)
    if runner is None:
        return Combination(draft=_draft(scheduler), paths=_paths(scheduler), beside=beside(args))
    config = getattr(runner, "model_config", None)
    pool = getattr(runner, "token_to_kv_pool", None)
    layers = _attention_layers(runner.model)
    return Combination(
        architecture=_architecture(config),
        attention=_attention(runner.model, layers, config, pool),
        window=_window(layers, pool),
        pool=_pool(pool),
        backends=phases.named(scheduler),
        draft=_draft(scheduler),
        paths=_paths(scheduler),
        draft_pool=_draft_pool(scheduler),
        beside=beside(args, pool),
    )


def _architecture(config: Any) -> str:
    found = getattr(getattr(config, "hf_config", None), "architectures", None) or [""]
    return str(found[0])


def _attention_layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__ == "RadixAttention"]


def _attention(model: Any, layers: list[Any], config: Any, pool: Any) -> str:
    if _has_states(pool):
        return LINEAR
    if any(_reads_others(layer) for layer in layers):
        return ENCODER
    arch = str(getattr(getattr(config, "attention_arch", None), "name", ""))
    names = (name.rpartition(".")[2] for name, _ in model.named_parameters())
    return SINKS if arch == MHA and any(name in _SINKS for name in names) else arch


def _reads_others(layer: Any) -> bool:
    """True if a layer reads the KV of an encoder, or writes none at all."""
    kind = getattr(getattr(layer, "attn_type", None), "value", "")
    return kind == "encoder_only" or bool(getattr(layer, "is_cross_attention", False))


def _window(layers: list[Any], pool: Any) -> str:
    if any(getattr(layer, "use_irope", False) for layer in layers):
        return CHUNKS
    if hasattr(pool, "swa_kv_pool"):
        return SWA_POOL
    sizes = (getattr(layer, "sliding_window_size", None) for layer in layers)
    return ONE_POOL if any(size is not None and size > -1 for size in sizes) else NO_WINDOW


def _pool(pool: Any) -> str:
    """``SWAKVPool of MHATokenToKVPool``, '' if there is none."""
    if pool is None:
        return ""
    parts = (getattr(pool, f"{name}_kv_pool", None) for name in ("full", "swa"))
    inner = dict.fromkeys(type(part).__name__ for part in parts if part is not None)
    return type(pool).__name__ + (f" of {' and '.join(inner)}" if inner else "")


def _has_states(pool: Any) -> bool:
    """True if some layers have no KV but a state."""
    return type(pool).__name__.startswith("HybridLinear")


def _is_linear(config: Any) -> bool:
    """True if the config may be of a model with such layers: it says of each layer what it is."""
    text = getattr(config, "hf_text_config", None)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return any(kind not in ("full_attention", "sliding_attention") for kind in kinds)


def _draft(scheduler: Any) -> str:
    algorithm = getattr(scheduler, "spec_algorithm", None)
    if algorithm is None:
        return ""
    if algorithm.is_none():
        return NO_DRAFT
    worker = getattr(scheduler, "draft_worker", None)
    if type(worker).__name__.startswith("MultiLayer"):
        return LAYERED
    return str(getattr(algorithm, "name", algorithm))


def _draft_pool(scheduler: Any) -> str:
    """The class of the pool that a draft writes, '' if that cannot be found.

    Of a worker without an adapter nothing is asked: on that release its draft is not judged.
    """
    if _draft(scheduler) in ("", NO_DRAFT):
        return ""
    if not speculation.draft_writes_own_kv(scheduler):
        return NO_KV
    return _pool(next(iter(speculation.draft_pools(scheduler)), None))


def _paths(scheduler: Any) -> str:
    """How many paths a draft has, '' if that is not known or there is none.

    Of NGRAM, SGLang keeps the breadth of its search as the same argument.
    """
    if _draft(scheduler) in ("", NO_DRAFT):
        return ""
    args = getattr(scheduler, "server_args", None)
    width = int(server_argument(args, "speculative_eagle_topk", 0))
    return {0: "", 1: ONE_PATH}.get(width, TREE)
