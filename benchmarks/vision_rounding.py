"""Measures how far a bfloat16 vision tower is from a float32 one, with SGLang's code and with ours.

    python benchmarks/vision_rounding.py [--layers 2] [--side 24] [--logits 1]

It runs on a CPU with E2B's widths, one picture of side x side patches and seeded weights. Instead
of our kernels it runs their references in torch, which round in the same places. Attention stands
in for fa3: scores and sums are float32, and probabilities are bfloat16. --logits is the standard
deviation of attention's logits. In a trained tower it is about 1; with random weights, where the
norms have the weight 1, it would be 8.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring import options
from mm_encoder import TOWERS

ROOT = Path(__file__).resolve().parents[1]


class Attention(torch.nn.Module):
    """Attention head by head. The inputs are [tokens, heads, head_dim] of one picture."""

    def forward(self, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
        heads = []
        for a, b, c in zip(*(t.unbind(1) for t in (q, k, v)), strict=True):
            scores = a.float() @ b.float().T
            scores = torch.exp(scores - scores.amax(-1, keepdim=True))
            found = scores.to(c.dtype).float() @ c.float()
            heads.append((found / scores.sum(-1, keepdim=True)).to(c.dtype))
        return torch.stack(heads, dim=1)


def tower(layers: int, logits: float) -> Any:
    """A seeded Gemma4VisionEncoder in float32, with weights that are bfloat16 numbers."""
    import real_tower

    made = real_tower.tower({**TOWERS["E2B"], "num_hidden_layers": layers})
    real_tower.logits_of_size(made, logits)
    for p in made.parameters():
        p.copy_(p.bfloat16())
    for layer in made.encoder.layers:
        layer.self_attn.qkv_backend = Attention()
    return made


def run(made: Any, side: int, ours: bool) -> torch.Tensor:
    """The hidden states after the last layer, as float32."""
    import real_tower

    from g4debug.fixes.paths.vision_layer import layer as vision_layers

    at = real_tower.positions(side, side)[None]
    pixels = torch.rand(1, side**2, 768, generator=torch.Generator().manual_seed(1)).bfloat16()
    valid, embedder = torch.ones(1, side**2, dtype=torch.bool), made.patch_embedder
    hidden = embedder._patch_projection(pixels.to(embedder.input_proj.weight.dtype))
    table = embedder.position_embedding_table
    hidden = hidden + vision_layers.position_embeddings(table, at, ~valid)
    if ours:
        return vision_layers.encode(made.encoder, hidden, at).float()
    out: torch.Tensor = made.encoder(hidden, valid, at)
    return out.float()


def main() -> None:
    parser = options.parser(__doc__, out="")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--side", type=int, default=24)
    parser.add_argument("--logits", type=float, default=1.0)
    args = parser.parse_args()
    from g4debug import cpu

    cpu.prepare()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import real_layer

    from g4debug.cpu.geometry import TINY
    from g4debug.cpu.models import write
    from g4debug.fixes.paths.vision_layer import layer as vision_layers

    for name in ("vision_qkv", "clipped_gelu_mul", "clipped_norm_add"):
        module = getattr(vision_layers, name)
        setattr(module, name, module.reference)
    with tempfile.TemporaryDirectory(prefix="g4debug-rounding-") as folder, torch.no_grad():
        target, _ = write(TINY, Path(folder) / "tiny")
        with real_layer.one_process(str(target), mm_attention_backend="triton_attn"):
            made = tower(args.layers, args.logits)
            right = run(made, args.side, ours=False)
            made.bfloat16()
            theirs, mine = (run(made, args.side, ours) for ours in (False, True))
    far = [float((t - right).norm() / right.norm()) for t in (theirs, mine)]
    apart = float((mine - theirs).norm() / theirs.norm())
    print(
        f"{args.layers} layers, {args.side} x {args.side} patches, logits of size {args.logits:g}"
    )
    print(f"from float32: SGLang {far[0]:.4f}, vision-layer {far[1]:.4f}; apart {apart:.4f}")


if __name__ == "__main__":
    main()
