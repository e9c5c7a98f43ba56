"""What the library does with a precision: one order of boosting for all of them, and the boosted optimizers.

    check -> convert -> place -> rebind -> wrap

`configure` asks a precision for its hooks (`mixed_precision/base.py`) in this order, and a placement, such as a plugin, to
place the models. `precision` is a `MixedPrecision` throughout, which imports this file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.interface.model import CriterionWrapper, ModelWrapper, avoid_fast_path, extras_of
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.kernels.eligibility import ASKED, by_kernels
from booster.masters.formats import MasterOptions
from booster.masters.masters import Masters
from booster.mixed_precision.half_products.probability_losses import check_probabilities
from booster.mixed_precision.half_products.product_choice import CHOICES, Choice
from booster.mixed_precision.policy import InProcess, Placement
from booster.model.modules import PlacedModule, bare, fast_path_changes_dtype
from booster.model.params import as_one_module, name_prefixes, named_parameters, placed_parameters, rebind
from booster.shards import Shards
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import hooks_read_weakly, reading_weakly
from booster.update.choice import COMPILED, PARAMETERS, can_compile, choose_update, switch_to_fused
from booster.update.context import UpdateContext, UpdateOptions
from booster.update.update import Update


def configure(
    precision: Any,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    criterion: Callable[..., Any] | None,
    placement: Placement | None,
    options: UpdateOptions | None,
) -> tuple[Any, Any, ModelWrapper | CriterionWrapper | None]:
    """See `MixedPrecision.configure`."""
    placement = InProcess() if placement is None else placement
    arguments.instance("placement", placement, Placement, "a booster.plugin.Plugin, or what has its methods")
    options = options or UpdateOptions()
    models = list(model) if isinstance(model, Sequence) else [model]
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    # check
    if precision.half_products is not None:
        precision.half_products.agree(precision.device, placement.group)
        precision.half_products.find_losses([*models, *([] if criterion is None else [criterion])])
    for each in (*models, *([criterion] if isinstance(criterion, nn.Module) else [])):
        precision.check(each)
    if precision.conversion is not None:
        for each in models:
            precision.conversion.measure(each, precision.device, precision._keep_fp32, placement.group)
    # Policies by the models as the user built them: names and types that keep_fp32 selects may be gone after `convert`.
    policies = [precision.policy_for(each) for each in models]
    if options.release_gradients and optimizers:
        policies = [dataclasses.replace(policy, release=True) for policy in policies]
    for held in optimizers:
        if (of_masters := precision.masters_on(precision.device)) is not None:
            of_masters.check(held)
        if precision.kept.offload:  # also where nothing moves, so that a script tried on a CPU runs on a GPU
            MasterOptions(offload=True).check(held)
    before = named_parameters(as_one_module(models))
    # convert and place
    weights: dict[str, torch.Tensor] = {}
    placed: list[nn.Module] = []
    for each, policy, prefix in zip(models, policies, name_prefixes(models), strict=True):
        if optimizers:
            weights |= {prefix + name: kept for name, kept in precision.keep_weights(each, placement).items()}
        placed.append(placement.place(precision.convert(each), policy, precision.device))
    boosted = [precision.wrap_model(each) for each in placed]
    boosted_criterion = wrap_criterion(precision, criterion, precision.device)
    casts = precision.policy.compute is not None or (precision.products is not None and precision.is_rehearsal)
    for wrapper in boosted:
        if hooks_read_weakly(inner := bare(wrapper.module)):
            wrapper.__dict__["_passed_over"] = "hooks"
        elif fast_path_changes_dtype(inner, casts=casts):
            avoid_fast_path(wrapper)
    # rebind
    names = tensor_names(placed, boosted_criterion)
    params = named_params(placed) if optimizers else {}
    all_shards = rebind_optimizers(optimizers, before, params, placed, placement)
    # wrap
    wrapped = [
        _wrap_optimizer(precision, held, shards, placed, params, names, weights, placement.group, options)
        for held, shards in zip(optimizers, all_shards, strict=True)
    ]
    for wrapper in boosted:
        _connect_conversion(precision, wrapper, wrapped, placement)
    return (
        boosted if isinstance(model, Sequence) else boosted[0],
        wrapped if isinstance(optimizer, Sequence) else next(iter(wrapped), None),
        boosted_criterion,
    )


def _connect_conversion(
    precision: Any, boosted: ModelWrapper, optimizers: Sequence[OptimizerWrapper], placement: Placement
) -> None:
    """Connect the converted layers of `boosted`, if any, with steps and with checkpoints."""
    if precision.conversion is None:
        return
    layers = bare(boosted.module)
    if (choice := precision.conversion.layer_choice(layers)) is not None:
        extras_of(boosted).choice = choice
    if not optimizers:
        return
    if (histories := precision.conversion.make_listener(layers, precision.device, placement.group)) is not None:
        extras_of(boosted).histories = histories
        update_of(optimizers[0]).gradients.listeners.append(histories)
    if not placement.stores_float32:  # shards are gathered, and freed
        precision.conversion.cache_weights(layers)


def _wrap_optimizer(
    precision: Any,
    optimizer: Optimizer,
    shards: Shards,
    placed: Sequence[nn.Module],
    params: Mapping[str, torch.Tensor],
    names: Mapping[torch.Tensor, str],
    weights: dict[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    options: UpdateOptions,
) -> OptimizerWrapper:
    """The boosted optimizer; it takes its masters' numbers out of `weights`, which `keep_weights` gave."""
    compiled = options.fused_optimizer == "compile" and precision.may_compile(optimizer) and can_compile(optimizer)
    # A fused optimizer takes loss scale and clip as one divisor; others cost a pass over all gradients.
    may_switch = bool(options.fused_optimizer) and not compiled and precision.may_fuse(optimizer)
    switched = may_switch and switch_to_fused(optimizer, as_one_module(placed))
    held = {param for group in optimizer.param_groups for param in group["params"]}
    with shards.local():
        # Of parameters, and of this rank's shards of them.
        shard_of = {name: shards.shard_of(param) for name, param in params.items()}
        named = {**names, **{tensor: name for name in params for tensor in (params[name], shard_of[name])}}
        shards.names = named
        own = {
            shard_of[name]: shards.local_slice(weights.pop(name), params[name])
            for name in [*weights]
            if name in params and params[name] in held
        }
        if options.release_gradients:
            make_update = master_update(precision, optimizer, named, own, released=True)
        else:
            make_update = precision.make_update(optimizer, named, own, compiled=compiled)
    context = UpdateContext(
        optimizer=optimizer,
        scaler=precision.make_scaler(),
        names=named,
        group=group,
        shards=shards,
        options=options,
        switched=switched,
    )
    chosen = make_update or functools.partial(choose_update, factories=COMPILED if compiled else PARAMETERS)
    if options.fused_optimizer in (True, ASKED):
        chosen = by_kernels(chosen)
    wrapper = OptimizerWrapper(
        context,
        chosen,
        backward_context=reading_weakly(map(bare, placed), precision.backward_context),
        after_step=precision.after_step_hook,
        forget_weights=None if precision.conversion is None else precision.conversion.drop_weights,
    )
    products = precision.half_products
    if products is not None and products.dtype is not None and products.refuses_probabilities:
        wrapper._update.gradients.check_loss = check_probabilities
    wrapper._update.optimizer_state.attach(as_one_module(placed))
    if make_update is not None and shards.sharded:
        shards.sync_params()  # masters round the weights of their own part anew, ties not as the cast did
    return wrapper


def rebind_optimizers(
    optimizers: Sequence[Optimizer],
    before: Mapping[str, torch.Tensor],
    params: Mapping[str, torch.Tensor],
    placed: Sequence[nn.Module],
    placement: Placement,
) -> list[Shards]:
    """Make `optimizers` hold `params`, those of the models `placed`, in place of those of `before`, see `params.rebind`; return
    what this rank steps of each."""
    partial = any(isinstance(each, PlacedModule) and each.is_partial for each in placed)
    selections = [rebind(each, before, params, partial=partial) for each in optimizers]
    # All before the first is wrapped: together they may decide how parameters are sharded.
    all_shards = [placement.make_shards(each) for each in optimizers]
    for shards, selection in zip(all_shards, selections, strict=True):
        shards.selection = selection
    return all_shards


def named_params(placed: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters of the models `placed`, by name."""
    params: dict[str, torch.Tensor] = {}
    for each, prefix in zip(placed, name_prefixes(placed), strict=True):
        params |= {prefix + name: param for name, param in placed_parameters(each).items()}
    return params


def tensor_names(
    placed: Sequence[nn.Module], criterion: ModelWrapper | CriterionWrapper | None
) -> dict[torch.Tensor, str]:
    """Return the names of parameters, as users see them."""
    names: dict[torch.Tensor, str] = {param: name for name, param in as_one_module(placed).named_parameters()}
    if isinstance(criterion, ModelWrapper):
        names |= {param: f"criterion.{name}" for name, param in criterion.named_parameters()}
    return names


def choose_half_products(precision: Any, choice: Choice, device: torch.device) -> None:
    """Have `precision` learn how products of halves are to be computed; `Booster` does it, before `bind`.

    choice: see `half_products` of `Booster`.
    device: where they are computed.

    Raises ValueError where another `Booster` chose otherwise for the strategy, and for "float32" where it could not be.
    """
    arguments.choice("half_products", choice, CHOICES)
    products = precision.half_products
    half = not HALF_DTYPES.isdisjoint((precision.policy.compute, precision.policy.param))
    if choice == "float32" and (device.type != "cpu" or (products is None and half)):
        own = f"{type(precision).__name__} keeps no HalfProducts as its half_products"
        where = f"the device is {device}" if device.type != "cpu" else own
        raise ValueError(f"half_products='float32' needs a CPU and a precision that widens, and {where}; leave it out")
    if products is None or products.choice == choice:
        return
    if precision._device is not None:
        raise ValueError(
            f"half_products={choice!r}, but this {type(precision).__name__} object runs with {products.choice!r} already; make "
            "another one"
        )
    products.choose(choice)


def master_update(
    precision: Any,
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    weights: MutableMapping[torch.Tensor, torch.Tensor],
    *,
    compiled: bool = False,
    released: bool = False,
) -> Callable[[UpdateContext], Update] | None:
    """As `MixedPrecision.make_update`. released: it steps within backward, in parts."""
    options = precision.masters_on(precision.device)
    if options is None:
        return None
    masters = Masters(optimizer, names, options, sources=weights, compiled=compiled, released=released)
    return functools.partial(precision._choose_update, masters=masters, compiled=compiled)


def wrap_criterion(
    precision: Any, criterion: Callable[..., Any] | None, device: torch.device
) -> ModelWrapper | CriterionWrapper | None:
    """The boosted criterion under `precision`; None for None."""
    if criterion is None:
        return None
    around = precision.around_criterion()
    if isinstance(criterion, nn.Module):
        return ModelWrapper(criterion.to(device), around)
    return CriterionWrapper(criterion, around)
