"""Which parameters of a model are gathered and reduced together, the groups that `fully_shard` is to make, and the weights of a
whole model, or of other shards, loaded into them.

The user's `wrap_policy` says which modules are blocks, gathered and freed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from booster.common import arguments
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import NEVER_CALLED, matcher, repeated_blocks, tensor_places
from booster.model.params import dtensor_around
from booster.shards.dtensor import check_own
from booster.shards.fully_sharded import forget_scales, reshard, sharded_in
from booster.tensors.trees import HALF_DTYPES


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that are gathered together.

    Attributes:
        modules: what `fully_shard` is called with.
        members: the modules that hold the tensors of the group, children first.
        pinned: kept in float32.
        gathered: in the dtype that the policy has for products alone.
        stays: the group of the model itself, or a part of it, which stays gathered from forward to backward.
    """

    modules: list[nn.Module]
    members: list[nn.Module]
    pinned: bool = False
    gathered: bool = False
    stays: bool = False


def plan_groups(
    model: nn.Module,
    *,
    blocks: Collection[str],
    pinned: Collection[str],
    dtype_of: Callable[[nn.Parameter, bool], torch.dtype],
    gathered: Collection[str] = (),
) -> list[Group]:
    """Return the groups of `model`, in the order in which they are to be made; the last is that of the model itself.

    blocks: names of modules that get their own group, unless they share a parameter with something outside, which
    can belong to one group only: then they join the group around them. pinned: names of modules that share one group,
    or, where blocks are inside them, several. dtype_of: dtype of a parameter at rest, given whether it is pinned.
    gathered: names of modules with parameters that are gathered in another dtype, so in separate groups.

    Raises ValueError for parameters without dimensions, for one that is both pinned and not, and where trainable
    parameters of several dtypes cannot be separated by their modules.
    """
    scalars = [name for name, param in model.named_parameters() if param.dim() == 0]
    if scalars:
        raise ValueError(
            f"parameters without dimensions cannot be sharded: {scalars}; make each a tensor of shape (1,), e.g. "
            "nn.Parameter(torch.ones(1))"
        )
    wrapped = {module for module in map(model.get_submodule, blocks) if _has(module)}
    in_fp32 = {module for module in map(model.get_submodule, pinned) if _has(module)}
    while True:
        homes, inside = _homes(model, wrapped, in_fp32)
        torn = _torn(model, homes, in_fp32)  # such a block joins the group around it
        if not torn:
            break
        wrapped -= torn
    order = list(_children_first(model, set()))
    members: dict[nn.Module | None, list[nn.Module]] = {}
    for module in order:
        members.setdefault(homes[module], []).append(module)
    sequence = [module for module in order if module in wrapped and module in inside]
    groups = [Group([module], members[module], pinned=True) for module in sequence]
    if _PINNED in members:
        listed = [module for module in order if module in in_fp32 and module not in wrapped]
        groups.append(Group(listed, members[_PINNED], pinned=True))
    rest = [module for module in order if module in wrapped and module not in inside]
    groups += [Group([module], members[module]) for module in rest if module in members]
    groups.append(Group([model], members[model], stays=True))
    names = {module: name for name, module in model.named_modules()}
    products = {model.get_submodule(name) for name in gathered}
    groups = [part for group in groups for part in _by_gather(group, products)]
    return [part for group in groups for part in _by_dtype(group, dtype_of, names)]


_PINNED = None  # in place of a module: the group of all that are pinned


def _homes(
    model: nn.Module, wrapped: Collection[nn.Module], in_fp32: Collection[nn.Module]
) -> tuple[dict[nn.Module, nn.Module | None], set[nn.Module]]:
    """Return, for each module, the block around it, `_PINNED` or the model; and which modules are in a pinned one."""
    homes: dict[nn.Module, nn.Module | None] = {}
    inside: set[nn.Module] = set()
    left: list[tuple[nn.Module, nn.Module | None, bool]] = [(model, model, False)]
    while left:  # not recursion: a closure that calls itself is a cycle, which keeps the modules alive
        module, home, is_pinned = left.pop()
        if module in homes:
            continue
        is_pinned = is_pinned or module in in_fp32
        if module in wrapped:
            home = module
        elif module in in_fp32:
            home = _PINNED
        homes[module] = home
        if is_pinned:
            inside.add(module)
        left += [(child, home, is_pinned) for child in reversed(list(module.children()))]
    return homes, inside


def _torn(
    model: nn.Module, homes: dict[nn.Module, nn.Module | None], in_fp32: Collection[nn.Module]
) -> set[nn.Module | None]:
    """Return the blocks that hold a parameter which another group holds too."""
    users: dict[torch.Tensor, dict[nn.Module | None, tuple[str, bool]]] = {}
    # By path, because a module that is in two blocks shares its parameters too.
    for param, places in tensor_places(model).items():
        for place in places:
            inner = [module for module in place.path if homes[module] is module or module in in_fp32]
            home = homes[inner[-1]] if inner else model
            is_pinned = any(module in in_fp32 for module in place.path)
            users.setdefault(param, {}).setdefault(home, (place.name, is_pinned))
    torn: set[nn.Module | None] = set()
    for by_home in users.values():
        if len(by_home) < 2:
            continue
        shown = {is_pinned: name for name, is_pinned in by_home.values()}
        if len(shown) == 2:
            raise ValueError(
                f"{shown[True]} is in a module that is kept in float32, and is the same parameter as {shown[False]}, which is "
                "not; keep both of its modules in float32, or neither"
            )
        torn |= by_home.keys() - {model, _PINNED}
    return torn


def _by_gather(group: Group, products: set[nn.Module]) -> Iterator[Group]:
    """Yield the part of `group` that is in `products` and the rest. The part without the group's modules comes first."""
    inside = [module for module in group.members if module in products]
    owners = [module for module in group.members if module not in products and module._parameters]
    # A projection is read by the module that holds it, and not called, so it cannot be gathered by itself.
    projections = {child for module in inside for child in module.children()}
    leaves = [module for module in inside if not _has_children(module) and module not in projections]
    if group.pinned or not inside:
        yield group
    elif not owners:
        yield replace(group, gathered=True)
    elif not any(_has_children(module) or not _is_called(module) for module in owners):
        # The group's modules stay with what is larger as a rule.
        yield replace(group, modules=owners, members=owners)
        yield replace(group, members=[module for module in group.members if module not in owners], gathered=True)
    elif leaves:
        # fully_shard passes on inputs as new tensors, and a module with children may compare its inputs by identity, as
        # MultiheadAttention does, which would compute in another way.
        yield replace(group, modules=leaves, members=leaves, gathered=True)
        yield replace(group, members=[module for module in group.members if module not in leaves])
    else:
        yield group


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _by_dtype(
    group: Group, dtype_of: Callable[[nn.Parameter, bool], torch.dtype], names: dict[nn.Module, str]
) -> Iterator[Group]:
    """Yield one more group for each further dtype among the trainable parameters of `group`, then what is left of it."""
    owners: dict[torch.dtype, list[nn.Module]] = {}
    sizes: dict[torch.dtype, int] = {}
    for module in group.members:
        for param in module.parameters(recurse=False):
            if param.requires_grad:
                dtype = dtype_of(param, group.pinned)
                sizes[dtype] = sizes.get(dtype, 0) + param.numel()
                if module not in owners.setdefault(dtype, []):
                    owners[dtype].append(module)
    if len(sizes) < 2:
        yield group
        return
    at_top = [dtype for dtype, modules in owners.items() if any(module in modules for module in group.modules)]
    main = max(at_top or sizes, key=lambda dtype: sizes[dtype])
    left = list(group.members)
    for dtype in [dtype for dtype in owners if dtype != main]:
        modules = owners[dtype]
        below = [child for module in modules for child in module.modules() if child in group.members]
        mixed = [m for other in owners if other != dtype for m in owners[other] if m in below]
        never_called = [m for m in modules if not _is_called(m)]
        for module in mixed or never_called:
            raise ValueError(
                f"the trainable parameters in {names[module] or 'the model'!r} have several dtypes "
                f"({', '.join(sorted(map(str, sizes)))}), and their gradients cannot be reduced together; cast them to one "
                "dtype, or put those of each dtype into a module of their own that has a forward"
            )
        yield replace(group, modules=modules, members=[m for m in left if m in below])
        left = [m for m in left if m not in below]
    yield replace(group, members=left)


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _has(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


WrapPolicy = type[nn.Module] | str | int | Callable[[str, nn.Module], bool] | Iterable[type[nn.Module] | str] | None


# Containers are not called themselves, and torch's attention reads the parameters of its children without calling them.
_INDIVISIBLE = (nn.MultiheadAttention,)


def check_wrap_policy(wrap_policy: Any) -> None:
    """Raise TypeError or ValueError unless `wrap_policy` is one that `block_names` takes."""
    legal = (
        "a module class, a name pattern, several of these, a number of parameters, a predicate (name, module), or None"
    )
    if wrap_policy is None or isinstance(wrap_policy, str):
        return
    if isinstance(wrap_policy, int):
        arguments.count("wrap_policy", wrap_policy, what="of parameters")
        return
    if isinstance(wrap_policy, Iterable) and not isinstance(wrap_policy, (type, nn.Module, Mapping, torch.Tensor)):
        entries = list(wrap_policy)
        if not entries:
            raise ValueError(
                "wrap_policy is empty; name a block class or pattern, or pass None for the repeated blocks"
            )
        wrong = [entry for entry in entries if not _is_class_or_pattern(entry)]
        if wrong:
            raise TypeError(
                f"wrap_policy holds {arguments.shown(wrong[0])}; in a list each entry must be a module class or a name pattern"
            )
        return
    if isinstance(wrap_policy, nn.Module):
        raise TypeError(f"wrap_policy is a module object ({type(wrap_policy).__name__}); pass its class, or its name")
    if not (_is_class_or_pattern(wrap_policy) or (callable(wrap_policy) and not isinstance(wrap_policy, type))):
        raise TypeError(f"wrap_policy={arguments.shown(wrap_policy)} is not legal; pass {legal}")


def block_names(model: nn.Module, wrap_policy: WrapPolicy) -> list[str]:
    """Return the qualified names of the blocks of `model`, in the order of its modules; the model itself is not one.

    wrap_policy: module classes; names or patterns, where `*` matches within one part of a name and `**` across parts;
    a predicate `(name, module) -> bool`; a number of parameters, at which a module becomes a block, parameters of blocks
    inside it not counted; None: see `repeated_blocks`. Raises ValueError for a class or pattern that selects nothing, not
    even, for a class, the model, which is gathered as a whole with or without a policy.
    """
    if wrap_policy is None:
        return repeated_blocks(model)
    named = [(name, module) for name, module in model.named_modules() if name and not isinstance(module, NEVER_CALLED)]
    if isinstance(wrap_policy, int):
        return _large_modules(model, wrap_policy)
    if isinstance(wrap_policy, (type, str)):
        entries: list[Any] = [wrap_policy]
    elif isinstance(wrap_policy, Iterable):
        entries = list(wrap_policy)
    else:
        return [name for name, module in named if wrap_policy(name, module)]
    chosen: set[str] = set()
    for entry in entries:
        if isinstance(entry, type):
            matches = {name for name, module in named if isinstance(module, entry)}
        else:
            matches = {name for name, _ in named if matcher(entry)(name)}
        if not matches and not (isinstance(entry, type) and isinstance(model, entry)):  # which is a block by itself
            shown = entry if isinstance(entry, str) else entry.__name__
            kinds = sorted({type(module).__name__ for _, module in named})
            raise ValueError(
                f"wrap_policy names {shown!r}, which selects no module of {type(model).__name__}; its top-level modules are "
                f"{[name for name, _ in model.named_children()]}, its classes {kinds}"
            )
        chosen |= matches
    return [name for name, _ in named if name in chosen]


def _large_modules(model: nn.Module, minimum: int) -> list[str]:
    """Return the modules with at least `minimum` parameters that are in no block inside them, innermost first."""
    chosen: list[str] = []
    seen: set[int] = set()

    def uncovered(module: nn.Module, name: str) -> int:
        """Choose inside `module`, then perhaps itself; return the number of parameters that are in no block yet."""
        if isinstance(module, _INDIVISIBLE):
            left = sum(param.numel() for param in module.parameters())
        else:
            own = [param for param in module.parameters(recurse=False) if id(param) not in seen]
            seen.update(map(id, own))
            children = module.named_children()
            left = sum(param.numel() for param in own)
            left += sum(uncovered(child, f"{name}.{part}" if name else part) for part, child in children)
        if name and left >= minimum and not isinstance(module, NEVER_CALLED):
            chosen.append(name)
            return 0
        return left

    uncovered(model, "")
    return chosen


def _is_class_or_pattern(entry: Any) -> bool:
    return isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module))


def apply_policy(model: nn.Module, policy: DtypePolicy) -> None:
    """Have weights that are loaded into `model` from now on treated as `policy` says; see `ShardLoaded`."""
    for hook in model._load_state_dict_pre_hooks.values():
        inner = getattr(hook, "hook", hook)
        if isinstance(inner, ShardLoaded):
            inner.set_policy(policy)


class ShardLoaded:
    """A load_state_dict pre-hook that cuts whole tensors to this rank's shards, so that checkpoints of whole models load.

    Where the shards are float32 master weights, a half-precision weight that a master rounds to leaves it as it is. So a model
    and its optimizer, which may hold the masters, load in any order. Float32 weights that are all exact in half precision
    count as half-precision weights that were widened.
    """

    def __init__(self, policy: DtypePolicy) -> None:
        self.set_policy(policy)

    def set_policy(self, policy: DtypePolicy) -> None:
        self._half = policy.param if policy.param in HALF_DTYPES and policy.store is None else None
        self._pinned = policy.keep_fp32

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        sharded = sharded_in(module)
        reshard(sharded)
        forget_scales(sharded)
        masters: dict[str, Any] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if not isinstance(param, DTensor):
                continue
            check_own(value, param)
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue  # torch names the mismatch
            if not isinstance(value, DTensor):
                placed = (param.device_mesh, param.placements)
                value = distribute_tensor(value.detach().to(param.device), *placed, src_data_rank=None)
                state_dict[prefix + name] = value
            is_pinned = any(module == "" or name.startswith(f"{module}.") for module in self._pinned)
            if param.dtype == torch.float32 and param.requires_grad and not is_pinned:
                masters[name] = param
        values = {name: state_dict[prefix + name] for name in masters}
        if self._half is not None and all(_holds(value.to_local(), self._half) for value in values.values()):
            state_dict.update(
                {prefix + name: _refined(param, values[name], self._half) for name, param in masters.items()}
            )


def _holds(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return value.dtype == dtype or torch.equal(value, value.to(dtype).to(value.dtype))


def _refined(master: Any, weight: Any, dtype: torch.dtype) -> Any:
    """`weight` of half precision, but `master` where it rounds to that, in whichever way its ties go."""
    if weight.placements != master.placements or weight.device_mesh != master.device_mesh:
        return weight
    kept, given = master.detach().to_local(), weight.to_local().float()
    rounded = kept.to(dtype).float()
    return dtensor_around(torch.where((rounded == given) | (kept + kept == rounded + given), kept, given), master)
