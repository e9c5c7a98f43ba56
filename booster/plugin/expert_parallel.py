"""Expert parallelism: each rank has whole experts, and tokens are sent to the rank that has theirs.

The idea: experts are one module with parameters of shape (experts, ...), called with tokens and, for each, the numbers and the
weights of its experts. The ranks that share the batch are cut into groups of `ep_size`; in such a group each rank
keeps `experts / ep_size` of the experts, and the other groups keep copies, among which `fully_shard` divides them further.
The number of ranks stays the same, and so does everything that is not experts.

An example, 4 experts on 2 ranks (ep_size=2), two experts a token:

    rank 0 has tokens a, b, with experts (0, 3) and (1, 2)        rank 1 has token c, with experts (2, 3)
    rank 0 sends a for 0 and b for 1 to itself                    a for 3 and b for 2 go to rank 1
    rank 1 computes its experts 2 and 3 on b, c and a, c          and the outputs travel back
    rank 0 adds up the two outputs of a, and those of b

What a rank computes with its experts belongs to tokens of the whole group, so the gradient of an expert is a sum over that
group already; over its copies it is summed, and divided by all ranks that share the batch.

Each exchange has the other direction as its gradient, so that gradients of gradients take the same ways. Parameters become
DTensors: by whole experts over one dimension of a mesh, and over the others as all parameters are.

Experts are kept evenly used by `balancing_loss`. Source: Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6. With f, the
share of tokens that chose an expert, and p, the mean of its probability, the loss is experts * sum(f * p). A product of two
means is not the mean of ranks' products, so f is counted over all ranks first; what is left is a mean over tokens. No gradient
goes through f, which is a count.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from booster.plugin.base import shared_mesh
from booster.plugin.sequence_parallel import token_mean
from booster.plugin.tensor_parallel.local_style import swapped
from booster.ranks.agreement import reduced
from booster.tensors.weak import ForwardProxy


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
    clipped = flat.where((flat >= 0) & (flat < last), last)
    # Not `bincount`, which waits for a GPU.
    rows_of_expert = torch.zeros(last + 1, dtype=torch.int64, device=flat.device).index_add_(
        0, clipped, torch.ones_like(clipped, dtype=torch.int64)
    )
    # To each rank what its experts get, and, so that all raise together, how many rows have no expert.
    counts = torch.cat([rows_of_expert[:last].view(ranks, num_local), rows_of_expert[last:].expand(ranks, 1)], dim=1)
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


def find_experts(model: nn.Module) -> list[str]:
    """Return the names of the modules of `model` that hold experts.

    Such a module has `num_experts`, more than one, direct parameters with so many entries along the first dimension, and a
    forward of three arguments: tokens, (tokens, features), and the numbers and the weights of their experts, both (tokens,
    experts of a token).
    """
    # Those of transformers are such modules.
    return [name for name, module in model.named_modules() if name and _holds_experts(module)]


def check_experts(model: nn.Module, ep_size: int) -> list[str]:
    """Return `find_experts(model)`. Raises ValueError if there are none, or they cannot be dealt to `ep_size` ranks."""
    names = find_experts(model)
    if not names:
        raise ValueError(
            f"ep_size={ep_size} deals experts to ranks, and {type(model).__name__} has none: no module with num_experts, "
            "parameters of shape (num_experts, ...) and a forward of (tokens, numbers of experts, weights). Make one of a "
            "ModuleList of experts by booster.nn.stack_experts, or leave ep_size out"
        )
    for name in names:
        module: Any = model.get_submodule(name)
        if module.num_experts % ep_size:
            raise ValueError(
                f"{name!r} has {module.num_experts} experts, which do not divide by ep_size={ep_size}; choose another ep_size"
            )
        inner = [own for own, _ in module.named_parameters() if own not in module._parameters]
        if inner:
            raise ValueError(
                f"{name!r} holds experts, and {inner[0]!r}, which all of them share and ep_size does not divide; move it out "
                "of that module, or leave ep_size out"
            )
    return names


def _holds_experts(module: Any) -> bool:
    count = getattr(module, "num_experts", None)
    own = [param for param in module._parameters.values() if param is not None]
    if not isinstance(count, int) or count < 2 or not own or any(not p.dim() or p.shape[0] != count for p in own):
        return False
    # A router has a row for each expert as well, and takes tokens alone. By the class: the forward of the instance may be ours.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [each for each in inspect.signature(type(module).forward).parameters.values() if each.kind in kinds]
    return len(taken) == 4


class ExpertForward(ForwardProxy):
    """The forward of a module of which this rank has some experts, on the tokens that chose them.

    Collectives of the ranks of `mesh`: counts, tokens and weights on the way there, outputs on the way back; in backward the
    same but for the counts. One host read. A rank without tokens takes part.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module.forward, module)
        self.mesh = mesh
        self._signature = inspect.signature(type(module).forward)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module: Any = self._owner()  # a weak reference: the module holds this
        given = self._signature.bind(module, *args, **kwargs)
        tokens, index, weights = given.args[1:]
        if tokens.dim() != 2 or index.dim() != 2 or weights.shape != index.shape or len(index) != len(tokens):
            raise ValueError(
                f"{type(module).__name__} was called with tensors of shapes {[tuple(each.shape) for each in given.args[1:]]}; "
                "under ep_size experts take (tokens, features), (tokens, experts of a token) and weights of that shape"
            )
        route = plan_route(index, module.num_experts, self.mesh.get_group())
        rows = send(spread(tokens, route), route)
        scales = send(weights.reshape(-1).index_select(0, route.order), route)
        with swapped(module._parameters, _local_params(module, 1 / self.mesh.size())):
            output = self.run(rows, route.experts.unsqueeze(1), scales.unsqueeze(1))
        if not isinstance(output, torch.Tensor) or len(output) != len(rows):
            raise ValueError(f"{type(module).__name__} must return one row for each token under ep_size")
        return add_up(send_back(output, route), route)


def _local_params(module: nn.Module, scale: float) -> dict[str, Any]:
    """Return the local tensors of the parameters of `module`, with gradients multiplied by `scale`."""
    local: dict[str, Any] = {}
    params: dict[str, Any] = dict(module._parameters)
    for name, param in params.items():
        if param is not None:
            local[name] = param.to_local()
            if local[name].requires_grad:
                # `fully_shard` divides a gradient by the number of copies of the parameter; what came here is a sum over ranks
                # besides. (Its own factor divides twice on a mesh of one rank, in torch 2.13.)
                local[name].register_hook(partial(torch.mul, other=scale))
    return local


def expert_mesh_sizes(sizes: Mapping[str, int], ep_size: int) -> dict[str, int]:
    """Return the dimensions of the mesh on which experts are, from those of the mesh of all other parameters."""
    # Ranks that share the batch, along "shard" or, where that is 1, along "replicate", are cut into groups of `ep_size`.
    cut = "shard" if sizes["shard"] > 1 else "replicate"
    divided: dict[str, int] = {}
    for name, size in sizes.items():
        divided[name] = size // ep_size if name == cut else size
        if name == "shard":
            divided["ep"] = ep_size
    return divided


class ExpertSharding:
    """How modules with experts are divided.

    Attributes:
        names: of these modules.
        mesh: what `fully_shard` divides them over, one dimension or (replicate, shard).
    """

    def __init__(self, device_type: str, sizes: Mapping[str, int], ep_size: int, names: Collection[str]) -> None:
        """sizes: of the mesh of all other parameters. A collective, the first time."""
        whole = shared_mesh(device_type, expert_mesh_sizes(sizes, ep_size))
        self.names = names
        self.mesh = whole["replicate", "shard"] if "replicate" in sizes else whole["shard"]
        self._ranks = whole["ep"]
        self._with_layers = whole["ep", "tp"] if sizes.get("tp", 1) > 1 else None

    def in_stage(self, names: Collection[str]) -> ExpertSharding:
        """Return the same for the modules of these names alone, those of a stage of a pipeline."""
        own = copy.copy(self)
        own.names = names
        return own

    @torch.no_grad()
    def divide(self, module: nn.Module) -> None:
        """Leave `module` this rank's experts.

        Parameters become DTensors; those of tensor parallelism, which has been applied, get a dimension more.
        """
        for name, param in module._parameters.items():
            if param is not None:
                # Ranks come with the same parameters, and nothing is sent.
                module._parameters[name] = nn.Parameter(self._own(param), requires_grad=param.requires_grad)
        module.forward = ExpertForward(module, self._ranks)
        module.num_experts = module.num_experts // self._ranks.size()  # type: ignore[operator, assignment]

    def _own(self, param: Any) -> DTensor:
        if not isinstance(param, DTensor):
            return distribute_tensor(param.detach(), self._ranks, [Shard(0)], src_data_rank=None)
        if self._with_layers is None:
            raise RuntimeError("experts are DTensors already; pass the model as it was before it was divided")
        local = param.to_local().chunk(self._ranks.size())[self._ranks.get_local_rank()].clone()
        return DTensor.from_local(
            local,
            self._with_layers,
            [Shard(0), *param.placements],
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    def placement(self, param: nn.Parameter) -> Shard | None:
        """Return the dimension along which `fully_shard` divides a parameter of experts: a free one that divides, or None."""
        taken = {getattr(placement, "dim", None) for placement in param.placements}  # type: ignore[attr-defined]
        parts = self.mesh.size(self.mesh.ndim - 1)
        free = [dim for dim in range(param.dim()) if dim not in taken and param.shape[dim] % parts == 0]
        return Shard(free[0]) if free else None


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
