"""Which steps no graph is made of, by the names of what they are made with."""

from __future__ import annotations

from collections.abc import Sequence

from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import HostRule
from booster.masters.update import MasterApplication
from booster.update.application import decides_on_device
from booster.update.device import DeviceDecision
from booster.update.update import Update


def check(optimizers: Sequence[OptimizerWrapper], *, plugin: str, several_ranks: bool) -> None:
    """Raise RuntimeError, by name, for what a graph cannot follow, whatever the step does."""
    if several_ranks:
        raise RuntimeError(
            f"capture() makes graphs of steps on one device, and {plugin} has several ranks: what sends their gradients keeps "
            "nodes of autograd on the stream that boost() ran on, which the stream of a graph may not wait for, and gloo sends "
            "from the host; call the step as it is"
        )
    check_optimizers(optimizers)


def check_optimizers(optimizers: Sequence[OptimizerWrapper]) -> None:
    """Raise RuntimeError, by name, for optimizers whose steps no graph follows."""
    for optimizer in optimizers:
        reason = _refusal(optimizer)
        if reason is not None:
            raise RuntimeError(
                f"capture() makes no graph of steps of this {type(optimizer.unwrap()).__name__}: {reason}"
            )


def _refusal(optimizer: OptimizerWrapper) -> str | None:
    update = optimizer._update
    gradients, application = update.gradients, update.decision.application
    if update.shards.sharded:
        return "this rank holds parts of its parameters, which hooks gather"
    if gradients.in_backward is not None:
        return (
            f"release_gradients={gradients.in_backward.mode!r} steps within backward, as the host says; leave it False"
        )
    if optimizer._after_step is not None:
        return "its precision follows each step on the host"
    if isinstance(gradients.scaler, HostRule):
        return f"the rule of its loss scale, {type(gradients.scaler.host).__name__}, runs on the host; use DynamicScale"
    if not isinstance(update.decision, DeviceDecision):
        return _of_the_host(update)
    if len({param.device for group in update.optimizer.param_groups for param in group["params"]}) > 1:
        return "its parameters lie on several devices, and a graph is of one"
    if isinstance(application, MasterApplication) and (
        application.masters.hosts or application.masters.options.offload
    ):
        return "its states lie in the host's memory; leave offload_states False"
    return None


def _of_the_host(update: Update) -> str:
    if not decides_on_device(update.optimizer):
        return (
            "it has no fused kernel, so the host decides on its steps and counts them; build it with capturable=True where its "
            "class takes that, or use Adam, AdamW, SGD or Adagrad, and leave fused_optimizer True"
        )
    return "the host decides on its steps, as under fused_optimizer='compile', apex's levels, and what reports on them"
