"""Reads each request's tree of NGRAM drafts from its mask.

It stands in for `sgl_kernel.speculative.reconstruct_indices_from_tree_mask`. Cell ``[b, i, j]`` of
the mask says that node j is i itself or an ancestor of it. A node's parent is its last ancestor.
These are written in place, for request b, with the W nodes of each tree:

    positions[b*W + t] = seq_lens[b] + the number of ancestors of t
    retrieve_index[b, t] = b*W + t
    retrieve_next_token[b, t] = first child of t, or -1
    retrieve_next_sibling[b, t] = next child of t's parent, or -1

Shapes: mask `[bs * W * W]` bool, seq_lens `[bs]`, positions `[bs * W]`, the others `[bs, W]`, all
integer. It is needed because the kernel is for CUDA only, and SGLang imports it on a CPU, too.
"""

from __future__ import annotations

import torch

from g4debug.cpu.draft_tree import links


def reconstruct(
    mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    width: int,
) -> None:
    if mask.numel() != batch_size * width * width:
        raise ValueError(
            f"NGRAM's tree mask: got {mask.numel()} cells, expected {batch_size} x {width} x "
            f"{width}: one for each pair of nodes."
        )
    device = positions.device
    nodes = torch.arange(width, device=device)
    ancestors = mask.view(batch_size, width, width).bool() & (nodes < nodes[:, None])
    retrieve_index.copy_(torch.arange(batch_size * width, device=device).view(-1, width))
    depth = ancestors.sum(-1)
    positions.copy_((depth + seq_lens.to(depth)[:, None]).view(-1))
    parents = torch.where(ancestors, nodes, -1).amax(-1)
    for b, parent in enumerate(parents.tolist()):
        child, sibling = links(parent)
        retrieve_next_token[b] = torch.tensor(child, device=device)
        retrieve_next_sibling[b] = torch.tensor(sibling, device=device)
