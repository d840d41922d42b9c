"""Compares vision-layer's kernels with SGLang's own operations and torch.compile of the formulas.

    python benchmarks/vision_layer.py [--rows 2520,15120] [--tune] [--out FILE.csv]

E2B and E4B have a tower 768 wide, with 12 heads of 64, and 26B-A4B one 1152 wide, with 16 heads of
72, in bfloat16. A row is a patch: one picture has 2520, six have 15,120. The stage "qkv" is the
work between the QKV GEMM and attention, "gelu" that between the GEMMs of the MLP, and "norm+add"
that after attention's last GEMM. Bounds are finite, as in E2B's checkpoints. "sglang" are the
operations of 0.5.12.post1's layer, with its norm kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring import kernels, opponents

from g4debug.fixes.paths.kernels import clipped_gelu_mul, clipped_norm_add, vision_qkv
from g4debug.fixes.paths.kernels._rows import Cut, Tile
from g4debug.fixes.paths.kernels.clipped_norm_add import Next

# hidden, MLP, heads, head_dim
TOWERS = {"E2B": (768, 3072, 12, 64), "26B-A4B": (1152, 4304, 16, 72)}
ROWS = (2520, 15120)
EPS = 1e-6
Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


class Inputs:
    """Seeded tensors of one tower and number of rows: ``count`` sets of inputs, and the weights."""

    def __init__(self, tower: str, rows: int, count: int, device: str = "cuda"):
        draw = kernels.drawing(rows, device)
        hidden, inner, self.heads, self.dim = TOWERS[tower]
        self.qkv = [draw(rows, 3 * hidden) for _ in range(count)]
        self.both = [draw(rows, 2 * inner) for _ in range(count)]
        self.x, self.residual = ([draw(rows, hidden) for _ in range(count)] for _ in "xr")
        self.w, self.w_next = draw(hidden), draw(hidden)
        self.wq, self.wk, self.one = draw(self.dim), draw(self.dim), draw(self.dim) * 0 + 1
        angle = draw(rows, self.dim)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.bounds = (torch.tensor(-3.0, device=device), torch.tensor(3.0, device=device))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b, c, d = x.chunk(4, dim=-1)
    return x * cos + torch.cat([-b, a, -d, c], dim=-1) * sin


def steps(t: Inputs, norm: Norm, rope: Any) -> dict[str, Callable[..., Any]]:
    """The three stages, with one operation after the other."""

    def qkv(x: torch.Tensor) -> Any:
        parts = [torch.clamp(p, *t.bounds) for p in x.chunk(3, dim=-1)]
        q, k, v = (
            norm(p.reshape(-1, t.dim), w, EPS).view(len(x), t.heads, t.dim)
            for p, w in zip(parts, (t.wq, t.wk, t.one), strict=True)
        )
        cos, sin = t.cos[:, None], t.sin[:, None]
        return rope(q, cos, sin), rope(k, cos, sin), v

    def gelu(both: torch.Tensor) -> torch.Tensor:
        gate, up = (torch.clamp(p, *t.bounds) for p in both.chunk(2, dim=-1))
        product = torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.clamp(product, *t.bounds)

    def norm_add(x: torch.Tensor, residual: torch.Tensor) -> Any:
        out = norm(torch.clamp(x, *t.bounds), t.w, EPS) + residual
        return out, torch.clamp(norm(out, t.w_next, EPS), *t.bounds)

    return {"qkv": qkv, "gelu": gelu, "norm+add": norm_add}


def ours(
    t: Inputs, qkv: Cut | None = None, gelu: Tile | None = None, norm_add: Tile | None = None
) -> dict[str, Callable[..., Any]]:
    b, following = t.bounds, Next(t.w_next, EPS, t.bounds)
    return {
        "qkv": lambda x: vision_qkv.vision_qkv(
            x, t.heads, t.heads, t.cos, t.sin, t.wq, t.wk, EPS, b, b, b, qkv
        ),
        "gelu": lambda both: clipped_gelu_mul.clipped_gelu_mul(both, b, b, b, gelu),
        "norm+add": lambda x, residual: clipped_norm_add.clipped_norm_add(
            x, b, t.w, residual, EPS, None, following, norm_add
        ),
    }


def sglang(t: Inputs) -> dict[str, Callable[..., Any]]:
    """SGLang's own operations. If one is missing, there are none, and that is printed."""
    mine = opponents.found(
        f"{opponents.NORMS}.rmsnorm", f"{opponents.VISION}._apply_multidimensional_rope"
    )
    return {} if mine is None else steps(t, *mine)


def build(tower: str, rows: int, device: str, compiled: bool) -> list[kernels.Stage]:
    hidden, inner, _, dim = TOWERS[tower]
    moved = {  # the bytes that each stage must read and write
        "qkv": 2 * rows * (6 * hidden + 2 * dim),
        "gelu": 2 * rows * 3 * inner,
        "norm+add": 2 * rows * 4 * hidden,
    }
    t = Inputs(tower, rows, kernels.sets(moved["norm+add"], device), device)
    plain = steps(t, kernels.rms_norm, turned)
    named = {"sglang": sglang(t)} if device == "cuda" else {}
    if compiled:
        named["compiled"] = {stage: kernels.compiled(f) for stage, f in plain.items()}
    named["ours"] = ours(t)
    inputs = {
        "qkv": [(x,) for x in t.qkv],
        "gelu": [(both,) for both in t.both],
        "norm+add": list(zip(t.x, t.residual, strict=True)),
    }
    tiles = [Tile(r, w, True) for r in (1, 2, 4) for w in (1, 2, 4, 8)]
    ways = {"qkv": [Cut(w, pdl=True) for w in (1, 2, 4, 8)], "gelu": tiles, "norm+add": tiles}
    return [
        kernels.Stage(
            {"tower": tower, "rows": rows, "stage": stage},
            {name: made[stage] for name, made in named.items() if made},
            inputs[stage],
            size,
            right=plain[stage],
            tries={"today": ours(t)[stage]}
            | {how: ours(t, **{stage.replace("+", "_"): how})[stage] for how in ways[stage]},
        )
        for stage, size in moved.items()
    ]


def main() -> None:
    args = kernels.parser(__doc__).parse_args()
    keys = ["tower", "rows", "stage"]
    kernels.compare(args, "vision_layer", keys, list(TOWERS), ROWS, ROWS, build)


if __name__ == "__main__":
    main()
