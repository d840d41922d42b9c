"""The shapes of a toy Gemma-4 and its MTP assistant, and the config.json of each for SGLang."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

SPECIAL_TOKENS: Final = ("<pad>", "<eos>", "<bos>", "<unk>")
_LAYER_TYPES: Final = {"s": "sliding_attention", "f": "full_attention"}
ROPE: Final[dict[str, dict[str, Any]]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


@dataclass(frozen=True)
class Geometry:
    """Shapes, and the few numbers that decide how the model behaves (see `weights`).

    `pattern` has one letter for each layer of the target: s for sliding, f for full. The assistant
    mirrors the last `assistant_layers` of them. These must be KV-shared and end in "sf", because
    FROZEN_KV_MTP reads the KV of the target's last sliding layer and of its last full layer.
    """

    vocab: int
    hidden: int
    intermediate: int
    pattern: str
    kv_shared: int
    heads: int
    kv_heads: int
    head_dim: int  # full layers
    swa_head_dim: int  # sliding layers
    window: int
    ple: int
    assistant_hidden: int
    assistant_intermediate: int
    assistant_layers: int
    centroids: int
    centroid_top_k: int
    dtype: str
    max_position: int = 4096
    softcap: float = 30.0
    votes: tuple[float, ...] = (0.7, 1.1)  # size of attention's output in each mirrored layer
    self_mix: float = 0.06  # size of the output of all other layers together
    sharpness: float = 16.0  # standard deviation of an attention logit
    coupling: float = 0.02  # how much the assistant reads its previous hidden state

    def __post_init__(self) -> None:
        mirrored = self.pattern[-self.assistant_layers :]
        wrong = {
            "pattern holds other letters than s and f": set(self.pattern) - set("sf"),
            "pattern must end in sf": self.pattern[-2:] != "sf",
            "mirrored layers must be KV-shared": self.assistant_layers > self.kv_shared,
            "the layers that own KV need both types": set(self.pattern[: -self.kv_shared])
            != {*"sf"},
            "vocab must be a multiple of centroids": self.vocab % self.centroids,
            "assistant_hidden must be even and <= hidden": self.assistant_hidden % 2
            or self.assistant_hidden > self.hidden,
            "assistant_intermediate must be <= intermediate": self.assistant_intermediate
            > self.intermediate,
            "heads must be a multiple of kv_heads": self.heads % self.kv_heads,
            "votes may not be more than the mirrored layers": len(self.votes) > len(mirrored),
        }
        problems = [text for text, bad in wrong.items() if bad]
        if problems:
            raise ValueError(f"Geometry: {'; '.join(problems)}; got {asdict(self)}")

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @property
    def mirrored(self) -> range:
        """The target layers that the assistant copies."""
        return range(self.layers - self.assistant_layers, self.layers)

    def kv_owner(self, layer: int) -> int:
        """The layer with the K and V of `layer`: itself, or the last of its type with KV."""
        owners = self.layers - self.kv_shared
        return layer if layer < owners else self.pattern.rindex(self.pattern[layer], 0, owners)

    def dim(self, layer: int) -> int:
        return self.swa_head_dim if self.pattern[layer] == "s" else self.head_dim

    def target_config(self) -> dict[str, Any]:
        """The config.json of the text-only target, as SGLang reads it.

        In a text-only config `head_dim` is for the full layers and `swa_head_dim` for the
        sliding ones. (In one of `gemma4` or `gemma4_assistant` SGLang exchanges the two.)
        """
        return self._text(self.pattern) | {
            "architectures": ["Gemma4ForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_kv_shared_layers": self.kv_shared,
            "hidden_size_per_layer_input": self.ple,
            "vocab_size_per_layer_input": self.vocab,
            "final_logit_softcapping": self.softcap,
            "tie_word_embeddings": False,
            "head_dim": self.head_dim,
            "v_head_dim": self.head_dim,
            "global_head_dim": self.head_dim,
            "swa_head_dim": self.swa_head_dim,
            "swa_v_head_dim": self.swa_head_dim,
            "swa_num_key_value_heads": self.kv_heads,
        }

    def assistant_config(self) -> dict[str, Any]:
        text = self._text(self.pattern[-self.assistant_layers :]) | {
            "hidden_size": self.assistant_hidden,
            "intermediate_size": self.assistant_intermediate,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "head_dim": self.swa_head_dim,
            "global_head_dim": self.head_dim,
        }
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "text_config": text,
            "backbone_hidden_size": self.hidden,
            "use_ordered_embeddings": True,
            "num_centroids": self.centroids,
            "centroid_intermediate_top_k": self.centroid_top_k,
            "tie_word_embeddings": True,
            "dtype": self.dtype,
        }

    def _text(self, pattern: str) -> dict[str, Any]:
        return {
            "model_type": "gemma4_text",
            "vocab_size": self.vocab,
            "num_hidden_layers": len(pattern),
            "layer_types": [_LAYER_TYPES[letter] for letter in pattern],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "sliding_window": self.window,
            "max_position_embeddings": self.max_position,
            "rope_parameters": ROPE,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_k_eq_v": False,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "moe_intermediate_size": 128,  # SGLang divides by it even without experts
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class MoEGeometry(Geometry):
    """A target with experts beside each layer's MLP, like 26B-A4B. The assistant has no experts."""

    experts: int = 8
    top_k: int = 2
    expert_intermediate: int = 32

    def target_config(self) -> dict[str, Any]:
        return super().target_config() | {
            "enable_moe_block": True,
            "num_experts": self.experts,
            "top_k_experts": self.top_k,
            "moe_intermediate_size": self.expert_intermediate,
        }


TINY: Final = Geometry(
    vocab=512,
    hidden=64,
    intermediate=128,
    pattern="ssfssfsf",
    kv_shared=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    swa_head_dim=32,
    window=128,
    ple=16,
    assistant_hidden=32,
    assistant_intermediate=64,
    assistant_layers=2,
    centroids=32,
    centroid_top_k=8,
    dtype="float32",
)

# The toy model in shapes that the kernels of a GPU take: those of E4B_256's attention.
TINY_256: Final = replace(
    TINY,
    hidden=256,
    intermediate=512,
    heads=8,
    head_dim=256,
    swa_head_dim=256,
    ple=64,
    assistant_hidden=128,
    assistant_intermediate=256,
    dtype="bfloat16",
)

# Many sliding layers for each full one, so that the ratio of the two pools matters.
TINY_MOE: Final = MoEGeometry(
    **vars(replace(TINY, pattern="sssssfsf", swa_head_dim=64, window=64, ple=0))
)

# Gemma-4 E4B, except that the full layers' head_dim is 256: sm90's kernel does not take E4B's 512.
E4B_256: Final = Geometry(
    vocab=262_144,
    hidden=2560,
    intermediate=10_240,
    pattern="sssssf" * 7,
    kv_shared=18,
    heads=8,
    kv_heads=2,
    head_dim=256,
    swa_head_dim=256,
    window=512,
    ple=256,
    assistant_hidden=256,
    assistant_intermediate=1024,
    assistant_layers=4,
    centroids=2048,
    centroid_top_k=32,
    dtype="bfloat16",
    max_position=131_072,
)

# Gemma-4 E2B, except that E2B's KV-shared layers have an MLP that is twice as wide.
E2B: Final = replace(
    E4B_256,
    hidden=1536,
    intermediate=6144,
    pattern="ssssf" * 7,
    kv_shared=20,
    kv_heads=1,
    head_dim=512,
)
