"""Experts that are modules of a `ModuleList`, as one module that `ep_size` can deal to ranks.

A loop over a `ModuleList` calls experts that have tokens, so ranks would wait for each other, and each expert has parameters of
its own names, which some ranks would lack. Stacked, parameters of one name are one of shape (experts, ...), on every rank; and
each expert is called, also without tokens. Files of weights have the names of the single experts: `save_model`, `load_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

_PLAIN = (bool, int, float, str, tuple, type(None))


class StackedExperts(nn.Module):
    """Experts of one kind and shape. Called with

        tokens: (tokens, features)
        index, weights: numbers of the experts of each token, and what their outputs are multiplied by, (tokens, top_k)

    it returns for each token the sum of its experts' outputs, in the dtype of tokens. Each expert is called once, by its own
    forward, with its tokens as (tokens, features), or with none, and returns a row for each. Reads counts on the host.

    experts: two or more, of which the weights are copied. Raises ValueError where they differ
        in more than numbers, have buffers, or share parameters.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        modules = list(experts)
        _check(modules)
        self.num_experts = len(modules)
        # Not a submodule, as its parameters are none of the model: in a tuple modules are not found.
        self._template = (copy.deepcopy(modules[0]).to("meta"),)
        self._names: dict[str, str] = {}  # of the parameters of an expert, by the names here, which may have no dots
        for name, first in modules[0].named_parameters():
            own = name.replace(".", "-")
            self._names[own] = name
            stacked = torch.stack([module.get_parameter(name).detach() for module in modules])
            self.register_parameter(own, nn.Parameter(stacked, requires_grad=first.requires_grad))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (template,), top_k = self._template, index.shape[1]
        if template.training is not self.training:
            template.train(self.training)
        numbers = index.reshape(-1)
        order = numbers.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=numbers.device)
        counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int64))
        # Each row once, so that gradients of a token are summed in one operation, and not rounded after each.
        rows = tokens.repeat_interleave(top_k, 0).index_select(0, order).split(counts.tolist())
        single = zip(*(getattr(self, own).unbind(0) for own in self._names), strict=True)
        outputs = [
            functional_call(template, dict(zip(self._names.values(), params, strict=True)), (part,))
            for params, part in zip(single, rows, strict=True)
        ]
        for output, part in zip(outputs, rows, strict=True):
            if not isinstance(output, torch.Tensor) or output.shape[:1] != part.shape[:1]:
                raise ValueError(
                    f"an expert, {type(template).__name__}, was called with {len(part)} tokens and must return a tensor of a "
                    f"row for each; it returned {getattr(output, 'shape', type(output).__name__)}"
                )
        scaled = torch.cat(outputs) * weights.reshape(-1).index_select(0, order).unsqueeze(1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
        return scaled.index_select(0, back).unflatten(0, (-1, top_k)).sum(1).to(tokens.dtype)

    def written_as(self) -> dict[str, tuple[str, int]]:
        """Return the name of each parameter of each expert, and where it is: its parameter here, and the number in that."""
        # Of a parameter that is dealt out the shape is that of the whole.
        return {
            f"{number}.{name}": (own, number)
            for own, name in self._names.items()
            for number in range(len(self.get_parameter(own)))
        }


def stack_experts(model: nn.Module, plan: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Put `StackedExperts` into the place of each `ModuleList` of `model` that `plan` names; returns their names.

    plan: by name or pattern of a list, such as "layers.*.moe.experts", a function `forward(module, *args)` that takes the place
        of the forward of the module that holds it, and calls what is there now with tokens, numbers and weights of experts.

    Call it before the optimizer is made: parameters are new ones, biases among them matrices, which Muon is not meant for.
    Raises ValueError, with nothing changed, for a pattern that finds no list, and experts that cannot be stacked, or are tied.
    """
    made: dict[str, tuple[StackedExperts, Callable[..., Any]]] = {}
    for pattern, forward in plan.items():
        found = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and fnmatchcase(name, pattern)
        ]
        if not found:
            raise ValueError(f"the plan names {pattern!r}, and no ModuleList of {type(model).__name__} is called so")
        for name in found:
            inside = {id(param) for param in model.get_submodule(name).parameters()}
            for other, param in model.named_parameters(remove_duplicate=False):
                if id(param) in inside and not other.startswith(f"{name}."):
                    raise ValueError(f"{other!r} is a parameter of an expert of {name!r} too; untie them")
            made[name] = StackedExperts(model.get_submodule(name).children()), forward
    for name, (experts, forward) in made.items():
        holder_name, _, leaf = name.rpartition(".")
        holder = model.get_submodule(holder_name)
        setattr(holder, leaf, experts)
        holder.forward = MethodType(forward, holder)
    return list(made)


def stacked_names(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return the names that single experts of `model` have in files, with the name of a parameter and the number in it."""
    return {
        f"{prefix}.{name}".removeprefix("."): (f"{prefix}.{own}".removeprefix("."), number)
        for prefix, module in model.named_modules()
        if isinstance(module, StackedExperts)
        for name, (own, number) in module.written_as().items()
    }


def _check(modules: list[nn.Module]) -> None:
    """Raise ValueError where `modules` are not experts that can be stacked."""
    if len(modules) < 2 or not any(True for _ in modules[0].parameters()):
        raise ValueError(f"StackedExperts takes two or more experts with parameters, got {len(modules)} modules")
    held = [id(param) for module in modules for _, param in module.named_parameters(remove_duplicate=False)]
    if len(set(held)) < len(held):
        raise ValueError("experts share parameters, or use one twice, which stacked ones cannot; untie them")
    first = _description(modules[0])
    for number, module in enumerate(modules):
        if buffers := [name for name, _ in module.named_buffers()]:
            raise ValueError(f"expert {number} has buffers, {buffers}, and only parameters are stacked; move them out")
        own = _description(module)
        for key in {**first, **own}:
            if own.get(key) != first.get(key):
                raise ValueError(
                    f"expert {number} differs from expert 0 in {key!r}: {own.get(key)} instead of {first.get(key)}; only "
                    "experts that differ in nothing but numbers are stacked"
                )


def _description(module: nn.Module) -> dict[str, str]:
    """What experts of one kind have alike, by what it is of."""
    found = {
        name: f"{tuple(p.shape)}, {p.dtype}, {p.device}, trained: {p.requires_grad}"
        for name, p in module.named_parameters()
    }
    for name, own in module.named_modules():
        plain = {key: value for key, value in vars(own).items() if isinstance(value, _PLAIN) and key != "training"}
        found[f"module {name}".rstrip()] = f"{type(own).__qualname__}({own.extra_repr()}) {plain}"
    return found
