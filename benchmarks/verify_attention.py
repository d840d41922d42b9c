"""Compares the attention of a verify with SGLang's own kernel for it, on triton.

    python benchmarks/verify_attention.py [--kind KIND] [--rows 1,64] [--tune] [--out FILE.csv]

The layers have E4B's shape: 8 heads on 2 KV heads, four queries a request. A layer with a window
of 512 tokens has heads of 256, and one that sees all has heads of 512. KIND is the layer and how
many tokens each request has. Rows are requests.
"""

from __future__ import annotations

from typing import Any

import torch
from measuring import kernels, opponents

from g4debug.fixes.paths.kernels import verify_attention as ours

KERNELS = "sglang.kernels.ops.attention.extend_attention"  # of the releases that have the path
HEADS, KV_HEADS, QUERIES, WINDOW = 8, 2, 4, 512
HEAD_DIM = {"window": 256, "full": 512}
KINDS = ("window-500", "window-4000", "full-500", "full-4000")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
TUNE_ROWS = (1, 8, 64)


def candidates(d: int, rows: int) -> list[ours.Cut]:
    shapes = [
        (keys, warps, stages)
        for keys in ((32, 64, 128) if d <= 256 else (16, 32, 64))
        for warps in (4, 8)
        for stages in (1, 2, 3)
        if keys * stages * d <= 3 * 64 * 256
    ]
    return [ours.cut(d, rows * KV_HEADS)] + [
        ours.Cut(*shape, programs, most)
        for shape in shapes
        for programs, most in ((132, 32), (264, 32), (528, 64))
    ]


def main() -> None:
    parser = kernels.parser(__doc__)
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    args = parser.parse_args()
    args.no_compile = True
    theirs = opponents.found(f"{KERNELS}.extend_attention_fwd")

    def build(name: str, rows: int, device: str, compiled: bool) -> list[kernels.Stage]:
        kind, tokens = name.split("-")
        d, slides = HEAD_DIM[kind], kind == "window"
        prefix = min(int(tokens), WINDOW) if slides else int(tokens)
        skipped = int(tokens) - prefix
        read = rows * (prefix + QUERIES) * 2 * KV_HEADS * d * 2
        moved = read + 2 * rows * QUERIES * HEADS * d * 2
        count = kernels.sets(moved, device)
        draw = kernels.drawing(0, device)
        slots, new = rows * prefix + 1, rows * QUERIES
        line = skipped + prefix + QUERIES
        mask = torch.ones(rows, QUERIES, line, dtype=torch.bool, device=device)
        mask[:, :, -QUERIES:] = torch.ones(QUERIES, QUERIES, device=device).tril().bool()
        each = torch.arange(rows + 1, device=device, dtype=torch.int32)
        shared = (
            each * QUERIES,
            each * prefix,
            torch.randperm(slots, device=device)[: rows * prefix],
            mask.flatten(),
            each.long() * QUERIES * line,
            torch.full((rows,), skipped, dtype=torch.int32, device=device),
        )
        inputs = [
            (
                draw(new, HEADS, d),
                *(draw(new, KV_HEADS, d) for _ in "kv"),
                *(draw(slots, KV_HEADS, d) for _ in "kv"),
                *shared,
            )
            for _ in range(count)
        ]
        window = WINDOW - 1 if slides else -1

        def mine(how: ours.Cut | None = None) -> Any:
            def run(q: Any, k: Any, v: Any, ks: Any, vs: Any, *rest: Any) -> torch.Tensor:
                queries, begins, indices, masked, lines, offsets = rest
                out = torch.empty_like(q)
                ours.verify_attention(
                    q, k, v, out, ks, vs, queries, begins, indices, masked, lines, QUERIES,
                    d**-0.5, window, offsets, how,
                )  # fmt: skip
                return out

            return run

        def sglangs(q: Any, k: Any, v: Any, ks: Any, vs: Any, *rest: Any) -> torch.Tensor:
            queries, begins, indices, masked, lines, offsets = rest
            out = torch.empty_like(q)
            assert theirs is not None
            theirs[0](
                q, k, v, out, ks, vs, queries, begins, indices, masked, True, lines, QUERIES,
                1.0, 1.0, d**-0.5, sliding_window_size=window, window_kv_offsets=offsets,
            )  # fmt: skip
            return out

        return [
            kernels.Stage(
                {"kind": name, "rows": rows, "queries": QUERIES, "head_dim": d},
                ({} if theirs is None else {"sglang": sglangs}) | {"ours": mine()},
                inputs,
                moved,
                tries={how: mine(how) for how in candidates(d, rows)},
            )
        ]

    kinds = [args.kind] if args.kind else list(KINDS)
    kernels.compare(args, "verify_attention", ["kind", "rows"], kinds, ROWS, TUNE_ROWS, build)


if __name__ == "__main__":
    main()
