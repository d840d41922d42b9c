"""Cases of the fused router, and what it must give: plain Python floats, one row at a time."""

from __future__ import annotations

import math
import struct

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# (rows, experts, top_k): Gemma-4's, no power of two, K = 1 and K = E, one expert, many.
SHAPES = (
    (1, 128, 8), (2, 128, 8), (7, 128, 8), (33, 128, 8), (5, 128, 1), (3, 128, 128), (3, 128, 17),
    (4, 8, 2), (4, 8, 8), (1, 1, 1), (3, 3, 2), (2, 100, 8), (2, 130, 9), (2, 60, 4), (2, 257, 16),
    (2, 1000, 6), (1, 1024, 32), (0, 128, 8),
)  # fmt: skip
INF, NAN = math.inf, math.nan
SPECIAL = {
    "all equal": [0.5] * 12,
    "ties at the last place": [3.0, 1.0, 2.0, 1.0, 1.0, 1.0, 2.0, 1.0, 0.0, -1.0, 1.0, 1.0],
    "zeros of both signs": [-0.0, 0.0, -0.0, 0.0, -1.0, -0.0, 0.0, -2.0, -0.0, 0.0, -0.0, 0.0],
    "one NaN": [1.0, 2.0, NAN, 4.0, 0.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "NaN above +inf": [1.0, INF, NAN, 4.0, INF, 5.0, NAN, 1.0, 1.0, 1.0, 1.0, 1.0],
    "negative NaN": [1.0, -NAN, 2.0, math.copysign(NAN, -1.0), 0.0] + [0.25] * 7,
    "all NaN": [NAN] * 12,
    "+inf": [1.0, INF, 0.0, 4.0, 3.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "-inf is not chosen": [-INF, 1.0, -INF, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -INF, 8.0, 9.0],
    "-inf is chosen": [-INF, 1.0, -INF, 2.0, *[-INF] * 8],
    "all -inf": [-INF] * 12,
    "far apart": [60000.0, -60000.0, 0.0, 59000.0, 1e-7, -1e-7, 6e-8, 100.0, -100.0, 1.0, 2.0, 3.0],
    "subnormal": [6e-8, -6e-8, 1.2e-7, 0.0, -0.0, 6e-5, 3e-5, -6e-5, 1e-7, 2e-7, 3e-7, 4e-7],
}


def logits(shape: tuple[int, int, int], dtype: torch.dtype, ties: bool = False) -> torch.Tensor:
    rows, experts, top_k = shape
    generator = torch.Generator().manual_seed(rows * 7919 + experts * 31 + top_k)
    drawn = torch.randn(rows, experts, generator=generator) * 4
    return (drawn.round() if ties else drawn).to(dtype)


def scale(experts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(experts) % 7 * 0.25 + 0.5).to(dtype)


def wanted(row: list[float], scale: list[float], top_k: int) -> tuple[list[float], list[int]]:
    """Weights and ids of one row, in float64."""

    def rank(e: int) -> tuple[bool, float, bool, int]:
        x = row[e]
        negative = struct.pack(">d", x)[0] >= 128
        return (math.isnan(x), 0.0 if math.isnan(x) else x, not negative or math.isnan(x), -e)

    ids = sorted(range(len(row)), key=rank, reverse=True)[:top_k]
    chosen = [row[e] for e in ids]
    if any(math.isnan(x) for x in chosen) or chosen[0] in (INF, -INF):
        return [NAN] * top_k, ids
    powers = [math.exp(x - chosen[0]) for x in chosen]
    return [p / math.fsum(powers) * scale[e] for p, e in zip(powers, ids, strict=True)], ids


def check(
    logits: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> None:
    """Weights to 1e-5 of their size (float32 exponentials), ids exactly."""
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    top_k = ids.shape[1]
    assert weights.shape == ids.shape == (logits.shape[0], top_k)
    plain = scale.double().tolist()
    found = [wanted(row, plain, top_k) for row in logits.double().tolist()]
    assert ids.tolist() == [i for _, i in found]
    if found:
        right = torch.tensor([w for w, _ in found], dtype=torch.float64)
        torch.testing.assert_close(
            weights.double().cpu(), right, rtol=1e-5, atol=1e-30, equal_nan=True
        )
