"""Rows of tokens on their way to the ranks of their experts and back.

Each function has the other direction as its gradient, so that gradients of gradients take the same ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Route:
    """Where rows go: one row for each expert of each token, sorted by expert.

    Attributes:
        order: by place among the sorted rows, the number of the row: token * top_k + its place among the token's experts.
        inverse: the way back.
        top_k: experts of a token.
        sent: how many rows this rank sends to each rank.
        received: how many it gets from each.
        experts: of each row that it gets, the number among this rank's experts, int64.
        group: the ranks.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    top_k: int
    sent: list[int]
    received: list[int]
    experts: torch.Tensor
    group: dist.ProcessGroup


def plan_route(index: torch.Tensor, num_local: int, group: dist.ProcessGroup) -> Route:
    """Return the route of tokens to the experts `index`, (tokens, top_k), whole numbers.

    num_local: experts of each rank of `group`. Raises ValueError, on all ranks, for a number that no expert has.
    """
    ranks = group.size()
    flat = index.reshape(-1)
    last = ranks * num_local
    known = flat.where((flat >= 0) & (flat < last), last)
    # Not `bincount`, which waits for a GPU.
    found = torch.zeros(last + 1, dtype=torch.int64, device=flat.device).index_add_(
        0, known, torch.ones_like(known, dtype=torch.int64)
    )
    # To each rank what its experts get, and, so that all raise together, how many rows have no expert.
    counts = torch.cat([found[:last].view(ranks, num_local), found[last:].expand(ranks, 1)], dim=1)
    theirs = torch.empty_like(counts)
    # A collective of one count per expert, and a host read.
    dist.all_to_all_single(theirs, counts, group=group)
    wrong = theirs[:, -1].sum().expand(ranks)
    counts, theirs = counts[:, :-1], theirs[:, :-1]
    sent, received, (without, *_) = torch.stack([counts.sum(1), theirs.sum(1), wrong]).tolist()
    if without:
        raise ValueError(
            f"{without} tokens on the ranks that share experts were given numbers of experts outside 0 to {last - 1}; "
            f"under ep_size every number must be that of one of the {last} experts"
        )
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    numbers = torch.arange(num_local, dtype=torch.int64, device=flat.device).repeat(ranks)
    experts = numbers.repeat_interleave(theirs.reshape(-1), output_size=sum(received))
    return Route(order, inverse, index.shape[-1], sent, received, experts, group)


def send(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Return the rows that other ranks send here, in the order of ranks; a collective, in backward as well."""
    return _Send.apply(rows, route.sent, route.received, route.group)


def send_back(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Return what became of the rows that this rank sent, in their order; a collective, in backward as well."""
    return _Send.apply(rows, route.received, route.sent, route.group)


def spread(tokens: torch.Tensor, route: Route) -> torch.Tensor:
    """Return one row for each expert of each of `tokens`, (tokens, features), sorted by expert."""
    return _Spread.apply(tokens, route)


def add_up(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Return, for each token, the sum of the rows of its experts."""
    return _AddUp.apply(rows, route)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.way = (sent, received, group)
        there = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(there, rows.contiguous(), received, sent, group=group)
        return there

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received, group = ctx.way
        return _Send.apply(grad, received, sent, group), None, None, None


class _Spread(torch.autograd.Function):
    # Not an index: its gradient would be added up row after row, which rounds halves each time.
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return tokens.index_select(0, route.order // route.top_k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AddUp.apply(grad, ctx.route), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return rows.index_select(0, route.inverse).unflatten(0, (-1, route.top_k)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Spread.apply(grad, ctx.route), None
