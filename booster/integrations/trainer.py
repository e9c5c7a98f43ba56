"""Hugging Face's Trainer, and trainers made of it such as TRL's, under a precision and a plugin of this library.

    from booster.integrations.trainer import BoosterTrainer, boosted_trainer

    trainer = BoosterTrainer(model=model, args=args, train_dataset=dataset, mixed_precision="fp16")
    MySFT = boosted_trainer(SFTTrainer)

A subclass, which replaces the Accelerator that the Trainer makes for itself; nothing of transformers is patched. Models,
losses, data, schedules, logs and callbacks stay those of the Trainer. See docs/guides/trainer.md.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

from booster.booster import Booster
from booster.common import arguments
from booster.integrations.trainer_job import TrainerJob, accelerator_around
from booster.mixed_precision import Autopilot, MixedPrecision, PrecisionSchedule, make
from booster.mixed_precision.schedule import Phase
from booster.plugin import Plugin, SingleDevice, TorchDDPPlugin

_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")
_LAUNCH_ONCE_A_DEVICE = (
    "start one process for each GPU, with `booster run --nproc_per_node N` or torchrun, or show it one GPU"
)
_DDP = {  # of TrainingArguments: of TorchDDPPlugin
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_static_graph": "static_graph",
}


Given = str | MixedPrecision | PrecisionSchedule | Autopilot


def precision_of(given: Given | None, args: Any) -> MixedPrecision | PrecisionSchedule | Autopilot:
    """Return the precision that `mixed_precision` and the flags of `args` say together; raises ValueError where they differ."""
    flags = [name for name in ("fp16", "bf16") if getattr(args, name, False)]
    if len(flags) > 1:
        raise ValueError("fp16=True and bf16=True are both set; leave one of them False")
    precision: MixedPrecision | PrecisionSchedule | Autopilot
    if isinstance(given, PrecisionSchedule | Autopilot):
        precision = given
    else:
        precision = make(given if given is not None or not flags else flags[0])
    # By type: `fp16=True` and an object with options of its own for float16 say the same.
    if flags and type(precision) is not type(make(flags[0])):
        raise ValueError(
            f"mixed_precision={given!r} and {flags[0]}=True of {type(args).__name__} contradict each other; set "
            f"{flags[0]}=False, as mixed_precision says the precision, or leave mixed_precision out"
        )
    if getattr(args, "tf32", None) is False and any(
        getattr(each, "products", None) == "tf32" for each in phases_of(precision)
    ):
        raise ValueError(f"mixed_precision={given!r} and tf32=False contradict each other; leave tf32 out")
    return precision


def phases_of(given: MixedPrecision | PrecisionSchedule | Autopilot) -> list[MixedPrecision]:
    """Return the precisions that a run is in, one after another."""
    made = given.made(make).values() if isinstance(given, PrecisionSchedule) else [Phase.of(given, make)]
    return [phase.precision for phase in made]


def plugin_of(given: Plugin | None, args: Any, *, num_processes: int, checkpointed: bool) -> Plugin:
    """Return the plugin that was given, or what the Trainer does without one: nothing in one process, DDP in several.

    checkpointed: whether the model recomputes activations, as then the Trainer does not look for unused parameters.
    Raises ValueError for arguments of DDP together with a plugin, and for ranks that see the same data.
    """
    options: dict[str, Any] = {ours: getattr(args, name, None) for name, ours in _DDP.items()}
    options = {name: value for name, value in options.items() if value is not None}
    if given is None:
        if num_processes == 1:
            return SingleDevice()
        # As the Trainer does: with recomputed activations DDP would mark parameters ready twice.
        return TorchDDPPlugin(**({"find_unused_parameters": not checkpointed} | options))
    if options:
        own = [name for name, ours in _DDP.items() if ours in options]
        raise ValueError(
            f"{own} of {type(args).__name__} are for the DDP of the Trainer; give them to plugin={given!r}"
        )
    if given.data_parallel_size != num_processes:
        raise ValueError(
            f"plugin={type(given).__name__} divides data among {given.data_parallel_size} ranks, and the Trainer among all "
            f"{num_processes}; choose TorchDDPPlugin, LowLevelZeroPlugin or TorchFSDPPlugin. Tensor, sequence and pipeline "
            "parallelism need a loop of your own"
        )
    return given


def check_arguments(
    args: Any, phases: Iterable[MixedPrecision], accelerator: Any, model: Any, *, has_reference: bool = False
) -> None:
    """Raise ValueError that names every argument which a boosted Trainer cannot honour, with what to do instead.

    has_reference: the Trainer was given a reference model, which does not train.
    """
    of_numbers = (each for precision in phases for each in _of_numbers(args, precision, has_reference))
    # All at once, each once: phases of a schedule may refuse the same.
    refused = dict.fromkeys([*_of_others(args, accelerator, model), *of_numbers, *_of_optimizers(args)])
    if refused:
        raise ValueError(f"a boosted Trainer cannot honour {'; '.join(refused)}")


def _of_others(args: Any, accelerator: Any, model: Any) -> Iterator[str]:
    if getattr(args, "deepspeed", None) or accelerator.state.distributed_type.value == "DEEPSPEED":
        yield "deepspeed, which steps by itself: give plugin=LowLevelZeroPlugin() or TorchFSDPPlugin()"
    elif getattr(args, "fsdp", None) or accelerator.state.distributed_type.value == "FSDP":
        yield "fsdp, which places the model as a plugin does: give plugin=TorchFSDPPlugin()"
    elif accelerator.state.distributed_type.value not in _DISTRIBUTED:
        yield f"the distributed type {accelerator.state.distributed_type.value}: {_LAUNCH_ONCE_A_DEVICE}"
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config: data is divided among all ranks, by the plugin"
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        yield "a model that was divided as it was loaded: load it whole"
    if args.n_gpu > 1:
        yield f"{args.n_gpu} GPUs in one process (DataParallel): {_LAUNCH_ONCE_A_DEVICE}"
    if getattr(args, "save_on_each_node", False) and accelerator.num_processes > 1:
        yield "save_on_each_node: ranks write one checkpoint together, on a disk that all of them see"


def _of_numbers(args: Any, precision: MixedPrecision, has_reference: bool) -> Iterator[str]:
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            yield f"{name}: it would cast the weights that train; evaluation runs in the precision of training already"
    if getattr(args, "half_precision_backend", "auto") == "apex":
        yield "half_precision_backend='apex': give mixed_precision='fp16_apex'"
    if getattr(args, "jit_mode_eval", False):
        yield "jit_mode_eval: a boosted model is not traced"
    if precision.pins_during_run:
        yield "keep_fp32='auto': a Trainer's checkpoint does not keep what was pinned; name the modules"
    if getattr(args, "use_transformers_continuous_batching", False):
        yield "use_transformers_continuous_batching: it casts the weights that train; leave it False"
    if getattr(args, "cast_lm_head_to_fp32", False) and precision.policy.param is not None:
        yield "cast_lm_head_to_fp32 with half weights: keep the head, with keep_fp32=('lm_head',) of the precision"
    converts = precision.policy.param is not None or precision.conversion is not None
    if getattr(args, "precompute_ref_log_probs", False) and converts and not has_reference:
        yield (
            "precompute_ref_log_probs: the reference would be computed before training begins, by weights and layers that "
            f"{type(precision).__name__} has not converted yet; leave it False, or give a ref_model"
        )


def _of_optimizers(args: Any) -> Iterator[str]:
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        yield f"optim={name!r}, which steps within backward: choose another, with release_gradients of a loop of your own"


__all__ = ["boosted_trainer"]  # and BoosterTrainer, made when it is asked for, as it needs transformers and accelerate

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_SCHEDULER = "scheduler.pt"


def boosted_trainer(trainer: T) -> T:
    """Make a class like `trainer`, transformers' Trainer or a subclass, that trains under a Booster.

    It takes the arguments of `trainer`, and two more, by keyword. mixed_precision: a name, a `MixedPrecision`, a
    `PrecisionSchedule`, an `Autopilot`, or None for what `fp16` and `bf16` of the arguments say, float32 if they say nothing;
    total_steps of a schedule is the Trainer's number of optimizer steps. plugin: a `Plugin`, made after the
    TrainingArguments, which start the process group; None for DistributedDataParallel on several ranks.

    It raises ValueError, when it is made, for arguments that contradict these two or that it cannot honour, and names them.
    Logs hold besides `loss_scale`, `skipped_steps`, and in `culprit` the parameters with the gradients that made the last skip.
    Checkpoints hold the weights that the forward reads, half ones where the precision stores them half, and in the folder
    `booster_optimizer` states, masters, loss scale, and where a schedule or an autopilot is. Raises TypeError where `trainer`
    is no Trainer.
    """
    import transformers

    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise TypeError(arguments.refusal("trainer", trainer, "transformers.Trainer or a subclass of it"))
    # A second pass would boost a model that is boosted already, with an unclear error in the middle of train().
    if hasattr(trainer, "booster"):
        raise TypeError(f"{trainer.__name__} is boosted already; give the class that it was made of")
    return cast(T, _boosted_class(cast(Any, trainer)))


def __getattr__(name: str) -> Any:
    if name == "BoosterTrainer":
        from transformers import Trainer

        return _boosted_class(Trainer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _boosted_class(trainer: Any) -> Any:
    class BoostedTrainer(trainer):
        trained_by_booster: TrainerJob
        accelerator: Any

        def __init__(
            self, *args: Any, mixed_precision: Given | None = None, plugin: Plugin | None = None, **kwargs: Any
        ) -> None:
            self._asked = (mixed_precision, plugin)
            self._has_reference = any(isinstance(each, nn.Module) for each in (*args[1:], kwargs.get("ref_model")))
            self._whole_weights: dict[str, Any] | None = None
            super().__init__(*args, **kwargs)
            # First, since callbacks that read gradients have to find them unscaled.
            self.callback_handler.callbacks.insert(0, _callback_class()(self))

        @property
        def booster(self) -> Booster:
            """The Booster that trains: for `record`, `diagnose` and what else it does."""
            return self.trained_by_booster.booster

        def create_accelerator_and_postprocess(self) -> None:
            # The Trainer makes its own first: that reads the environment and begins the process group.
            super().create_accelerator_and_postprocess()
            plain = self.accelerator
            self.trained_by_booster = TrainerJob(
                _booster_for(self.args, *self._asked, plain, self.model, has_reference=self._has_reference)
            )
            self.accelerator = accelerator_around(plain, self.trained_by_booster, self)

        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            if "loss" in logs:
                logs = {**self.trained_by_booster.report(), **logs}
            super().log(logs, start_time)

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            # All ranks gather here; the Trainer then calls `_save` on the ranks that write alone.
            self._whole_weights = self.trained_by_booster.whole_weights()
            try:
                super().save_model(output_dir, _internal_call)
            finally:
                self._whole_weights = None

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, self._whole_weights if state_dict is None else state_dict)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            self.trained_by_booster.save_optimizer(output_dir)
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            if checkpoint is None:
                return
            scheduler = os.path.join(checkpoint, _SCHEDULER)
            if not self.trained_by_booster.load_optimizer(checkpoint) or not os.path.isfile(scheduler):
                _logger.warning("%s has no states of an optimizer and its schedule: they begin anew", checkpoint)
                return
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
            if self._keeps_whole_weights():
                self.trained_by_booster.load_weights(resume_from_checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

        def _load_best_model(self) -> None:
            if self._keeps_whole_weights():
                self.trained_by_booster.load_weights(self.state.best_model_checkpoint)
            else:
                super()._load_best_model()

        def _keeps_whole_weights(self) -> bool:
            """Whether checkpoints hold all weights of a model that is boosted already, and not adapters alone."""
            return self.trained_by_booster.model is not None and not hasattr(self.model, "peft_config")

        def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
            return False  # norms of divided gradients are the boosted optimizer's

    BoostedTrainer.__name__ = BoostedTrainer.__qualname__ = f"Boosted{trainer.__name__}"
    BoostedTrainer.__doc__ = f"{trainer.__name__} under a Booster; see `booster.integrations.trainer.boosted_trainer`."
    return BoostedTrainer


@functools.cache
def _callback_class() -> Any:
    from transformers import TrainerCallback

    class UnscalesGradients(TrainerCallback):
        """Divides gradients by the loss scale, and clips them, before another callback reads them between clip and step.

        Not where no callback reads any, as then the step does it in the same pass over the gradients.
        """

        def __init__(self, trainer: Any) -> None:
            self._trainer = trainer

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            plain = TrainerCallback.on_pre_optimizer_step
            others = (type(each) for each in self._trainer.callback_handler.callbacks if each is not self)
            if any(each.on_pre_optimizer_step is not plain for each in others):
                self._trainer.optimizer.unscale_grads()

    return UnscalesGradients


def _booster_for(
    args: Any, mixed_precision: Any, plugin: Any, accelerator: Any, model: Any, *, has_reference: bool
) -> Booster:
    precision = precision_of(mixed_precision, args)
    check_arguments(args, phases_of(precision), accelerator, model, has_reference=has_reference)
    checkpointed = any(getattr(args, name, False) for name in ("gradient_checkpointing", "activation_checkpointing"))
    placed = plugin_of(plugin, args, num_processes=accelerator.num_processes, checkpointed=checkpointed)
    return Booster(args.device, precision, placed)
