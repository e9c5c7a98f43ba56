"""What a precision and a parallelism know of each other: dtypes as data one way, a protocol of six members the other way.

`DtypePolicy` is what a plugin gets of a precision; `half_policy` and `cast_parameters` make and apply it. `Placement` is what a
precision gets of a plugin. Neither imports the other's classes, so n precisions and m plugins are n + m files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.arguments import dtype_name, listed
from booster.mixed_precision.half_products.product_choice import product_modules
from booster.mixed_precision.keep_fp32 import (
    Float32Forward,
    KeepFP32,
    KeptModules,
    asked_for,
    check_untied,
    compute_in_fp32,
    is_batch_norm,
    is_marked,
    normalise_keep_fp32,
    selected_buffers,
)
from booster.model.modules import bare, parents, tensor_places
from booster.model.params import Done, set_tensors
from booster.shards import Shards
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import forward_depth_of, install_weak_buffers, remove_weak_buffers


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Which dtype each part of a training step uses; None leaves that part as it is.

    param: what forward and backward read.
    compute: float16 or bfloat16, in which autocast has products made of whatever they read; `MixedPrecision.forward_context`
    sees to it, so plugins need not.
    gather: dtype in which a plugin that shards weights gathers them: `param`, or, if that is None, `compute`. In `compute` only
    weights that products alone read are gathered (`gathered_modules`), which the products would round anyway; all others are
    gathered as they are stored. Where nothing is gathered it changes nothing.
    store: parameters at rest; None means float32 where the plugin shards, otherwise `param`.
    reduce: dtype of the gradient collectives; None means the dtype of the parameters.
    output: floating dtype of what the model returns, and so of what the criterion receives.
    keep_fp32: names of modules that keep float32 parameters and compute in float32.
    release: gradients are used within backward, each as soon as it is complete on all ranks, and freed, so that a plugin must
    not keep them, or memory for them.
    half_buffers: names of float buffers that are stored in `param` like parameters; None: all. Others stay in the dtype that
    they were registered in, and those of float32 do not widen halves that they meet, see `tensors/weak.py`; None also has kept
    modules return halves.
    fp32_buffers: names of float buffers that torch sees as they are, so that they do widen them.
    fp8_weights: modules with a `weight` that nothing reads but products that round it to e4m3 under one float32 scale of the
    whole. A plugin that shards weights gathers these as e4m3, so that the products read the same numbers. Where nothing is
    gathered it changes nothing.

    Raises TypeError or ValueError for what is no floating dtype, or no set of names.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    gather: torch.dtype | None = None
    store: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    keep_fp32: frozenset[str] = frozenset()
    half_buffers: frozenset[str] | None = frozenset()
    fp32_buffers: frozenset[str] = frozenset()
    release: bool = False
    fp8_weights: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("param", "store", "reduce", "output"):
            if getattr(self, name) is not None:
                arguments.floating_dtype(name, getattr(self, name))
        if self.compute is not None:
            arguments.choice("compute", self.compute, (None, torch.float16, torch.bfloat16))
        # Gathered in another dtype than products read, a weight would be rounded twice.
        if self.gather is not None and self.gather != (self.param or self.compute):
            raise ValueError(
                f"gather={arguments.shown(self.gather)} is not what is computed in, so weights would be rounded; choose "
                f"param={self.param} or, where that is None, compute={self.compute}, or None"
            )
        arguments.flag("release", self.release)
        for field in ("keep_fp32", "half_buffers", "fp32_buffers", "fp8_weights"):
            names = getattr(self, field)
            if names is None and field == "half_buffers":
                continue
            if not isinstance(names, (set, frozenset)) or not all(isinstance(name, str) for name in names):
                raise TypeError(arguments.refusal(field, names, "a frozenset of names"))


def half_policy(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep_fp32: KeepFP32 | Iterable[KeepFP32] = is_batch_norm,
    output: torch.dtype | None = torch.float32,
    half_buffers: KeepFP32 | Iterable[KeepFP32] = (),
    fp32_buffers: KeepFP32 | Iterable[KeepFP32] = (),
) -> DtypePolicy:
    """The policy of a `model` with parameters, activations and gradients in `dtype`, but for those kept in float32.

    Kept are those that `keep_fp32` selects (see `KeptModules`), those that `set_fp32_attr_to_module` marked, and those that
    the model's own class asks for, see `asked_for`.
    half_buffers, fp32_buffers: see `DtypePolicy`; selected by the name of the buffer, or as modules that hold them.
    output: see `DtypePolicy`. `model` is not changed: give it and the policy to `cast_parameters`, or to a plugin's
    `place`. Inputs are for the caller to cast: `casting.cast_floats(args, dtype)`, or `ModelWrapper(input_dtype=dtype)`.

    Raises ValueError if a kept module shares a parameter with one that is not, if the model as a whole is marked, and for a
    float buffer that TorchScript reads, unless it is selected.
    """
    model = bare(model)
    if is_marked("", model):
        raise ValueError(
            f"the whole {type(model).__name__} is marked by set_fp32_attr_to_module, so nothing of it would run in {dtype}; "
            "mark submodules, or train in fp32"
        )
    wish = asked_for(model, dtype)
    names = KeptModules(model, (*normalise_keep_fp32(keep_fp32), is_marked, wish)).names
    check_untied(model, names)
    stored = selected_buffers(model, half_buffers, "half_buffers")
    seen = selected_buffers(model, fp32_buffers, "fp32_buffers")
    if stored & seen:
        raise ValueError(
            f"half_buffers and fp32_buffers both select {listed(sorted(stored & seen))}; name it in one of them"
        )
    policy = DtypePolicy(param=dtype, output=output, keep_fp32=names, half_buffers=stored, fp32_buffers=seen)
    scripted = [
        name
        for name in weak_buffers(model, policy)
        if isinstance(model.get_submodule(name.rpartition(".")[0]), torch.jit.ScriptModule)
    ]
    if scripted:
        raise ValueError(
            f"TorchScript reads {listed(scripted)} itself, so float32 there would make the {dtype_name(dtype)} that it meets "
            "float32: name it in half_buffers, to be rounded once, or in fp32_buffers, to be read so; or boost the module "
            "unscripted"
        )
    return policy


def cast_parameters(module: nn.Module, policy: DtypePolicy) -> nn.Module:
    """Cast floating parameters of `module`, and buffers of `policy.half_buffers`, to the dtype in which `policy` stores them.

    In place. Other buffers stay as they were registered. What modules of `policy.keep_fp32` hold becomes float32 without a
    detour through half, and these modules compute in float32 from now on, see `install_keep_fp32`. Integer and complex tensors
    stay. Gradients are cast along. Does nothing where the policy names no dtype. Returns `module`.
    """
    if policy.store is None and policy.param is None:
        return module
    store_parameters(module, policy)
    install_keep_fp32(module, policy)
    return module


def store_parameters(module: nn.Module, policy: DtypePolicy) -> None:
    """The first half of `cast_parameters`: cast what `module` holds, in place, and leave its forwards as they are."""
    dtype = policy.store or policy.param
    if dtype is None:
        return
    # For plugins that give modules forwards of their own, which `install_keep_fp32` has to come after.
    inner = bare(module)
    to: dict[int, tuple[torch.Tensor, torch.dtype]] = {  # with the tensor, so that no other gets its id meanwhile
        id(tensor): (tensor, dtype) for tensor in (*_parameters(inner), *half_buffers(inner, policy))
    }
    for name in policy.keep_fp32:
        kept = inner.get_submodule(name)
        to |= {id(tensor): (tensor, torch.float32) for tensor in (*_parameters(kept), *kept.buffers())}

    def cast(tensor: torch.Tensor) -> torch.Tensor:  # also of what is neither, such as the states of a metric
        known = to.get(id(tensor))
        return tensor if known is None or not tensor.is_floating_point() else tensor.to(known[1])

    # `_apply` also reaches tensors that are neither parameters nor buffers, and keeps parameters the same objects.
    module._apply(cast)


def cast_placed(module: nn.Module, policy: DtypePolicy) -> None:
    """As `store_parameters`, for a model of which a plugin has divided tensors: DTensor parameters are replaced by others."""
    dtype = policy.store or policy.param
    if dtype is None:
        return
    done: Done = {}
    halves = {id(buffer) for buffer in half_buffers(bare(module), policy)}
    for name, child in bare(module).named_modules():
        kept = not policy.keep_fp32.isdisjoint((name, *parents(name)))

        def cast(own: str, tensor: torch.Tensor, kept: bool = kept) -> torch.Tensor:
            if not kept and not isinstance(tensor, nn.Parameter) and id(tensor) not in halves:
                return tensor
            return tensor.detach().to(torch.float32 if kept else dtype)

        set_tensors(child, cast, done)


def install_keep_fp32(module: nn.Module, policy: DtypePolicy) -> None:
    """Make the modules of `module` that `policy` keeps in float32 take inputs in it, and float buffers be read, in place.

    For plugins that cast parameters themselves; `cast_parameters` does it too.
    """
    inner = bare(module)
    half, depth = policy.param, forward_depth_of(inner) if reads_weakly(policy) else None
    # Repeating it changes nothing.
    remove_weak_buffers(inner)
    for name in policy.keep_fp32:
        compute_in_fp32(inner.get_submodule(name), None, half, as_weak=depth)
    if half in HALF_DTYPES:
        # Weights that are computed from parameters are rounded once, also where they are read outside of forward: many of
        # these functions have no half kernel. Those with parameters of their own compute in the dtype of these.
        for computed in [each for each in inner.modules() if isinstance(each, ParametrizationList)]:
            for each in computed:
                if next(each.parameters(), None) is None and not isinstance(each.forward, Float32Forward):
                    compute_in_fp32(each, None, half)
    if half is not None and depth is not None:
        # What they return, and float buffers of other modules, are float32 and do not widen the halves that they meet, see
        # `weak.WeakTensor`.
        install_weak_buffers(inner, half, weak_buffers(inner, policy), depth, returning=policy.keep_fp32)


def reads_weakly(policy: DtypePolicy) -> bool:
    """Whether float32 numbers amid the half weights of `policy` leave those as they are."""
    return policy.param in HALF_DTYPES and policy.half_buffers is not None


def weak_buffers(model: nn.Module, policy: DtypePolicy) -> list[str]:
    """Return the names of the float buffers of `model` that are stored as registered, and read by `weak.WeakTensor`."""
    if not reads_weakly(policy):
        return []
    other = (policy.half_buffers or frozenset()) | policy.fp32_buffers
    return [
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.dtype in (torch.float32, torch.float64)
        and name not in other
        and policy.keep_fp32.isdisjoint(parents(name))
    ]


def half_buffers(model: nn.Module, policy: DtypePolicy) -> list[torch.Tensor]:
    """Return the float buffers of `model` that `policy` stores as it stores parameters."""
    return [
        buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.is_floating_point() and (policy.half_buffers is None or name in policy.half_buffers)
    ]


def gathered_modules(model: nn.Module, policy: DtypePolicy) -> frozenset[str]:
    """Return the names of modules of `model` with weights in float32 that a plugin is to gather in `policy.gather`.

    For plugins that shard weights, to be asked before they replace any.
    """
    if policy.gather is None or policy.param is not None:
        # None where weights are computed in `policy.param`, which is what such a plugin gathers anyway.
        return frozenset()
    names = product_modules(model)
    return frozenset(name for name in names if policy.keep_fp32.isdisjoint((name, *parents(name))))


def dtypes_read(model: nn.Module, half: torch.dtype | None, *, weights: bool) -> dict[str, torch.dtype]:
    """Return the dtype in which the forward of the placed `model` reads parameters that it stores in float32, by all names.

    half: what products are computed in. weights: whether all weights are in it, as where a plugin rounds what it gathers, or
    those alone that nothing but products reads.
    """
    if half is None:
        return {}
    products = frozenset() if weights else product_modules(model, placed=True)
    found: dict[str, torch.dtype] = {}
    for tensor, places in tensor_places(model).items():
        kept = any(isinstance(vars(module).get("forward"), Float32Forward) for p in places for module in p.path)
        read = weights or any(place.name.rpartition(".")[0] in products for place in places)
        # All others are read as they are stored.
        if tensor.dtype == torch.float32 and read and not kept:
            found |= dict.fromkeys((place.name for place in places), half)
    return found


def _parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    for param in module.parameters():
        yield param
        if param.grad is not None:
            yield param.grad


@runtime_checkable
class Placement(Protocol):
    """What a strategy asks of a parallelism, which it knows by nothing else. Every `booster.plugin.Plugin` is one."""

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds and steps all of every parameter."""

    @property
    def stores_float32(self) -> bool:
        """Whether placed parameters stay in their dtype where `policy.store` is None, as shards that serve as masters do."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that must skip a step together; None means no collective, also inside a launched job."""

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        """Put `module` on `device` in the dtypes of `policy` and return what is to be called; may run collectives."""

    def synchronise(self, module: nn.Module) -> None:
        """Give `module` the parameters and buffers that all ranks are to start from, before a precision casts them; may
        run collectives."""

    def make_shards(self, optimizer: Optimizer) -> Shards:
        """Return what this rank holds and steps of the parameters of `optimizer`, which are those of a placed module."""


class InProcess:
    """No parallelism: a model is cast where it is."""

    is_whole = True
    stores_float32 = False
    group: dist.ProcessGroup | None = None

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        return cast_parameters(module, policy)

    def synchronise(self, module: nn.Module) -> None:
        pass

    def make_shards(self, optimizer: Optimizer) -> Shards:
        return Shards(optimizer)
