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
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from booster.booster import Booster
from booster.common import arguments
from booster.integrations.accelerator import accelerator_around
from booster.integrations.trainer_arguments import Given, check_arguments, phases_of, plugin_of, precision_of
from booster.integrations.trainer_job import TrainerJob
from booster.plugin import Plugin

if TYPE_CHECKING:
    from transformers import Trainer as BoosterTrainer  # noqa: F401

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
    Logs hold besides `loss_scale`, `skipped_steps`, and in `culprit` the parameters whose gradients made the last skip.
    Checkpoints hold the weights that the forward reads, half ones where the precision stores them half, and in the folder
    `booster_optimizer` states, masters, loss scale, and where a schedule or an autopilot is. Raises TypeError where `trainer`
    is no Trainer.
    """
    import transformers

    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise TypeError(arguments.refusal("trainer", trainer, "transformers.Trainer or a subclass of it"))
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
            self,
            *args: Any,
            mixed_precision: Given | None = None,
            plugin: Plugin | None = None,
            **kwargs: Any,
        ) -> None:
            self._asked = (mixed_precision, plugin)
            self._has_reference = any(isinstance(each, nn.Module) for each in (*args[1:], kwargs.get("ref_model")))
            self._whole_weights: dict[str, Any] | None = None
            super().__init__(*args, **kwargs)
            self.callback_handler.callbacks.insert(0, _callback_class()(self))

        @property
        def booster(self) -> Booster:
            """The Booster that trains: for `record`, `diagnose` and what else it does."""
            return self.trained_by_booster.booster

        def create_accelerator_and_postprocess(self) -> None:
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
