"""Lays out each request's draft tokens as a tree (`sgl_kernel.build_tree_kernel_efficient`).

Node 0 of a request is the bonus token. Node t (1 <= t < d) is the draft candidate `selected[t-1]`;
candidates are numbered level by level, with `topk` children for each parent. The parent is node 0
if `selected // topk == 0`, or else the node whose candidate number is `parents[selected // topk]`.

These are written in place, for request b, where p is its sequence length before the drafts:

    positions[b*d + t] = p + depth(t)
    retrieve_index[b, t] = b*d + t
    retrieve_next_token[b, t] = first child of t, or -1
    retrieve_next_sibling[b, t] = next sibling of t, or -1
    tree_mask: row t is true at the ancestors of t and at t

With FULL_MASK, p columns for the prefix come first in tree_mask and stay as the caller filled them.
With QLEN_ONLY it has only the d columns of the draft.

Shapes: parents `[bs, topk*(depth-1)+1]` or `[bs, 0]`, selected `[bs, d-1]`, seq_lens `[bs]`, all
integer; tree_mask bool, flat. It is needed because the kernel is for CUDA only and SGLang has no
code for CPUs. Source: the tree layout of EAGLE-2 (Li et al., 2024) and SpecInfer (Miao et al.,
2023).
"""

from __future__ import annotations

import torch

FULL_MASK = 0
QLEN_ONLY = 1


def build_tree(
    parents: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_tokens: int,
    mask_mode: int,
) -> None:
    mode = int(mask_mode)
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            f"build_tree: got tree mask mode {mask_mode!r}, expected FULL_MASK (0) or QLEN_ONLY "
            "(1); bit packing has no CPU stand-in. Use --attention-backend trtllm_mha."
        )
    mask = tree_mask.view(-1)
    start = 0
    for b, prefix in enumerate(seq_lens.tolist()):
        parent = _parent_nodes(parents[b].tolist(), selected[b].tolist(), topk)
        ancestors = _ancestor_rows(parent)
        next_token, next_sibling = links(parent)
        base = b * draft_tokens
        rows = torch.tensor(ancestors, dtype=torch.bool)
        device = positions.device
        depths = rows.sum(1) - 1
        positions[base : base + draft_tokens] = (depths + prefix).to(positions)
        retrieve_index[b] = torch.arange(base, base + draft_tokens, device=device)
        retrieve_next_token[b] = torch.tensor(next_token, device=device)
        retrieve_next_sibling[b] = torch.tensor(next_sibling, device=device)
        width = draft_tokens + (int(prefix) if mode == FULL_MASK else 0)
        block = mask[start : start + draft_tokens * width].view(draft_tokens, width)
        block[:, width - draft_tokens :] = rows.to(mask)
        start += draft_tokens * width


def _parent_nodes(parents: list[int], selected: list[int], topk: int) -> list[int]:
    """The parent node of each node; -1 for node 0."""
    result = [-1]
    for candidate in selected:
        group = candidate // topk
        if group == 0:
            result.append(0)
            continue
        if group >= len(parents) or parents[group] not in selected:
            raise ValueError(
                f"build_tree: got candidate {candidate}, whose parent group {group} is not among "
                f"the selected candidates {selected} (parents {parents}), expected a closed tree. "
                "The draft worker's scores do not fall along a path: check its logits."
            )
        result.append(selected.index(parents[group]) + 1)
    return result


def _ancestor_rows(parent: list[int]) -> list[list[bool]]:
    rows = []
    for node in range(len(parent)):
        row = [False] * len(parent)
        while node != -1:
            row[node] = True
            node = parent[node]
        rows.append(row)
    return rows


def links(parent: list[int]) -> tuple[list[int], list[int]]:
    """The first child and the next sibling of each node, in node order; -1 for none."""
    first = [-1] * len(parent)
    sibling = [-1] * len(parent)
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            sibling[node] = first[parent[node]]
            first[parent[node]] = node
    return first, sibling
