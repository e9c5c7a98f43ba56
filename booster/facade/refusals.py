"""What `Booster.boost` accepts: checks that run before anything is changed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.arguments import listed
from booster.data import DataLoaderWrapper, check_dealt, check_sharded
from booster.facade.switch import BoostedObjects
from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.scheduler import LRSchedulerWrapper
from booster.interface.transparent import refuse_torchscript
from booster.launch import environment_world_size
from booster.mixed_precision import MixedPrecision
from booster.model.modules import bare
from booster.model.optimizers import granularity_of, inner_optimizers, not_elementwise
from booster.model.params import as_one_module, describe_optimizer_wrapper
from booster.plugin import Plugin
from booster.ranks import agreement
from booster.update.context import UpdateOptions

_logger = logging.getLogger(__name__)


def check_plugin(plugin: Any) -> None:
    """Raise unless `plugin` is a Plugin or None. If it is None in a job of several processes, one WARNING; RuntimeError where
    they have no process group either, so that only the launcher knows of the others."""
    if sys.platform == "win32":
        raise RuntimeError("booster does not support Windows; it runs under the Windows Subsystem for Linux (WSL2)")
    if plugin is not None and not isinstance(plugin, Plugin):
        hint = "; pass an instance of it" if isinstance(plugin, type) else ""
        raise TypeError(
            f"plugin must be a booster.plugin.Plugin or None, got {plugin!r}{hint}; there are SingleDevice(), "
            "TorchDDPPlugin(), TorchFSDPPlugin(), LowLevelZeroPlugin() and HybridParallelPlugin(tp_size, pp_size)"
        )
    # Each process would train a model of its own in silence, and its checkpoints would write over the others'.
    if plugin is None and not dist.is_initialized() and environment_world_size() > 1:
        raise RuntimeError(
            f"this job was launched with WORLD_SIZE={environment_world_size()}, but Booster has no plugin and there is no "
            "process group: each process would train its own model. Call booster.launch_from_torch() first, and pass "
            "plugin=TorchDDPPlugin(); or pass plugin=SingleDevice() if each is to train by itself"
        )
    if plugin is None and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
        _logger.warning(
            "Booster has no plugin in a job of %d processes: each trains its own model; "
            "pass plugin=TorchDDPPlugin() to train one",
            dist.get_world_size(),
        )


def check_pins(plugin: Plugin, diagnose: Any) -> None:
    """Raise ValueError unless modules can be pinned to float32 during a run on `plugin`. diagnose: as given to `Booster`."""
    if not plugin.is_whole:
        raise ValueError(
            f"keep_fp32='auto' needs models that are whole on every rank, and {type(plugin).__name__} divides weights, "
            "gradients or states: a replay finds the module in which a skip began, and is not sure there. Use "
            "TorchDDPPlugin or one process, or find the modules before the run, with booster.numerics.auto_pins"
        )
    if diagnose not in (None, "every"):
        raise ValueError(
            f"diagnose={arguments.shown(diagnose)} is not legal with keep_fp32='auto', which diagnoses every skipped step; "
            "leave it out, or pass 'every'"
        )


def check_phases(phases: Sequence[MixedPrecision], plugin: Plugin) -> None:
    """Raise ValueError if a run on `plugin` cannot go over from one of `phases` to another, whatever the model."""
    if len(phases) == 1:
        return
    # The placement comes first: its reason holds whatever precisions are named.
    reasons = (plugin.fixed_dtypes, *(phase.switch_refusal for phase in phases))
    if (why := next(filter(None, reasons), None)) is not None:
        raise ValueError(
            f"PrecisionSchedule has {len(phases)} phases, and a run cannot go over from one to another here, because {why}; "
            "give Booster one precision, or save, build anew and load between phases"
        )


def check_release(options: UpdateOptions, precision: MixedPrecision, plugin: Plugin) -> None:
    """Raise ValueError unless gradients can be released as `options` ask, with this precision on this plugin."""
    mode = options.release_gradients
    if not mode:
        return
    refusal = plugin.release_refusal or precision.release_refusal
    if options.fused_optimizer == "compile":
        refusal = 'fused_optimizer="compile" compiles a step of all gradients at once; leave it True'
    # Asked of the scaler, not of the precision's name: a float16 with a static scale of 1 may do it.
    if mode == "previous_norm" and precision.make_scaler().enabled:
        refusal = (
            "an overflow would be found after other parameters were stepped, and under a loss scale overflows are ordinary; "
            "use 'exact'"
        )
    elif mode == "previous_norm" and options.skip_nonfinite:
        refusal = "skip_nonfinite=True would find what is not finite after other parameters were stepped; use 'exact'"
    if refusal:
        raise ValueError(
            f"release_gradients={mode!r} is not possible here: {refusal}; or leave release_gradients False"
        )


def check_released(optimizer: Any, options: UpdateOptions) -> None:
    """Raise ValueError if gradients are to be released and `optimizer` cannot be stepped on some parameters at a time."""
    if options.release_gradients and optimizer is not None and granularity_of(optimizer) == "whole":
        would = f"would be stepped on some parameters at a time by release_gradients={options.release_gradients!r}"
        raise ValueError(not_elementwise(optimizer, would, "leave release_gradients False"))


def check_recorded(every: Any, activations: Any, options: UpdateOptions) -> None:
    """Raise ValueError if gradients are to be recorded that are gone by then. every, activations: as given to `record`."""
    if options.release_gradients and (every is not None or activations):
        raise ValueError(
            f"record(every={every!r}) looks at gradients before a step, and release_gradients={options.release_gradients!r} "
            "has freed them by then; pass every=None and no activations, which writes losses, norms, scales and skips"
        )


def check_boost(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    criterion: Any,
    *,
    boosted: BoostedObjects,
    plugin: Plugin,
    options: UpdateOptions,
    is_list: bool,
    shares: bool,
    changes: bool,
) -> None:
    """Raise unless these can be boosted together, in the order in which a user would mend them; nothing is changed.

    boosted: the objects of before. is_list: whether several models were given as a list. shares: whether several optimizers
    share the model. changes: whether the run changes its precision.
    """
    for model in models:
        check_model(model, boosted.models, plugin)
    if is_list:
        check_several(models, changes=changes)
    whole = as_one_module(models)
    check_criterion(criterion, plugin)
    for optimizer in optimizers:
        check_optimizer(
            optimizer, whole, criterion, models=boosted.models, optimizers=boosted.optimizers, plugin=plugin
        )
        check_released(optimizer, options)
    if shares:
        check_shared(optimizers, whole)


def check_alike(models: Sequence[nn.Module], precision: MixedPrecision, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError, on all ranks of `group`, unless these are alike but for values and devices; a small collective."""
    form = [["mixed_precision", type(precision).__name__]]
    for name, param in as_one_module(models).named_parameters():
        shape = "no shape" if nn.parameter.is_lazy(param) else tuple(param.shape)
        form.append([name, f"{shape} {param.dtype}{'' if param.requires_grad else ' frozen'}"])
    # Else a rank would wait for a gradient that another one does not send, or receive too few bytes.
    if group is None or agreement.are_alike(repr(form), group):
        return
    forms = agreement.gather(form, group)
    rank = next(rank for rank, each in enumerate(forms) if each != forms[0])
    first, other = dict(forms[0]), dict(forms[rank])
    names = [name for name in first | other if first.get(name) != other.get(name)]
    differences = [
        f"{name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')}" for name in names
    ]
    raise ValueError(
        f"ranks boost unlike models: {listed(differences, 3) or 'parameters in another order'} on rank {rank}. Build the same "
        "model, and freeze the same parameters, on every rank, before boost()"
    )


def check_model(model: Any, boosted: Collection[nn.Module], plugin: Plugin) -> None:
    """Raise unless `model` is a module that is not in `boosted`, and that `plugin` can keep alike on its ranks."""
    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    if isinstance(model, ModelWrapper) or model in boosted:
        raise RuntimeError(
            f"this {type(model).__name__} is boosted already; boost each model once and keep what it returned"
        )
    refuse_torchscript(model, "model")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError("model is a DistributedDataParallel already; pass its .module, and plugin=TorchDDPPlugin(...)")
    if plugin.averaging_size > 1:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                raise ValueError(
                    f"{name or 'the model'} is an {type(module).__name__} with max_norm={module.max_norm}, which writes to its "
                    "weight in forward: each rank to the rows of its batch, so that ranks drift apart, or the next step "
                    "undoes it. Leave max_norm out, and in forward scale the rows that were looked up, or after each step all "
                    "rows on all ranks"
                )


def check_several(models: Sequence[nn.Module], *, changes: bool) -> None:
    """Raise unless `models` can be boosted as a list. changes: their precision does, during the run."""
    if not models:
        raise ValueError("model is an empty list; pass the models that the optimizer trains")
    if changes:
        raise ValueError(
            "boost got a list of models, and a PrecisionSchedule or an Autopilot changes the precision of one model at a time; "
            "boost each by itself with its own optimizer, or give Booster one precision"
        )
    places: dict[torch.Tensor, tuple[int, str]] = {}
    for place, model in enumerate(models):
        for name, param in model.named_parameters():
            other, other_name = places.setdefault(param, (place, name))
            if other != place:
                raise ValueError(
                    f"model {place} of the list has the parameter {name!r}, which is {other_name!r} of model {other} too; put "
                    "both into one module, and call the one or the other in its forward"
                )


def boosted_loader(
    loader: Any, boosted: Collection[DataLoaderWrapper], *, device: torch.device, plugin: Plugin
) -> DataLoaderWrapper | None:
    """Wrap `loader`, or raise if it is in `boosted` or not sharded; that of `prepare_dataloader` is wrapped already. Small
    collectives on several ranks."""
    if plugin.group is not None:
        # Before anything is wrapped, since all ranks compare here, and all of them have to come.
        given = loader.unwrap() if isinstance(loader, DataLoaderWrapper) else loader
        place, num_places = plugin.data_parallel_rank, plugin.data_parallel_size
        check_dealt(given, place=place, num_places=num_places, group=plugin.group)
    if isinstance(loader, DataLoaderWrapper):
        if loader in boosted:
            raise RuntimeError("this dataloader is boosted already; pass it to boost() once, or pass None")
        return loader
    if loader is None:
        return None
    wrapped = DataLoaderWrapper(loader, device)
    check_sharded(loader, plugin.data_parallel_size)
    return wrapped


def check_criterion(criterion: Any, plugin: Plugin) -> None:
    """Raise unless `criterion` is None or a function or module that `plugin` can serve."""
    if criterion is None:
        return
    # A wrapper is a module as well, so it would pass all checks below, and cast twice.
    if isinstance(criterion, (ModelWrapper, CriterionWrapper)):
        raise RuntimeError("this criterion is boosted already; pass the original, or None")
    refuse_torchscript(criterion, "criterion")
    if not callable(criterion) or isinstance(criterion, Optimizer):
        meant = _keyword_of(criterion)
        hint = f"; pass {meant} by name, boost(model, optimizer, {meant}={meant})" if meant else ""
        raise TypeError(f"criterion must be callable, got {arguments.described(criterion)}{hint}")
    trainable = isinstance(criterion, nn.Module) and [n for n, p in criterion.named_parameters() if p.requires_grad]
    if trainable and plugin.averaging_size > 1:
        raise ValueError(
            f"the criterion has trainable parameters {trainable}, and {type(plugin).__name__} does not synchronise "
            "their gradients; make it a submodule of the model"
        )


def _keyword_of(value: Any) -> str:
    """Return which argument of `boost` a value in third place is meant for; "" for what is none."""
    if isinstance(value, Optimizer):
        return "optimizer"
    if callable(getattr(value, "step", None)) and hasattr(value, "optimizer"):
        return "lr_scheduler"
    return "dataloader" if isinstance(value, Iterable) else ""


def check_optimizer(
    optimizer: Any,
    model: nn.Module,
    criterion: Any,
    *,
    models: Collection[nn.Module],
    optimizers: Mapping[int, OptimizerWrapper],
    plugin: Plugin,
) -> None:
    """Raise unless `optimizer` is None or one that trains `model`. models, optimizers: boosted before, these by `id` of the
    user's."""
    if optimizer is None:
        return
    if isinstance(optimizer, OptimizerWrapper) or id(optimizer) in optimizers:
        raise RuntimeError("this optimizer is boosted already; boost each optimizer once and keep what it returned")
    if not isinstance(optimizer, Optimizer):
        wrapper = describe_optimizer_wrapper(optimizer)
        if wrapper:
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {wrapper}")
        arguments.instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    # A subclass of Optimizer whose `__init__` never called that of its base.
    if not hasattr(optimizer, "param_groups"):
        inner = " or ".join(type(each).__name__ for each in inner_optimizers(optimizer).values())
        cure = (
            f"give boost() the {inner} that it is put around, over model.parameters()"
            if inner
            else "call super().__init__"
        )
        raise TypeError(f"{type(optimizer).__name__} has no param_groups, which every torch optimizer has; {cure}")
    modules = [model, *models, *([criterion] if isinstance(criterion, nn.Module) else [])]
    boosted_params = {id(param) for module in modules for param in module.parameters()}
    own = {id(param) for param in model.parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [tuple(param.shape) for param in held if id(param) not in boosted_params]
    # Some of another model are legal, as in a GAN; none of this one is a mistake.
    if held and not any(id(param) in own for param in held):
        raise ValueError(
            f"none of the optimizer's {len(held)} parameters belong to the model {type(bare(model)).__name__}: it would "
            "not train. Was the optimizer built before the model was replaced or its parameters re-created?"
        )
    if strangers and plugin.averaging_size > 1:
        raise ValueError(
            f"{len(strangers)} of the optimizer's parameters (shapes {strangers[:5]}) belong to no boosted model, so "
            f"{type(plugin).__name__} would not synchronise their gradients; make them parameters of the model"
        )
    plugin.check_optimizer(optimizer)


def check_shared(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Raise unless `optimizers` share the parameters of `model`, none in two; one WARNING names those in none that train."""
    if not optimizers:
        raise ValueError("optimizer is an empty list of optimizers; pass None for a model that is not trained")
    if any(optimizer is None for optimizer in optimizers):
        raise TypeError("optimizer must be a torch.optim.Optimizer, got NoneType in a list; leave it out")
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ValueError("boost got the same optimizer twice in one list; name each once")
    held = [{id(param) for group in each.param_groups for param in group["params"]} for each in optimizers]
    named = dict(model.named_parameters())
    shared = [name for name, param in named.items() if sum(id(param) in own for own in held) > 1]
    if shared:
        raise ValueError(
            f"{listed(shared, 5)} {'is' if len(shared) == 1 else 'are'} in several of the {len(optimizers)} optimizers, and "
            "would be stepped by each of them; give every parameter to one"
        )
    idle = [n for n, p in named.items() if p.requires_grad and not any(id(p) in own for own in held)]
    if idle and (not dist.is_initialized() or dist.get_rank() == 0):
        _logger.warning(
            "%s of %s %s in none of the %d optimizers, and will not be trained; give them to one, or freeze them with "
            "requires_grad_(False)",
            listed(idle, 5),
            type(bare(model)).__name__,
            "is" if len(idle) == 1 else "are",
            len(optimizers),
        )


def scheduler_owners(
    scheduler: Any, optimizer: Any, optimizers: Mapping[int, OptimizerWrapper]
) -> list[tuple[Any, Optimizer]]:
    """Each of the schedulers with the optimizer that it drives, which is in `optimizer` or was boosted before."""
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    several = list(scheduler) if isinstance(scheduler, (list, tuple)) else [] if scheduler is None else [scheduler]
    # Schedulers without an `optimizer` of their own belong to that in the same place of the list.
    paired = given if len(given) == len(several) else [None] * len(several)
    return [(each, _owner(each, own, given, optimizers)) for each, own in zip(several, paired, strict=True)]


def _owner(
    scheduler: Any, optimizer: Optimizer | None, given: Sequence[Optimizer], optimizers: Mapping[int, OptimizerWrapper]
) -> Optimizer:
    if isinstance(scheduler, LRSchedulerWrapper):
        raise RuntimeError("this lr_scheduler is boosted already; pass it to boost() once")
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, (type, Optimizer)):
        raise TypeError(
            f"lr_scheduler must have a step method, as schedulers have, or be None; got {arguments.described(scheduler)}"
        )
    owner = getattr(scheduler, "optimizer", optimizer)
    owner = owner.unwrap() if isinstance(owner, OptimizerWrapper) else owner
    if owner is None or (all(owner is not each for each in given) and id(owner) not in optimizers):
        raise ValueError(
            "the lr_scheduler's optimizer is neither the one given to this boost() nor one boosted before; boost them "
            "together"
        )
    return owner


def check_boosted_optimizers(optimizer: Any, method: str) -> list[OptimizerWrapper]:
    """`optimizer`, or the several in it, as a list; raises TypeError unless all of them are boosted."""
    several = list(optimizer) if isinstance(optimizer, (list, tuple, set, frozenset)) else [optimizer]
    for entry in several:
        if not isinstance(entry, OptimizerWrapper):
            raise TypeError(
                f"{method} needs the optimizer that boost() returned, or a list of such, got {arguments.described(entry)}"
            )
    if not several:
        raise ValueError(f"{method} got no optimizer, but an empty list; name one at least")
    return several


def check_named(name: str, value: Any) -> None:
    """Raise unless `value` is an object to save or load, or several in a list or dict."""
    if value is None or (isinstance(value, (list, tuple, dict)) and not value):
        raise ValueError(arguments.refusal(name, value, "what boost() returned, or several of such"))


def checked_group(num_micro_batches: Any, num_tokens: Any) -> tuple[int, float | None]:
    """Return the arguments of `Booster.accumulate`; raise unless they are counts. A 0-dim tensor of tokens is read."""
    count = arguments.count("num_micro_batches", num_micro_batches)
    if num_tokens is None:
        return count, None
    return count, arguments.number("num_tokens", arguments.plain(num_tokens), above=0, also="None")


def next_batch(data_iter: Any) -> Any:
    """The next batch of an iterator; raises TypeError for what is none, such as a dataloader, and StopIteration at its end."""
    if not hasattr(data_iter, "__next__"):
        raise TypeError(f"data_iter must be an iterator, got {arguments.described(data_iter)}; pass iter(dataloader)")
    return next(data_iter)
