"""Compares fused-router with SGLang's torch code, that code compiled, and 0.5.13.post1's kernel.

    python benchmarks/fused_router.py [--sglang13 FOLDER] [--rows 1,64] [--tune] [--out FILE.csv]

The router has 26B-A4B's shape: 128 experts, top 8, bfloat16 logits, bfloat16 scales. The torch code
is the routing function in the source of the installed SGLang. FOLDER is an unpacked wheel of SGLang
0.5.13.post1, or its .whl, for its kernel. Without it that column is left out.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measuring import kernels

from g4debug.fixes.paths.kernels import fused_router as ours

EXPERTS, TOP_K = 128, 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TUNE_ROWS = (1, 8, 64, 256, 1024, 4096, 16384)
MODULE = "sglang/srt/layers/gemma4_fused_ops.py"
Route = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def torch_path(scale: torch.Tensor) -> Route:
    """``routing_function`` of Gemma4MoE in the installed SGLang, as a closure over ``scale``."""
    from g4debug.fixes.source import source

    text = textwrap.dedent(source("sglang.srt.models.gemma4_causal.Gemma4MoE.__init__"))
    found = [n for n in ast.walk(ast.parse(text)) if getattr(n, "name", "") == "routing_function"]
    if not found or "fused_routing(" in text:
        raise SystemExit("the installed SGLang has no torch routing path; expected 0.5.12.post1")
    code = compile(ast.Module(body=[found[0]], type_ignores=[]), "routing_function", "exec")

    names: dict[str, Any] = {"torch": torch, "per_expert_scale": scale}
    exec(code, names)
    function = names["routing_function"]
    return lambda logits, scale, top_k: function(None, logits, top_k, True)


def sglang13(place: Path | None) -> Route | None:
    """The kernel of 0.5.13.post1, from an unpacked wheel or a .whl. Nothing else is imported."""
    if place is None:
        print("SGLang 0.5.13.post1's kernel: left out; give --sglang13 FOLDER_OR_WHEEL")
        return None
    file = place / MODULE
    if place.suffix == ".whl":
        with zipfile.ZipFile(place) as wheel:
            file = Path(wheel.extract(MODULE, tempfile.mkdtemp(prefix="g4debug-sglang13-")))
    if not file.is_file():
        raise SystemExit(f"--sglang13: {place} has no {MODULE}; expected an unpacked SGLang wheel")
    spec = importlib.util.spec_from_file_location("sglang13_fused_ops", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton reads the kernel's source through it
    spec.loader.exec_module(module)
    if not hasattr(module, "gemma4_fused_routing"):
        raise SystemExit(f"--sglang13: {file} has no gemma4_fused_routing; expected 0.5.13.post1")
    route: Route = module.gemma4_fused_routing
    return route


def candidates(rows: int) -> list[ours.Tile]:
    shapes = [(r, w) for r in (1, 2, 4, 8, 16) for w in (1, 2, 4, 8) if w <= 4 * r <= 16 * w]
    others = [ours.Tile(r, w, pdl) for r, w in shapes for pdl in (False, True)]
    return [ours.tile(rows, EXPERTS), *others]


def check(routes: Mapping[str, Route], scale: torch.Tensor) -> None:
    """Check that all variants choose the same experts, with weights within bfloat16's roundings."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(9)])
    logits = (logits / 16).to(scale.device, torch.bfloat16)
    right = ours.reference(logits, scale, TOP_K)
    for name, route in routes.items():
        weights, ids = route(logits, scale, TOP_K)
        torch.testing.assert_close(weights, right[0], rtol=2**-7, atol=1e-6)
        if not torch.equal(ids, right[1]):
            raise SystemExit(f"{name} chooses other experts")
    print(f"the same experts and weights: {', '.join(routes)}")


def main() -> None:
    parser = kernels.parser(__doc__)
    parser.add_argument("--sglang13", type=Path, help="unpacked wheel, or .whl, of 0.5.13.post1")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(1)).to(device).bfloat16()
    sglang = torch_path(scale)
    routes: dict[str, Route] = {"torch": sglang}
    if (newer := sglang13(args.sglang13)) is not None:
        routes["sglang 0.5.13"] = newer
    torch._dynamo.config.recompile_limit = 64

    def build(name: str, rows: int, device: str, compiled: bool) -> list[kernels.Stage]:
        moved = rows * (EXPERTS * 2 + TOP_K * 8) + EXPERTS * 2
        count = kernels.sets(moved, device)
        logits = [torch.randn(rows, EXPERTS, device=device).bfloat16() for _ in range(count)]
        return [
            kernels.Stage(
                {"rows": rows, "experts": EXPERTS, "top_k": TOP_K, "dtype": "bfloat16"},
                routes
                | ({"compiled": kernels.compiled(sglang)} if compiled else {})
                | {"ours": ours.fused_router},
                [(x, scale, TOP_K) for x in logits],
                moved,
                tries={
                    t: lambda x, s, k, t=t: ours.fused_router(x, s, k, t) for t in candidates(rows)
                },
            )
        ]

    kernels.compare(
        args, "fused_router", ["rows"], [""], ROWS, TUNE_ROWS, build,
        lambda stages: check(stages[0].variants, scale),
    )  # fmt: skip


if __name__ == "__main__":
    main()
