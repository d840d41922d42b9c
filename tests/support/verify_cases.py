"""Verifies for the kernels of verify_attention.py, and their attention in float64, key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """prefixes: listed tokens of each row. skipped: tokens before these that are not listed."""

    prefixes: tuple[int, ...]
    queries: int = 4
    heads: int = 8
    kv_heads: int = 2
    d: int = 64
    dv: int = 64
    window: int = -1
    masked: bool = True
    tree: bool = False
    dtype: torch.dtype = torch.float32
    skipped: int = 0


def tensors(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The arguments of ``verify_attention``, but for ``how``."""
    g = torch.Generator().manual_seed(seed)
    rows, new = len(case.prefixes), len(case.prefixes) * case.queries
    slots = sum(case.prefixes) + new + 7

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float32).to(case.dtype).to(device)

    begins = torch.tensor([0, *case.prefixes]).cumsum(0)
    lines = [case.skipped + prefix + case.queries for prefix in case.prefixes]
    cells = torch.tensor([0, *(case.queries * line for line in lines)]).cumsum(0)
    mask = torch.ones(int(cells[-1]), dtype=torch.uint8)
    for row, line in enumerate(lines):
        mine = mask[int(cells[row]) : int(cells[row + 1])].view(case.queries, line)
        own = torch.ones(case.queries, case.queries).tril()
        if case.tree:
            own = (own * torch.randint(0, 2, own.shape, generator=g)).fill_diagonal_(1)
        mine[:, line - case.queries :] = own.to(torch.uint8)
    q = draw(new, case.heads, case.d)
    return {
        "q": q,
        "k_new": draw(new, case.kv_heads, case.d),
        "v_new": draw(new, case.kv_heads, case.dv),
        "out": torch.full((new, case.heads, case.dv), 999.0, dtype=case.dtype, device=device),
        "k_buffer": draw(slots, case.kv_heads, case.d),
        "v_buffer": draw(slots, case.kv_heads, case.dv),
        "qo_indptr": torch.arange(rows + 1, dtype=torch.int32, device=device) * case.queries,
        "kv_indptr": begins.to(torch.int32).to(device),
        "kv_indices": torch.randperm(slots, generator=g)[: int(begins[-1])].to(device),
        "mask": mask.to(device) if case.masked else None,
        "mask_indptr": cells[:-1].to(device) if case.masked else None,
        "queries": case.queries,
        "scale": case.d**-0.5,
        "window": case.window,
        "offsets": torch.full((rows,), case.skipped, dtype=torch.int32, device=device),
    }


def expected(case: Case, given: dict[str, Any]) -> torch.Tensor:
    """[rows * queries, heads, DV], float64."""
    at = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    out = torch.zeros(at["out"].shape, dtype=torch.float64)
    group = case.heads // case.kv_heads
    for row, prefix in enumerate(case.prefixes):
        first = row * case.queries
        begin = int(at["kv_indptr"][row])
        listed = at["kv_indices"][begin : begin + prefix]
        line = case.skipped + prefix + case.queries
        for i in range(case.queries):
            seen = torch.ones(prefix + case.queries, dtype=torch.bool)
            if case.masked:
                start = int(at["mask_indptr"][row]) + i * line + case.skipped + prefix
                seen[prefix:] = at["mask"][start : start + case.queries] != 0
            else:
                seen[prefix:] = torch.arange(case.queries) <= i
            if case.window >= 0:
                places = torch.arange(prefix + case.queries)
                seen &= prefix + i - places <= case.window
            for head in range(case.heads):
                g, new = head // group, slice(first, first + case.queries)
                k = torch.cat([at["k_buffer"][listed, g], at["k_new"][new, g]]).double()
                v = torch.cat([at["v_buffer"][listed, g], at["v_new"][new, g]]).double()
                s = k[seen] @ at["q"][first + i, head].double() * at["scale"]
                out[first + i, head] = torch.softmax(s, 0) @ v[seen]
    return out


def error(case: Case, given: dict[str, Any]) -> float:
    """|out - expected| / |expected|."""
    right = expected(case, given)
    return float((given["out"].cpu().double() - right).norm() / right.norm())
