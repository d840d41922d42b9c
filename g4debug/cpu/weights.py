"""The weights of a toy target, and of an assistant that can guess its tokens. Nothing is trained.

**The stream.** With r the assistant's hidden size and B an r x d matrix with orthonormal rows, the
target's residual stream is always c B for some c in R^r: embeddings, `o_proj`, `down_proj` and
`per_layer_projection` all end in B. Every matrix of the target is a small "core" written in B, and
the assistant has the same core in plain R^r. An RMS norm over d of cB equals one over r of c,
except for sqrt(d/r), which goes into the assistant's norm weights. Norm weights are constants (of
q_norm there are two).

**The tokens.** Ordinary tokens lie on one seeded cycle. The i-th has the unit embedding

    u_i = [A_j cos(w_j i), A_j sin(w_j i)]_j,    w_j = 2 pi n_j / N

so a rotation R_s turns each u_i into exactly u_{i+s}. The row of `lm_head` for the (i+1)-th token
is u_i, so without attention the model walks along the cycle. `lm_head` is *not* tied to the
embedding (in the real E4B it is). Some of the n_j are low, so neighbours on the cycle look alike,
and a centroid head over blocks of neighbours finds the right rows. The others are random, so single
tokens can be told apart.

**The context.** V carries u of the token at its position. The slice of `o_proj` that belongs to
head h undoes V and applies R_s for a random s. So each head votes for the s-th successor of the
token that it attends to, and Q and K choose that token by content. The post-attention norm sets the
size of the vote (`votes`), and q_norm how sharp attention is (`sharpness`; Gemma-4's scaling factor
is 1). Only slow rotary pairs count in q_norm, because FROZEN_KV_MTP drafts with a position that is
one to three behind. To avoid loops, one head of each mirrored layer attends to the last dozens of
tokens and votes *against* them.

**The assistant** is the target's last layers in R^r, and reads the target's KV. It lacks what a
draft cannot have: the KV of the newest tokens, the small contributions of the other layers
(`self_mix`) and the per-layer embeddings. So its guesses are right most of the time, and wrong with
a wrong page.

`target_tensors` and `assistant_tensors` yield all weights under the names that they have in a
Gemma-4 checkpoint. The target's are lifted into B.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from g4debug.cpu.geometry import ROPE, SPECIAL_TOKENS, Geometry, MoEGeometry

LOW_SHARE = 0.35  # the part of |u|^2 in low frequencies, which neighbours have in common
LOGIT_SIZE = 24.0  # the logit of a token to which the stream points exactly
HEAD_FALLOFF = 0.45  # each further head's vote, relative to the one before
FASTEST = 0.1  # radians per position that attention may use: a draft is 1 to 3 positions behind
CONSTANT_SHARE = 0.04  # the part that all tokens have in common, for heads that want position only
RECENCY_SHARE = 0.5  # the part of a key that says "recent", whatever the token
INHIBITION = 2.0  # the inhibiting head, relative to the strongest vote
EXPERT_SHARE = 0.3  # of the MLP's size: the experts influence the next token, but do not decide it
MLP_SHARE = 0.1  # the mirrored layers' MLP contribution


@dataclass
class Core:
    """One layer in R^r. The target lifts it into B, and the assistant takes it as it is."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor
    attention_size: float
    mlp_size: float


@dataclass
class Weights:
    geometry: Geometry
    seed: int = 0
    device: str = "cpu"
    basis: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = self.geometry
        self.basis = self._orthonormal("basis", g.assistant_hidden, g.hidden)
        self._amplitude, self._frequency = self._features()
        self._cycle = self._permutation(g.vocab - len(SPECIAL_TOKENS)) + len(SPECIAL_TOKENS)

    # --- random numbers: each tensor has its own generator, so the order does not matter

    def _generator(self, name: str, device: str | None = None) -> torch.Generator:
        generator = torch.Generator(device or self.device)
        return generator.manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))

    def _normal(self, name: str, *shape: int, std: float = 1.0) -> torch.Tensor:
        noise = torch.randn(*shape, generator=self._generator(name), device=self.device)
        return noise * std

    def _orthonormal(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """A random matrix with orthonormal rows, or columns if there are fewer of them."""
        noise = self._normal(name, max(rows, columns), min(rows, columns))
        q: torch.Tensor = torch.linalg.qr(noise).Q
        return q if rows >= columns else q.T.contiguous()

    def _permutation(self, n: int) -> torch.Tensor:
        # Always drawn on the CPU, so that the same tokens follow each other on every device.
        return torch.randperm(n, generator=self._generator("cycle", "cpu")).to(self.device)

    # --- tokens

    def _features(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Amplitudes and frequencies: of several random draws the one that mixes tokens least."""
        g = self.geometry
        n, pairs = g.vocab - len(SPECIAL_TOKENS), g.assistant_hidden // 2
        low, high = pairs // 3, pairs - pairs // 3 - 1
        generator = self._generator("frequencies", "cpu")
        top = max(2.0, min(n / 8, 2.0 * g.centroids / g.centroid_top_k))
        spaced = torch.logspace(0, math.log10(top), low, dtype=torch.float64).round()
        share = torch.cat(
            [
                torch.tensor([CONSTANT_SHARE]),
                torch.full((low,), LOW_SHARE / low),
                torch.full((high,), (1 - LOW_SHARE - CONSTANT_SHARE) / high),
            ]
        )
        best: tuple[float, torch.Tensor] | None = None
        shifts = torch.arange(1, min(n, 4096), dtype=torch.float64)
        for _ in range(64):
            fast = torch.randint(int(top) + 1, n // 2, (high,), generator=generator)
            cycles = torch.cat([torch.zeros(1), spaced, fast]).double()
            frequency = cycles * (2 * math.pi / n)
            likeness = torch.cos(shifts[:, None] * frequency) @ share.double()
            if best is None or float(likeness.max()) < best[0]:
                best = float(likeness.max()), frequency
        assert best is not None
        return share.sqrt().to(self.device), best[1].to(self.device)

    def token_features(self) -> torch.Tensor:
        """u of the i-th token on the cycle, `[N, r]`."""
        n = self.geometry.vocab - len(SPECIAL_TOKENS)
        angle = (torch.arange(n, device=self.device).double()[:, None] * self._frequency).float()
        return torch.cat([self._amplitude * angle.cos(), self._amplitude * angle.sin()], 1)

    def shift(self, steps: int) -> torch.Tensor:
        """R_s with `R_s @ u_i = u_{i+s}`, `[r, r]`."""
        cos, sin = (self._frequency * steps).cos(), (self._frequency * steps).sin()
        upper = torch.cat([torch.diag(cos), torch.diag(-sin)], 1)
        lower = torch.cat([torch.diag(sin), torch.diag(cos)], 1)
        return torch.cat([upper, lower]).float()

    def embedding_core(self) -> torch.Tensor:
        """`[vocab, r]`: rows of length 1; the rows of special tokens are random."""
        g = self.geometry
        special = self._normal("special", len(SPECIAL_TOKENS), g.assistant_hidden)
        core = torch.empty(g.vocab, g.assistant_hidden, device=self.device)
        core[: len(SPECIAL_TOKENS)] = torch.nn.functional.normalize(special, dim=1)
        core[self._cycle] = self.token_features()
        return core

    def head_core(self) -> torch.Tensor:
        """`[vocab, r]`: the row of the (i+1)-th token is u_i. Special tokens are never chosen."""
        g = self.geometry
        core = torch.zeros(g.vocab, g.assistant_hidden, device=self.device)
        core[self._cycle.roll(-1)] = self.token_features()
        return core * (LOGIT_SIZE / math.sqrt(g.hidden))

    def token_ordering(self) -> torch.Tensor:
        """The tokens in blocks of neighbours on the cycle, one block for each centroid."""
        special = torch.arange(len(SPECIAL_TOKENS), device=self.device)
        return torch.cat([special, self._cycle.roll(-1)])

    # --- layers

    def core(self, layer: int) -> Core:
        g = self.geometry
        r, dim, name = g.assistant_hidden, g.dim(layer), f"layer{layer}"
        mirrored = layer in g.mirrored
        generator = self._generator(f"{name}/shifts", "cpu")
        shifts = torch.randint(2, g.vocab - len(SPECIAL_TOKENS), (g.heads,), generator=generator)
        owner = f"layer{g.kv_owner(layer)}"  # whose K and V this layer really reads
        values = [self._orthonormal(f"{owner}/v{h}", dim, r) for h in range(g.kv_heads)]
        strongest = layer % g.heads
        queries = self._normal(f"{name}/q", g.heads, dim, r, std=1 / math.sqrt(g.hidden))
        keys = self._normal(f"{name}/k", g.kv_heads, dim, r, std=1 / math.sqrt(g.hidden))
        q_norm, recent = self._q_norm(layer), self._recent(layer)
        # The first feature is sqrt(CONSTANT_SHARE) in every token.
        keys *= math.sqrt(1 - RECENCY_SHARE)
        keys[:, :, 0] += recent * math.sqrt(RECENCY_SHARE / CONSTANT_SHARE / g.hidden)
        votes = []
        for head in range(g.heads):
            undo = values[head // (g.heads // g.kv_heads)].T
            if mirrored and head == (strongest + 1) % g.heads:
                queries[head] = 0  # attends to recent tokens, whatever they are
                queries[head, :, 0] = recent
                votes.append(-INHIBITION * self.shift(-1) @ undo)
            else:
                size = HEAD_FALLOFF ** ((head - strongest) % g.heads)
                votes.append(size * self.shift(int(shifts[head])) @ undo)
        down = self._normal(f"{name}/down", r, g.intermediate)
        attention = mlp = g.self_mix / math.sqrt(3 * (g.layers - g.assistant_layers) or 1)
        if mirrored:
            down[:, g.assistant_intermediate :] = 0
            place = layer - g.layers
            attention = g.votes[place] if -place <= len(g.votes) else attention
            mlp = MLP_SHARE
        unit = 1 / math.sqrt(g.hidden)  # a normed input cB has |c| = sqrt(d)
        return Core(
            q=queries.flatten(0, 1),
            k=keys.flatten(0, 1),
            v=torch.cat(values) * unit,
            o=torch.cat(votes, 1),
            gate=self._normal(f"{name}/gate", g.intermediate, r, std=unit),
            up=self._normal(f"{name}/up", g.intermediate, r, std=unit),
            down=down / math.sqrt(g.intermediate),
            q_norm=q_norm,
            attention_size=attention,
            mlp_size=mlp,
        )

    def _rotary_speed(self, layer: int) -> torch.Tensor:
        """Radians per position of each dimension of a head; dimensions j and j + dim/2 pair up."""
        g = self.geometry
        dim = g.dim(layer)
        rope = ROPE["sliding_attention" if g.pattern[layer] == "s" else "full_attention"]
        pair = torch.arange(dim // 2, dtype=torch.float64)
        speed: torch.Tensor = rope["rope_theta"] ** (-2 * pair / dim)
        speed[pair >= rope.get("partial_rotary_factor", 1.0) * dim / 2] = 0
        return speed.repeat(2)

    def _recent(self, layer: int) -> torch.Tensor:
        """A vector with |.|^2 = dim that rotary embeddings turn away within tens of positions."""
        speed = self._rotary_speed(layer)
        chosen = (speed > 0.03) & (speed < FASTEST)
        if not chosen.any():
            chosen = speed == speed[speed < FASTEST].max()
        direction = torch.where(chosen, math.sqrt(len(speed) / int(chosen.sum())), 0.0)
        return direction.float().to(self.device)

    def _q_norm(self, layer: int) -> torch.Tensor:
        g = self.geometry
        slow = self._rotary_speed(layer) < FASTEST
        weight = torch.where(slow, g.sharpness / math.sqrt(int(slow.sum())), 0.0)
        return weight.float().to(self.device)


# --- the tensors of a checkpoint, by their names

Tensors = Iterator[tuple[str, torch.Tensor]]


def layer_tensors(w: Weights, layer: int, prefix: str, core: Core, assistant: bool) -> Tensors:
    """The tensors of one decoder layer: lifted into B, or in R^r for the assistant."""
    g = w.geometry
    inner = g.assistant_intermediate if assistant else g.intermediate
    width = g.assistant_hidden if assistant else g.hidden
    one = math.sqrt(g.hidden / width)  # 1, or sqrt(d/r) for the same vector in R^r

    def reads(matrix: torch.Tensor) -> torch.Tensor:
        return matrix if assistant else matrix @ w.basis

    def writes(matrix: torch.Tensor) -> torch.Tensor:
        return matrix if assistant else w.basis.T @ matrix

    def constant(size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, device=w.device)

    yield f"{prefix}.self_attn.q_proj.weight", reads(core.q)
    yield f"{prefix}.self_attn.k_proj.weight", reads(core.k)
    yield f"{prefix}.self_attn.v_proj.weight", reads(core.v)
    yield f"{prefix}.self_attn.o_proj.weight", writes(core.o)
    yield f"{prefix}.self_attn.q_norm.weight", core.q_norm
    yield f"{prefix}.self_attn.k_norm.weight", constant(g.dim(layer), 1.0)
    yield f"{prefix}.mlp.gate_proj.weight", reads(core.gate[:inner])
    yield f"{prefix}.mlp.up_proj.weight", reads(core.up[:inner])
    yield f"{prefix}.mlp.down_proj.weight", writes(core.down[:, :inner])
    yield f"{prefix}.input_layernorm.weight", constant(width, one)
    yield f"{prefix}.pre_feedforward_layernorm.weight", constant(width, one)
    yield (
        f"{prefix}.post_attention_layernorm.weight",
        constant(width, one * core.attention_size),
    )
    yield f"{prefix}.post_feedforward_layernorm.weight", constant(width, one * core.mlp_size)
    yield f"{prefix}.layer_scalar", constant(1, 1.0)
    if not assistant and g.ple:
        small = core.mlp_size * (0.5 if layer in g.mirrored else 1.0)
        name = f"layer{layer}"
        gate = w._normal(f"{name}/ple_gate", g.ple, g.assistant_hidden)
        back = w._normal(f"{name}/ple_back", g.assistant_hidden, g.ple)
        yield f"{prefix}.per_layer_input_gate.weight", reads(gate / math.sqrt(g.hidden))
        yield f"{prefix}.per_layer_projection.weight", writes(back / math.sqrt(g.ple))
        yield f"{prefix}.post_per_layer_input_norm.weight", constant(width, small)


def expert_tensors(w: Weights, g: MoEGeometry, layer: int, prefix: str) -> Tensors:
    """Router, experts and their norms of one layer, named as in a Gemma-4 checkpoint.

    ``experts.gate_up_proj`` is [experts, 2 * intermediate, hidden], gate first;
    ``experts.down_proj`` [experts, hidden, intermediate].
    """
    name, inner, unit = f"layer{layer}/experts", g.expert_intermediate, 1 / math.sqrt(g.hidden)

    def constant(value: float) -> torch.Tensor:
        return torch.full((g.hidden,), value, device=w.device)

    # The router gets a vector of length 1 (normed, over sqrt(hidden)), so logits are small numbers.
    yield f"{prefix}.router.proj.weight", w._normal(f"{name}/router", g.experts, g.hidden, std=4.0)
    yield f"{prefix}.router.scale", constant(1.0)
    yield f"{prefix}.router.per_expert_scale", torch.ones(g.experts, device=w.device)
    gate_up = w._normal(f"{name}/gate_up", g.experts, 2 * inner, g.hidden, std=unit)
    yield f"{prefix}.experts.gate_up_proj", gate_up
    down = w._normal(f"{name}/down", g.experts, g.hidden, inner, std=1 / math.sqrt(inner))
    yield f"{prefix}.experts.down_proj", down
    yield f"{prefix}.pre_feedforward_layernorm_2.weight", constant(1.0)
    yield f"{prefix}.post_feedforward_layernorm_1.weight", constant(1.0)
    yield f"{prefix}.post_feedforward_layernorm_2.weight", constant(EXPERT_SHARE)


def target_tensors(w: Weights) -> Tensors:
    g = w.geometry
    yield "model.embed_tokens.weight", w.embedding_core() @ w.basis
    yield "lm_head.weight", w.head_core() @ w.basis
    yield "model.norm.weight", torch.ones(g.hidden, device=w.device)
    if g.ple:
        rows = g.layers * g.ple
        table = torch.empty(g.vocab, rows, dtype=getattr(torch, g.dtype), device=w.device)
        table.normal_(0, 1 / math.sqrt(g.ple), generator=w._generator("ple"))
        yield "model.embed_tokens_per_layer.weight", table
        yield "model.per_layer_model_projection.weight", w._normal("ple_model", rows, g.hidden)
        yield "model.per_layer_projection_norm.weight", torch.ones(g.ple, device=w.device)
    for layer in range(g.layers):
        yield from layer_tensors(w, layer, f"model.layers.{layer}", w.core(layer), False)
        if isinstance(g, MoEGeometry):
            yield from expert_tensors(w, g, layer, f"model.layers.{layer}")


def assistant_tensors(w: Weights) -> Tensors:
    g = w.geometry
    head = w.head_core()
    blocks = head[w.token_ordering()].view(g.centroids, -1, g.assistant_hidden).mean(1)
    yield "model.embed_tokens.weight", head  # the assistant's lm_head is tied to its own table
    yield "masked_embedding.centroids.weight", torch.nn.functional.normalize(blocks, dim=1)
    yield "masked_embedding.token_ordering", w.token_ordering()
    yield "pre_projection.weight", torch.cat([w.basis, g.coupling * w.basis], 1)
    yield "post_projection.weight", w.basis.T
    norm = torch.full((g.assistant_hidden,), math.sqrt(g.hidden / g.assistant_hidden))
    yield "model.norm.weight", norm
    for i, layer in enumerate(g.mirrored):
        yield from layer_tensors(w, layer, f"model.layers.{i}", w.core(layer), True)
