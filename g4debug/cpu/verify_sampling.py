"""Accepts drafts by chance, so that what is answered has the target's probabilities.

SGLang 0.5.14 and 0.5.15 verify requests with a temperature by three functions of ``sgl_kernel``,
on a CPU too; later releases verify greedily there. Two of them cut off the unlikely tokens, and
:func:`sample_tree` walks each request's tree from node 0. The children of a node are tried in
their order: one is accepted if the coin of the node is at most the sum of the target's
probabilities of the children tried so far (over ``threshold_acc``), or if its own probability is at
least ``threshold_single``. Where no child is, a token is drawn of what the refused ones have left.

Source of the idea: speculative sampling, Leviathan et al. 2023 and Chen et al. 2023; with several
children and no probabilities of the draft's, SpecInfer (Miao et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch

_LEAST = 1e-9  # of the threshold, which is divided by


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Each row with its k likeliest tokens only, and the sum 1; as likely as the k-th stay.

    probs: ``[rows, vocab]`` float32. top_ks: ``[rows]`` integers; that of the vocabulary is all.
    """
    ranked = probs.sort(dim=-1, descending=True).values
    last = top_ks.to(torch.int64).clamp(1, probs.shape[-1]) - 1
    return _normed(probs.where(probs >= ranked.gather(1, last[:, None]), 0.0))


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Each row with the fewest likeliest tokens that have at least this sum, and the sum 1.

    probs: ``[rows, vocab]`` float32; top_ps: ``[rows]`` float32.
    """
    ranked, order = probs.sort(dim=-1, descending=True)
    before = ranked.cumsum(dim=-1) - ranked
    kept = ranked.where(before < top_ps.to(ranked)[:, None], 0.0)
    kept[:, 0] = ranked[:, 0]
    return _normed(torch.zeros_like(probs).scatter(1, order, kept))


def _normed(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def sample_tree(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: Any = True,
) -> None:
    """``sgl_kernel.tree_speculative_sampling_target_only``, and spelt as there.

    Written in place, as by :func:`g4debug.cpu.verify_greedy.verify_tree_greedy`: predicts
    ``[>= bs*d]`` and accept_index ``[bs, steps+1]`` int32, accept_token_num ``[bs]`` int32.
    candidates and retrive_*: ``[bs, d]`` int64. uniform_samples: ``[bs, d]`` float32, of each
    node; uniform_samples_for_final_sampling: ``[bs]``. target_probs, draft_probs: ``[bs, d,
    vocab]`` float32. deterministic is ignored: this always is.
    """
    floor = max(threshold_acc, _LEAST)
    tokens, flat = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for b in range(len(tokens)):
        node, steps, refused = 0, 0, list[int]()
        accept_index[b, 0] = flat[b][0]
        while steps + 1 < accept_index.shape[1]:
            coin, tried, of = float(uniform_samples[b, node]), 0.0, target_probs[b, node]
            refused, found = [], child[b][node]
            while found != -1:
                single = float(of[tokens[b][found]])
                tried += single
                if coin <= tried / floor or single >= threshold_single:
                    break
                refused.append(tokens[b][found])
                found = sibling[b][found]
            if found == -1:
                break
            predicts[flat[b][node]] = tokens[b][found]
            node, steps, refused = found, steps + 1, []
            accept_index[b, steps] = flat[b][node]
        accept_token_num[b] = steps
        left = target_probs[b, node].clone()
        if steps + 1 < accept_index.shape[1]:  # else nothing was drafted behind this node
            left = (left - draft_probs[b, node]).clamp(min=0.0)
        left[refused] = 0.0
        coin = float(uniform_samples_for_final_sampling[b])
        predicts[flat[b][node]] = _drawn(left, coin, target_probs[b, node])


def _drawn(weights: torch.Tensor, coin: float, else_of: torch.Tensor) -> int:
    """The token at ``coin`` of the sum. else_of: drawn from, if nothing has any weight."""
    sums = (weights if float(weights.sum()) > 0 else else_of).to(torch.float64).cumsum(0)
    return int(torch.searchsorted(sums, coin * sums[-1], right=True).clamp(max=len(sums) - 1))
