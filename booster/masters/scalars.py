"""A backend for torch.compile that computes what is one number for all elements before the loop over them.

Bias corrections are powers of the step count. Torch's compiler for CPUs puts them into the loop, once for each vector of
elements, where they take longer than the update itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def scalars_first(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile `graph` with inductor, except operations among 0-dim tensors, which run eagerly before."""
    import torch._inductor  # heavy, and loaded by torch.compile anyway
    from torch.fx.passes.split_module import split_module

    inductor: Any = torch._inductor.compile
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
    """Operations among 0-dim tensors; none if moving them to the front would change what another operation reads."""
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
