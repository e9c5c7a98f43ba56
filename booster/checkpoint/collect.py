"""The whole state of a run: tensors under whole names, and a JSON-like tree that refers to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from booster.checkpoint import parts
from booster.checkpoint.agree import agreed, exchange
from booster.checkpoint.layout import storable
from booster.checkpoint.objects import Objects
from booster.checkpoint.parts.part import Collection, Tensors, leaves_out_frozen


def collect(
    objects: Objects, run: Mapping[str, Any], group: dist.ProcessGroup | None
) -> tuple[Tensors, dict[str, Any]]:
    """Return this rank's tensors by their names in the checkpoint, and the tree of all ranks; a collective.

    run: what is known of the run as a whole, JSON-like. Tensors are those of the running job, not copies.
    """
    into = Collection(0 if group is None else dist.get_rank(group), frozen=not leaves_out_frozen(run))
    tree: dict[str, Any] = {} if into.rank else {"run": dict(run)}
    with agreed(group):
        for kind in parts.PARTS:
            tree |= kind(objects).collect(into)
    tensors = {name: storable(tensor) for name, tensor in into.shared.items()} | into.own
    return tensors, _merged(exchange(tree, group))


def _merged(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """One tree: what the first rank says, more keys where others hold other layers, and what is each rank's own."""
    of_ranks = {key: [tree.pop(key) for tree in trees] for kind in parts.PARTS for key in kind.of_ranks}
    merged = trees[0]
    for tree in trees[1:]:
        _add_keys(merged, tree)
    return {**merged, **of_ranks}


def _add_keys(tree: Any, other: Any) -> None:
    if isinstance(tree, dict) and isinstance(other, dict):
        for key, value in other.items():
            if key in tree:
                _add_keys(tree[key], value)
            else:
                tree[key] = value
    elif isinstance(tree, list) and isinstance(other, list):
        for one, two in zip(tree, other, strict=True):
            _add_keys(one, two)
