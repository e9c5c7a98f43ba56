"""Starting the autograd engine without leaving torch function modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from booster.common.torch_internals import engine_backward

Tensors = torch.Tensor | Sequence[torch.Tensor]


def run_engine(
    tensors: Tensors,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: None = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`, which takes torch function modes off before it starts the engine; this does not.

    Activation checkpointing then recomputes under the modes that the forward pass had.
    """
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    given = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors)
    given = given if len(given) == len(roots) else (None,) * len(roots)
    if inputs is not None:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        if not inputs:
            raise ValueError("inputs is empty; name the tensors to accumulate gradients into, or pass None for all")
    grads = tuple(
        torch.ones_like(root, requires_grad=False) if grad is None and root.requires_grad else grad
        for root, grad in zip(roots, given, strict=True)
    )
    engine_backward(
        roots,
        grads,
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
