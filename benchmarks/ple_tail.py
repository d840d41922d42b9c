"""Compares ple-tail with eager torch, torch.compile, SGLang's own layer and SGLang's fused ops.

    python benchmarks/ple_tail.py [--part kernels|tail] [--rows 1,4096] [--tune] [--out FILE.csv]

The widths are those of E2B (1536), E4B (2560) and 26B-A4B (2816), in bfloat16. The per-layer inputs
are 256 wide and a slice of those of all 35, 42 or 30 layers.

The part kernels is the pointwise work alone, on given results of the GEMMs. The part tail is all of
it with both GEMMs (torch.nn.functional.linear), as the layer runs it; torch.compile may then fuse
into a GEMM. "sglang" are the operations of 0.5.12.post1's layer. "sglang fused" uses SGLang's own
fused kernels where they fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring import kernels
from torch.nn.functional import gelu, linear

from g4debug.fixes.paths.kernels import gelu_mul as gelu_mul_kernel
from g4debug.fixes.paths.kernels import rmsnorm_add as rmsnorm_add_kernel
from g4debug.fixes.paths.kernels._rows import Cut
from g4debug.fixes.paths.kernels.gelu_mul import Tile, gelu_mul
from g4debug.fixes.paths.kernels.rmsnorm_add import rmsnorm_add

WIDTHS = {"E2B": (1536, 35), "E4B": (2560, 42), "26B-A4B": (2816, 30)}
PLE, EPS = 256, 1e-6
ROWS = (1, 8, 64, 512, 4096, 16384)
TUNE_ROWS = (1, 64, 512, 4096, 16384)
Chain = Callable[["Inputs", int, bool], Any]


class Inputs:
    """Seeded tensors of one width and number of rows: ``count`` sets of inputs, and the weights."""

    def __init__(self, width: int, layers: int, rows: int, count: int, device: str = "cuda"):
        draw = kernels.drawing(width + rows, device)
        self.x, self.residual, self.share = (
            [draw(rows, width) for _ in range(count)] for _ in "xrs"
        )
        self.gate = [draw(rows, PLE) for _ in range(count)]
        # A slice of the inputs of all layers, as in the model. There are few sets: they are large.
        kept = min(count, max(1, (1 << 30) // (rows * layers * PLE * 2)))
        every = [draw(rows, layers, PLE) for _ in range(kept)]
        self.ple = [every[i % kept][:, (7 * i) % layers] for i in range(count)]
        self.w1, self.w2 = draw(width), draw(width)
        self.gate_weight, self.back_weight = draw(PLE, width) / width**0.5, draw(width, PLE) / 16
        self.scalar, self.one = draw(1), torch.ones(1, device=device).bfloat16()


# Each stage of the chain: (norm and add), (gelu and multiply), (norm, add and multiply).


def eager1(x: Any, w: Any, r: Any) -> Any:
    return kernels.rms_norm(x, w, EPS) + r


def eager2(gate: Any, ple: Any) -> Any:
    return gelu(gate, approximate="tanh") * ple


def eager3(share: Any, w: Any, h: Any, scalar: Any) -> Any:
    return (h + kernels.rms_norm(share, w, EPS)) * scalar


def eager_tail(x: Any, w1: Any, r: Any, gate_w: Any, ple: Any, back_w: Any, w2: Any, s: Any) -> Any:
    h = eager1(x, w1, r)
    return eager3(linear(eager2(linear(h, gate_w), ple), back_w), w2, h, s)


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
    """SGLang's own kernels. If it is not installed, there are none, and that is printed."""
    try:
        from sgl_kernel import rmsnorm
        from sglang.srt.layers.gemma4_fused_ops import gemma_rmsnorm_residual_scalar
    except ImportError as e:
        print(f"SGLang's kernels: left out; {e}")
        return {}
    one = torch.ones(1, device="cuda", dtype=torch.bfloat16)
    return {"rmsnorm": rmsnorm, "fused": gemma_rmsnorm_residual_scalar, "one": one}


def kernel_variants(
    t: Inputs, made: dict[str, tuple[Any, Any, Any]]
) -> dict[str, dict[str, kernels.Variant]]:
    """stage -> variant -> call. "all" are the three stages, on given results of the GEMMs."""

    def one(f: Any) -> kernels.Variant:
        return lambda i: f(t.x[i], t.w1, t.residual[i])

    def two(f: Any) -> kernels.Variant:
        return lambda i: f(t.gate[i], t.ple[i])

    def three(f: Any) -> kernels.Variant:
        return lambda i: f(t.share[i], t.w2, t.residual[i], t.scalar)

    def whole(fs: Any) -> kernels.Variant:
        def call(i: int) -> Any:
            h = fs[0](t.x[i], t.w1, t.residual[i])
            g = fs[1](t.gate[i], t.ple[i])
            return h, g, fs[2](t.share[i], t.w2, h, t.scalar)

        return call

    return {
        "norm+add": {n: one(f[0]) for n, f in made.items()},
        "gelu*ple": {n: two(f[1]) for n, f in made.items()},
        "norm+add*scalar": {n: three(f[2]) for n, f in made.items()},
        "all": {n: whole(f) for n, f in made.items()},
    }


def tail_variants(t: Inputs, made: dict[str, tuple[Any, Any, Any]]) -> dict[str, kernels.Variant]:
    def tail(fs: Any) -> kernels.Variant:
        def call(i: int) -> Any:
            h = fs[0](t.x[i], t.w1, t.residual[i])
            g = fs[1](linear(h, t.gate_weight), t.ple[i])
            return fs[2](linear(g, t.back_weight), t.w2, h, t.scalar)

        return call

    return {n: tail(f) for n, f in made.items()}


def moved(rows: int, width: int) -> dict[str, int]:
    """The bytes that each stage must read and write; "tail" includes the weights of the GEMMs."""
    norm, gated = 2 * (3 * rows * width + width), 2 * 3 * rows * PLE
    gemms = 2 * (2 * width * PLE + 2 * rows * (width + PLE))
    return {
        "norm+add": norm,
        "gelu*ple": gated,
        "norm+add*scalar": norm,
        "all": 2 * norm + gated,
        "tail": 2 * norm + gated + gemms,
    }


def cuts() -> list[Cut]:
    found = [Cut(w, pdl=pdl) for w in (1, 2, 4, 8, 16) for pdl in (False, True)]
    loops = [(n, s) for n in (2, 4, 8) for s in (1, 2, 3)]
    return found + [Cut(w, n, s, True) for w in (4, 8, 16) for n, s in loops]


def tune(t: Inputs, at: str, rows: int, width: int, rounds: int) -> None:
    count = len(t.x)
    every = dict.fromkeys([rmsnorm_add_kernel.cut(rows, width), *cuts()])
    kernels.tuned(
        f"{at} norm+add",
        {
            str(tuple(c)): lambda i, c=c: rmsnorm_add(t.x[i], t.w1, t.residual[i], EPS, t.scalar, c)
            for c in every
        },
        count,
        rounds,
    )
    tiles = [Tile(r, w, pdl) for r in (1, 2, 4, 8) for w in (1, 2, 4, 8) for pdl in (False, True)]
    kernels.tuned(
        f"{at} gelu*ple",
        {
            str(tuple(c)): lambda i, c=c: gelu_mul(t.gate[i], t.ple[i], c)
            for c in dict.fromkeys([gelu_mul_kernel.tile(rows), *tiles])
        },
        count,
        rounds,
    )


def check(device: str, made: dict[str, tuple[Any, Any, Any]]) -> None:
    """Check that all variants give the same result, within bfloat16's roundings."""
    t = Inputs(1536, 3, 9, 1, device)
    results = {n: v(0).float() for n, v in tail_variants(t, made).items()}
    for result in results.values():
        torch.testing.assert_close(result, results["eager"], rtol=0.05, atol=0.1)
    print(f"the same tail: {', '.join(results)}")


def main() -> None:
    parser = kernels.parser(__doc__)
    parser.add_argument("--part", choices=("kernels", "tail"), default="kernels")
    parser.add_argument("--widths", default=",".join(WIDTHS))
    args = parser.parse_args()
    if args.check:
        gpu = torch.cuda.is_available()
        return check("cuda" if gpu else "cpu", stages(sglang_kernels() if gpu else {}))
    kernels.needs_gpu()
    made = stages(sglang_kernels())
    check("cuda", made)
    sweep = kernels.Sweep(args.rounds)
    for name in args.widths.split(","):
        width, layers = WIDTHS[name]
        for rows in kernels.sizes(args, ROWS, TUNE_ROWS):
            size = moved(rows, width)
            count = kernels.sets(size["norm+add"])
            t = Inputs(width, layers, rows, count)
            if args.tune:
                tune(t, f"{name} {rows}", rows, width, args.rounds)
                continue
            torch._dynamo.reset()
            if args.part == "kernels":
                now = dict(made)
                if not args.no_compile:
                    now["compiled"] = tuple(map(kernels.compiled, made["eager"]))
                work = kernel_variants(t, now)
            else:
                work = {"tail": tail_variants(t, made)}
                if not args.no_compile:
                    whole = kernels.compiled(eager_tail)
                    work["tail"]["compiled"] = lambda i, t=t, whole=whole: whole(
                        t.x[i], t.w1, t.residual[i], t.gate_weight, t.ple[i], t.back_weight, t.w2,
                        t.scalar,
                    )  # fmt: skip
            for stage, variants in work.items():
                at = {"width": name, "hidden": width, "rows": rows, "stage": stage}
                sweep.add(at, variants, size[stage], count)
            del t, work, variants
    if not args.tune:
        names = {"kernels": "ple_tail", "tail": "ple_tail_gemms"}
        sweep.write(names[args.part], args.out, ["width", "rows", "stage"])


if __name__ == "__main__":
    main()
