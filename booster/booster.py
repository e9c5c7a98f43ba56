"""The facade: one precision, one plugin, and the user's own loop."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler

from booster.checkpoint.objects import Loaded
from booster.checkpoint.run_checkpoints import RunCheckpoints
from booster.common import arguments
from booster.common.devices import resolve_device
from booster.common.hang_watchdog import PATIENCE, watch
from booster.common.torch_internals.optimizer_internals import remove_guards
from booster.data import DataLoaderWrapper
from booster.facade import collectives, foreign_names, refusals
from booster.facade.accumulation import Accumulation, Accumulations, NoSync
from booster.facade.before_boost import BeforeBoost
from booster.facade.boosted_objects import BoostedObjects, BoostOutput
from booster.facade.older_config import translate
from booster.facade.pipeline_pass import execute
from booster.facade.precision_run import PrecisionRun
from booster.interface.model import (
    CriterionWrapper,
    ModelWrapper,
    boosted_wrapper,
    guard_raw_calls,
    remove_raw_call_guard,
)
from booster.interface.optimizer import OptimizerWrapper, gradients_of, updates_of
from booster.interface.scheduler import LRSchedulerWrapper
from booster.mixed_precision import Autopilot, MixedPrecision, PrecisionSchedule
from booster.mixed_precision.low_precision.autopilot import Measurement
from booster.mixed_precision.schedule import Phase
from booster.plugin import Plugin, SingleDevice
from booster.ranks.coordinator import is_main, wait_for_all
from booster.tensors.cast_regions import region
from booster.update.backward import run_backward
from booster.update.context import UpdateOptions

if TYPE_CHECKING:
    from booster.capture.captured import CapturedStep
    from booster.capture.graph import Recorder
    from booster.facade.progress_bar import DisplayedLoss
    from booster.masters.quantized_state import States
    from booster.memory import Estimate, Measured
    from booster.numerics import Diagnosis, Record
    from booster.numerics.diagnosis.replay import Replay
    from booster.numerics.diagnosis.skips import SkipWatcher
    from booster.numerics.record.record import Records

Optimizers = OptimizerWrapper | Sequence[OptimizerWrapper]
M = TypeVar("M", bound=nn.Module)


class Booster:
    """Wraps model, optimizer and data loader for mixed-precision and distributed training, by one precision and one plugin.

    device: "cpu", "cuda", "cuda:N" or a torch.device; None means the current CUDA device if there is one and the process group,
        if any, can use it, otherwise the CPU.
    mixed_precision: a name (see `booster.mixed_precision.available`), a `MixedPrecision`, a
        `PrecisionSchedule` of them, an `Autopilot`, or None for float32.
    plugin: a `Plugin`, or None for a single device.

    fused_optimizer: True takes Triton kernels of this library on CUDA, where a trial of them is like torch, else the fused
        kernel of torch optimizers that have one, which also who builds them with fused=True keeps; "triton" takes those of
        this library, and raises ValueError at `boost` where they cannot step; "compile" compiles the update of any optimizer
        instead, and says so in a WARNING where it cannot; False does none of it.
    clip_grad_norm: every `step()` clips the gradients of its optimizer to this norm; 0 does not.
    skip_nonfinite: skip steps whose gradients are not finite also without a loss scaler and without clipping.
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
        are, "bf16" in 2 bytes an element, "8bit" in 1.0625, rounded by chance; None is what the precision says, "fp32" unless
        it was told otherwise.
    offload_states: keep states of elementwise optimizers, and masters, in pinned memory of the host, and have them on a GPU a
        bucket at a time, while it is stepped; on a CPU they lie in the host's memory already, and nothing changes.

    patience: on several ranks, after so many seconds in `save`, `load`, `gather`, `save_model`, `backward` and the like a
        WARNING names the ranks that have not called it, and where they are, and the wait goes on. A rank that raised and lives
        on, or stands still in the script, is named within ten seconds. None names those alone. The last Booster's counts for
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
        watch(patience)
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
            on_change=self._note_precision,
            on_measurement=self._note_measurement,
        )
        run = {"precision": repr(self.precision), "plugin": type(self.plugin).__name__}
        self._checkpoints = RunCheckpoints(self.plugin.group, run, self.plugin.carried)
        self._records: Records | None = None
        self._watcher: SkipWatcher | None = None
        self._shown_loss: DisplayedLoss | None = None
        if self.precision.pins_during_run:
            refusals.check_pins(self.plugin, diagnose)
            from booster.numerics.diagnosis.skips import PinningWatcher

            self._watcher = PinningWatcher(self._boosted.labelled, self._replay, self.plugin.group, self.device)
        elif diagnose is not None:
            from booster.numerics.diagnosis.skips import SkipWatcher

            self._watcher = SkipWatcher(diagnose, self._replay, self.plugin.group, self.device)

    @property
    def precision(self) -> MixedPrecision:
        """What is trained in now."""
        return self._run.precision

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
        """A Booster from the dict of the older interface: `fp16=dict(mode=AMP_TYPE.NAIVE, ...)`, see `config.translate`.

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

        model: moves to `device`, and the plugin places it; to type checkers it stays of its own class, whose attributes it has.
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
        models = cast(list[nn.Module], list(model) if isinstance(model, (list, tuple)) else [model])
        several = list(optimizer) if isinstance(optimizer, (list, tuple)) else None
        refusals.check_boost(
            models,
            [optimizer] if several is None else several,
            criterion,
            boosted=self._boosted,
            plugin=self.plugin,
            options=self._options,
            is_list=isinstance(model, (list, tuple)),
            shares=several is not None,
            changes=self._run.changes,
        )
        owners = refusals.scheduler_owners(lr_scheduler, optimizer, self._boosted.optimizers)
        loader = refusals.boosted_loader(dataloader, self._boosted.loaders, device=self.device, plugin=self.plugin)
        # Before anything is changed: a later switch goes back to this.
        built = [BeforeBoost(one, self._boosted.dtypes()) for one in models]
        boosted, boosted_optimizer, boosted_criterion = self.precision.configure(
            model if isinstance(model, nn.Module) else models,
            optimizer if several is None else several,
            criterion,
            placement=self.plugin,
            options=self._options,
        )
        wrappers = [
            each for each in ([boosted_optimizer] if several is None else boosted_optimizer) if each is not None
        ]
        wrapped_models: list[ModelWrapper] = [boosted] if isinstance(model, nn.Module) else boosted
        # Weakly: an optimizer that the user keeps does not keep a model that was dropped.
        for update in updates_of(wrappers):
            update.models = list(map(weakref.ref, wrapped_models))
        for place, one in enumerate(wrapped_models):
            # What belongs to all models of a list is kept with the first.
            own = (boosted_criterion, wrappers) if place == 0 else (None, [])
            self._boosted.add(models[place], one, *own, built[place], alone=len(models) == 1)
            if wrappers and self.plugin.pipeline(one.module) is None:  # a pipeline's schedule calls layers by itself
                guard_raw_calls(one, several_ranks=self.plugin.group is not None)
            for watching in (self._records, self._watcher):
                if watching is not None:
                    watching.attach(one, *own)
        if not isinstance(model, (list, tuple)):
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

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: Optimizers,
        *,
        loss_id: int = 0,
        inputs: Any = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Accumulate the gradients of `loss` (one element), scaled as the optimizer's loss scaler wants.

        optimizer: the boosted optimizer that will step on it, or several: then the smallest of their scales is used and they
            step together or not at all.
        loss_id: which of the precision's loss scalers, for those that keep several.
        inputs, retain_graph, create_graph: those of `torch.autograd.backward`; inputs=None is every leaf.

        Under `accumulate` the loss is divided as given there. Side effect: the plugin's gradient collectives, except inside
        `no_sync`.
        """
        if isinstance(optimizer, OptimizerWrapper):
            optimizers = [optimizer]
        else:
            optimizers = refusals.check_boosted_optimizers(optimizer, "backward")
        # Calls cost in every step, so what nearly every call passes is compared here: 0 is a scaler of every precision.
        if type(loss_id) is not int or loss_id != 0:
            self.precision.check_loss_id(loss_id)
        group, divisor, weight, delayed = None, 1.0, 1.0, False
        if self._accumulations.any_open:  # an attribute, for the same reason
            group = self._accumulations.group_of(optimizers)
            delayed = self._accumulations.leaves_unsynchronised(optimizers)
            if group is not None:
                group.before_backward()
                divisor, weight, delayed = group.divisor, group.weight, delayed or group.delayed
        run_backward(
            loss,
            gradients_of(optimizers),
            optimizers[0].backward_context,
            divisor=divisor,
            weight=weight,
            loss_id=loss_id,
            delayed=delayed,
            inputs=inputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
        )
        if group is not None:
            group.after_backward()
        if self._shown_loss is not None:
            self._shown_loss.keep(loss if weight == 1.0 else loss.detach() * weight)
        if self._watcher is not None:
            self._watcher.log.end_pass(loss, optimizers, divisor)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: Optimizers | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Forward and backward of the next batch of `data_iter`, in the micro-batches of the plugin; a pipeline needs it.

        data_iter: batches, (inputs..., target): `criterion(model(*inputs), target)`; or mappings: `criterion(model(**batch),
            batch)`. All ranks of a pipeline read the same ones.
        model: the boosted model.
        criterion: a function of output and target; the loss is the mean over micro-batches.
        optimizer: as for `backward`; None evaluates.
        return_loss: whether the loss is returned.
        return_outputs: whether what the model returned is.

        Returns {"loss": detached, 0-dim, unscaled, of this rank's batch, on every rank of a pipeline; "outputs": what the model
        returned, on the last stage}, None for what was not asked for or is elsewhere.
        """
        optimizers = [] if optimizer is None else refusals.check_boosted_optimizers(optimizer, "execute_pipeline")
        arguments.function("criterion", criterion, "a function of output and target")
        arguments.flag("return_loss", return_loss)
        arguments.flag("return_outputs", return_outputs)
        wrapper, batch = self._boosted.own(model, "execute_pipeline"), refusals.next_batch(data_iter)
        run = functools.partial(
            execute,
            batch,
            wrapper,
            criterion,
            optimizers,
            plugin=self.plugin,
            precision=self.precision,
            device=self.device,
            accumulating=self._accumulations.any_of(optimizers),
            accumulate=lambda count: self.accumulate(wrapper, optimizers, count),
            backward=lambda loss: self.backward(loss, optimizers),
            return_loss=return_loss,
            return_outputs=return_outputs,
        )
        if self._watcher is None or not optimizers or self.plugin.pipeline(wrapper.module) is None:
            return run()
        return self._watcher.keep_pipeline(run, optimizers)

    def accumulate(
        self, model: nn.Module, optimizer: Optimizers, num_micro_batches: int, num_tokens: float | None = None
    ) -> AbstractContextManager[Any]:
        """Context around one group of micro-batches whose gradients are summed before a step (gradient accumulation).

        model, optimizer: those that the group trains.
        num_micro_batches: how many backward passes the group has; each is divided by it, and only the last synchronises,
            so a short last group passes its own length.
        num_tokens: divide by this instead, for losses summed over tokens: the tokens of the whole group over all micro-batches
            and data-parallel ranks, so one number on all of them, as `b.reduce(own_tokens, "sum")` gives. None divides by
            num_micro_batches.

        On several ranks the first groups of a run are a small collective, and ValueError where ranks gave another num_tokens.

            for group in groups:
                with b.accumulate(model, optimizer, num_micro_batches=len(group)):
                    for x, y in group:
                        b.backward(criterion(model(x), y), optimizer)
                optimizer.step()
        """
        optimizers = refusals.check_boosted_optimizers(optimizer, "accumulate")
        num_micro_batches, num_tokens = refusals.checked_group(num_micro_batches, num_tokens)
        self._run.follow()
        placed = self._boosted.own(model, "accumulate").module
        size = self.plugin.data_parallel_size
        self._accumulations.compare(num_tokens, self.plugin.group)
        # Ranks average their gradients, while tokens count over all of them.
        divisor = float(num_micro_batches) if num_tokens is None else float(num_tokens) / size
        group = Accumulation(
            model,
            optimizers,
            num_micro_batches=num_micro_batches,
            divisor=divisor,
            no_sync=lambda: self.plugin.no_sync(placed),
            synchronises=size > 1,
        )
        return self._accumulations.open(group)

    def no_sync(self, model: nn.Module, optimizer: Optimizers | None = None) -> AbstractContextManager[Any]:
        """Context in which forward and backward of `model` leave gradients unsynchronised among ranks.

        optimizer: the boosted optimizer of the model, or several, for plugins that hold gradients in it; None where none does.
        """
        optimizers = None if optimizer is None else refusals.check_boosted_optimizers(optimizer, "no_sync")
        boosted = self._boosted.own(model, "no_sync")
        self._run.follow()
        entry = NoSync(boosted, optimizers, self.plugin.no_sync(boosted.module))
        return self._accumulations.unsynchronised(entry)

    def switch(self, mixed_precision: str | MixedPrecision | None) -> None:
        """Go over to another precision between two steps; what `boost` returned stays the same objects, and changes in place.

        mixed_precision: as for `Booster`, whose `states`, `offload_states` and `half_products` hold for it too. Weights,
        masters, states of optimizers, loss scales and random numbers go on as if they had been saved, everything built anew
        under that precision, and loaded, to the bit, and at no time are states there twice. A loss scale begins anew where the
        precision so far had none of its kind. Rounding by chance draws other numbers than after a load. A collective.

        Raises on all ranks, with nothing changed, between backward and step, inside `accumulate` and `no_sync`, for a compiled
        model, for the levels of apex, and where the plugin cannot: in a pipeline, or where weights that ranks divide by
        fully_shard would have to lie in another dtype; and as `Booster` and `boost` do, for what that precision refuses.
        """
        self._run.switch(mixed_precision)

    def record(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = 100,
        activations: str | Sequence[str] = (),
        tracker: Callable[[dict[str, float], int], Any] | None = None,
    ) -> Record:
        """Write down every optimizer step from now on, in `folder`: losses, scales, norms, clips, and skips with culprits.

        folder: is made; each rank appends to a file of its own there, so ranks exchange nothing, and a kill loses no line that
            was written.
        every: in the first step and in every so many, gradients and weights are looked at too, parameter by parameter: how
            their magnitudes are spread, what underflows, which weights stand still; None never looks.
        activations: names of modules whose outputs, and the gradients of them, are looked at in these steps too, by forward
            hooks; `*` stands for anything within one part of a name, `**` across parts. Written names of a second model begin
            with its class.
        tracker: also called with the numbers of each step by name, and the number of the step; a tracker's own
            `log(values, step)` will do. What it raises is warned of once, and training goes on. None calls nothing.

        A disk that is full ends the record with a warning, and not the training. Nothing in a step waits for a device: there,
        lines follow some steps later. `booster report FOLDER` shows it. Returns the record, whose `close()` ends it; the end of
        the process does too.

        Raises ValueError for a folder that this Booster writes to already, and unless every=None under release_gradients, where
        no gradients are left to look at; OSError where it cannot write.
        """
        # Imported here, as for `diagnose`: most scripts never need it.
        from booster.numerics.record.record import Records

        refusals.check_recorded(every, activations, self._options)

        if self._records is None:
            self._records = Records(self.precision, self.plugin, self.device)
        return self._records.open(
            folder,
            self._boosted.wrappers(),
            self._boosted.optimizers.values(),
            every=every,
            activations=activations,
            tracker=tracker,
        )

    def diagnose(self, forward: Callable[[], Any], optimizer: Optimizers) -> Diagnosis:
        """Replay a step that went bad, and say which operation made the first inf or NaN, why, and what helps.

        forward: computes the loss and returns it, `lambda: criterion(model(x), y)`; or runs a whole step but for
            `optimizer.step()`, by `backward` or `execute_pipeline`, and returns the loss. It is called several times, with
            the random states of now.
        optimizer: as for `backward`. The loss scale is that of its last step where that was skipped, else the present one.

        Nothing changes: weights, buffers, gradients, loss scale and random states are as before, and nothing is hooked.
        What `forward` does besides, such as reading the next batch or printing, is done each time. A collective: all ranks
        call it alike. Cost: about three steps for a replay; one to some ten of them, and a copy of what they write to.
        Raises what `forward` raises, and TypeError for a `forward` that returns no loss.
        """
        from booster.numerics.diagnosis.diagnosis import diagnose
        from booster.numerics.diagnosis.replay import replayed_scale

        arguments.function("forward", forward, "a function that computes and returns the loss")
        optimizers = refusals.check_boosted_optimizers(optimizer, "diagnose")
        with nullcontext() if self._watcher is None else self._watcher.log.paused():
            replay = self._replay(forward, optimizers, replayed_scale(optimizers))
            return diagnose(replay, group=self.plugin.group, device=self.device)

    def capturable(self, train_step: Callable[..., Any], *example_batch: Any) -> list[str]:
        """Run a whole training step and return what in it keeps a CUDA graph from being made of it, `path/file.py:LINE: what`.

        Empty where nothing does. No GPU is needed: boosted optimizers decide as they would on one, so what is listed is what
        a GPU would be waited for, found by running: `.item()`, `float(loss)`, an `if` on a tensor, printing, masks as indices;
        in helpers too; with the line of the user's statement. Besides, what a graph would do again with the numbers of its
        capture: options of a group written by Python, as by a scheduler that was not boosted, and copies of numbers to the
        device. Tensors that are made without naming a device lie on the host, and cost nothing to read.

        train_step: called with `example_batch`, on the device: forward, `backward`, clip, `optimizer.step()`,
            `scheduler.step()`,
        `zero_grad`. It runs twice, of which the second is looked at. Weights, states, gradients, loss scales, schedules and
        random states are afterwards what they were, also where it raises; what it does besides, such as appending to a list,
        it does. No line is written to a record. Costs a copy of all that training changes.
        """
        from booster.capture.trial import reads_of
        from booster.data.boosted_loader import to_device

        arguments.function("train_step", train_step, "a function that makes one training step of a batch")
        optimizers = self._boosted.all_optimizers("capturable")
        batch, roots = to_device(example_batch, self.device), self._boosted.modules()
        with nullcontext() if self._watcher is None else self._watcher.log.paused(), self._unrecorded():
            return reads_of(train_step, batch, roots=roots, optimizers=optimizers, device=self.device)

    def capture(self, train_step: Callable[..., Any], *example_batch: Any, max_graphs: int = 8) -> Callable[..., Any]:
        """Return `train_step` as a CUDA graph: one launch for a whole step, where launches are the price.

            step = b.capture(train_step, x, y)
            for x, y in loader:
                loss = step(x, y)

        train_step: a function of a batch that makes a step with boosted objects: forward, `backward`, clip, `optimizer.step()`,
        `scheduler.step()` of a boosted scheduler, `zero_grad`; or a part of one, such as a micro-batch of `accumulate`. It may
        return tensors and results of steps, which come back as copies, without a graph of autograd. What it computes from
        Python's numbers, and draws from Python's random ones, is the same in every replay. Numbers in the batch tell one kind
        of call from another, as do shapes, dtypes, modules in training or not, and gradients that wait. The first call of a
        kind runs `train_step`, the second is recorded, those after it are replayed; both run it for what it does besides.
        example_batch: one batch, on which it is looked at what a host would read.
        max_graphs: so many kinds; others run without a graph, to the same bits.

        Learning rates are read from tensors, in float32 on a GPU, so schedules go on; other options of a group that change,
        loaded states and new groups have graphs made anew. Skips, loss scales, counters and results are those of each step.
        While a record is written or skipped steps are diagnosed, steps run without a graph. Where there is no GPU all do, and
        one WARNING says so. Nothing changes before the first call; on a GPU `train_step` runs twice, as for `capturable`.
        Raises RuntimeError for what `capturable` lists, by line, and by name for several ranks, optimizers that decide on the
        host, offloaded states and release_gradients.
        """
        from booster.capture.graph import recorder_of

        arguments.function("train_step", train_step, "a function that makes one training step of a batch")
        arguments.count("max_graphs", max_graphs)
        return self._captured(train_step, example_batch, recorder_of(self.device), max_graphs)

    def _captured(
        self, train_step: Callable[..., Any], example_batch: Sequence[Any], recorder: Recorder | None, max_graphs: int
    ) -> CapturedStep:
        from booster.capture.captured import CapturedStep
        from booster.capture.trial import check

        optimizers = self._boosted.all_optimizers("capture")
        if recorder is not None:
            check(optimizers, plugin=type(self.plugin).__name__, several_ranks=self.plugin.group is not None)
            reads = self.capturable(train_step, *example_batch)
            if reads:
                lines = "".join(f"\n  {line}" for line in reads)
                raise RuntimeError(
                    f"capture() makes no graph of a step that a host has a part in; capturable() lists:{lines}"
                )
        return CapturedStep(
            train_step,
            modules=self._boosted.modules(),
            optimizers=optimizers,
            passes=self._accumulations,
            device=self.device,
            recorder=recorder,
            max_graphs=max_graphs,
            follow=self._run.follow,
        )

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """What skipped steps were diagnosed as, with `Booster(diagnose=...)`, the latest last."""
        return () if self._watcher is None else tuple(self._watcher.diagnoses)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | os.PathLike[str] | None = None,
        lora_config: Any = None,
        *,
        storage_dtype: torch.dtype | Literal["int8", "fp8", "nf4"] | None = None,
    ) -> Any:
        """LoRA, QLoRA: freeze `model` and put low-rank adapters of peft around it, in place; returns the PeftModel, to boost.

        pretrained_dir: a folder of `save_lora` or of peft, whose adapters train on; None makes new ones by `lora_config`.
        lora_config: a peft.LoraConfig, for new adapters; None where there is a folder.
        storage_dtype: how the weights of frozen linear layers are stored, as for `load_weights`: "nf4" (QLoRA), "int8", "fp8",
            torch.bfloat16 or torch.float16, from what they are now; all but those that others share, and what makes the logits.
            None leaves them. Adapters are float32.

        Raises ImportError without peft, RuntimeError for a boosted model, and ValueError for a model with adapters and for
        what cannot be on packed weights: DoRA, and adapters that begin with numbers of the base.
        """
        from booster.facade.adapters import put_adapters

        return put_adapters(model, pretrained_dir, lora_config, storage_dtype)

    def save_lora(self, model: nn.Module, folder: str | os.PathLike[str]) -> None:
        """Write the adapters (LoRA) of the boosted `model` alone, as peft reads them; a collective.

        folder: gets adapter_model.safetensors and adapter_config.json, for `enable_lora(pretrained_dir=...)`, for
        `PeftModel.from_pretrained` and for servers.

        `save_model(merge=True)` merges them. Raises ValueError for a model without adapters.
        """
        self._checkpoints.save_lora(boosted_wrapper(model, "save_lora"), folder)

    def estimate_memory(
        self, model: nn.Module, optimizer: Optimizer, batch: Any, criterion: Callable[..., Any]
    ) -> Estimate:
        """Estimate what a training step takes of memory on this rank, before `boost`; nothing is allocated, nothing changes.

        model, optimizer: not boosted yet; the model may be on the meta device.
        batch: of this rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole; tensors
            may be on the meta device.
        criterion: a function of output and target.

        The precision is this Booster's, of a schedule the phase that takes most; so are plugin, number of ranks and device.
        No collective. Raises ValueError for what is not known, as pipelines and tensor parallelism, and as `memory.estimate`.
        """
        from booster.memory import estimate_placed

        refusals.check_model(model, self._boosted.models, self.plugin)
        arguments.function("criterion", criterion, "a function of output and target")
        arguments.instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        placed: Any = {"plugin": self.plugin, "device": self.device, "options": self._options}
        each = (
            estimate_placed(model, optimizer, batch, criterion, precision=phase, **placed)
            for phase in self._run.precisions
        )
        return max(each, key=lambda found: found.peak)

    def memory(self, model: nn.Module, optimizer: OptimizerWrapper) -> Measured:
        """Count what the boosted `model` and its `optimizer` hold on this rank now; no collective, no copy.

        After a step, with gradients there, it compares with what `estimate_memory` said.
        """
        from booster.memory import measure

        wrappers = refusals.check_boosted_optimizers(optimizer, "memory")
        if len(wrappers) > 1:
            raise ValueError(f"memory needs one optimizer, got {len(wrappers)}; count each by itself")
        return measure(self._boosted.own(model, "memory"), wrappers[0])

    def save(
        self,
        folder: str | os.PathLike[str],
        model: Any,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        *,
        extra: Any = None,
        step: int | None = None,
        keep_last: int | None = None,
        async_save: bool = False,
        frozen: bool = True,
    ) -> Path:
        """Write everything of the run as one checkpoint below `folder`, `folder/step-N`, and return its path; a collective.

        model, optimizer, criterion, dataloader, lr_scheduler: what `boost` returned, or a list or dict of such; None leaves it
            out.
        extra: what else is to be kept: numbers, strings, tensors, containers of them, objects with state_dict(); None is none.
        step: the number in its name; None counts on from the newest. A checkpoint of the same step stays until the new one
            is complete.
        keep_last: remove all but so many of the newest afterwards; None keeps all.
        async_save: return as soon as the state is copied to host memory, and write while training goes on; the next save, a
            load and the end of the process wait, and a failure surfaces there.
        frozen: False leaves out parameters of models that do not train, such as those under adapters; a load leaves those
            that the model has, which are to be the same.

        Kept are weights, optimizer states and masters by whole name and shape, loss scales and counters, schedules, the order
        and position of the data, the random states of every rank, and `extra`. Raises `booster.checkpoint.CheckpointError` on
        all ranks if any fails, with `folder` as it was; RuntimeError between backward and step, as within a group of
        `accumulate`, since gradients are not kept.
        """
        given = (model, optimizer, criterion, dataloader, lr_scheduler, extra)
        if (schedule := self._run.state_dict()) is not None:
            self._checkpoints.note(schedule=schedule)
        return self._checkpoints.save(
            folder, given, step=step, keep_last=keep_last, async_save=async_save, frozen=frozen
        )

    def wait_for_save(self) -> None:
        """Wait until what `save(async_save=True)` writes is complete; raises CheckpointError if it failed."""
        self._checkpoints.wait()

    def load(
        self,
        folder: str | os.PathLike[str],
        model: Any,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        *,
        extra: Any = None,
        strict: bool = True,
    ) -> Loaded:
        """Load a checkpoint of `save`, whatever layout and precision wrote it; returns its `.step`, `.extra` and `.path`.

        folder: a checkpoint, or a folder of checkpoints, of which the newest valid one is taken.
        model, optimizer, criterion, dataloader, lr_scheduler: as `save` was given them; None leaves it out.
        extra: objects with load_state_dict(), in the places where `save` was given them; None gives back what it was given.
        strict: the model's entries must be those of the checkpoint; otherwise what differs is left out and named in a WARNING.

        A collective. Every byte is verified, and names, shapes and classes compared, before anything is touched. Raises
        `booster.checkpoint.CheckpointError` on all ranks, listing all that differs, with nothing loaded.
        """
        given = (model, optimizer, criterion, dataloader, lr_scheduler, extra)
        return self._resumed(self._checkpoints.load(folder, given, strict=strict))

    def resume_or_start(
        self,
        folder: str | os.PathLike[str],
        model: Any,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        *,
        extra: Any = None,
    ) -> Loaded:
        """Load the newest valid checkpoint below `folder`, or nothing where there is none yet; then `.step` is 0.

        model, optimizer, criterion, dataloader, lr_scheduler, extra: as for `load`; None leaves it out.

        From here on SIGTERM and SIGUSR1 do not end the process: `stop_requested` says that one came.

            run = b.resume_or_start(folder, model, optimizer, criterion, loader, schedule)
            for step in range(run.step, total):
                ...
                if b.stop_requested():
                    b.save(folder, model, optimizer, criterion, loader, schedule, step=step + 1)
                    break

        A collective. Raises as `load` does, also where all checkpoints of `folder` are damaged.
        """
        given = (model, optimizer, criterion, dataloader, lr_scheduler, extra)
        return self._resumed(self._checkpoints.resume_or_start(folder, given))

    def stop_requested(self) -> bool:
        """Whether SIGTERM or SIGUSR1 has reached any rank since `resume_or_start`; a collective of one number."""
        return self._checkpoints.stop_requested()

    def save_model(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        shard: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
        *,
        weights: Literal["bf16", "fp16", "fp8", "int8"] | None = None,
        merge: bool = False,
    ) -> None:
        """Write the whole weights of the boosted `model` for other programs; a collective.

        path: the file; with `shard` a folder.
        shard: write files of at most `size_per_shard` MB, an index, and the model's own configuration if it has one, so that
            `from_pretrained` opens it.
        prefix: what the names of these files begin with; None is the usual one.
        size_per_shard: in MB.
        use_safetensors: False writes files of `torch.save`.
        weights: None writes them as the model stores them. The others are made of half weights where the precision computes
            with these throughout, also where shards are float32. "bf16" and "fp16" round all floating parameters. "fp8" and
            "int8" write linear layers in 8 bits, and other floating parameters in float16 where the precision computes in it,
            else in bfloat16. "fp8": e4m3 under a scale for each 128 x 128 numbers, as FineGrainedFP8Config of transformers and
            vLLM read it. "int8": a scale for each row, as compressed-tensors has it for products in int8 (W8A8). Both are for
            models of transformers, need `shard`, and leave wide what makes the logits, shared weights, and layers that 128 does
            not divide ("fp8"), which config.json names.
        merge: write adapters of `enable_lora` as part of what they adapt, under the names of the model without them.

        Weights that the optimizer keeps in float32 behind half ones are in what `save` writes, not here.
        Raises ValueError for what cannot be in 8 bits or merged, and CheckpointError for numbers that the form does not hold.
        """
        self._checkpoints.save_model(
            boosted_wrapper(model, "save_model"),
            path,
            shard=shard,
            prefix=prefix,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            weights=weights,
            half=self.precision.policy.param,
            wide=self.precision.half_dtype or torch.bfloat16,
            merge=merge,
        )

    def sync_weights(self, model: nn.Module, *, merge: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of every weight and buffer that a sampler needs, whole, to the bit as the forward reads it.

            sampler.load_state_dict(dict(b.sync_weights(model)))

        model: the boosted model.
        merge: with adapters of `enable_lora` added to what they adapt, under the names of the model without them.

        Half weights are yielded as they are, and what autocast or a plugin rounds before a product, rounded; norms, embeddings
        and modules of keep_fp32 that are read in float32, in float32. Under formats of 8 bits weights are yielded before they
        are rounded to these. Tied weights are yielded under each name. What is neither rounded nor gathered is the model's own
        memory: copy it before the next step.

        A collective where ranks hold parts of weights: each is gathered as it is asked for, so all ranks go through all of
        them. Raises RuntimeError for stages of a pipeline, which `save_model` writes.
        """
        from booster.facade.synced_weights import synced_weights

        halves = self.precision.policy.param is not None
        wrapper = boosted_wrapper(model, "sync_weights")
        return synced_weights(wrapper, self.precision.half_dtype, halves=halves, merge=merge)

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Load weights into the boosted `model`: a file or folder of `save_model`, of `torch.save` or of `save_pretrained`.

        path: that file or folder.
        strict: False leaves out names that only one side has, with a WARNING.

        Weights are read from safetensors files straight into the model, but for those that masters or several names share.
        Raises CheckpointError that lists all names and shapes that differ, with nothing loaded, and where a file that fits
        cannot be read to its end says that weights hold parts of it. Masters of the optimizer follow the weights.
        """
        self._checkpoints.load_model(boosted_wrapper(model, "load_model"), path, strict=strict)

    def save_optimizer(self, optimizer: Any, path: str | os.PathLike[str]) -> None:
        """Write states, masters and loss scale of the boosted `optimizer` as the checkpoint folder `path`; a collective."""
        refusals.check_boosted_optimizers(optimizer, "save_optimizer")
        self._checkpoints.save_part(path, optimizer=optimizer)

    def load_optimizer(self, optimizer: Any, path: str | os.PathLike[str]) -> None:
        """Load into `optimizer` what `save_optimizer` wrote at `path`, in any layout; raises as `load` does. A collective."""
        refusals.check_boosted_optimizers(optimizer, "load_optimizer")
        self.load(arguments.path("path", path), None, optimizer)

    def save_lr_scheduler(self, lr_scheduler: Any, path: str | os.PathLike[str]) -> None:
        """Write the state of `lr_scheduler` as the checkpoint folder `path`; a collective."""
        refusals.check_named("lr_scheduler", lr_scheduler)
        self._checkpoints.save_part(path, lr_scheduler=lr_scheduler)

    def load_lr_scheduler(self, lr_scheduler: Any, path: str | os.PathLike[str]) -> None:
        """Load into `lr_scheduler` what `save_lr_scheduler` wrote at `path`; raises as `load` does. A collective."""
        refusals.check_named("lr_scheduler", lr_scheduler)
        self.load(arguments.path("path", path), None, lr_scheduler=lr_scheduler)

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
        """`tensor` (or number, or container of them) reduced over data-parallel ranks, on every rank; a collective.

        op: how: their mean, sum, largest or smallest.
        """
        return collectives.reduce(tensor, op, group=self.plugin.data_parallel_group)

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
        flush: True, so that lines of a job whose output goes into a file come at once.
        """
        if is_main():
            print(*values, sep=sep, end=end, file=file, flush=flush)  # noqa: T201 - printing is what was asked for

    def wait_for_everyone(self) -> None:
        """Wait until every rank of the job has come here; nothing without a process group. A collective."""
        wait_for_all()

    def progress(self, items: Iterable[Any], description: str = "", total: int | None = None) -> Iterator[Any]:
        """`items` as they are, with a bar on rank 0: how many, how fast, the loss of the last `backward`, and how long yet.

        The other ranks draw nothing. No collective. The loss, which is this rank's, is read once a second; a GPU is then waited
        for.

        description: the text before the bar.
        total: how many there are; None asks `len(items)`, and a boosted loader, which a resumed epoch lets begin where it was
            left, for those before too. The bar is rich's; raises ImportError without it.
        """
        from booster.facade.progress_bar import DisplayedLoss, progress

        self._shown_loss = DisplayedLoss()
        return progress(items, description, total, self._shown_loss)

    def profile(
        self,
        folder: str | os.PathLike[str],
        *,
        skip: int = 2,
        steps: int = 3,
        shapes: bool = False,
        memory: bool = False,
        stacks: bool = False,
    ) -> AbstractContextManager[Any]:
        """Context in which torch's profiler records `steps` steps after the first `skip`, on every rank.

            with b.profile("trace") as profile:
                for x, y in loader:
                    ...
                    profile.step()

        folder: each rank writes `folder/rank_N.json`; drop it on https://ui.perfetto.dev.
        skip: steps before it begins, at least 1.
        steps: that are recorded.
        shapes: also note shapes of inputs, which slows the steps, as do the next two.
        memory: also note memory.
        stacks: also note lines of Python.

        It yields a `torch.profiler.profile`, with tables too. No collective. Raises RuntimeError at the end where `.step()` was
        not called often enough to record a step.
        """
        from booster.facade.profiler import profiled

        return profiled(folder, self.device, skip=skip, steps=steps, shapes=shapes, memory=memory, stacks=stacks)

    def _note_measurement(self, model: int, found: Measurement) -> None:
        if self._records is not None:
            self._records.add_look(model, found)

    def _note_precision(self, phase: Phase, why: str) -> None:
        self._checkpoints.note(precision=repr(phase.precision))
        if self._records is not None:
            self._records.on_precision_switch(phase.precision, self._boosted.wrappers(), repr(phase), why)

    def _resumed(self, loaded: Loaded) -> Loaded:
        """Have the run go on where `loaded` was saved."""
        if loaded.path is not None:
            self._run.load_state_dict(loaded.run.get("schedule"))
        return loaded

    def _replay(self, forward: Callable[[], Any], optimizers: Sequence[OptimizerWrapper], scale: float) -> Replay:
        from booster.numerics.diagnosis.replay import Replay

        own = self._boosted
        return Replay(forward, optimizers, own.labelled(), list(own.criteria), scale, self._unrecorded)

    def _unrecorded(self) -> AbstractContextManager[Any]:
        """A context in which records look at no layer."""
        return nullcontext() if self._records is None else self._records.paused()
