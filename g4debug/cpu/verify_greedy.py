"""Accepts greedily the drafts that the target agrees with (`sgl_kernel.verify_tree_greedy`).

It starts at node 0 of each request's tree. At most `accept_index.shape[1] - 1` times it goes on to
a child: the first one with a candidate token that equals the target's prediction *at* the current
node. If there is no such child, it stops. These are written in place, with the flat index i =
retrieve_index[b, t]:

    accept_index[b, j] = flat index of the j-th accepted node (the caller filled -1)
    accept_token_num[b] = accepted drafts, not counting node 0
    predicts[i] = target_predict[i] for every accepted node i (the last one is the new bonus token)

Shapes: predicts `[>= bs*d]` int32, accept_index `[bs, steps+1]` int32, accept_token_num `[bs]`
int32, candidates / retrieve_* / target_predict `[bs, d]` int64. It is needed because SGLang's own
wrapper (`eagle_utils.verify_tree_greedy_func`) has no CPU branch up to 0.5.15 and silently verifies
nothing there. From 0.5.18 on its branch calls a kernel of sgl_kernel that is not installed. Source
of the idea: speculative decoding's greedy case, Leviathan et al. 2023; SpecInfer's trees.
"""

from __future__ import annotations

import torch


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: object = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`topk` is ignored: in SGLang it only selects a kernel, and the rule is always the same."""
    wanted = target_predict.reshape(-1).tolist()
    tokens = candidates.tolist()
    flat = retrieve_index.tolist()
    child = retrieve_next_token.tolist()
    sibling = retrieve_next_sibling.tolist()
    for b in range(len(tokens)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = child[b][path[-1]]
            want = wanted[flat[b][path[-1]]]
            while node != -1 and tokens[b][node] != want:
                node = sibling[b][node]
            if node == -1:
                break
            path.append(node)
        accepted = [flat[b][node] for node in path]
        index = torch.tensor(accepted, device=accept_index.device)
        accept_index[b, : len(path)] = index.to(accept_index)
        predicts[index] = torch.tensor([wanted[i] for i in accepted]).to(predicts)
        accept_token_num[b] = len(path) - 1
    return predicts, accept_index, accept_token_num


def verify_tree_greedy_cpu(**tensors: torch.Tensor) -> None:
    """The same, but sgl_kernel spells ``retrive_index`` and its like so."""
    verify_tree_greedy(**{n.replace("retrive", "retrieve"): t for n, t in tensors.items()})
