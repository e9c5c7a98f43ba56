"""Sequence parallelism: between the branches of its blocks, every rank keeps a shard of the sequence only."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from booster.common.torch_internals.tensor_internals import RunningNorm
from booster.plugin.tensor_parallel.attention import HeadParallel
from booster.plugin.tensor_parallel.linear_styles import Colwise, Rowwise
from booster.plugin.tensor_parallel.module_styles import Region

_MIX_TOKENS = (RunningNorm, nn.GroupNorm)


def with_sequence_parallelism(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return `plan`, of exact names, with activations sharded along the sequence between the branches of a block.

    The first block of each stack shards them, the last gathers them. A branch is a child of a block that holds modules of the
    plan; its input is gathered, and the output of its row-wise layers is reduce-scattered.
    """
    stacks: dict[str, set[str]] = {}
    for name, style in plan.items():
        block = _block_of(model, name)
        if block is not None:
            stacks.setdefault(block.rpartition(".")[0], set()).add(block)
        elif isinstance(style, (Rowwise, HeadParallel)) or (isinstance(style, Colwise) and not style.gather_output):
            raise _refusal(f"{name!r} is in no block of a ModuleList or Sequential")
    if not stacks:
        # Raises ValueError where that cannot be.
        raise _refusal("tp_plan names no module in a ModuleList or Sequential")
    # Everything else in a block works token by token, on its shard of the sequence.
    sharded = dict(plan)
    for stack, blocks in stacks.items():
        names = [f"{stack}.{child}".lstrip(".") for child, _ in model.get_submodule(stack).named_children()]
        left_out = [name for name in names if name not in blocks]
        if left_out:
            raise _refusal(f"tp_plan names nothing in {left_out[0]!r}")
        # Only torch's own attention has the time first; everything known elsewhere has the batch first.
        attention = getattr(model.get_submodule(names[0]), "self_attn", None)
        dim = 0 if isinstance(attention, nn.MultiheadAttention) and not attention.batch_first else 1
        for name in names:
            _shard_block(model, name, sharded, dim)
            into, out = "split" if name == names[0] else None, "gather" if name == names[-1] else None
            sharded[name] = _region(sharded.get(name), into=into, out=out, sequence_dim=dim)
    return sharded


def _refusal(why: str) -> ValueError:
    return ValueError(f"sequence_parallelism=True: {why}; use sequence_parallelism=False")


def _shard_block(model: nn.Module, block: str, plan: dict[str, ParallelStyle], dim: int) -> None:
    given = dict(plan)  # `plan` changes below
    for child, module in model.get_submodule(block).named_children():
        branch = f"{block}.{child}"
        inside = [name for name in given if name.startswith(f"{branch}.")]
        if branch in given and not isinstance(given[branch], Region):
            plan[branch] = _alone(branch, given[branch], dim)
            for name in inside:  # the projection of a MultiheadAttention
                plan[name] = _in_branch(name, given[name], dim)
            continue
        if inside:
            rows = [name for name in inside if isinstance(given[name], Rowwise)]
            if len(rows) != 1:
                raise ValueError(
                    f"sequence_parallelism=True needs one row-wise module in {branch!r}, to divide its output; tp_plan "
                    f"names {rows or 'none'}. Otherwise use sequence_parallelism=False"
                )
        else:
            mixing = [each for each in module.modules() if isinstance(each, _MIX_TOKENS)]
            heavy = [f"{branch}.{param_name}" for param_name, param in module.named_parameters() if param.dim() > 1]
            if mixing:
                raise _refusal(f"{branch!r} is a {type(mixing[0]).__name__}, which mixes tokens")
            if heavy:
                raise ValueError(
                    f"sequence_parallelism=True: tp_plan does not divide {heavy[0]!r}; name its module, or use "
                    "sequence_parallelism=False"
                )
        for name, each in module.named_modules(prefix=branch):
            if inside and name in given:
                plan[name] = _in_branch(name, given[name], dim)
            elif each._parameters:  # it sees some of the tokens on each rank, so its gradients are summed
                plan[name] = Region(partial_gradients=True)
        if inside:
            plan[branch] = _region(given.get(branch), into="gather", sequence_dim=dim)


def _alone(name: str, style: ParallelStyle, dim: int) -> ParallelStyle:
    """Return the style of a module that is itself a child of the block, and so gathers or scatters by itself."""
    if isinstance(style, HeadParallel):
        return HeadParallel(sequence_dim=dim, whole_memory=name.endswith("multihead_attn"))
    if isinstance(style, Colwise) and not style.gather_output:
        return Colwise(num_parts=style.num_parts, sequence_dim=dim)
    return _in_branch(name, style, dim)


def _in_branch(name: str, style: ParallelStyle, dim: int) -> ParallelStyle:
    if isinstance(style, Colwise) and not style.gather_output:
        return Colwise(num_parts=style.num_parts, shared_input=True)
    if isinstance(style, Rowwise) and not style.split_input:
        return Rowwise(sequence_dim=dim)
    if isinstance(style, Region) and style.into is None and style.out is None:
        return _region(style)
    raise _refusal(f"the style of {name!r}, {type(style).__name__}, cannot be used in it")


def _region(style: ParallelStyle | None, **options: Any) -> Region:
    """Return the region of a module with a shard of the sequence; what `style` says of attributes and arguments stays."""
    own = style if isinstance(style, Region) else Region()
    kept = {name: getattr(own, name) for name in ("divide", "assign", "by_heads", "shared")}
    return Region(partial_gradients=True, **kept, **options)


def _block_of(model: nn.Module, name: str) -> str | None:
    """Return the outermost element, of a stack of modules of one class, that is or holds the module `name`."""
    for match in re.finditer(r"\.\d+(?=\.|$)", f".{name}"):
        block = name[: match.end() - 1]
        stack = model.get_submodule(block.rpartition(".")[0])
        if isinstance(stack, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in stack}) == 1:
            return block
    return None
