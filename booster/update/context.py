"""What an update is made from, what it is asked to do, and who hears of its steps; the parameters of one optimizer, by name,
and what of its states a checkpoint holds.

While gradients are multiplied by a loss scale, a clip of the user's own would clip scaled ones. `GradMutationCheck` finds that,
in the first steps and then one in a hundred, from tensors' version counters, which cost nothing to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.torch_internals.optimizer_internals import loads_with_hooks
from booster.common.torch_internals.tensor_internals import local_tensor, version
from booster.loss_scaler import LossScaler
from booster.model.optimizers import load_states
from booster.model.params import is_dtensor, local_shard, params_of
from booster.shards import Shards
from booster.tensors.trees import HALF_DTYPES


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """The arguments of the same names of `Booster`. Raises TypeError or ValueError for one that is not legal."""

    fused_optimizer: bool | str = True
    clip_grad_norm: float = 0.0
    skip_nonfinite: bool = False
    max_consecutive_skips: int | None = 50
    release_gradients: bool | str = False

    def __post_init__(self) -> None:
        arguments.choice("fused_optimizer", self.fused_optimizer, (True, False, "compile", "triton"))
        if self.max_consecutive_skips is not None:
            arguments.count("max_consecutive_skips", self.max_consecutive_skips, also="None for no limit")
        arguments.number("clip_grad_norm", self.clip_grad_norm, least=0, fix="0 is off")
        arguments.flag("skip_nonfinite", self.skip_nonfinite)
        arguments.choice("release_gradients", self.release_gradients, (False, "exact", "previous_norm"))


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateContext:
    """What an update is made from.

    Attributes:
        optimizer: the user's.
        scaler: the loss scale.
        names: the name of each parameter, for reports.
        group: the ranks that agree on found_inf; None means alone.
        shards: what this rank holds of the parameters; whatever touches gradients runs inside its `local()`.
        options: the arguments of `Booster`.
        switched: whether the optimizer's fused kernel was not the user's choice.
    """

    optimizer: Optimizer
    scaler: LossScaler
    names: Mapping[torch.Tensor, str] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    shards: Shards = None  # type: ignore[assignment]
    options: UpdateOptions = UpdateOptions()
    switched: bool = False

    def __post_init__(self) -> None:
        if self.shards is None:
            object.__setattr__(self, "shards", Shards(self.optimizer))


class StepListener:
    """Hears of backward passes and steps; override what is of use. It changes nothing that trains, and waits for no device."""

    def after_backward(self, loss: torch.Tensor | None) -> None:
        """A pass is complete. loss: detached, of one element, not scaled; None where another pipeline stage has it."""

    def before_step(self, update: Any, number: int) -> None:
        """Gradients are there, as `Gradients.factors` says, and nothing is decided yet. Not before a step with a closure."""

    def after_step(self, update: Any, number: int, result: Any) -> None:
        """The step is made or skipped. number: of the step, from 1; a checkpoint keeps count. result: a `StepResult`."""


SPARSE = "{name}, {dtype}, has a sparse gradient, which flat buckets do not step; build its module with sparse=False"
KEPT_FLOAT32 = ", or keep it in float32 (keep_fp32=...)"

_DTYPE = attrgetter("dtype")  # of every parameter, without a Python call for each


def name_of_stranger(group: int, place: int) -> str:
    """What a parameter of no boosted model is called in states and checkpoints: by its group and its place there."""
    return f"group {group}, parameter {place}"


FIRST, EVERY = 2, 100  # steps in which `GradMutationCheck` and `BarePasses` look: the first ones, and one in so many


class Parameters:
    """What the groups of `optimizer` hold. names: of each, for reports.

    are_full: whether none was half when that was noted last.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[Any, str]) -> None:
        self._optimizer = optimizer
        self.names = names
        self.remember_dtypes()

    def held(self) -> list[torch.Tensor]:
        """What the optimizer's groups hold now."""
        return params_of(self._optimizer)

    def name_of(self, param: torch.Tensor) -> str:
        """The qualified name of `param`, for reports."""
        return self.names.get(param, f"a parameter of shape {tuple(param.shape)}")

    def names_of(self, indices: Sequence[int], params: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The names of those of `params`."""
        return tuple(self.name_of(params[index]) for index in indices)

    def refuse_sparse_halves(self) -> None:
        """Raise RuntimeError where a half parameter has a sparse gradient, to which torch may not be able to add another."""
        for param in self.held():
            if param.dtype in HALF_DTYPES and param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(SPARSE.format(name=self.name_of(param), dtype=param.dtype) + KEPT_FLOAT32)

    def remember_dtypes(self) -> None:
        """Note whether parameters are float32 now, so that a step notices if they were made half since."""
        self.are_full = HALF_DTYPES.isdisjoint(map(_DTYPE, self.held()))

    def check_full(self, params: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError if all parameters were float32 or float64, and some of `params` are half now."""
        half = [param for param in params if param.dtype in HALF_DTYPES] if self.are_full else []
        if half:
            raise RuntimeError(
                f"{self.name_of(half[0])} was float32 at boost() and is {half[0].dtype} now, as after model.half() or "
                "model.to(dtype): it has no float32 master, and small updates would be lost. Leave the weights as "
                "they are, since the precision casts what it computes; for half weights with masters use "
                "mixed_precision='fp16_naive' or 'bf16_naive'"
            )


class _Noted(NamedTuple):
    param: torch.Tensor
    value: torch.Tensor  # that holds the numbers: of a DTensor this rank's part
    version: int


class GradMutationCheck:
    """The gradients of `params` as a backward pass left them. Kept are the tensors themselves, and how often they were written.

    Torch's clip of DTensors counts nowhere, so of them an element each is kept too; comparing it waits for the device.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._noted = [
            _Noted(param, value, _version(param)) for param in params if (value := _value(param)) is not None
        ]
        self._in_parts = [noted.value for noted in self._noted if is_dtensor(noted.param.grad)]
        self._sample = self._sampled()

    def mutated(self) -> list[torch.Tensor]:
        """Return the parameters with gradients that were written in place since, or are other tensors."""
        now = [(noted, _value(noted.param)) for noted in self._noted]
        found = [
            noted.param
            for noted, value in now
            if value is not None
            and (value is not noted.value or _version(noted.param) != noted.version)
            # `zero_grad` makes no scaled gradient wrong.
            and value.any()
        ]
        # A write to one of many views of one tensor counts for all: a sample of the numbers says whether any changed.
        if found or not self._in_parts or torch.equal(self._sample, self._sampled()):
            return found
        return [noted.param for noted in self._noted]

    def _sampled(self) -> torch.Tensor:
        elements = [value.detach().reshape(-1)[:1].float() for value in self._in_parts]
        return torch.cat(elements).nan_to_num() if elements else torch.zeros(0, dtype=torch.float32)


class BarePasses:
    """Backward passes that no `b.backward` of an optimizer made, noted while its parameters have hooks.

    params: to which one brought gradients. Who makes passes clears them afterwards. hooks: empty where nothing is noted.
    """

    def __init__(self) -> None:
        self.params: deque[torch.Tensor] = deque()
        self.hooks: list[Any] = []

    def register(self, params: Sequence[torch.Tensor]) -> None:
        """Note passes from now on; does nothing where that is so already."""
        if not self.hooks:
            leaves = [param for param in params if param.requires_grad and param.is_leaf]
            self.params = deque(maxlen=len(leaves))
            # Such a method is C's: no hook is a Python call.
            self.hooks = [param.register_post_accumulate_grad_hook(self.params.append) for param in leaves]

    def remove(self) -> None:
        """Note nothing any longer."""
        while self.hooks:
            self.hooks.pop().remove()

    def refuse(self, parameters: Parameters, shards: Shards) -> None:
        """Raise RuntimeError if what a pass brought is still there."""
        for param in self.params:
            grad = param.grad  # where ranks keep slices elsewhere, there is none
            # What another network's loss left, and was dropped or zeroed since, changes nothing.
            if shards.has_gradient(param) and (grad is None or grad.is_sparse or local_shard(grad).any()):
                raise RuntimeError(
                    f"the gradient of {parameters.name_of(param)} has a part of a bare loss.backward(); those of b.backward "
                    "are multiplied by the loss scale, so that it would count thousands of times too little. Pass "
                    "every loss to b.backward, and drop what is not to be used by optimizer.zero_grad() before that"
                )

    def __reduce__(self) -> Any:
        return BarePasses, ()  # the parameters of a copy are others


def _value(param: torch.Tensor) -> torch.Tensor | None:
    grad = param.grad
    if grad is None or grad.is_sparse:  # its reader puts a coalesced one in its place
        return None
    return local_tensor(grad) if is_dtensor(grad) else grad


def _version(param: torch.Tensor) -> int:
    grad: torch.Tensor = param.grad  # type: ignore[assignment]
    return version(grad) + (version(local_tensor(grad)) if is_dtensor(grad) else 0)


@dataclass
class Fill:
    """What a load gives for states and masters on the meta device, as buckets take them over: no more than one is there twice.

    Attributes:
        read: given what a group holds, the name of a state (None: its master), and a place in memory order, reads as many
            numbers from there as it is given memory for.
        before: the states of buckets until then, to be written over.
    """

    read: Callable[[torch.Tensor, str | None, int, torch.Tensor], None]
    before: MutableMapping[Any, Any] = field(default_factory=dict)


class OptimizerState:
    """The state of the optimizer as it is, and nothing besides: the null object of `MasterState`."""

    has_masters = False
    """Whether float32 numbers stand behind half parameters."""

    def __init__(self, job: UpdateContext) -> None:
        self.optimizer = job.optimizer
        self.shards = job.shards
        self.names = job.names

    @property
    def state(self) -> Any:
        """The optimizer's state, by the parameters that the user knows."""
        return self.shards.states.view_state(self.optimizer.state)

    def has_master(self, param: torch.Tensor) -> bool:
        """Return whether float32 numbers stand behind `param`, a whole parameter, as checkpoints keep them."""
        return False

    def loads_without_copy(self, param: torch.Tensor) -> bool:
        """Return whether a load makes the tensors that it is given the states of `param`, and reads none of their numbers."""
        # Torch's own optimizers do, without hooks of their load, for states of the parameter's dtype.
        return type(self.optimizer).__module__.startswith("torch.optim.") and not loads_with_hooks(self.optimizer)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Torch's state dict of what the optimizer's groups hold, and what is kept besides. Inside `local()`."""
        return self.optimizer.state_dict(), {}

    def can_be_filled(self, param: torch.Tensor) -> bool:
        """Return whether a load may give states and master of `param`, a whole parameter, by a `Fill`."""
        return False

    def read_state_dict(
        self, state_dict: dict[str, Any], own: Mapping[str, Any], fill: Fill | None = None
    ) -> Callable[[], None]:
        """`load_state_dict` into what the optimizer's groups hold; own: what `state_dict` gave besides. Inside `local()`.

        What is returned does the rest, and does not fail.
        """
        # Containers of the optimizer may change, but no tensor.
        load_states(self.optimizer, state_dict)
        return lambda: None

    def rounding_state(self) -> dict[str, Any]:
        """Return the random state of rounding, where weights are rounded stochastically, to be given to `load_rounding`."""
        return {}

    def load_rounding(self, state: Mapping[str, Any]) -> None:
        """Continue the random numbers of rounding where `rounding_state` was taken; does nothing where none are drawn."""

    def restore_params(self) -> dict[torch.Tensor, torch.Tensor]:
        """Have the states by what the groups hold; return the masters likewise. Inside `local()`."""
        return {}

    def attach(self, model: nn.Module) -> None:
        """Take over what masters can use of weights that are loaded into `model`."""

    def adopt_loaded(self) -> None:
        """Have masters become the values that were loaded into their weights, if any were; a step does it by itself."""

    def weights_in_model(self) -> list[str]:
        """Names of trained parameters that are their own masters. Not inside `local()`."""
        return []

    def master_tensors(self) -> list[torch.Tensor]:
        """Return what is kept besides half weights."""
        return []

    def scratch_tensors(self) -> list[torch.Tensor]:
        """Return the scratch that stays from step to step."""
        return []

    def wait_for_copies(self) -> None:
        """Wait until what the last step sent to the host's memory, if anything, has arrived there."""

    def read_masters(self, masters: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[torch.Tensor, torch.Tensor]]:
        """Of masters of whole parameters, the part that is kept besides, and values of parameters that are their own masters.

        Not inside `local()`. Raises ValueError, with nothing changed, if there is no use for them or bits would be lost.
        """
        if masters["weights"]:
            raise ValueError(
                "the optimizer state holds float32 master weights, but this precision keeps none; resume with the precision "
                "that wrote it, or delete state['booster']['masters'] to go on from the rounded weights"
            )
        return masters, {}
