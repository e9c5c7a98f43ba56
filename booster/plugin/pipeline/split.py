"""Where a model is cut into pipeline stages, and which stage owns which of its modules and parameters.

Gradients of weights that several stages hold are summed over the ranks that hold them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from booster.model.modules import names_in_forward, parents, side_of, tensor_places
from booster.model.params import dtensor_around, local_shard
from booster.ranks.agreement import gather

_CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Split:
    """Cuts between the children of one module, the container of the model's blocks.

    Attributes:
        container: its qualified name, "" for the model itself.
        children: the names of its children in it, in order.
        starts: the positions among them that begin the second and later stages.
    """

    container: str
    children: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.starts) + 1

    def stage_of(self, child: int) -> int:
        """Return the stage of the child at a position."""
        return bisect_right(self.starts, child)

    def name_of(self, child: int) -> str:
        """Return the qualified name of the child at a position."""
        return qualified(self.container, self.children[child])

    def ancestors(self) -> list[str]:
        """Return the names of the modules around several stages: from the model itself, "", down to the container."""
        parts = self.container.split(".") if self.container else []
        return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def find_split(model: nn.Module, num_stages: int, split_points: Sequence[str] | None = None) -> Split:
    """Cut `model` into `num_stages` stages, evenly by blocks, the earlier stages taking what does not divide.

    split_points: names of the modules that begin the second and later stages, in order, all children of one module. Raises
    ValueError if there are fewer blocks than stages, or split points are not legal.
    """
    if split_points is not None:
        return _split_at(model, num_stages, list(split_points))
    rows = _rows(model)
    outer: list[tuple[str, list[int]]] = []
    for name, blocks in rows:
        # A row inside a block, as the layers of an MLP, is none to cut.
        if not any(len(row) >= num_stages and name.startswith(f"{other}." if other else "") for other, row in outer):
            outer.append((name, blocks))
    # The blocks are the longest row of modules of one class in a ModuleList or Sequential, rows inside blocks of a row that is
    # long enough left out.
    name, blocks = max(outer, key=lambda entry: len(entry[1]), default=("", []))
    if len(blocks) < num_stages:
        longest = f"the longest row is {name or 'the model itself'} with {len(blocks)}" if blocks else "there is no row"
        raise ValueError(
            f"{type(model).__name__} does not divide into {num_stages} pipeline stages by its blocks, modules of one class in "
            f"a ModuleList or Sequential: {longest}; use fewer stages, or name the modules that begin stages with split_points"
        )
    # Embedding and head are in the first and last stage; users with uneven costs name split_points.
    size, longer = divmod(len(blocks), num_stages)
    ends = [size * stage + min(stage, longer) for stage in range(1, num_stages)]
    return Split(name, _children(model.get_submodule(name)), tuple(blocks[end] for end in ends))


def owners(model: nn.Module, split: Split) -> dict[str, int]:
    """Return the stage of each topmost module that belongs to one stage alone, by qualified name.

    Children of the container go by the cuts. What a forward names before it, in the modules around it, goes to the first stage,
    and what it names after it to the last.
    """
    owned: dict[str, int] = {}
    chain = split.ancestors()
    for parent, on_path in zip(chain, chain[1:], strict=False):
        module, row = model.get_submodule(parent), on_path.rpartition(".")[2]
        named, before = names_in_forward(module), True
        for name, child in _named_children(module):
            if name == row:
                before = False
            # Modules without parameters and running statistics belong to all stages and are not listed.
            elif holds_state(child):
                side = side_of(name, row, named)
                # Where a source does not say, the order of registration decides.
                owned[qualified(parent, name)] = 0 if side < 0 or (before and not side) else split.num_stages - 1
    for position, (_, child) in enumerate(_named_children(model.get_submodule(split.container))):
        if holds_state(child):
            owned[split.name_of(position)] = split.stage_of(position)
    return owned


def holders(model: nn.Module, owned: Mapping[str, int]) -> dict[str, list[tuple[str, int]]]:
    """Return for each parameter, by its first name in the model, all its names, each with the stage that has it there.

    owned: what `owners` returns.
    """

    def stage_of(name: str) -> int:
        return next((owned[around] for around in parents(name) if around in owned), 0)

    tensors = tensor_places(model).values()
    return {places[0].name: [(place.name, stage_of(place.name)) for place in places] for places in tensors}


def holds_state(module: nn.Module) -> bool:
    """Return whether `module` has parameters or running statistics, so that one stage has to own it."""
    return any(True for _ in module.parameters()) or any(
        getattr(child, "track_running_stats", False) for child in module.modules()
    )


def qualified(parent: str, name: str) -> str:
    """Return the name in the model of the child `name` of `parent`."""
    return f"{parent}.{name}" if parent else name


def _split_at(model: nn.Module, num_stages: int, points: list[str]) -> Split:
    modules = dict(model.named_modules(remove_duplicate=False))
    parents = {point.rpartition(".")[0] for point in points}
    unknown = [point for point in points if not point or point not in modules]
    if unknown or len(parents) != 1:
        wrong = f"there is no module named {unknown}" if unknown else f"they lie in several modules, {sorted(parents)}"
        raise ValueError(f"split_points={points!r}: {wrong}; {_legal_points(model)}")
    if len(points) != num_stages - 1:
        raise ValueError(
            f"split_points={points!r} make {len(points) + 1} stages, but there are {num_stages}; name {num_stages - 1} modules"
        )
    container = parents.pop()  # one: cuts are between children of one module
    children = _children(modules[container])
    starts = [children.index(point.rpartition(".")[2]) for point in points]
    if sorted(set(starts)) != starts or starts[0] == 0:
        raise ValueError(
            f"split_points={points!r} must be in the order of the model, without repetition, and leave something to the "
            f"first stage; {_legal_points(model)}"
        )
    stateless = [point for point in points if not holds_state(modules[point])]
    if stateless:
        raise ValueError(f"split_points names {stateless}, which have no parameters; {_legal_points(model)}")
    return Split(container, children, tuple(starts))


def _legal_points(model: nn.Module) -> str:
    rows = [
        [qualified(name, _children(model.get_submodule(name))[block]) for block in blocks]
        for name, blocks in _rows(model)
    ]
    longest = max(rows, key=len, default=[])
    return f"legal are children of one module that have parameters, such as {longest[1:]}"


def _rows(model: nn.Module) -> list[tuple[str, list[int]]]:
    """Return containers with two or more blocks, outer ones first, and the positions of their blocks."""
    rows = []
    for name, module in model.named_modules():
        if not isinstance(module, _CONTAINERS):
            continue
        children = [child for _, child in _named_children(module)]
        if len({id(child) for child in children}) < len(children):
            continue  # a module that is called several times has no place in a pipeline
        classes = Counter(type(child) for child in children if any(True for _ in child.parameters()))
        for block_class, count in classes.most_common(1):
            if count >= 2:
                is_block = [type(child) is block_class and holds_state(child) for child in children]
                rows.append((name, [position for position, found in enumerate(is_block) if found]))
    return rows


def _named_children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _children(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, _ in _named_children(module))


class TiedWeights:
    """Copies of a weight on several ranks of a pipeline, such as an embedding that is the output layer too.

    params: this rank's copies by name. ranks: by name, the pipeline ranks that have one, for all tied weights of the model.
    A collective over `group` if there are any. Raises ValueError on all ranks if copies do not have one layout.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        ranks: Mapping[str, tuple[int, ...]],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.params = dict(sorted(params.items()))
        self.ranks = dict(ranks)
        self._rank = rank
        self._group = group
        if not ranks:
            return
        shards = {name: local_shard(param) for name, param in self.params.items()}
        layouts = {
            name: (tuple(local.shape), str(local.dtype), str(getattr(self.params[name], "placements", "")))
            for name, local in shards.items()
        }
        everyone = gather(layouts, group or dist.group.WORLD)
        for name in ranks:
            placings = {rank: held[name] for rank, held in enumerate(everyone) if name in held}
            if any(placing != placings[min(placings)] for placing in placings.values()):
                raise ValueError(
                    f"the weight {name} is tied across pipeline stages, and its copies are laid out differently, by rank: "
                    f"{placings}; give both of its modules the same tensor-parallel style"
                )

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Return a context; at its end the gradients of its backward passes are summed over ranks. Earlier ones stay."""
        before = {name: param.grad for name, param in self.params.items()}
        for param in self.params.values():
            param.grad = None  # only what this run adds is summed; earlier gradients were summed already
        try:
            yield
        finally:
            made = {name: param.grad for name, param in self.params.items()}
            for name, param in self.params.items():
                param.grad = before[name]
        parts: dict[str, dict[int, torch.Tensor]] = {}
        operations = []
        for name, param in self.params.items():
            own = _local_gradient(param, made[name])
            parts[name] = {self._rank: own}
            for peer in self.ranks[name]:
                if peer == self._rank or not own.numel():
                    continue
                parts[name][peer] = torch.empty_like(own)
                there = dist.get_global_rank(self._group or dist.group.WORLD, peer)  # type: ignore[arg-type]
                operations.append(dist.P2POp(dist.isend, own, there, self._group))
                operations.append(dist.P2POp(dist.irecv, parts[name][peer], there, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for name, param in self.params.items():
            # Every rank sums in the order of ranks, so that copies stay equal to the bit.
            total = torch.stack([parts[name][rank] for rank in sorted(parts[name])]).sum(0).to(param.dtype)
            summed: Any = dtensor_around(total, param)
            if isinstance(param.grad, DTensor) and param.grad.placements != summed.placements:
                param.grad = param.grad.redistribute(placements=summed.placements) + summed
            elif param.grad is not None:
                param.grad += summed
            else:
                param.grad = summed


def _local_gradient(param: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(local_shard(param))
    if isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=param.placements).to_local()  # type: ignore[attr-defined]
    return gradient.contiguous()
