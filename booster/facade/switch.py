"""What one Booster has boosted, and a run that goes over to another precision: it carries what a checkpoint would."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common.snapshot import random_state, set_random_state
from booster.common.torch_internals.autograd_internals import is_compiled
from booster.data import DataLoaderWrapper
from booster.facade.before_boost import BeforeBoost, wrap_forward
from booster.interface.model import CriterionWrapper, ModelWrapper, boosted_wrapper
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.mixed_precision import MixedPrecision
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare
from booster.plugin import Plugin
from booster.ranks.agreement import gather
from booster.shards import Shards
from booster.tensors.trees import HALF_DTYPES
from booster.update.context import UpdateOptions


class BoostRecord:
    """What one call of `boost` returned, as long as the user keeps the model, and what the model was before.

    Attributes:
        built: the model before boost.
        alone: False for one of several models that share optimizers.
        hooks: keys of the forward pre-hooks that the precision registered; those of the user's come later.
    """

    def __init__(
        self,
        built: BeforeBoost,
        model: ModelWrapper,
        criterion: Any,
        optimizers: Sequence[OptimizerWrapper],
        *,
        alone: bool,
    ) -> None:
        self.built, self.alone = built, alone
        self.hooks = set(model._forward_pre_hooks)
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._criterion = weakref.ref(criterion) if isinstance(criterion, (ModelWrapper, CriterionWrapper)) else None

    @property
    def model(self) -> ModelWrapper:
        """The boosted model. Only while the user keeps it, `is_kept`."""
        return cast(ModelWrapper, self._model())

    @property
    def is_kept(self) -> bool:
        return self._model() is not None

    @property
    def optimizers(self) -> list[OptimizerWrapper]:
        return [each for reference in self._optimizers if (each := reference()) is not None]

    @property
    def criterion(self) -> Any:
        return None if self._criterion is None else self._criterion()


class Switch:
    """From the precision `old` to `new`, of models that `plugin` placed. `check` all of them first, then `make` each."""

    def __init__(
        self, old: MixedPrecision, new: MixedPrecision, *, plugin: Plugin, device: torch.device, options: UpdateOptions
    ) -> None:
        self._old, self._new, self._plugin, self._device = old, new, plugin, device
        self._options = options
        self._policies: dict[BoostRecord, tuple[DtypePolicy, DtypePolicy]] = {}  # of before and after

    @property
    def target(self) -> str:
        """What all ranks are to go over to, in words."""
        return repr(self._new)

    def check(self, record: BoostRecord) -> None:
        """Raise RuntimeError or ValueError if the move cannot be made; nothing is changed."""
        for precision in (self._old, self._new):
            if precision.switch_refusal is not None:
                raise ValueError(self._refusal(precision.switch_refusal))
        placed = record.model.module
        if not record.alone:
            raise ValueError(
                self._refusal(
                    "it moves models one by one, and several were boosted as a list with one optimizer; save, build "
                    "anew and load"
                )
            )
        if type(record.model) is not ModelWrapper:
            raise ValueError(
                self._refusal(f"{type(self._old).__name__} wraps models in its own {type(record.model).__name__}")
            )
        compiled = [name for name, child in placed.named_modules() if is_compiled(child)]
        if compiled:
            raise RuntimeError(
                self._refusal(
                    "the model was compiled, and what was compiled would go on in the old precision; compile after the last "
                    "switch, or train without torch.compile"
                )
            )
        for optimizer in record.optimizers:
            update = update_of(optimizer)
            if update.gradients.in_backward is not None:
                update.gradients.in_backward.check_weights()
            if waiting := update.gradients.num_backwards:
                raise RuntimeError(
                    f"switch() between backward and step: the gradients of {waiting} backward pass(es) wait for a step, and "
                    "belong to the old precision; call optimizer.step() first, or optimizer.zero_grad() to drop them"
                )
            # A scale that the new one cannot take over, as out of its bounds, is refused here and not in the middle of `make`.
            scale = self._new.make_scaler()
            if scale.state_dict().keys() == update.gradients.scaler.state_dict().keys():
                scale.load_state_dict(update.gradients.scaler.state_dict())
        # Such a forward was put there after boost, around the old placement; it would be lost.
        if (why := record.built.replaced_forward(placed)) is not None:
            raise RuntimeError(self._refusal(why))
        # Names and types that keep_fp32 selects are those of the model as its user built it.
        with record.built.as_built(placed, self._old):
            self._new.check(bare(placed))
            if isinstance(record.criterion, ModelWrapper):
                self._new.check(record.criterion.unwrap())
            before, after = self._old.policy_for(bare(placed)), self._new.policy_for(bare(placed))
            self._policies[record] = before, after
            if (why := self._plugin.switch_refusal(placed, before, after)) is not None:
                raise RuntimeError(self._refusal(why))
            built = [
                name
                for name, param in bare(placed).named_parameters()
                if param.requires_grad and param.dtype in HALF_DTYPES
            ]
            if built and before.param in HALF_DTYPES and after.param not in HALF_DTYPES:
                raise ValueError(
                    self._refusal(
                        f"the model was built in half precision, as its parameter {built[0]!r}; build it in float32"
                    )
                )
            for optimizer in record.optimizers:
                if (options := self._new.masters_on(self._device)) is not None:
                    options.check(optimizer.unwrap())
            self._new.convert(bare(placed))  # what it refuses, it refuses now

    def make(self, record: BoostRecord) -> None:
        """Make the move. May run the collectives of placing a model; random numbers go on where they were."""
        wrapper, placed = record.model, record.model.module
        wrapper.unwrap()  # which waits for weights
        inner, optimizers = bare(placed), record.optimizers
        # A switch must not change which numbers the run draws later.
        before = random_state()
        kept_states = [_KeptState(optimizer) for optimizer in optimizers]
        masters: dict[torch.Tensor, torch.Tensor] = {}
        for optimizer in optimizers:
            optimizer.zero_grad()
            # The user's optimizer has float32 states again, and the masters are taken out of it: the new precision makes its
            # own of both, as a load would. They are moved, not copied, so states are never there twice.
            masters |= update_of(optimizer).give_back()
        for param in inner.parameters():
            # Of parameters without an optimizer as well: gradients are of the old dtype.
            param.grad = None
        names: dict[torch.Tensor, str] = {param: name for name, param in inner.named_parameters()}
        # What the user wrapped around forward before boost stays outermost, so it comes off first and is put back last.
        around = record.built.remove_wrapped_forwards(placed)
        self._old.revert(placed)
        policy, after = self._policies[record]
        half = (after.store or after.param) in HALF_DTYPES and not self._plugin.stores_float32
        done = record.built.restore(placed, masters, for_masters=half)
        # Their memory is free before the new masters are made: the peak is that of one precision.
        del masters
        for optimizer in optimizers:  # parameters that changed their dtype are new tensors
            for group in optimizer.optimizer.param_groups:
                group["params"][:] = [done.get(param, param) for param in group["params"]]
        record.built = record.built.again(placed)
        placement = _PlacedAgain(self._plugin, placed, policy, around, [c.shards for c in kept_states], names)
        criterion = record.criterion
        new_model, new_optimizers, new_criterion = self._new.configure(
            inner,
            [each.optimizer for each in optimizers],
            None if criterion is None else criterion.unwrap(),
            placement=placement,
            options=self._options,
        )
        record.built.forget_unrounded(new_model.module)
        record.hooks = wrapper.replace_with(new_model, record.hooks)
        if criterion is not None:
            criterion.replace_with(new_criterion)
        for optimizer, made, kept in zip(optimizers, new_optimizers, kept_states, strict=True):
            optimizer.replace_with(made)
            kept.give(optimizer)
        set_random_state(before)  # placing a model may draw numbers, which a load would not

    def _refusal(self, why: str) -> str:
        return f"switch() from {self._old!r} to {self._new!r} cannot be made while the run goes on, because {why}"


def switch_all(switch: Switch, records: Sequence[BoostRecord], group: dist.ProcessGroup | None) -> None:
    """Check every one on every rank of `group`, and move them all, or none."""
    with torch.inference_mode(False):  # tensors made there could not be trained later
        problem: Exception | None = None
        try:
            for record in records:
                switch.check(record)
        except Exception as error:  # raised again once the others know
            problem = error
        # Before anything changes: a rank that refused while others place again would leave them waiting.
        others = gather([switch.target, None if problem is None else f"{type(problem).__name__}: {problem}"], group)
        if problem is not None:
            raise problem
        for rank, (target, why) in enumerate(others):
            if why is not None:
                raise RuntimeError(f"switch() was refused on rank {rank}, so nothing has changed on any: {why}")
            # Ranks of two precisions would send each other tensors of two dtypes.
            if target != switch.target:
                raise RuntimeError(
                    f"switch() got {switch.target} here and {target} on rank {rank}; give all ranks the same"
                )
        for record in _owners_first(records):
            switch.make(record)


def _owners_first(records: Sequence[BoostRecord]) -> list[BoostRecord]:
    """Return first those with optimizers of shared parameters, which take these in float32, before others round them."""
    held = [set(each.model.parameters()) for each in records]
    shared = {param for place, params in enumerate(held) for other in held[:place] for param in params & other}
    return sorted(
        records,
        key=lambda each: shared.isdisjoint(
            param for optimizer in each.optimizers for group in optimizer.param_groups for param in group["params"]
        ),
    )


class _KeptState:
    """What an optimizer's update knows besides states and masters, and the next one goes on with."""

    def __init__(self, optimizer: OptimizerWrapper) -> None:
        update = update_of(optimizer)
        self.shards = update.shards
        self._scale, self._rounding = update.gradients.scaler.state_dict(), update.optimizer_state.rounding_state()
        self._previous = None if update.gradients.in_backward is None else update.gradients.in_backward.previous

    def give(self, optimizer: OptimizerWrapper) -> None:
        update = update_of(optimizer)
        # From float16 to bfloat16 there is no scale to go on with, and back a new one begins.
        if update.gradients.scaler.state_dict().keys() == self._scale.keys():
            update.gradients.scaler.load_state_dict(self._scale)
        update.optimizer_state.load_rounding(self._rounding)
        if update.gradients.in_backward is not None:
            update.gradients.in_backward.reset(self._previous)


class _PlacedAgain:
    """The `Placement` that a precision meets when models are placed already: they are placed again, and not anew."""

    def __init__(
        self,
        plugin: Plugin,
        placed: nn.Module,
        before: DtypePolicy,
        around: Mapping[str, Any],
        shards: Sequence[Shards],
        names: Mapping[torch.Tensor, str],
    ) -> None:
        self._plugin, self._placed, self._around = plugin, placed, dict(around)
        self.policy, self._shards, self._names = before, {id(each.optimizer): each for each in shards}, names
        self.is_whole, self.stores_float32, self.group = plugin.is_whole, plugin.stores_float32, plugin.group

    def place(self, module: nn.Module, policy: DtypePolicy, device: torch.device) -> nn.Module:
        wrap_forward(module, self._around)
        before, self.policy = self.policy, policy
        return self._plugin.place_again(self._placed, before, policy, device)

    def synchronise(self, module: nn.Module) -> None:
        pass  # ranks agree since boost()

    def make_shards(self, optimizer: Optimizer) -> Shards:
        made, old = self._plugin.make_shards(optimizer), self._shards[id(optimizer)]
        now = dict(bare(self._placed).named_parameters())
        made.states.move_states_from(old, {param: now[name] for param, name in self._names.items()})
        # What the user froze or chose since boost stays so.
        made.selection = old.selection
        return made


class BoostOutput(tuple[Any, ...]):
    """(model, optimizer, criterion, dataloader, lr_scheduler), for which Python's own error would not name `boost`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"boost() returns {len(self)} objects, not a model, and together they have no attribute {name!r}. Write "
            "model, optimizer, *_ = b.boost(model, optimizer)"
        )


class BoostedObjects:
    """The objects of one Booster, as long as the user keeps them.

    Attributes:
        models: both what the user gave and what wraps it.
        criteria: the wrappers of criteria that are modules.
        loaders: the wrappers of loaders.
        optimizers: the wrappers, by the id of the user's optimizer, which its wrapper keeps alive.

    Models and criteria are in the order in which they were boosted, the same on every rank; a set has no order.
    """

    def __init__(self) -> None:
        self.models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.criteria: weakref.WeakKeyDictionary[ModelWrapper, None] = weakref.WeakKeyDictionary()
        self.loaders: weakref.WeakSet[DataLoaderWrapper] = weakref.WeakSet()
        self._records: list[BoostRecord] = []
        self.optimizers: weakref.WeakValueDictionary[int, OptimizerWrapper] = weakref.WeakValueDictionary()

    def add(self, model: nn.Module, record: BoostRecord) -> None:
        """Keep what `boost` made of the user's `model`."""
        record.built.forget_unrounded(record.model.module)
        self._records.append(record)
        self.models.update({model: None, record.model: None})
        if isinstance(record.criterion, ModelWrapper):
            self.criteria[record.criterion] = None
        for wrapper in record.optimizers:
            self.optimizers[id(wrapper.unwrap())] = wrapper

    def records(self) -> list[BoostRecord]:
        """Return what each call of `boost` returned, in their order, of which the user has the model still."""
        # Models are held weakly; those that the user dropped leave here.
        self._records = [each for each in self._records if each.is_kept]
        return list(self._records)

    def dtypes(self) -> dict[torch.Tensor, torch.dtype]:
        """Return in which dtype each tensor of the boosted models was given to `boost`."""
        return {
            tensor: dtype for each in self.records() for tensor, dtype in each.built.dtypes(each.model.module).items()
        }

    def wrappers(self) -> list[ModelWrapper]:
        """Return the boosted models."""
        return [model for model in self.models if isinstance(model, ModelWrapper)]

    def modules(self) -> list[ModelWrapper]:
        """Return the boosted models and the criteria that are modules."""
        return [*self.wrappers(), *self.criteria]

    def all_optimizers(self, method: str) -> list[OptimizerWrapper]:
        """Return the boosted optimizers. Raises RuntimeError where there is none for `method` yet."""
        optimizers = list(self.optimizers.values())
        if not optimizers:
            raise RuntimeError(f"{method}() came before boost(): there is no step of a boosted optimizer to look at")
        return optimizers

    def labelled(self) -> dict[str, ModelWrapper]:
        """Return the boosted models, by a name for messages; "" for a single one."""
        boosted = self.wrappers()
        if len(boosted) == 1:
            return {"": boosted[0]}
        labelled: dict[str, ModelWrapper] = {}
        for model in boosted:
            name = type(model.unwrap()).__name__
            labelled[f"{name}-{len(labelled)}" if name in labelled else name] = model
        return labelled

    def own(self, model: nn.Module, method: str) -> ModelWrapper:
        """Return the boosted model that `method` was given. Raises TypeError or ValueError for one of somebody else."""
        wrapper = boosted_wrapper(model, method)
        if wrapper not in self.models:
            raise ValueError(f"{method} got a {type(wrapper.unwrap()).__name__} that this Booster did not boost")
        return wrapper
