"""Compares ple-tail with eager torch, torch.compile, SGLang's own layer and SGLang's fused ops.

    python benchmarks/ple_tail.py [--part kernels|tail] [--rows 1,4096] [--tune] [--out FILE.csv]

E2B is 1536 wide, E4B 2560 and 26B-A4B 2816, in bfloat16. The per-layer inputs are 256 wide, and a
slice of the inputs of all 35, 42 or 30 layers.

The part kernels is the pointwise work alone, on given results of the GEMMs. The part tail is all of
it with both GEMMs (torch.nn.functional.linear), as the layer runs it; torch.compile may then fuse
into a GEMM. "sglang" are the operations of 0.5.12.post1's layer, with the norm kernel of the
installed release. "sglang fused" uses that release's fused kernels where they fit. If they
are missing on a GPU, it ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import kernels, opponents
from torch.nn.functional import gelu, linear

from g4debug.fixes.paths.kernels import gelu_mul as gelu_mul_kernel
from g4debug.fixes.paths.kernels import rmsnorm_add as rmsnorm_add_kernel
from g4debug.fixes.paths.kernels.gelu_mul import Tile, gelu_mul
from g4debug.fixes.paths.kernels.rmsnorm_add import rmsnorm_add

WIDTHS = {"E2B": (1536, 35), "E4B": (2560, 42), "26B-A4B": (2816, 30)}
PLE, EPS = 256, 1e-6
ROWS = (1, 8, 64, 512, 4096, 16384)
TUNE_ROWS = (1, 64, 512, 4096, 16384)


# Each stage of the chain: (norm and add), (gelu and multiply), (norm, add and multiply).


def eager1(x: Any, w: Any, r: Any) -> Any:
    return kernels.rms_norm(x, w, EPS) + r


def eager2(gate: Any, ple: Any) -> Any:
    return gelu(gate, approximate="tanh") * ple


def eager3(share: Any, w: Any, h: Any, scalar: Any) -> Any:
    return (h + kernels.rms_norm(share, w, EPS)) * scalar


def stages(theirs: dict[str, Any]) -> dict[str, tuple[Any, Any, Any]]:
    """The name of each variant -> its three stages."""
    made = {"eager": (eager1, eager2, eager3)}
    if "rmsnorm" in theirs:
        norm, fused = theirs["rmsnorm"], theirs["fused"]

        def sglang3(share: Any, w: Any, h: Any, scalar: Any) -> Any:
            return (h + norm(share, w, EPS)) * scalar

        made["sglang"] = (lambda x, w, r: norm(x, w, EPS) + r, eager2, sglang3)
        one = theirs["one"]
        made["sglang fused"] = (
            lambda x, w, r: fused(x, w, r, one, EPS),
            eager2,
            lambda share, w, h, scalar: fused(share, w, h, scalar, EPS),
        )
    made["ours"] = (
        lambda x, w, r: rmsnorm_add(x, w, r, EPS),
        gelu_mul,
        lambda share, w, h, scalar: rmsnorm_add(share, w, h, EPS, scalar),
    )
    return made


def sglang_kernels() -> dict[str, Any]:
    """SGLang's own kernels. If one is missing, there are none, and that is printed."""
    mine = opponents.found(
        f"{opponents.NORMS}.rmsnorm", f"{opponents.LAYER}.gemma_rmsnorm_residual_scalar"
    )
    if mine is None:
        return {}
    one = torch.ones(1, device="cuda", dtype=torch.bfloat16)
    return {"rmsnorm": mine[0], "fused": mine[1], "one": one}


def whole(fs: Any) -> Callable[..., Any]:
    """The three stages, on given results of the GEMMs."""

    def call(x: Any, w1: Any, r: Any, gate: Any, ple: Any, share: Any, w2: Any, scalar: Any) -> Any:
        h = fs[0](x, w1, r)
        return h, fs[1](gate, ple), fs[2](share, w2, h, scalar)

    return call


def tail(fs: Any) -> Callable[..., Any]:
    """The three stages with both GEMMs."""

    def call(x: Any, w1: Any, r: Any, gate: Any, ple: Any, back: Any, w2: Any, scalar: Any) -> Any:
        h = fs[0](x, w1, r)
        return fs[2](linear(fs[1](linear(h, gate), ple), back), w2, h, scalar)

    return call


def build(part: str, name: str, rows: int, device: str, compiled: bool) -> list[kernels.Stage]:
    """The stages of a part, with seeded inputs."""
    width, layers = WIDTHS[name]
    norm, gated = 2 * (3 * rows * width + width), 2 * 3 * rows * PLE  # bytes
    gemms = 2 * (2 * width * PLE + 2 * rows * (width + PLE))  # with their weights
    count = kernels.sets(norm, device)
    draw = kernels.drawing(width + rows, device)
    x, residual, share = ([draw(rows, width) for _ in range(count)] for _ in "xrs")
    gate = [draw(rows, PLE) for _ in range(count)]
    # A slice of the inputs of all layers, as in the model. There are few sets: they are large.
    kept = min(count, max(1, (1 << 30) // (rows * layers * PLE * 2)))
    every = [draw(rows, layers, PLE) for _ in range(kept)]
    ple = [every[i % kept][:, (7 * i) % layers] for i in range(count)]
    w1, w2 = draw(width), draw(width)
    gate_weight, back_weight = draw(PLE, width) / width**0.5, draw(width, PLE) / 16
    scalar = draw(1)
    made = stages(sglang_kernels() if device == "cuda" else {})
    each = range(count)

    def stage(what: str, functions: Any, inputs: Any, moved: int, **more: Any) -> kernels.Stage:
        at = {"width": name, "hidden": width, "rows": rows, "stage": what}
        return kernels.Stage(at, functions, inputs, moved, **more)

    if part == "tail":
        functions = {n: tail(fs) for n, fs in made.items()}
        if compiled:
            functions["compiled"] = kernels.compiled(tail(made["eager"]))
        inputs = [
            (x[i], w1, residual[i], gate_weight, ple[i], back_weight, w2, scalar) for i in each
        ]
        return [stage("tail", functions, inputs, 2 * norm + gated + gemms)]
    if compiled:
        made["compiled"] = tuple(map(kernels.compiled, made["eager"]))
    one, two, three = ({n: fs[k] for n, fs in made.items()} for k in range(3))
    cuts = [rmsnorm_add_kernel.cut(rows, width), *kernels.cuts()]
    tiles = [Tile(r, w, pdl) for r in (1, 2, 4, 8) for w in (1, 2, 4, 8) for pdl in (False, True)]
    return [
        stage(
            "norm+add", one, [(x[i], w1, residual[i]) for i in each], norm,
            tries={c: lambda x, w, r, c=c: rmsnorm_add(x, w, r, EPS, scalar, c) for c in cuts},
        ),
        stage(
            "gelu*ple", two, [(gate[i], ple[i]) for i in each], gated,
            tries={
                t: lambda g, p, t=t: gelu_mul(g, p, t) for t in [gelu_mul_kernel.tile(rows), *tiles]
            },
        ),
        stage(
            "norm+add*scalar", three, [(share[i], w2, residual[i], scalar) for i in each], norm
        ),
        stage(
            "all", {n: whole(fs) for n, fs in made.items()},
            [(x[i], w1, residual[i], gate[i], ple[i], share[i], w2, scalar) for i in each],
            2 * norm + gated,
        ),
    ]  # fmt: skip


def main() -> None:
    parser = kernels.parser(__doc__)
    parser.add_argument("--part", choices=("kernels", "tail"), default="kernels")
    parser.add_argument("--widths", default=",".join(WIDTHS))
    args = parser.parse_args()
    stem = {"kernels": "ple_tail", "tail": "ple_tail_gemms"}[args.part]
    keys, names = ["width", "rows", "stage"], args.widths.split(",")
    kernels.compare(args, stem, keys, names, ROWS, TUNE_ROWS, partial(build, args.part))


if __name__ == "__main__":
    main()
