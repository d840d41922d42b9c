"""Draws docs/paths.svg, the speed-ups of the performance paths, from the CSVs in results/.

    python benchmarks/picture.py

Above are the measurements of whole requests and of output tokens, below of kernels alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import results
from measuring.svg import drawn

OUT = results.FOLDER.parents[1] / "docs" / "paths.svg"
WIDTH, LEFT, RIGHT, LINE = 900, 400, 70, 26
Bar = tuple[str, float]


def paired(path: str, key: str, figure: str, slow: str, fast: str, **where: str) -> Iterator[float]:
    """The median over the rounds of slow / fast, if the file ``path`` has both."""
    found = results.read(results.FOLDER / path)[1]
    mine = [row for row in found if all(row[name] == value for name, value in where.items())]
    rounds = results.by_round(mine, key, figure)
    ratios = [r[slow] / r[fast] for r in rounds if slow in r and fast in r]
    if ratios:
        yield statistics.median(ratios)


def kernel(path: str, variant: str, **where: str) -> Iterator[float]:
    """How many times as fast as ``variant`` ours is."""
    for row in results.read(results.FOLDER / path)[1]:
        if row["variant"] == variant and all(row[n] == value for n, value in where.items()):
            yield float(row["ours_is_faster_by"])


def requests() -> Iterator[Bar]:
    for model in ("E2B", "E4B"):
        for x in paired(f"yoco_{model}_h200.csv", "variant", "seconds", "off", "on"):
            yield f"yoco-fast-prefill, {model}, 30 x (7000 in, 10 out)", x
    for tower in ("E2B", "26B-A4B"):
        for note in ("", "_triton_attn"):
            path = f"mm_encoder_{tower}{note}_h200.csv"
            how = " (triton)" if note else ""
            for x in paired(path, "way", "end_to_end_s", "alone", "together"):
                yield f"mm-batched-encoder, {tower}, 6 images{how}", x
            for x in paired(path, "way", "end_to_end_s", "alone", "fused"):
                yield f"the same with vision-layer, {tower}{how}", x
    for model in ("E4B", "26B-A4B"):
        for batch in ("1", "8", "64"):
            path, figure = f"decode_paths_{model}_h200.csv", "ms_per_token"
            for x in paired(path, "paths", figure, "off", "on", batch=batch):
                yield f"output token, {model}, batch {batch}, all paths", x
    for batch in ("1", "8", "64"):
        path, figure = "frozen_kv_mtp_v2_h200.csv", "ms_per_token"
        for x in paired(path, "variant", figure, "v1", "ours", batch=batch):
            yield f"frozen-kv-mtp-v2 against v1, E4B, batch {batch}", x


def kernels() -> Iterator[Bar]:
    for label, path, variant, where in (
        ("fused-router", "fused_router_h200.csv", "torch", {}),
        ("ple-tail, E4B", "ple_tail_h200.csv", "sglang", {"width": "E4B", "stage": "all"}),
        ("triple-rmsnorm, 26B-A4B", "triple_rmsnorm_h200.csv", "sglang", {"width": "26B-A4B"}),
    ):
        for rows in ("1", "64", "4096"):
            for x in kernel(path, variant, rows=rows, **where):
                yield f"{label}, {rows} rows", x


def main() -> None:
    panels: list[dict[str, Any]] = []
    y = 34
    for title, bars in (
        ("Whole requests and output tokens: path off / path on", [*requests()]),
        ("Kernels alone: SGLang 0.5.12.post1's own / ours", [*kernels()]),
    ):
        unit = (WIDTH - LEFT - RIGHT) / (max(1.0, *(x for _, x in bars)) - 1)
        wide = [(label, x, max(1.0, (x - 1) * unit)) for label, x in bars]
        panels.append({"title": title, "y": y, "bars": wide})  # a bar begins at 1: no change
        y += 16 + len(bars) * LINE + 36
    device = results.read(results.FOLDER / "fused_router_h200.csv")[0]["device"]
    note = (
        f"{device}, seeded weights, medians of interleaved rounds; a bar begins at 1 x: no change"
    )
    title = "Speed-up of each performance path"
    OUT.write_text(
        drawn("paths.svg.j2", width=WIDTH, height=y, left=LEFT, high=LINE, title=title,
              panels=panels, note=note)
    )  # fmt: skip
    print(f"wrote {Path(OUT).name}")


if __name__ == "__main__":
    main()
