"""A model that trains on one batch under one precision, and how far its gradients are from those of another precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.devices import clock
from booster.interface.optimizer import update_of
from booster.memory import Measured, measure
from booster.memory.measured_memory import StorageTracker, kept_tensors, storage_bytes
from booster.mixed_precision import MixedPrecision
from booster.plugin import SingleDevice
from booster.tensors.trees import MicroBatch, map_tensors, tensors
from booster.update.context import UpdateOptions

_MOST_SCALES = 48  # that are tried until gradients are finite


@dataclass(frozen=True)
class Task:
    """What is trained, with the arguments of `advise`. begin: seeds all random generators."""

    model_fn: Callable[[], nn.Module]
    batch: Any
    criterion: Callable[..., Any]
    optimizer_fn: Callable[[nn.Module], Optimizer]
    device: torch.device
    seed: int
    begin: Callable[[int], None]


@dataclass(frozen=True)
class LossAndGradients:
    """The loss of one pass and its gradients, in float32 and without their loss scale, by the name of the parameter.

    finite: of all of them. Where they never were, the last ones are here, at the last loss scale that was tried.
    """

    loss: float
    grads: Mapping[str, torch.Tensor]
    loss_scale: float
    finite: bool


class Subject:
    """`task` under `precision`, which is bound to the device, from seeded weights or from `weights`, a state dict.

    Raises what `boost` would: ValueError or RuntimeError where this model cannot train under this precision.
    """

    def __init__(self, task: Task, precision: MixedPrecision, weights: Mapping[str, Any] | None = None) -> None:
        task.begin(task.seed)
        model = made_model(task.model_fn)
        if weights is not None:
            model.load_state_dict(weights)
        optimizer = arguments.instance(
            "what optimizer_fn(model) returned", task.optimizer_fn(model), Optimizer, "a torch.optim.Optimizer"
        )
        criterion = copy.deepcopy(task.criterion) if isinstance(task.criterion, nn.Module) else task.criterion
        self._task = task
        self._batch = copied_batch(task.batch, task.device)
        self._criterion: Any
        self.model, self.optimizer, self._criterion = precision.configure(
            model, optimizer, criterion, placement=SingleDevice(), options=UpdateOptions(max_consecutive_skips=None)
        )
        self.num_skipped = 0

    def backward(self) -> torch.Tensor:
        """Run forward and backward; returns the loss, without its graph."""
        loss = self._criterion(self.model(*self._batch.args, **self._batch.kwargs), self._batch.target)
        self.optimizer.backward(loss)
        return loss.detach()

    def step(self) -> torch.Tensor:
        """Make one training step; returns the loss."""
        loss = self.backward()
        self.num_skipped += not self.optimizer.step().applied
        self.optimizer.zero_grad()
        return loss

    def timed_step(self) -> float:
        """Make one training step; returns its seconds."""
        start = clock(self._task.device)
        self.step()
        return clock(self._task.device) - start

    def gradients(self) -> LossAndGradients:
        """Return the gradients at the weights of now, with the random numbers of the seed."""
        update = update_of(self.optimizer)
        for _ in range(_MOST_SCALES):
            self._task.begin(self._task.seed + 1)
            loss, scale = float(self.backward()), self.optimizer.loss_scale
            grads = {
                name: param.grad.detach().float().div_(scale)
                for name, param in self.model.named_parameters()
                if param.grad is not None
            }
            finite = all(bool(grad.isfinite().all()) for grad in grads.values())
            # Under a loss scaler, steps that overflow are made, which change nothing but the scale, until none does.
            if finite or not update.gradients.scaler.enabled or not math.isfinite(loss):
                break
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.optimizer.zero_grad()
        return LossAndGradients(loss, grads, scale, finite and math.isfinite(loss))

    def memory(self) -> tuple[int, Measured]:
        """Make one training step; returns the highest bytes of tensors in it, and what is held at its end."""
        held_before = [*self.model.parameters(), *self.model.buffers()]
        for kept in kept_tensors(self.optimizer):
            held_before += kept
        held_before += list(tensors((self._batch.args, self._batch.kwargs, self._batch.target)))
        before = storage_bytes(held_before)
        # The highest point is counted by storages, as operations make and free them.
        with StorageTracker(held_before) as tracker:
            self.backward()
            self.optimizer.step()
        held = measure(self.model, self.optimizer)
        self.optimizer.zero_grad()
        return before + tracker.highest, held


def made_model(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Return what `model_fn` makes; raises TypeError for what is no module."""
    legal = "a function that makes a torch.nn.Module that is not boosted"
    return arguments.instance("what model_fn() returned", model_fn(), nn.Module, "a torch.nn.Module", fix=legal)


def copied_batch(batch: Any, device: torch.device) -> MicroBatch:
    """Return a copy of `batch` on `device`, without graphs, by what the model and what the criterion takes."""
    return MicroBatch.of(map_tensors(lambda tensor: tensor.detach().to(device, copy=True), batch))


def product_ratio(dtype: torch.dtype, device: torch.device) -> float:
    """Return how long a matrix product takes in `dtype`, relative to float32: whether the processor has the format."""
    size = 256 if device.type == "cpu" else 4096
    best = {}
    for each in (torch.float32, dtype):
        a = torch.ones(size, size, device=device, dtype=each)
        times = []
        for _ in range(4):
            start = clock(device)
            a @ a
            times.append(clock(device) - start)
        best[each] = min(times)
    return best[dtype] / best[torch.float32]


_FLOOR = 1e-6  # of the norm of all gradients: below it a layer has gradients of rounding alone


@dataclass(frozen=True)
class LayerError:
    """The gradients of the parameters that one module holds itself, taken together.

    relative: the norm of the difference over that of the reference; inf where one is not finite.
    cosine: of the angle between them.
    norm: of the reference.
    """

    name: str
    relative: float
    cosine: float
    norm: float


@dataclass(frozen=True)
class GradientError:
    """The same of all gradients together; layers: the worst first."""

    relative: float
    cosine: float
    layers: tuple[LayerError, ...]


def gradient_error(
    grads: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], *, whole: str = "model"
) -> GradientError:
    """Compare gradients by the names of their parameters; one that is missing is zero. whole: the name of the model itself.

    Sums are in float64.
    """
    sums: dict[str, list[float]] = {}
    for name in reference.keys() | grads.keys():
        either = grads[name] if name in grads else reference[name]
        zero = torch.zeros((), dtype=torch.float64, device=either.device).expand_as(either)
        # In float64: squares of large gradients overflow float32.
        mine, exact = grads.get(name, zero).double(), reference.get(name, zero).double()
        layer = sums.setdefault(name.rpartition(".")[0] or whole, [0.0, 0.0, 0.0, 0.0])
        products = (mine - exact).square().sum(), exact.square().sum(), mine.square().sum(), (mine * exact).sum()
        for place, product in enumerate(products):
            layer[place] += float(product)
    total = [math.fsum(layer[place] for layer in sums.values()) for place in range(4)]
    # The error of a layer with hardly any gradient is taken relative to a millionth of all.
    floor = _FLOOR * math.sqrt(total[1])
    layers = [LayerError(name, *_ratios(layer, floor), math.sqrt(layer[1])) for name, layer in sums.items()]
    layers.sort(key=lambda layer: (-layer.relative, layer.name))
    return GradientError(*_ratios(total, 0.0), tuple(layers))


def _ratios(sums: list[float], floor: float) -> tuple[float, float]:
    """Return the relative error and the cosine from sums of squares: of difference, reference, found; and of their product."""
    difference, exact, own, product = sums
    if not math.isfinite(difference):
        return math.inf, math.nan
    if difference == 0.0:
        return 0.0, 1.0
    below = max(math.sqrt(exact), floor)
    lengths = math.sqrt(exact * own)
    return (math.sqrt(difference) / below if below else math.inf), (product / lengths if lengths else 0.0)
