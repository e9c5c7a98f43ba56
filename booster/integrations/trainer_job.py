"""What one Trainer trains, the model and the optimizer that its Booster boosted, and the Accelerator that hands them over.

The Trainer keeps the user's model, and a model that was boosted from it. It evaluates and generates through either, so hooks on
the user's own one run its calls in the precision too. The Accelerator is Accelerate's own but for what concerns a model that
trains and its optimizer.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from booster.booster import Booster
from booster.common.arguments import listed
from booster.interface.model import ModelWrapper, extras_of, precision_of, remove_raw_call_guard
from booster.interface.optimizer import OptimizerWrapper
from booster.model.modules import bare
from booster.model.params import is_dtensor, is_part
from booster.tensors.cast_regions import cast_noting_writes, region
from booster.tensors.trees import Writes

_logger = logging.getLogger(__name__)
OPTIMIZER = "booster_optimizer"
"""The folder of a Trainer's checkpoint that holds states, masters, loss scale, and what a model has besides weights."""
_OF_TRAINER = "optimizer.pt"


class TrainerJob:
    """The boosted model and optimizer of one Trainer, made when it first trains; None until then."""

    def __init__(self, booster: Booster) -> None:
        self.booster = booster
        self.model: ModelWrapper | None = None
        self.optimizer: OptimizerWrapper | None = None
        self._own: nn.Module | None = None
        self._evaluator: Booster | None = None
        self._params: frozenset[int] = frozenset()

    def is_trained(self, model: Any) -> bool:
        """Return whether `model` is the user's model, or what was made of it."""
        return model is not None and (model is self._own or model is self.model)

    def prepare(self, model: nn.Module | None, optimizer: Optimizer) -> tuple[ModelWrapper, OptimizerWrapper]:
        """Boost the two, or return what they became before, with no gradients left. model: None for that of before."""
        if isinstance(optimizer, OptimizerWrapper):
            if optimizer is not self.optimizer or self.model is None or not (model is None or self.is_trained(model)):
                raise RuntimeError(
                    "this optimizer was boosted with another model; set trainer.optimizer = None to have a new one made"
                )
            # A Trainer that trains again, as after `find_batch_size`, may have left gradients of a pass that ran out of
            # memory.
            optimizer.zero_grad()
            return self.model, optimizer
        if model is None:
            raise RuntimeError("the optimizer came without the model that it trains; prepare both in one call")
        boosted: Any
        boosted, stepped, *_ = self.booster.boost(model, optimizer)
        if self.booster.plugin.error_feedback(boosted.module) is not None:
            raise ValueError(
                "error_feedback=True of fp8_communication keeps on each rank what rounding took, which a Trainer's checkpoint "
                "does not hold; leave it False"
            )
        self.model, self.optimizer, self._own = boosted, stepped, bare(boosted.module)
        if self.booster.plugin.group is None:
            remove_raw_call_guard(boosted)  # the hooks run such calls under the precision
        RegionHooks(self._own, boosted)
        if any(map(is_part, self._own.parameters())):
            generate_together(self._own)
        self._params = frozenset(map(id, boosted.parameters()))
        return boosted, self.optimizer

    def prepare_evaluated(self, model: nn.Module) -> nn.Module:
        """Return `model`, which is not trained, to compute in the precision; its weights become those of the precision."""
        if isinstance(model, ModelWrapper):
            return model
        # The model of the Trainer stays as it is until it is trained.
        if self._evaluator is None:
            self._evaluator = Booster(self.booster.device, self.booster.precision)
        boosted: Any = self._evaluator.boost(model)[0]
        RegionHooks(bare(boosted.module), boosted)
        return model

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss`."""
        self.booster.backward(loss, self._stepped("backward"))

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients of all parameters that train; returns the norm before, 0-dim."""
        optimizer = self._stepped("clip_grad_norm_")
        self._check_all(parameters, "clip_grad_norm_")
        return optimizer.clip_grad_by_norm(float(max_norm), norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp the gradients of all parameters that train."""
        optimizer = self._stepped("clip_grad_value_")
        self._check_all(parameters, "clip_grad_value_")
        optimizer.clip_grad_by_value(clip_value)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context in which passes leave gradients unsynchronised."""
        return self.booster.no_sync(self.model, self._stepped("no_sync"))  # type: ignore[arg-type]

    def report(self) -> dict[str, Any]:
        """Numbers of the last step for the Trainer's log; the skips since training began, and the last one's culprits."""
        optimizer = self.optimizer
        if optimizer is None or optimizer.last_step is None:
            return {}
        last, skipped = optimizer.last_step, optimizer.num_skipped
        said: dict[str, Any] = {"loss_scale": optimizer.loss_scale, "skipped_steps": skipped}
        if last.grad_norm is not None:
            said["grad_norm"] = last.grad_norm
        if last.culprit:
            said["culprit"] = ", ".join(last.culprit)
        return said

    def whole_weights(self) -> dict[str, Any] | None:
        """Return all weights on the host where ranks divide them, by the names of the user's model; a collective. Else None."""
        if self.model is None:
            return None
        state = self.model.unwrap().state_dict()
        if not any(map(is_dtensor, state.values())):
            return None
        whole: dict[int, torch.Tensor] = {}  # of each weight once, so that tied ones stay one
        for value in state.values():
            if is_dtensor(value) and id_of_memory(value) not in whole:
                whole[id_of_memory(value)] = value.full_tensor().cpu()
        return {name: whole[id_of_memory(value)] if is_dtensor(value) else value for name, value in state.items()}

    def save_optimizer(self, checkpoint: str) -> None:
        """Write states, masters, loss scale and extras of the model into a Trainer's checkpoint; a collective."""
        optimizer = self._stepped("a checkpoint")
        self.booster.save(Path(checkpoint) / OPTIMIZER, None, optimizer, extra=self._besides_weights(), step=0)

    def load_optimizer(self, checkpoint: str) -> bool:
        """Load what `save_optimizer` wrote, or the states of a plain Trainer's checkpoint; False where there is neither."""
        optimizer = self._stepped("resume_from_checkpoint")
        own, others = Path(checkpoint) / OPTIMIZER, Path(checkpoint) / _OF_TRAINER
        if own.is_dir():
            self.booster.load(own, None, optimizer, extra=self._besides_weights())
            if (
                self.booster._run.switch_if_due()
            ):  # a precision that may have masters, which the one before had no place for
                self.booster.load(own, None, optimizer, extra=self._besides_weights())
        elif others.is_file():
            optimizer.load_state_dict(torch.load(others, map_location="cpu", weights_only=True))
        else:
            return False
        return True

    def _besides_weights(self) -> dict[str, Any]:
        """What a run has in its model and no weight holds, by name: such as what delayed scales follow from."""
        model = cast(ModelWrapper, self.model)
        kept = {
            "scales": extras_of(model).histories,
            "chosen": extras_of(model).choice,
            "autopilot": extras_of(model).pins,
        }
        return {name: each for name, each in kept.items() if each is not None}

    def load_weights(self, checkpoint: str | os.PathLike[str]) -> None:
        """Load the weights of a Trainer's checkpoint into the boosted model and its masters; a collective."""
        self.booster.load_model(self.model, checkpoint)  # type: ignore[arg-type]

    def _stepped(self, what: str) -> OptimizerWrapper:
        if self.optimizer is None:
            raise RuntimeError(f"{what} needs the optimizer, which is boosted when train() begins")
        return self.optimizer

    def _check_all(self, parameters: Iterable[torch.Tensor], method: str) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Parameters without a gradient are no part of a norm, whoever they belong to.
        strange = {id(param) for param in given if param.grad is not None} - self._params
        if not strange:
            return
        came = [name for name, param in self.model.named_parameters() if id(param) in strange]  # type: ignore[union-attr]
        if came:
            raise RuntimeError(
                f"{listed(came, 3)} came into the model after training began, and the optimizer does not know them: they would "
                "not train. What replaces parameters, as peft's load_adapter does for half weights, comes before train(); "
                "afterwards load values into those that are there, by model.load_state_dict or peft's "
                "set_peft_model_state_dict"
            )
        raise ValueError(
            f"{method} was given parameters that are not of the model that trains; pass model.parameters()"
        )


class RegionHooks:
    """Hooks on the user's model that run each of its calls as those of `boosted` are, but without a plugin's wrapper.

    Trainers evaluate, generate and take log-probabilities through the model that they were given, and not through what was
    made of it. Inside a call of `boosted` they enter the same region again, which changes no number. A compiled model is
    traced without them, inside the region of `boosted`.
    """

    def __init__(self, model: nn.Module, boosted: ModelWrapper) -> None:
        self._boosted = boosted
        self._open: list[tuple[AbstractContextManager[Any], Writes | None]] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._exit, always_call=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if torch.compiler.is_compiling():
            return None
        context = region(precision_of(self._boosted).forward_context)
        context.__enter__()
        args, kwargs, writes = cast_noting_writes(self._boosted.cast_inputs, args, kwargs)
        self._open.append((context, writes))
        return args, kwargs

    def _exit(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self._open:
            return None
        context, writes = self._open.pop()
        context.__exit__(None, None, None)
        if writes is not None:
            writes.bring_back(self._boosted.cast_outputs)
        return self._boosted.cast_outputs(output)


def generate_together(model: nn.Module) -> None:
    """Have ranks that hold shards of `model` generate in step, and gather the weights that `generate` itself reads."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]  # what transformers asks, of torch's FSDP
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def id_of_memory(tensor: Any) -> int:
    """Return what identifies a sharded weight: the address of this rank's shard, or the tensor where that is empty."""
    local = tensor.to_local()
    # Empty shards of several weights may all have the address 0.
    return local.data_ptr() if local.numel() else id(tensor)


def accelerator_around(plain: Any, trained: TrainerJob, owner: Any) -> Any:
    """Return an Accelerator that knows what `plain` does, and the passes of `trained`, for the model of the Trainer `owner`."""
    kind = _accelerator_class()
    own = kind.__new__(kind)
    # The attributes of the Trainer's own: making another Accelerator would read arguments and environment anew.
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
            # What trains is boosted as a whole later; a second boost for evaluation would cast its weights.
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
