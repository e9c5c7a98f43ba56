"""Gradients of leaves that a backward pass would add to, set aside while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

REENTRANT = (
    "release_gradients cannot know when gradients are complete under reentrant activation checkpointing, which runs backward "
    "passes inside the backward pass; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), as "
    "model.gradient_checkpointing_enable({'use_reentrant': False}) does in transformers"
)


class Aside:
    """Leaves whose gradients are set aside. keep: whether those that a pass brings are added to them at the end."""

    keep = False

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._before = {leaf: leaf.grad for leaf in leaves}
        self.clear()

    def clear(self) -> None:
        """Drop what a pass has brought."""
        for leaf in self._before:
            leaf.grad = None

    def restore(self) -> None:
        for leaf, grad in self._before.items():
            brought = leaf.grad if self.keep else None
            leaf.grad = grad if brought is None else brought if grad is None else grad + brought


@contextmanager
def set_aside(leaves: Iterable[torch.Tensor]) -> Iterator[Aside]:
    """Inside, gradients of `leaves` are set aside; afterwards what a pass has brought is dropped, or added to them."""
    aside = Aside(leaves)
    try:
        yield aside
    finally:
        aside.restore()


def leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose gradients a backward pass from `loss` fills. Raises RuntimeError for a graph with others
    inside, as reentrant checkpointing makes."""
    nodes: dict[Any, None] = {loss.grad_fn: None}
    waiting, found = [loss.grad_fn], [loss] if loss.grad_fn is None else []
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        name = type(node).__name__
        if name == "AccumulateGrad":
            found.append(node.variable)
        elif name == "CheckpointFunctionBackward":
            raise RuntimeError(REENTRANT)
        for after, _ in node.next_functions:
            if after is not None and after not in nodes:
                nodes[after] = None
                waiting.append(after)
    return found
