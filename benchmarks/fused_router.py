"""Compares fused-router with SGLang's own router, torch code, and that code compiled.

    python benchmarks/fused_router.py [--sglang13 FOLDER] [--rows 1,64] [--tune] [--out FILE.csv]

The router has 26B-A4B's shape: 128 experts, top 8, bfloat16 logits, bfloat16 scales. SGLang's own
router is the routing function of the installed release: torch code on 0.5.12.post1 ("torch"), and
from 0.5.13 on a kernel ("sglang"), beside which "torch" are the same operations. On 0.5.12.post1
FOLDER is an unpacked wheel of SGLang 0.5.13.post1, or its .whl, for its kernel. Without it that
column is left out.
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
from measuring import kernels, opponents

from g4debug.fixes.paths.kernels import fused_router as ours

EXPERTS, TOP_K = 128, 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TUNE_ROWS = (1, 8, 64, 256, 1024, 4096, 16384)
MODULE = "sglang/srt/layers/gemma4_fused_ops.py"
Route = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def operations(
    logits: torch.Tensor, scale: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice of experts in torch, for the releases that have a kernel for it."""
    top, ids = torch.topk(logits, top_k, dim=-1)
    return top.float().softmax(-1) * scale[ids].float(), ids.to(torch.int32)


def installed(scale: torch.Tensor) -> dict[str, Route]:
    """SGLang's own router, as the installed release has it, and torch code."""
    from g4debug.fixes.source import source

    text = source("sglang.srt.models.gemma4_causal.Gemma4MoE.__init__")
    if "gemma4_fused_routing(" not in text:
        return {"torch": torch_path(textwrap.dedent(text), scale)}
    mine = opponents.found(f"{opponents.LAYER}.gemma4_fused_routing")
    return {"torch": operations} | ({} if mine is None else {"sglang": mine[0]})


def torch_path(text: str, scale: torch.Tensor) -> Route:
    """``routing_function`` in the source of Gemma4MoE, as a closure over ``scale``."""
    found = [n for n in ast.walk(ast.parse(text)) if getattr(n, "name", "") == "routing_function"]
    if not found:
        raise SystemExit("the installed SGLang has no routing path that is known here")
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
    routes = installed(scale)
    own = "sglang" if routes["torch"] is operations else "torch"
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
                | ({"compiled": kernels.compiled(routes["torch"])} if compiled else {})
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
        lambda stages: check(stages[0].variants, scale), (own,),
    )  # fmt: skip


if __name__ == "__main__":
    main()
