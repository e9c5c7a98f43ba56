"""The facade: one precision, one plugin, and the user's own loop."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler

from booster.checkpoint.objects import warn_of_unsaved
from booster.checkpoint.run_checkpoints import RunCheckpoints
from booster.common import arguments
from booster.common.devices import resolve_device
from booster.common.hang_watchdog import PATIENCE, start_watchdog
from booster.common.torch_internals.optimizer_internals import remove_guards
from booster.data import DataLoaderWrapper
from booster.facade import (
    checkpoint_methods,
    collectives,
    diagnostic_methods,
    foreign_names,
    frozen_weights,
    pass_methods,
    refusals,
)
from booster.facade.accumulation import Accumulations
from booster.facade.before_boost import BeforeBoost
from booster.facade.booster_state import BoosterState
from booster.facade.foreign_names import translate
from booster.facade.precision_run import PrecisionRun
from booster.facade.switch import BoostedObjects, BoostOutput, BoostRecord
from booster.interface.model import (
    CriterionWrapper,
    ModelWrapper,
    boosted_wrapper,
    guard_raw_calls,
    remove_raw_call_guard,
)
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.interface.scheduler import LRSchedulerWrapper
from booster.mixed_precision import Autopilot, MixedPrecision, PrecisionSchedule
from booster.plugin import Plugin, SingleDevice
from booster.ranks.agreement import is_main, wait_for_all
from booster.tensors.cast_regions import region
from booster.update.context import UpdateOptions

if TYPE_CHECKING:
    from booster.masters.quantized_state import States
    from booster.numerics import Diagnosis

M = TypeVar("M", bound=nn.Module)


class Booster(BoosterState):
    """Wraps model, optimizer and data loader for mixed-precision and distributed training, by one precision and one plugin.

    device: "cpu", "cuda", "cuda:N" or a torch.device; None means the current CUDA device if there is one and the process group,
        if any, can use it, otherwise the CPU.
    mixed_precision: a name (see `booster.mixed_precision.available`), a `MixedPrecision`, a
        `PrecisionSchedule` of them, an `Autopilot`, or None for float32.
    plugin: a `Plugin`, or None for a single device.

    fused_optimizer: True takes Triton kernels of this library on CUDA if a trial of them gives what torch gives, else torch's
        fused kernel if the optimizer has one; an optimizer built with fused=True keeps that. "triton" takes the kernels of
        this library, and raises ValueError at `boost` if they cannot step. "compile" compiles the update of any optimizer
        instead, and says so in a WARNING if it cannot. False does none of it.
    clip_grad_norm: every `step()` clips the gradients of its optimizer to this norm; 0 does not.
    skip_nonfinite: skip steps with gradients that are not finite also without a loss scaler and without clipping.
    max_consecutive_skips: so many skipped steps in a row raise `LossScaleError`; None never does.

    release_gradients: optimizer step in backward: each parameter is stepped as soon as its gradient is complete, and the
        gradient is freed. False does not. "exact": to the same bits as without; under a loss scale, a clip or skip_nonfinite,
        `backward` goes through the graph twice, first for the norm alone. "previous_norm": in one pass, clipping by the norm of
        the step before. See docs/memory.md.

    diagnose: replay skipped steps, the "first", "every" one or so many, None of them, and log what `diagnose` finds as one
        WARNING; `diagnoses` has it too. Without a loss scaler, a clip or skip_nonfinite no step is skipped, and one WARNING
        says so. Until a step is over, what models and criteria were given in it is kept, by reference, and the gradients of
        what they returned.
    states: how the states of elementwise optimizers are kept between steps, in every precision but fp16_apex: "fp32" as they
        are, "bf16" in 2 bytes an element, "8bit" in 1.0625, rounded stochastically; None is what the precision says,
        else "fp32".
    offload_states: keep states of elementwise optimizers, and masters, in pinned memory of the host, and have them on a GPU a
        bucket at a time, while it is stepped; on a CPU they lie in the host's memory already, and nothing changes.

    patience: on several ranks, after so many seconds in `save`, `load`, `gather`, `save_model`, `backward` and the like a
        WARNING names the ranks that have not called it, and where they are, and the wait goes on. A rank that raised and lives
        on, or waits elsewhere in the script, is named within ten seconds. None names those alone. The last Booster's counts for
        all.

    half_products: how a CPU computes matrix products, convolutions, recurrent layers and attention of halves. "float32": in
        float32, on operands rounded to half, the result rounded once, as units for the dtype do; sums differ by their order.
        "auto" does so where this CPU is slower in half, by a table of units, on all ranks alike; one INFO line says so.
        "native": as torch does, to the bit, by kernels up to 150 times slower than those of float32 where the CPU has no such
        units; nothing is entered around a forward then. `sdpa_fp32` of the precision, True or False, has the last word on
        attention.

    Raises ValueError for an unknown name or a device that precision or plugin cannot use, TypeError for other objects.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: str | MixedPrecision | PrecisionSchedule | Autopilot | None = None,
        plugin: Plugin | None = None,
        *,
        fused_optimizer: bool | Literal["compile", "triton"] = True,
        clip_grad_norm: float = 0.0,
        skip_nonfinite: bool = False,
        max_consecutive_skips: int | None = 50,
        release_gradients: Literal[False, "exact", "previous_norm"] = False,
        diagnose: int | Literal["first", "every"] | None = None,
        states: States | None = None,
        offload_states: bool = False,
        patience: float | None = PATIENCE,
        half_products: Literal["auto", "native", "float32"] = "auto",
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            options = list(inspect.signature(Booster).parameters)[:-1]
            foreign_names.refuse_unknown(unknown, options)
        foreign_names.check_places(device, mixed_precision, plugin)
        refusals.check_plugin(plugin)
        arguments.flag("offload_states", offload_states)
        self.plugin = plugin or SingleDevice()
        self.device = resolve_device(device)
        if patience is not None:
            arguments.number("patience", patience, above=0.0, also="None")
        start_watchdog(patience)
        self.plugin.bind(self.device)
        self._options = UpdateOptions(
            fused_optimizer=fused_optimizer,
            clip_grad_norm=clip_grad_norm,
            skip_nonfinite=skip_nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            release_gradients=release_gradients,
        )
        self._boosted = BoostedObjects()
        self._accumulations = Accumulations()
        self._run = PrecisionRun(
            mixed_precision,
            plugin=self.plugin,
            device=self.device,
            options=self._options,
            states=states,
            offload_states=offload_states,
            half_products=half_products,
            boosted=self._boosted,
            accumulations=self._accumulations,
            on_change=self._remember_precision,
            on_measurement=self._remember_measurement,
        )
        # `error_feedback` is a method of the plugin: what a plugin keeps between steps is asked for when something is saved.
        run = {"precision": repr(self.precision), "plugin": type(self.plugin).__name__}
        self._checkpoints = RunCheckpoints(run, self.plugin.error_feedback)
        self._records = None
        self._watcher = None
        self._shown_loss = None
        if self.precision.pins_during_run:
            refusals.check_pins(self.plugin, diagnose)
            from booster.numerics.diagnosis.skips import PinningWatcher

            self._watcher = PinningWatcher(self._boosted.labelled, self._replay, self.plugin.group, self.device)
        elif diagnose is not None:
            from booster.numerics.diagnosis.skips import SkipWatcher

            self._watcher = SkipWatcher(diagnose, self._replay, self.plugin.group, self.device)

    @classmethod
    def from_config(
        cls,
        *,
        fp16: Mapping[str, Any] | None = None,
        clip_grad_norm: float | None = None,
        device: str | torch.device | None = None,
        plugin: Plugin | None = None,
        **options: Any,
    ) -> Booster:
        """A Booster from the dict of the older interface: `fp16=dict(mode=AMP_TYPE.NAIVE, ...)`, see
        `booster.facade.foreign_names.translate`.

        fp16: that dict; None is float32.
        clip_grad_norm: as for `Booster`; None does not clip.
        device, plugin: as for `Booster`; None likewise.
        options: the keyword-only arguments of `Booster`. Raises as those two do.
        """
        precision, clip = translate(fp16, clip_grad_norm)
        return cls(device, precision, plugin, clip_grad_norm=clip, **options)

    @overload
    def boost(
        self,
        model: M,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any | None = None,
    ) -> tuple[M, OptimizerWrapper, Any, Any, Any]: ...

    @overload
    def boost(
        self,
        model: M,
        optimizer: Sequence[Optimizer],
        criterion: Callable[..., Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any | None = None,
    ) -> tuple[M, list[OptimizerWrapper], Any, Any, Any]: ...

    @overload
    def boost(
        self,
        model: M,
        optimizer: None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any | None = None,
    ) -> tuple[M, None, Any, Any, Any]: ...

    @overload
    def boost(
        self,
        model: Sequence[M],
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any | None = None,
    ) -> tuple[list[M], OptimizerWrapper, Any, Any, Any]: ...

    @overload
    def boost(
        self,
        model: Sequence[M],
        optimizer: Sequence[Optimizer] | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any | None = None,
    ) -> tuple[list[M], Any, Any, Any, Any]: ...

    def boost(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any | None = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Prepare the five for training; returns (model, optimizer, criterion, dataloader, lr_scheduler), None for None.

        model: moves to `device`, and the plugin places it; to type checkers it stays of its class, and has its attributes.
            It is a `ModelWrapper` of it. One, or a list of several that one optimizer trains, such as two critics; then a list
            comes back, each was placed by itself, and names of parameters begin with the place in the list, as "0.".
        optimizer: follows the parameters of the model. One, or a list of several that share them, which come back as a list;
            then `backward(loss, optimizers)`, and each is stepped, clipped and saved by itself.
        criterion: the loss, a module or a function; a module moves to `device`.
        dataloader: its batches arrive on `device`; a loader of `prepare_dataloader` is returned as it is.
        lr_scheduler: one, or a list; advances after steps that were applied alone.

        Call it again for models with optimizers of their own, as a GAN does. The user's model and optimizer are edited in
        place; a plugin may broadcast the model's weights.

        Raises before anything is changed: TypeError for a wrong object, RuntimeError for one that was boosted before,
        ValueError for an optimizer without parameters of the model, a parameter in two optimizers or two models of a list, a
        list of models under a `PrecisionSchedule` or an `Autopilot`, a loader that is not sharded in a world of several ranks,
        or a model that cannot train in this precision.
        """
        is_list, shares = isinstance(model, (list, tuple)), isinstance(optimizer, (list, tuple))
        models: list[Any] = list(cast(Any, model)) if is_list else [model]
        optimizers: list[Any] = list(cast(Any, optimizer)) if shares else [optimizer]
        refusals.check_boost(
            models,
            optimizers,
            criterion,
            boosted=self._boosted,
            plugin=self.plugin,
            options=self._options,
            is_list=is_list,
            shares=shares,
            changes=self._run.changes,
        )
        owners = refusals.scheduler_owners(lr_scheduler, optimizer, self._boosted.optimizers)
        loader = refusals.boosted_loader(dataloader, self._boosted.loaders, device=self.device, plugin=self.plugin)
        refusals.check_alike(models, self.precision, self.plugin.group)
        # Before anything is changed: a later switch goes back to this.
        built = [BeforeBoost(one, self._boosted.dtypes()) for one in models]
        boosted, boosted_optimizer, boosted_criterion = self.precision.configure(
            models if is_list else model,
            optimizers if shares else optimizer,
            criterion,
            placement=self.plugin,
            options=self._options,
        )
        wrappers = [each for each in (boosted_optimizer if shares else [boosted_optimizer]) if each is not None]
        wrapped_models: list[ModelWrapper] = boosted if is_list else [boosted]
        # Weakly: an optimizer that the user keeps does not keep a model that was dropped.
        for each in wrappers:
            update_of(each).models = list(map(weakref.ref, wrapped_models))
            each.after_first = warn_of_unsaved
        for place, one in enumerate(wrapped_models):
            # What belongs to all models of a list is kept with the first.
            own = (boosted_criterion, wrappers) if place == 0 else (None, [])
            self._boosted.add(models[place], BoostRecord(built[place], one, *own, alone=len(models) == 1))
            if wrappers and self.plugin.pipeline(one.module) is None:  # a pipeline's schedule calls layers by itself
                guard_raw_calls(one, several_ranks=self.plugin.group is not None)
            for watching in (self._records, self._watcher):
                if watching is not None:
                    watching.attach(one, *own)
        if not is_list:
            self._run.attach(boosted, wrappers)
        if loader is not None:
            self._boosted.loaders.add(loader)
        wrapped = [LRSchedulerWrapper(each, self._boosted.optimizers[id(owner)]) for each, owner in owners]
        schedulers = wrapped if isinstance(lr_scheduler, (list, tuple)) else next(iter(wrapped), None)
        return BoostOutput((boosted, boosted_optimizer, boosted_criterion, loader, schedulers))

    if not TYPE_CHECKING:  # which would take every name for legal

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(foreign_names.missing_method(name))

    def __repr__(self) -> str:
        plugin = f"{type(self.plugin).__name__}()"
        return f"Booster(device={str(self.device)!r}, mixed_precision={self.precision!r}, plugin={plugin})"

    def switch(self, mixed_precision: str | MixedPrecision | None) -> None:
        """Go over to another precision between two steps; what `boost` returned stays the same objects, and changes in place.

        mixed_precision: as for `Booster`, and its `states`, `offload_states` and `half_products` hold here too. Weights,
        masters, states of optimizers, loss scales and random numbers go on as if they had been saved, everything built anew
        under that precision, and loaded, to the bit, and at no time are states there twice. A loss scale begins anew where the
        precision so far had none of its kind. Stochastic rounding draws other numbers than after a load. A collective.

        Raises on all ranks, with nothing changed, between backward and step, inside `accumulate` and `no_sync`, for a compiled
        model, for the levels of apex, and where the plugin cannot: in a pipeline, or where weights that ranks divide by
        fully_shard would have to lie in another dtype; and as `Booster` and `boost` do, for what that precision refuses.
        """
        self._run.switch(mixed_precision)

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """What skipped steps were diagnosed as, with `Booster(diagnose=...)`, the latest last."""
        return () if self._watcher is None else tuple(self._watcher.diagnoses)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass, for losses and penalties computed outside model and criterion."""
        return region(self.precision.forward_context)

    def unwrap(self, boosted: Any) -> Any:
        """The user's object inside `boosted`, a boosted model, optimizer, criterion, dataloader or scheduler."""
        if isinstance(boosted, nn.Module):
            wrapper = boosted_wrapper(boosted, "unwrap")
            remove_raw_call_guard(wrapper)
            return wrapper.unwrap()
        if isinstance(boosted, OptimizerWrapper):
            remove_guards(boosted.unwrap())
        if isinstance(boosted, (OptimizerWrapper, CriterionWrapper, DataLoaderWrapper, LRSchedulerWrapper)):
            return boosted.unwrap()
        raise TypeError(f"unwrap needs a boosted object, as boost() returned it, got {arguments.described(boosted)}")

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[Sampler[Any]] | None = None,
        **dataloader_options: Any,
    ) -> DataLoaderWrapper:
        """A boosted DataLoader over this rank's share of `dataset`: batches arrive on `device`, and it needs no `boost()`.

        dataset: with a length, or an `IterableDataset`, which deals to ranks by itself.
        batch_size: samples of one rank in a step.
        shuffle: draw the order of each epoch anew.
        seed: of the shuffling, the same on all ranks, and of the workers, which differ.
        drop_last: drop the tail that does not fill a batch, or does not divide among ranks; without it the sampler repeats
            samples to divide.
        pin_memory: batches in pinned host memory, from which copies to a GPU do not wait.
        num_workers: processes that read; 0 reads in this one.
        distributed_sampler_cls: the sampler that deals to several ranks; None is torch's DistributedSampler.
        dataloader_options: any other argument of `torch.utils.data.DataLoader`.
        """
        loader = self.plugin.prepare_dataloader(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            distributed_sampler_cls=distributed_sampler_cls,
            **dataloader_options,
        )
        return DataLoaderWrapper(loader, self.device)

    def gather(self, tensor: torch.Tensor, dataloader: DataLoaderWrapper | None = None) -> torch.Tensor:
        """Rows of `tensor` from all data-parallel ranks, on every rank; a collective.

        dataloader: the boosted loader that the rows were computed from, batch by batch or over a whole epoch: the rows
            come in the order in which the loader deals them, the dataset's unless it shuffles, without those that the sampler
            repeated to divide the dataset evenly. None leaves these in.
        """
        return collectives.gather(tensor, group=self.plugin.data_parallel_group, padding_from=dataloader)

    def reduce(self, tensor: Any, op: Literal["mean", "sum", "max", "min"] = "mean") -> Any:
        """`tensor` (or number, or container of them) reduced over data-parallel ranks, and those that share sequences, on every
        rank; a collective.

        op: how: their mean, sum, largest or smallest.
        """
        return collectives.reduce(tensor, op, group=self.plugin.averaging_group)

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0 of the job; True without a process group. `DistCoordinator` knows more of ranks."""
        return is_main()

    def print(
        self, *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = True
    ) -> None:
        """Print on rank 0 of the job alone, as `print` does. No collective: ranks need not all call it.

        values, sep, end: as for Python's `print`.
        file: a stream to print into; None is standard output.
        flush: True, so that lines of a job that writes into a file come at once.
        """
        if is_main():
            print(*values, sep=sep, end=end, file=file, flush=flush)  # noqa: T201 - printing is what was asked for

    def wait_for_everyone(self) -> None:
        """Wait until every rank of the job has come here; nothing without a process group. A collective."""
        wait_for_all()

    # Passes, and groups of them
    backward = pass_methods.backward
    accumulate = pass_methods.accumulate
    no_sync = pass_methods.no_sync
    execute_pipeline = pass_methods.execute_pipeline
    shard_sequence = pass_methods.shard_sequence
    token_mean = pass_methods.token_mean
    balancing_loss = pass_methods.balancing_loss
    capture = pass_methods.capture
    capturable = pass_methods.capturable
    _captured = pass_methods.captured

    # What a run says of itself
    record = diagnostic_methods.record
    diagnose = diagnostic_methods.diagnose
    estimate_memory = diagnostic_methods.estimate_memory
    memory = diagnostic_methods.memory
    profile = diagnostic_methods.profile
    progress = diagnostic_methods.progress

    # Checkpoints, and weights for other programs
    save = checkpoint_methods.save
    wait_for_save = checkpoint_methods.wait_for_save
    load = checkpoint_methods.load
    resume_or_start = checkpoint_methods.resume_or_start
    stop_requested = checkpoint_methods.stop_requested
    save_model = checkpoint_methods.save_model
    load_model = checkpoint_methods.load_model
    save_optimizer = checkpoint_methods.save_optimizer
    load_optimizer = checkpoint_methods.load_optimizer
    save_lr_scheduler = checkpoint_methods.save_lr_scheduler
    load_lr_scheduler = checkpoint_methods.load_lr_scheduler
    sync_weights = checkpoint_methods.sync_weights
    enable_lora = frozen_weights.enable_lora
    save_lora = frozen_weights.save_lora
