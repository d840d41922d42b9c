"""Compares triple-rmsnorm with eager torch, torch.compile, SGLang's own layer and its fused ops.

    python benchmarks/triple_rmsnorm.py [--rows 1,4096] [--tune] [--out FILE.csv]

E2B is 1536 wide, E4B 2560 and 26B-A4B 2816, in bfloat16. "sglang" are the
five kernels of 0.5.12.post1's layer. "sglang fused" is its fused norm + add and one norm kernel for
each output, where the router's scale is the weight of its norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring import kernels, opponents

from g4debug.fixes.paths.kernels import triple_rmsnorm as ours

WIDTHS = {"E2B": 1536, "E4B": 2560, "26B-A4B": 2816}
EPS = 1e-6
ROWS = (1, 8, 64, 512, 4096, 16384)
TUNE_ROWS = (1, 64, 512, 4096, 16384)


def eager(x: Any, r: Any, wx: Any, wd: Any, wr: Any, we: Any, one: Any) -> Any:
    def norm(t: torch.Tensor) -> torch.Tensor:
        wide = t.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)

    residual = (norm(x) * wx.float()).to(x.dtype) + r
    n = norm(residual)
    return residual, *((n * w.float()).to(x.dtype) for w in (wd, wr, we))


def sglang_variants() -> dict[str, Any]:
    """SGLang's own kernels. If one is missing, there are none, and that is printed."""
    mine = opponents.found(
        f"{opponents.NORMS}.fused_add_rmsnorm",
        f"{opponents.NORMS}.rmsnorm",
        f"{opponents.LAYER}.gemma_rmsnorm_residual_scalar",
    )
    if mine is None:
        return {}
    fused_add_rmsnorm, rmsnorm, gemma_rmsnorm_residual_scalar = mine
    scalar = torch.ones(1, device="cuda", dtype=torch.bfloat16)

    def layer(x: Any, r: Any, wx: Any, wd: Any, wr: Any, we: Any, one: Any) -> Any:
        dense = rmsnorm(x, wx, EPS)
        fused_add_rmsnorm(dense, r, wd, EPS)  # both in place
        return r, dense, rmsnorm(r, one, EPS) * wr, rmsnorm(r, we, EPS)

    def fused(x: Any, r: Any, wx: Any, wd: Any, wr: Any, we: Any, one: Any) -> Any:
        residual = gemma_rmsnorm_residual_scalar(x, wx, r, scalar, EPS)
        return residual, *(rmsnorm(residual, w, EPS) for w in (wd, wr, we))

    return {"sglang": layer, "sglang fused": fused}


def build(name: str, rows: int, device: str, compiled: bool) -> list[kernels.Stage]:
    """Seeded inputs: x, the residual, four weights, and ones. There is one stage."""
    width = WIDTHS[name]
    moved = 2 * (6 * rows * width + 4 * width)
    draw = kernels.drawing(width + rows, device)
    xs, residuals = ([draw(rows, width) for _ in range(kernels.sets(moved, device))] for _ in "xr")
    weights = [*(draw(width) for _ in range(4)), torch.ones(width, device=device).bfloat16()]

    def mine(how: Any = None) -> Callable[..., Any]:
        return lambda x, r, *w: ours.triple_rmsnorm(x, r, *w[:4], EPS, EPS, how)

    variants: dict[str, Any] = {"eager": eager}
    if device == "cuda":
        variants |= sglang_variants()
    if compiled:
        variants["compiled"] = kernels.compiled(eager)
    return [
        kernels.Stage(
            {"width": name, "hidden": width, "rows": rows},
            variants | {"ours": mine()},
            [(x, r, *weights) for x, r in zip(xs, residuals, strict=True)],
            moved,
            tries={how: mine(how) for how in [ours.cut(rows, width), *kernels.cuts()]},
        )
    ]


def main() -> None:
    parser = kernels.parser(__doc__)
    parser.add_argument("--widths", default=",".join(WIDTHS))
    args = parser.parse_args()
    keys, names = ["width", "rows"], args.widths.split(",")
    kernels.compare(args, "triple_rmsnorm", keys, names, ROWS, TUNE_ROWS, build)


if __name__ == "__main__":
    main()
