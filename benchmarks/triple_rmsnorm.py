"""Compares triple-rmsnorm with eager torch, torch.compile, SGLang's own layer and its fused ops.

    python benchmarks/triple_rmsnorm.py [--rows 1,4096] [--tune] [--out FILE.csv]

The widths are those of E2B (1536), E4B (2560) and 26B-A4B (2816), in bfloat16. "sglang" are the
five kernels of 0.5.12.post1's layer. "sglang fused" is its fused norm + add and one norm kernel for
each output, where the router's scale is the weight of its norm.
"""

from __future__ import annotations

from typing import Any

import torch
from measuring import kernels

from g4debug.fixes.paths.kernels import triple_rmsnorm as ours
from g4debug.fixes.paths.kernels._rows import Cut

WIDTHS = {"E2B": 1536, "E4B": 2560, "26B-A4B": 2816}
EPS = 1e-6
ROWS = (1, 8, 64, 512, 4096, 16384)
TUNE_ROWS = (1, 64, 512, 4096, 16384)


class Inputs:
    """Seeded tensors of one width and number of rows: ``count`` sets of inputs, and the weights."""

    def __init__(self, width: int, rows: int, count: int, device: str = "cuda"):
        draw = kernels.drawing(width + rows, device)
        self.x, self.residual = ([draw(rows, width) for _ in range(count)] for _ in "xr")
        self.wx, self.wd, self.wr, self.we = (draw(width) for _ in range(4))
        self.weights = (self.wx, self.wd, self.wr, self.we)
        self.one = torch.ones(width, device=device).bfloat16()


def eager(x: Any, r: Any, wx: Any, wd: Any, wr: Any, we: Any) -> Any:
    def norm(t: torch.Tensor) -> torch.Tensor:
        wide = t.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)

    residual = (norm(x) * wx.float()).to(x.dtype) + r
    n = norm(residual)
    return residual, *((n * w.float()).to(x.dtype) for w in (wd, wr, we))


def sglang_variants() -> dict[str, Any]:
    """SGLang's own kernels. If it is not installed, there are none, and that is printed."""
    try:
        from sgl_kernel import fused_add_rmsnorm, rmsnorm
        from sglang.srt.layers.gemma4_fused_ops import gemma_rmsnorm_residual_scalar
    except ImportError as e:
        print(f"SGLang's kernels: left out; {e}")
        return {}
    scalar = torch.ones(1, device="cuda", dtype=torch.bfloat16)

    def layer(x: Any, r: Any, wx: Any, wd: Any, wr: Any, we: Any, one: Any) -> Any:
        dense = rmsnorm(x, wx, EPS)
        fused_add_rmsnorm(dense, r, wd, EPS)  # both in place
        return r, dense, rmsnorm(r, one, EPS) * wr, rmsnorm(r, we, EPS)

    def fused(x: Any, r: Any, wx: Any, wd: Any, wr: Any, we: Any, one: Any) -> Any:
        residual = gemma_rmsnorm_residual_scalar(x, wx, r, scalar, EPS)
        return residual, *(rmsnorm(residual, w, EPS) for w in (wd, wr, we))

    return {"sglang": layer, "sglang fused": fused}


def check(device: str, others: dict[str, Any]) -> None:
    """Check that all variants give the same four outputs, within bfloat16's roundings."""
    t = Inputs(1536, 9, 1, device)
    right = eager(t.x[0], t.residual[0], *t.weights)
    found = {n: f(t.x[0], t.residual[0].clone(), *t.weights, t.one) for n, f in others.items()}
    found["ours"] = ours.triple_rmsnorm(t.x[0], t.residual[0], *t.weights, EPS, EPS)
    for four in found.values():
        for got, wanted in zip(four, right, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.1)
    print(f"the same residual and inputs: eager, {', '.join(found)}")


def tune(t: Inputs, at: str, rows: int, width: int, rounds: int) -> None:
    cuts = [Cut(w, pdl=pdl) for w in (1, 2, 4, 8, 16) for pdl in (False, True)]
    loops = [(n, s) for n in (1, 2, 4, 8) for s in (1, 2, 3)]
    cuts += [Cut(w, n, s, True) for w in (4, 8, 16) for n, s in loops]
    tries = {
        str(tuple(c)): lambda i, c=c: ours.triple_rmsnorm(
            t.x[i], t.residual[i], *t.weights, EPS, EPS, c
        )
        for c in dict.fromkeys([ours.cut(rows, width), *cuts])
    }
    kernels.tuned(f"{at} (warps, per_sm, stages, pdl)", tries, len(t.x), rounds)


def main() -> None:
    parser = kernels.parser(__doc__)
    parser.add_argument("--widths", default=",".join(WIDTHS))
    args = parser.parse_args()
    if args.check:
        gpu = torch.cuda.is_available()
        return check("cuda" if gpu else "cpu", sglang_variants() if gpu else {})
    kernels.needs_gpu()
    others = sglang_variants()
    check("cuda", others)
    sweep = kernels.Sweep(args.rounds)
    for name in args.widths.split(","):
        width = WIDTHS[name]
        for rows in kernels.sizes(args, ROWS, TUNE_ROWS):
            moved = 2 * (6 * rows * width + 4 * width)
            count = kernels.sets(moved)
            t = Inputs(width, rows, count)
            if args.tune:
                tune(t, f"{name} {rows}", rows, width, args.rounds)
                continue
            variants: dict[str, kernels.Variant] = {
                "eager": lambda i, t=t: eager(t.x[i], t.residual[i], *t.weights)
            }
            for key, function in others.items():
                variants[key] = lambda i, t=t, f=function: f(
                    t.x[i], t.residual[i], *t.weights, t.one
                )
            if not args.no_compile:
                torch._dynamo.reset()
                compiled = kernels.compiled(eager)
                variants["compiled"] = lambda i, t=t, f=compiled: f(
                    t.x[i], t.residual[i], *t.weights
                )
            variants["ours"] = lambda i, t=t: ours.triple_rmsnorm(
                t.x[i], t.residual[i], *t.weights, EPS, EPS
            )
            sweep.add({"width": name, "hidden": width, "rows": rows}, variants, moved, count)
            del t, variants
    if not args.tune:
        sweep.write("triple_rmsnorm", args.out, ["width", "rows"])


if __name__ == "__main__":
    main()
