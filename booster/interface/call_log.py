"""What a training step called: enough to call it again, kept by reference until the step is over.

A `CallLog` belongs to a `SkipWatcher`. Boosted models and criteria call through it, and each backward pass ends in it. When the
step turns out to have been skipped, its `LoggedPass`es are run again under a trace; when not, they are dropped. Nothing is
copied, so a step pays a few references a call.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from booster.common.snapshot import attributes
from booster.common.torch_internals.tensor_internals import storage_key, version
from booster.tensors.trees import map_tensors, tensors

_MANY = 64  # calls after which those that lead nowhere are looked for


@dataclass(eq=False, slots=True)
class OutputRef:
    """Output number `output` of `call`, or a view of it: size, stride and offset, None for the output itself."""

    call: LoggedCall
    output: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    def of(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the same of other outputs of the call."""
        tensor = outputs[self.output]
        return tensor if self.view is None else tensor.as_strided(*self.view)


@dataclass(eq=False, slots=True)
class LoggedCall:
    """One call of a boosted model or criterion that records gradients.

    Attributes:
        run: does it again, where the log is paused.
        links: of tensors among the arguments, in the order of `trees.tensors`, those that earlier calls returned; None
            elsewhere.
        versions: of the arguments then, which count writes since.
        loose: an argument has a graph that no link explains.
        random: the random state before.
        grads: of the outputs, as they came in the backward pass, by number.
        reached: they came in the present pass.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    links: list[OutputRef | None]
    versions: list[int]
    loose: bool
    random: tuple[Any, ...]
    outputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    grads: dict[int, torch.Tensor] = field(default_factory=dict)
    reached: bool = False

    def again(self, made: dict[LoggedCall, list[torch.Tensor]], *, linked: bool) -> list[torch.Tensor]:
        """Run the call once more, from the random state of then, and return the tensors that come out, `made` ones as
        arguments."""
        _set_random(self.random)
        links = iter(self.links)

        def argument(tensor: torch.Tensor) -> torch.Tensor:
            link = next(links)
            # Else the loss of before is followed, with the arguments of then.
            if link is not None and linked:
                return link.of(made[link.call])
            # Cut off from the graph of then, which this call makes anew.
            return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors(argument, (self.args, self.kwargs))
        return list(tensors(self.run(*args, **kwargs)))

    @property
    def was_written_to(self) -> bool:
        """Return whether an argument was written in place since."""
        now = [version(tensor) for tensor in _given(self.args, self.kwargs)]
        return any(after != before for after, before in zip(now, self.versions, strict=True))


@dataclass(eq=False)
class LoggedPass:
    """One backward pass.

    Attributes:
        calls: those that its gradients reached, in order.
        link: where the loss came from; None if no call returned it.
        run: does the whole pass again, for a pipeline; then there are no calls.
    """

    optimizer_refs: list[weakref.ref[Any]]  # a step that waits for its outcome holds this, and its optimizer that step
    calls: list[LoggedCall]
    link: OutputRef | None
    loss: torch.Tensor | None
    divisor: float
    run: Callable[[], Any] | None = None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        return tuple(ref() for ref in self.optimizer_refs)


class CallLog:
    """Keeps the calls and backward passes of each optimizer's present step. device: its random state belongs to a call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[LoggedCall] = []
        self._passes: list[LoggedPass] = []
        self._inside = False
        self._stopped = False
        self._made: dict[int, OutputRef] = {}  # by memory of the outputs

    def call(
        self, run: Callable[..., Any], again: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `run(*args, **kwargs)`, and keep the call with `again`, which does the same where the log is paused."""
        # Nothing would lead gradients back, or the call is inside of another.
        if self._inside or self._stopped or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return run(*args, **kwargs)
        links: list[OutputRef | None] = []
        versions, loose = [], False
        for tensor in _given(args, kwargs):
            versions.append(version(tensor))
            link = None if tensor.grad_fn is None else self._link(tensor)
            links.append(link)
            loose = loose or (link is None and tensor.grad_fn is not None)
        call = LoggedCall(again, args, kwargs, links, versions, loose, _random(self._device))
        # What runs inside of a logged call is run again with it.
        self._inside = True
        try:
            result = run(*args, **kwargs)
        finally:
            self._inside = False
        self._calls.append(call)
        if len(self._calls) % _MANY == 0:
            self._calls = [call for call in self._calls if call.grads or any(ref() is not None for ref in call.outputs)]
            kept = set(self._calls)
            self._made = {key: link for key, link in self._made.items() if link.call in kept}
        for number, tensor in enumerate((result,) if isinstance(result, torch.Tensor) else tensors(result)):
            call.outputs.append(weakref.ref(tensor))
            if tensor.requires_grad:
                self._made[storage_key(tensor)] = OutputRef(call, number)
                tensor.register_hook(_KeepGradient(call, number))
        return result

    def end_pass(self, loss: torch.Tensor, optimizers: Sequence[Any], divisor: float) -> None:
        """A backward pass of `loss` is over."""
        if self._stopped:
            return
        calls = [call for call in self._calls if call.reached]
        for call in calls:
            call.reached = False
        self._passes.append(
            LoggedPass(list(map(weakref.ref, optimizers)), calls, self._link(loss), loss.detach(), divisor)
        )

    def end_pipeline(self, run: Callable[[], Any], optimizers: Sequence[Any], state: tuple[Any, ...]) -> None:
        """A pipeline ran its passes; `run` does it again, from the random state `state`."""
        if self._stopped:
            return

        def again() -> Any:
            _set_random(state)
            return run()

        self._passes.append(LoggedPass(list(map(weakref.ref, optimizers)), [], None, None, 1.0, again))

    def random_state(self) -> tuple[Any, ...]:
        """Return the random state of now, for `end_pipeline`."""
        return _random(self._device)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is kept."""
        return attributes([self], _inside=True)

    def stop(self) -> None:
        """Keep nothing from now on, and forget what was kept."""
        self._stopped = True
        self._calls.clear()
        self._passes.clear()
        self._made.clear()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a boosted model is not recorded

    def pop_passes(self, optimizer: Any) -> list[LoggedPass]:
        """Return the passes that `optimizer` took part in since its last step, and forget them with the calls before them."""
        taken = [each for each in self._passes if optimizer in each.optimizers]
        self._passes = [each for each in self._passes if optimizer not in each.optimizers]
        if not self._passes:
            self._calls.clear()
            self._made.clear()
        return taken

    def _link(self, tensor: torch.Tensor) -> OutputRef | None:
        link = self._made.get(storage_key(tensor))
        output = None if link is None else link.call.outputs[link.output]()
        if link is None or output is None:
            return None
        if tensor is output:
            return link
        # Memory that was freed and used anew, or a view of another dtype, leads to no output.
        if tensor.dtype != output.dtype or tensor._base is not (output if output._base is None else output._base):
            return None
        return OutputRef(link.call, link.output, (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))


class _KeepGradient:
    """A hook that keeps the gradient of an output, and not the output."""

    __slots__ = ("_call", "_number")

    def __init__(self, call: LoggedCall, number: int) -> None:
        self._call, self._number = call, number

    def __call__(self, grad: torch.Tensor) -> None:
        call = self._call
        call.grads[self._number] = grad.detach() if grad.requires_grad else grad
        call.reached = True


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors in the arguments of a call, in the order of `trees.tensors`, which is slower for plain arguments."""
    given: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            given.append(value)
        else:
            given += tensors(value)
    return given


def _random(device: torch.device) -> tuple[Any, ...]:
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), random.getstate(), of_device, device


def _set_random(state: tuple[Any, ...]) -> None:
    of_torch, of_python, of_device, device = state
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device, device)
