"""The loss that keeps experts evenly used, over the tokens of all ranks.

Source: Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6. With f, the share of tokens that chose an expert, and p, the mean
of its probability, the loss is experts * sum(f * p). A product of two means is not the mean of ranks' products, so f is
counted over all ranks first; what is left is a mean over tokens. No gradient goes through f, which is a count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from booster.plugin.sequence_parallel import token_mean
from booster.ranks.agreement import reduced


def balancing_loss(
    router_logits: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the loss over the tokens of the ranks of `group`, None is this one alone; see `Booster.balancing_loss`.

    router_logits: (tokens, experts), of each layer. mask: which tokens count; None: all.
    """
    probabilities = torch.cat([logits.float().softmax(-1) for logits in router_logits])
    rows, experts = probabilities.shape
    if mask is None:
        counted = torch.ones(rows, dtype=torch.float32, device=probabilities.device)
    else:
        counted = mask.reshape(-1).to(probabilities.device, torch.float32).repeat(len(router_logits))
    chosen = probabilities.detach().topk(top_k, dim=-1).indices
    sums = torch.zeros(experts + 1, dtype=torch.float64, device=probabilities.device)
    sums.index_add_(0, chosen.flatten(), counted.double().repeat_interleave(top_k))
    sums[experts] = counted.sum()  # rows of all layers
    if group is not None:
        sums = reduced(sums, dist.ReduceOp.SUM, group).to(probabilities.device)
    # (experts,)
    share = (sums[:experts] / sums[experts]).float()
    return token_mean((probabilities * share).sum(-1) * experts, counted, group)
