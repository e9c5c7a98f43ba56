"""The Accelerator of a boosted Trainer: Accelerate's own but for what concerns a model that trains and its optimizer."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.integrations.trainer_job import TrainerJob
from booster.interface.model import ModelWrapper
from booster.model.modules import bare


def accelerator_around(plain: Any, trained: TrainerJob, owner: Any) -> Any:
    """Return an Accelerator with everything that `plain` knows, and the models, backward passes and clips of `trained`.

    owner: the Trainer; its `model` is to be trained.
    """
    kind = _accelerator_class()
    own = kind.__new__(kind)
    vars(own).update(vars(plain), trained=trained, owner=owner, scaler=None, native_amp=False)
    return own


@functools.cache
def _accelerator_class() -> Any:
    from accelerate import Accelerator

    class BoosterAccelerator(Accelerator):
        """Data loaders, ranks and gathers are Accelerate's; models, optimizers and gradients are Booster's."""

        trained: TrainerJob
        owner: Any

        def prepare(self, *args: Any, device_placement: Any = None) -> Any:
            models = [each for each in args if isinstance(each, nn.Module)]
            optimizers = [each for each in args if isinstance(each, Optimizer)]
            if not models and not optimizers:
                return super().prepare(*args, device_placement=device_placement)
            if len(models) > 1 or len(optimizers) != 1:
                raise ValueError(
                    f"prepare() was given {len(models)} models and {len(optimizers)} optimizers; a boosted Trainer trains one "
                    "model with one optimizer, and prepares what it only evaluates by prepare_model(evaluation_mode=True)"
                )
            model = models[0] if models else None
            boosted, optimizer = self.trained.prepare(self._compiled(model), optimizers[0])
            if not self._models:
                self._models.append(boosted)
                self._optimizers.append(optimizer)
            prepare_other = super().prepare
            result = tuple(
                boosted if each is model else optimizer if each is optimizers[0] else prepare_other(each)
                for each in args
            )
            return result if len(result) > 1 else result[0]

        def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
            if not evaluation_mode:
                raise ValueError(
                    "prepare_model() of a boosted Trainer is for evaluation_mode=True; prepare(model, optimizer) trains"
                )
            if self.trained.is_trained(model) or model is self.owner.model:
                return model
            return self.trained.prepare_evaluated(model)

        def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
            return self.prepare(optimizer)

        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
            if kwargs:
                raise ValueError(f"backward() of a boosted Trainer takes the loss alone, got {sorted(kwargs)}")
            self.trained.backward(loss)

        def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            return self.trained.clip_norm(parameters, max_norm, norm_type)

        def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
            self.trained.clip_value(parameters, clip_value)

        def unscale_gradients(self, optimizer: Any = None) -> None:
            self.trained.optimizer.unscale_grads()  # type: ignore[union-attr]

        def no_sync(self, model: Any) -> AbstractContextManager[Any]:
            return self.trained.no_sync() if self.trained.is_trained(model) else super().no_sync(model)

        def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
            return self.trained.booster.autocast()

        def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
            if not isinstance(model, ModelWrapper):
                return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
            return model.unwrap() if keep_torch_compile else bare(model.module)

        def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
            whole = self.trained.whole_weights() if self.trained.is_trained(model) else None
            return super().get_state_dict(model, unwrap) if whole is None else whole

        def save_state(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "save_state() does not know what a Booster keeps; trainer.save_model and the Trainer's checkpoints do"
            )

        def load_state(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "load_state() does not know what a Booster keeps; use trainer.train(resume_from_checkpoint=...)"
            )

        def _compiled(self, model: Any) -> Any:
            plugin = self.state.dynamo_plugin
            compiles = plugin.backend.value != "NO" and model is not None and not self.trained.is_trained(model)
            return torch.compile(model, **plugin.to_kwargs()) if compiles else model

    return BoosterAccelerator
