"""A bucket's whole update as one function of tensors, compiled: cast, join, the optimizer's own step, split.

The compiler keys a graph that sees an optimizer by the very tensors of its state, so every bucket would have one of its
own. Here the optimizer's `step` runs on a stand-in that is made inside the traced function from the function's arguments:
an object with the class's methods and the instance's attributes, whose only parameter is the bucket and whose state is
what is passed in. Buckets of one size then share a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from booster.masters.formats import Format
from booster.masters.formats_24 import WEIGHTS
from booster.masters.formats_compiled import join, split
from booster.masters.packed import Packed, Way
from booster.masters.packed_compiled import pack, unpack
from booster.masters.stand_in import (
    NOT_READ,
    Entries,
    State,
    instance_attributes,
    read_entries,
    stand_in_class,
    step_stand_in,
)
from booster.torch_internals import compile_graph
from booster.update.compiled import OWN_CACHE


class Kernel:
    """The compiled step of optimizers of the class and attributes of `optimizer`, which is not touched.

    One Kernel is for one size and dtype. ways: how states are packed, by name. Raises, at a call, whatever the compiler raises
    for what it cannot trace; nothing has changed then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        format: Format,
        dtype: torch.dtype,
        ways: Mapping[str, Way] = MappingProxyType({}),
    ) -> None:
        stand_in = stand_in_class(type(optimizer))
        attributes = instance_attributes(optimizer)

        def update(
            group: Entries,
            state: State,
            rate: Any,
            ratio: torch.Tensor,
            rest: list[torch.Tensor],
            weights: torch.Tensor,
            grads: torch.Tensor,
            codes: dict[str, torch.Tensor],
            factors: dict[str, torch.Tensor | None],
            lanes: dict[str, torch.Tensor],
            present: torch.Tensor | None,
        ) -> tuple[Entries, State, dict[str, torch.Tensor | None]]:
            masters = join(format, weights, rest)
            masters.grad = grads.float() * ratio
            state = {**state, **{name: unpack(ways[name], codes[name], factors[name]) for name in codes}}
            group, state = step_stand_in(stand_in, attributes, group, rate, masters, state)
            rounded, kept = split(format, masters, dtype, lanes.get(WEIGHTS))
            weights.copy_(rounded)
            for old, new in zip(rest, kept, strict=True):
                old.copy_(new)
            scales = {}
            for name in codes:
                code, scales[name] = pack(ways[name], state.pop(name), lanes[name], present)
                codes[name].copy_(code)
            return group, state, scales

        self._update: Callable[..., tuple[Entries, State, dict[str, torch.Tensor | None]]] = torch.compile(
            update, fullgraph=True, dynamic=False, backend=scalars_first, **OWN_CACHE
        )

    def step(
        self,
        group: Entries,
        state: State,
        grad_scale_inverse: float,
        rest: list[torch.Tensor],
        weights: torch.Tensor,
        grads: torch.Tensor,
        lanes: dict[str, torch.Tensor],
        present: torch.Tensor | None = None,
    ) -> None:
        """Update everything in place, `group` and `state` included. `weights` and `grads`: flat.

        lanes: random numbers of this step, by the name of what they round. present: where the bucket has elements, None for
        everywhere; packed states are zero elsewhere.
        """
        rate = group.get("lr")
        if isinstance(rate, (int, float)):  # a number would be compiled in
            rate = torch.full((), rate, dtype=torch.float32, device=weights.device)
        ratio = torch.full((), grad_scale_inverse, dtype=torch.float32, device=weights.device)
        entries = read_entries(group)
        packed = {name: value for name, value in state.items() if isinstance(value, Packed)}
        wide = {name: value for name, value in state.items() if name not in packed}
        codes = {name: value.codes for name, value in packed.items()}
        factors = {name: value.factors() for name, value in packed.items()}
        arguments = entries, wide, rate, ratio, rest, weights, grads, codes, factors, lanes, present
        written, after, scales = self._update(*arguments)
        for name, kept in packed.items():
            found = scales[name]
            if kept.scales is not None and found is not None:
                kept.scales.copy_(found)
        for key, value in after.items():
            if state.get(key) is not value:
                state[key] = value
        for key, value in written.items():
            if entries.get(key) is not value and key not in ("foreach", *NOT_READ):
                group[key] = value


# ---------------------------------------------------------------------- what is one number for all elements


def scalars_first(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile `graph` with inductor, except operations among 0-dim tensors, which run eagerly before; for torch.compile.

    Bias corrections are powers of the step count. Torch's compiler for CPUs puts them into the loop over the elements, once
    for each vector of them, where they take longer than the update itself.
    """
    from torch.fx.passes.split_module import split_module

    inductor = compile_graph()
    scalars = _scalars(graph)
    if not scalars:
        return inductor(graph, inputs)
    whole: Any = split_module(graph, graph, lambda node: 0 if node in scalars else 1, keep_original_order=False)
    rest = whole.submod_1
    values = {node.name: node.meta.get("example_value") for node in graph.graph.nodes}
    examples: Any = [values[node.name] for node in rest.graph.nodes if node.op == "placeholder"]
    whole.submod_1 = _Compiled(inductor(rest, examples))
    return whole.forward


class _Compiled(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


def _scalars(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the operations among 0-dim tensors; none if moving them to the front would change what another operation reads."""
    found: set[fx.Node] = set()
    read: set[fx.Node] = set()  # by operations that stay
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes
        if _is_scalar(node) and all(a in found or (a.op == "placeholder" and _is_scalar(a)) for a in inputs):
            if _writes(node) and not read.isdisjoint(inputs):
                return set()
            found.add(node)
        else:
            if _writes(node) and any(_is_scalar(written) for written in inputs[:1]):
                return set()
            read.update(inputs)
    return found


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or name.startswith(("i", "setitem"))


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() == 0
