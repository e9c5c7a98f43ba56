"""Modules that hold experts, and the forward that sends tokens to the ranks of theirs."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from booster.plugin.expert_parallel.exchange import add_up, plan_route, send, send_back, spread
from booster.plugin.tensor_parallel.local_style import swapped
from booster.tensors.weak import ForwardProxy


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
            "parameters of shape (num_experts, ...) and a forward of (tokens, numbers of experts, weights). Put experts of a "
            "ModuleList into one such module, or leave ep_size out"
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
    found: dict[str, Any] = {}
    params: dict[str, Any] = dict(module._parameters)
    for name, param in params.items():
        if param is not None:
            found[name] = param.to_local()
            if found[name].requires_grad:
                # `fully_shard` divides a gradient by the number of copies of the parameter; what came here is a sum over ranks
                # besides. (Its own factor divides twice on a mesh of one rank, in torch 2.13.)
                found[name].register_hook(partial(torch.mul, other=scale))
    return found
