"""The whole state of a run: tensors under whole names, and a JSON-like tree that refers to them."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.checkpoint import parts
from booster.checkpoint.agree import agreed, exchange
from booster.checkpoint.hashing import hash_of
from booster.checkpoint.layout import Held, storable
from booster.checkpoint.objects import Objects
from booster.checkpoint.parts.part import Collection, Tensors, leaves_out_frozen
from booster.common.text import listed
from booster.interface.model import ModelWrapper
from booster.model.modules import bare
from booster.update.state_dict import STATE_KEY

_logger = logging.getLogger(__name__)
OWN = "own"  # key of the tree: by rank, which of its tensors stand under which name of the checkpoint
ROUNDING = f"/{STATE_KEY}/masters/rounding/"


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
    shared = {name: storable(tensor) for name, tensor in into.shared.items()}
    tensors, own = settle(shared, group, buffers_of(objects))
    merged = _merged(exchange(tree, group))
    return tensors | into.own, {**merged, OWN: own} if any(own) else merged


def settle(
    shared: Tensors, group: dist.ProcessGroup | None, buffers: Container[str], *, all_kept: bool = True
) -> tuple[Tensors, list[dict[str, str]]]:
    """Return what this rank writes of `shared`, and by rank the names of what it keeps under another name; a collective.

    Torch's planner takes each plain tensor that several ranks hold from any of them, which is right where they are equal to
    the bit. Where they are not, the first rank that holds it writes it. Of `buffers`, what is below "extra", and random states
    of rounding, which go with the size of a rank's part, others write theirs under a name of their own, or nothing without
    `all_kept`. Of all else, as weights that drifted apart, a WARNING.
    """
    if group is None:
        return shared, [{}]
    plain = {name: _digest(tensor) for name, tensor in shared.items() if _is_plain(tensor)}
    rank, told = dist.get_rank(group), exchange(plain, group)
    kept, own, drifted = dict(shared), [dict[str, str]() for _ in told], []
    for name in sorted({name for each in told for name in each}):
        holders = [index for index, each in enumerate(told) if name in each]
        if len({told[index][name] for index in holders}) == 1:
            continue
        may_differ = name in buffers or name == "extra" or name.startswith("extra/") or ROUNDING in name
        drifted += [] if may_differ else [name]
        for index in holders[1:]:
            if may_differ and all_kept:
                own[index][name] = f"{name}#{index}"
        if rank in holders[1:]:
            value = kept.pop(name)
            if name in own[rank]:
                kept[own[rank][name]] = value
    if drifted and rank == 0:
        _logger.warning(
            "%d tensors differ between ranks that should have the same, and those of the first rank are saved: %s. Learning "
            "rates, data of schedules, random numbers or writes that differ by rank let replicas drift apart",
            len(drifted),
            listed(drifted, 4),
        )
    return kept, own


def _is_plain(tensor: Held) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided  # type: ignore[union-attr]


def _digest(tensor: Held) -> str:
    """Say by which tensors of other numbers, or in another order, are told apart; on a device without a copy to the host."""
    bits = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)  # type: ignore[union-attr]
    form = f"{tensor.dtype} {list(tensor.shape)} "
    if bits.device.type == "cpu":
        return form + hash_of(memoryview(bits.numpy()))  # type: ignore[arg-type]
    width = max(w for w in (1, 2, 4, 8) if bits.numel() % w == 0)
    whole = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    return form + str([whole[::step].sum(dtype=torch.int64).item() for step in (1, 2, 3)])


def buffers_of(objects: Objects) -> set[str]:
    """The names in a checkpoint of the buffers of models and criteria."""
    return {
        f"{kind}/{name}/{key}"
        for kind, modules in (("models", objects.models), ("criteria", objects.criteria))
        for name, module in modules.items()
        for key, _ in (bare(module.module) if isinstance(module, ModelWrapper) else module).named_buffers(
            remove_duplicate=False
        )
    }


def _merged(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """One tree: what the first rank says, more keys where others hold other layers, and what is each rank's own."""
    of_ranks = {key: [tree.pop(key) for tree in trees] for kind in parts.PARTS for key in kind.of_ranks}
    merged = trees[0]
    for tree in trees[1:]:
        _add_keys(merged, tree)
    if all(extra in (merged["extra"], None) for extra in of_ranks["extras"]):  # None: a rank that gave nothing
        del of_ranks["extras"]
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
