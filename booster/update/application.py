"""Stepping the user's optimizer on gradients that still carry a scale, by its fused kernel where it has one.

A fused kernel divides by `grad_scale` and skips on `found_inf` by itself, which makes a step cheap. It walks raw memory,
and takes parameter, gradient and states to be laid out alike: where they are not, it reads and writes the wrong elements,
on a CPU without a word. `FusedKernel` therefore looks before every step, without a Python call for a contiguous parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from booster.common.torch_internals.optimizer_internals import set_fused_flags, step_hooks
from booster.common.torch_internals.tensor_internals import like_check
from booster.model.optimizers import OPTIMIZERS, info_of
from booster.model.params import params_of
from booster.tensors.flat import has_same_layout, is_dense
from booster.tensors.grads import gradient_values, own_memory, scale_values
from booster.tensors.trees import HALF_DTYPES
from booster.update.context import UpdateContext
from booster.update.distributed_muon import distributed_muon
from booster.update.gradients import Gradients
from booster.update.in_backward_pass import GradualStep, bare_step, hooks_once

_logger = logging.getLogger(__name__)

KERNELS = {cls: row.kernel for cls, row in OPTIMIZERS.items() if row.kernel is not None}
_FLOAT32_MAX = torch.finfo(torch.float32).max

# What every step asks of every group and parameter, without a Python call for each.
_FUSED, _FOREACH = methodcaller("get", "fused"), methodcaller("get", "foreach")
_DTYPE, _GRAD = attrgetter("dtype"), attrgetter("grad")
_ADDRESS = torch.Tensor.data_ptr
_NO_STATE: dict[str, Any] = {}


class StepScalars:
    """The numbers of one step: what gradients are divided by, and whether nothing is to change.

    Attributes:
        grad_scale: a number, or a 0-dim tensor, which the host does not read.
        found_inf: likewise a 0-dim tensor, 1 for a skip; None where the host has decided.
        grad_scale_is_one: whether it is known that there is nothing to divide by.
    """

    def __init__(self, grad_scale: float | torch.Tensor = 1.0, found_inf: torch.Tensor | None = None) -> None:
        self.grad_scale = grad_scale
        self.found_inf = found_inf
        self.grad_scale_is_one = not isinstance(grad_scale, torch.Tensor) and grad_scale == 1.0
        self._there: dict[torch.device, torch.Tensor] = {}

    @property
    def number(self) -> float:
        """`grad_scale` as a number; waits for the device where it is a tensor there."""
        return float(self.grad_scale)

    @property
    def is_tensor(self) -> bool:
        """Whether the host does not know the numbers, so that a kernel has to heed them."""
        return self.found_inf is not None or isinstance(self.grad_scale, torch.Tensor)

    def step(self, call: Callable[[], Any], optimizer: Any, device: torch.device) -> None:
        """Call `call`, a step of `optimizer`; its fused kernel finds these numbers in its attributes meanwhile. An optimizer
        without such a kernel is stepped by `_step_divided`."""
        groups = optimizer.param_groups
        # `honours_grad_scale`, uncalled
        if type(optimizer) not in KERNELS or not all(map(_FUSED, groups)) or any(map(_FOREACH, groups)):
            self._step_divided(call, optimizer)
            return
        if not self.grad_scale_is_one:
            # A number is copied to each device once.
            if device not in self._there:
                given = self.grad_scale
                self._there[device] = (
                    given.to(device, torch.float32)
                    if isinstance(given, torch.Tensor)
                    else torch.full((), given, dtype=torch.float32, device=device)
                )
            optimizer.grad_scale = self._there[device]
        if self.found_inf is not None:
            optimizer.found_inf = self.found_inf
        try:
            call()
        finally:
            # GradScaler and a later plain step take the attributes' presence as an order.
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)

    @torch.no_grad()
    def _step_divided(self, call: Callable[[], Any], optimizer: Any) -> None:
        """Call `call`, a step of `optimizer` without a kernel, on gradients that are divided before it."""
        params = [param for param in params_of(optimizer) if param.grad is not None]
        grads: Any = [param.grad for param in params]
        if grads and not self.grad_scale_is_one:
            grad_scale = self.grad_scale.float() if isinstance(self.grad_scale, torch.Tensor) else self.grad_scale
            grads = torch._foreach_div(grads, grad_scale)
        # What it wrote is put back where nothing is to change: weights, states and gradients are twice in memory meanwhile.
        written = [*params]
        for param in params:
            written += [value for value in optimizer.state.get(param, {}).values() if isinstance(value, torch.Tensor)]
        before = [] if self.found_inf is None else [tensor.clone() for tensor in written]
        with given_grads(params, grads):
            call()
        if self.found_inf is not None:
            for tensor, old in zip(written, before, strict=True):
                # By `where`, since 0 * inf would carry a NaN of the skipped step into what is kept.
                tensor.copy_(torch.where(self.found_inf > 0, old, tensor))


@contextmanager
def given_grads(params: Sequence[torch.Tensor], grads: Sequence[Any]) -> Iterator[None]:
    """Inside, `params` have `grads` for gradients; afterwards their own again, which hooks and users read after a step."""
    own = [param.grad for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    try:
        yield
    finally:
        for param, grad in zip(params, own, strict=True):
            param.grad = grad


NO_SCALARS = StepScalars()
"""Gradients are stepped on as they are."""


class Application:
    """Steps the user's optimizer on the parameters themselves."""

    compiled = False
    """Whether torch.compile makes its steps."""

    def __init__(self, context: UpdateContext) -> None:
        self.optimizer: Any = context.optimizer
        self.shards = context.shards
        self.kernel = FusedKernel(context.optimizer, context.names, switched=context.switched)
        self.muon = distributed_muon(context.optimizer)

    def step(self, gradients: Gradients, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        """Step `params` on `gradients` divided as `scalars`, a number; the division is the optimizer's own where it can be.
        Where no rank has a gradient there are none.

        Returns whether what `.grad` is multiplied by is 1 afterwards, and not what it was.
        """
        optimizer = self.optimizer
        fused = self.kernel.prepare(params)
        if self.muon is not None:
            if not scalars.grad_scale_is_one:
                gradients.unscale()
            with hooks_once(optimizer):
                self.muon(optimizer)
        # That is a fused kernel's, where it divides as precisely as gradients are, and no hook reads them in between.
        elif scalars.grad_scale_is_one:
            optimizer.step()
        # The kernel's grad_scale is float32, too coarse for float64 gradients; and hooks would see scaled gradients.
        elif (
            fused and scalars.grad_scale <= _FLOAT32_MAX and not (self.kernel.has_float64 or any(step_hooks(optimizer)))
        ):
            if params:
                scalars.step(optimizer.step, optimizer, params[0].device)
            else:  # they are all of other ranks, but schedules and counters want the call
                optimizer.step()
            if self.shards.sharded:
                self.shards.mark_divided(scalars.grad_scale)
        else:
            gradients.unscale()
            optimizer.step()
        return True

    def step_on_device(self, gradients: Gradients, params: list[torch.Tensor], scalars: StepScalars) -> bool:
        """As `step`, where `scalars` lives on a device: nothing waits for it, but in a step that a kernel cannot decide."""
        optimizer = self.optimizer
        self.kernel.prepare(params)
        found_inf = scalars.found_inf
        if found_inf is not None and self.must_know(gradients, scalars):
            if not bool(found_inf):
                if (
                    not scalars.grad_scale_is_one
                ):  # not by `unscale`, in which ranks may have to agree: others may not come here
                    gradients.apply_scale()
                optimizer.step()
        else:
            device = torch.device("cpu") if found_inf is None else found_inf.device
            scalars.step(optimizer.step, optimizer, device)
            if not honours_grad_scale(optimizer):
                return False
            if self.shards.sharded and not scalars.grad_scale_is_one:
                self.shards.mark_divided(
                    scalars.grad_scale if found_inf is None else torch.where(found_inf > 0, 1.0, scalars.grad_scale)
                )
        return True

    def step_with_closure(self, gradients: Gradients, closure: Callable[[], Any]) -> tuple[Any, Any]:
        """Step an optimizer that evaluates the loss itself, on gradients clipped as asked inside. Returns the loss, and what
        `.grad` is multiplied by afterwards."""

        def clipped() -> Any:
            loss = closure()
            gradients.unscale()
            self.kernel.prepare(gradients.params())
            return loss

        return self.optimizer.step(clipped), 1.0

    def call(self, gradients: Gradients | None, method: Callable[[], Any], *, keep: bool = True) -> tuple[Any, bool]:
        """Call `method`, of the optimizer and no step, on what the groups hold, with unscaled gradients.

        gradients: None where there are none to be used. Returns its result, and whether it changed any of these.
        """
        params = [] if gradients is None else gradients.params()
        if gradients is not None:
            gradients.apply_scale()
        # A method that is no step may do anything; only numbers before and after say whether it wrote.
        before = [param.detach().clone() for param in params]
        result = method()
        with torch.no_grad():
            changed = not all(map(torch.equal, params, before))
            for param, old in zip(params, before, strict=True) if changed and not keep else ():
                # Unless `keep`, what it made of weights with a gradient is taken back.
                param.copy_(old)
        return result, changed

    def gradual(self, gradients: Gradients) -> GradualStep | None:
        """Return what makes the next step in parts, within backward; None where it is made all at once."""
        trained = [param for param in gradients.parameters.held() if param.requires_grad]
        watched = any(step_hooks(self.optimizer)) or torch.float64 in map(_DTYPE, trained)
        return PlainGradualStep(self, gradients, divides=honours_grad_scale(self.optimizer) and not watched)

    def must_know(self, gradients: Gradients, scalars: StepScalars) -> bool:
        """Return whether the host must know what a device decided."""
        # Hooks fire for updates only; a skipped first step would leave torch's states uninitialised; a kernel may have been
        # given up.
        if any(step_hooks(self.optimizer)) or self._lacks_states() or not decides_on_device(self.optimizer):
            return True
        # The kernel takes a float32 scale also for float64 gradients, which the host divides.
        return not scalars.grad_scale_is_one and any(param.dtype == torch.float64 for param in gradients.params())

    def _lacks_states(self) -> bool:
        """Return whether a step would make states that a skip is not to leave: see `begins`."""
        groups = self.optimizer.param_groups
        return any(
            begins(self.optimizer, group, param)
            for group in groups
            for param in group["params"]
            if param.grad is not None
        )


class PlainGradualStep(GradualStep):
    """Parts of a step of the optimizer on the parameters themselves.

    divides: whether its kernel is to divide gradients, instead of a multiplication.
    """

    def __init__(self, application: Application, gradients: Gradients, *, divides: bool) -> None:
        super().__init__(application.optimizer, application.shards)
        self._kernel = application.kernel
        self._gradients = gradients
        self._divides = divides

    def _step(self, params: Sequence[torch.Tensor], grad_scale: float) -> None:
        scalars = NO_SCALARS if grad_scale == 1.0 else StepScalars(grad_scale)
        if not scalars.grad_scale_is_one and not (self._divides and grad_scale <= _FLOAT32_MAX):
            scale, factor, _ = self._gradients.factors
            own_memory(params)
            scale_values(gradient_values(params), factor / scale)
            scalars = NO_SCALARS
        by_group: dict[int, list[torch.Tensor]] = {}
        for param in sorted(params, key=self._place.__getitem__):
            by_group.setdefault(self._place[param][0], []).append(param)
        for index, own in by_group.items():
            with self._restricted[index] as restricted:
                restricted.to(own)
                self._kernel.prepare(own)
                scalars.step(lambda: bare_step(self.optimizer), self.optimizer, own[0].device)


class FusedKernel:
    """Keeps the fused kernel of `optimizer` to what it can step; does nothing for an optimizer without.

    The kernels walk raw memory. Where parameter, gradient and states are not laid out alike, elements meet their neighbours'
    numbers, on CPU without a word, and parameters with gaps between their elements have what is in the gaps overwritten. Where
    these are of other shapes, as after a vocabulary was resized in place, memory of others is. That all are on one device and
    of one dtype torch looks for itself.

    names: of parameters, for messages. switched: the implementation was chosen by `switch_to_fused`, not by the user, and may
    be given up.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[Any, str], *, switched: bool = False) -> None:
        self.optimizer = optimizer
        self._names = names
        self.switched = switched
        self.has_float64 = False  # of any parameter that it was given
        # Of what was found to fit: how many tensors, and what tells whether others are like them. By the first parameter of a
        # step, since a backward pass may step parts.
        self._known: dict[int, tuple[int, Callable[..., bool] | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}  # what torch compiled cannot be copied

    def prepare(self, params: Sequence[torch.Tensor], *, looks_alone: bool = False) -> bool:
        """Before each step on the gradients of `params`: give gradients and states the memory order of their parameters.
        Returns `honours_grad_scale` of the optimizer.

        Raises RuntimeError if fused=True was the user's, and where gradients or states are of another shape than their
        parameter. looks_alone: of shapes, and no more.
        """
        groups = self.optimizer.param_groups
        fused = list(map(_FUSED, groups))
        if not any(fused):
            return False
        if not all(fused):
            params = [p for group in groups if group.get("fused") for p in group["params"] if p.grad is not None]
        state = self.optimizer.state
        in_order = len(state) == len(params) and all(map(is_, state, params))  # else each is looked up, by its hash
        own = state.values() if in_order else map(state.get, params, repeat(_NO_STATE))
        held = list(chain.from_iterable(map(dict.values, own)))
        found = [*params, *map(_GRAD, params), *held]
        first = bool(params) and id(params[0])
        # Costs no Python call for a parameter that is contiguous, and what it was.
        # Taken out until the look is done: an error must not leave what was found before.
        num, alike = self._known.pop(first, (-1, None))
        # On a CPU the kernels themselves raise where memory was freed.
        freed = bool(params) and params[0].is_cuda and not all(map(_ADDRESS, chain(params, held)))
        if alike is None or num != len(found) or freed or not alike(*found):
            self.has_float64 |= torch.float64 in map(_DTYPE, params)
            self.check_shapes(params)
            reason = None if looks_alone else self._unfit(params)
            if reason is not None:
                # What a kernel cannot step makes the optimizer go back to torch's default implementation, for good.
                self._give_up(reason)
                return False
            held = list(chain.from_iterable(map(dict.values, map(state.get, params, repeat(_NO_STATE)))))
            found = [*params, *map(_GRAD, params), *held]  # as they are laid now
            alike = like_check(found)
        self._known[first] = len(found), alike
        if looks_alone:
            return False
        if type(self.optimizer) is SGD:
            start_late_momentum(self.optimizer)
        return all(fused) and type(self.optimizer) in KERNELS

    def check_shapes(self, params: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError if a gradient or a state of `params`, all of which have a gradient, has another shape than its
        parameter, or no memory."""
        for param in params:
            own = self.optimizer.state.get(param, _NO_STATE)
            self._check_shape(param, param.grad, own)  # type: ignore[arg-type]
            # States of another memory layout, as after a load, are copied.
            lay_states(param, own)

    def _check_shape(self, param: torch.Tensor, grad: torch.Tensor, own: Mapping[str, Any]) -> None:
        row = info_of(self.optimizer)
        tensors = {f"state {name!r}": own[name] for name in row.states if isinstance(own.get(name), torch.Tensor)}
        tensors |= {"gradient": grad}
        wrong = {what: tuple(value.shape) for what, value in tensors.items() if value.shape != param.shape}
        # Counters are read as one number: a vector there would be read beyond its end or taken for its first element.
        wrong |= {
            f"state {name!r}": tuple(own[name].shape)
            for name in row.counts
            if isinstance(own.get(name), torch.Tensor) and own[name].numel() != 1
        }
        name = self._names.get(param, "a parameter")
        if wrong:
            what = " and ".join(f"its {each} has shape {shape}" for each, shape in wrong.items())
            raise RuntimeError(
                f"{name} has shape {tuple(param.shape)} now, and {what}: a fused kernel would read and write memory of "
                "others. It was not stepped. Where a parameter changed its shape after its first step, as by resizing a "
                f"vocabulary, drop its state (optimizer.state.clear(), or {type(self.optimizer).__name__} made anew and "
                "boosted), and its gradient, before the next backward pass"
            )
        used = {"weight": param, **tensors}.items()
        # Sparse tensors have no storage of their own.
        freed = [
            what for what, value in used if value.layout == torch.strided and value.numel() and not value.data_ptr()
        ]
        if freed:
            raise RuntimeError(
                f"the memory of {name} was freed: its {' and '.join(freed)} has elements and no storage, so that a fused "
                "kernel cannot step it"
            )

    def _unfit(self, params: Sequence[torch.Tensor]) -> str | None:
        """Return why the kernel cannot step `params`; None, with all gradients laid like their parameters, if it can."""
        if type(self.optimizer) is SGD and any(p.dtype in HALF_DTYPES and p.device.type == "cpu" for p in params):
            return "on CPU it leaves most elements of half-precision parameters as they are"
        for param in params:
            grad: Any = param.grad
            if grad.is_sparse:
                if info_of(self.optimizer).takes_sparse:
                    return "it takes no sparse gradients"
                continue  # torch says that this optimizer takes none at all
            if not is_dense(param):
                return f"a parameter of shape {tuple(param.shape)} has gaps or overlaps in memory"
            if not has_same_layout(grad, param):
                param.grad = laid_like(grad, param)
        return None

    def give_up(self) -> None:
        """Have the optimizer as it was before `switch_to_fused`, where that switched it."""
        if not self.switched:
            return
        # Groups that are added later follow the defaults.
        self.optimizer.defaults["fused"] = None
        for group in self.optimizer.param_groups:
            group["fused"] = None
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                # Torch's default implementation counts on the host, and would wait for the device in every step.
                state["step"] = state["step"].cpu()
        set_fused_flags(self.optimizer, False)

    def _give_up(self, reason: str) -> None:
        name = type(self.optimizer).__name__
        if not self.switched:
            raise RuntimeError(
                f"{name} was built with fused=True, and torch's fused kernel cannot make this step: {reason}; nothing has "
                f"changed. Build the optimizer without fused=True"
            )
        self.give_up()
        _logger.info("%s goes on with torch's default implementation; of its fused one: %s", name, reason)


def honours_grad_scale(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step()` divides gradients by its `grad_scale` and skips on its `found_inf` by itself."""
    # Not by torch's attribute that says so, which a deep copy of the optimizer lacks.
    # SGD heeds foreach=True first, which a user may set at any time.
    groups = optimizer.param_groups
    return type(optimizer) in KERNELS and all(map(_FUSED, groups)) and not any(map(_FOREACH, groups))


def is_capturable(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` was built with capturable=True, so that none of its steps asks the host for anything."""
    kind: Any = info_of(optimizer).granularity
    return kind == "elementwise" and all(
        group.get("capturable") and group.get("foreach") is not False for group in optimizer.param_groups
    )


def decides_on_device(optimizer: Optimizer) -> bool:
    """Return whether a step of `optimizer` can be undone, or not be made, without the host: see `StepScalars.step`."""
    return honours_grad_scale(optimizer) or is_capturable(optimizer)


def begins(optimizer: Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    """Return whether a step would make states of `tensor` that do not begin at zero: momentum of torch's SGD, and what an
    optimizer has that is not known."""
    if isinstance(optimizer, SGD):
        return group["momentum"] != 0 and optimizer.state.get(tensor, {}).get("momentum_buffer") is None
    return not honours_grad_scale(optimizer) and not optimizer.state.get(tensor)


def start_late_momentum(optimizer: Optimizer) -> None:
    """Give zero momentum to parameters of a fused SGD that have their first gradient after others.

    Torch's kernel starts all of a group at once or none. With dampening, zero would not be the right start.
    """
    if type(optimizer) is not SGD:
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or group["momentum"] == 0 or group["dampening"] != 0:
            continue
        state = optimizer.state
        params = [param for param in group["params"] if param.grad is not None]
        late = [param for param in params if state.get(param, {}).get("momentum_buffer") is None]
        # Where all begin together torch starts them right by itself.
        if late and len(late) < len(params):
            for param in late:
                state[param]["momentum_buffer"] = torch.zeros_like(param)


def lay_states(param: Any, state: dict[str, Any]) -> None:
    """Give states of the shape of `param` its memory layout."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape and not has_same_layout(value, param):
            state[key] = laid_like(value, param)


def laid_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` in the memory layout of `param`."""
    laid = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor.detach())
