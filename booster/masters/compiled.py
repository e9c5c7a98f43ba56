"""The step on masters, compiled: cast, join, the optimizer's own step and split as one pass over a bucket's memory.

torch.compile keys a graph that sees an optimizer by the very tensors of its state: one graph for each bucket. So the traced
function makes a *proxy* of the optimizer from its arguments: an object with the class's functions and the instance's
attributes, with the bucket for its only parameter and the given state. Buckets of one size then share a graph, and the
user's optimizer is not touched.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from booster.common.torch_internals.autograd_internals import compile_graph
from booster.common.torch_internals.optimizer_internals import is_counted_step, unwrapped
from booster.masters.bucket import Bucket
from booster.masters.formats import WEIGHTS, Format, MasterOptions, Split24
from booster.masters.formats_compiled import dequantize, fuses, join, quantize, rows, split
from booster.masters.masters import Masters
from booster.masters.quantized_state import DIVISOR, Encoding, QuantizedState, StateSigns, ratios_last
from booster.masters.step import MasterStep, inverse
from booster.model.optimizers import granularity_of, not_elementwise, restored_afterwards
from booster.shards.base import State
from booster.update.application import StepScalars
from booster.update.choice import COMPILER_OPTIONS, compile_alone, is_compilable

Entries = dict[str, Any]
# Of a group: what no `step` reads, but differs from group to group. Each value seen is a graph.
NOT_READ = ("params", "lr", "initial_lr", "param_names")


def read_entries(group: Entries) -> Entries:
    """Return the entries of a group that a step reads, the learning rate excepted."""
    entries = {key: value for key, value in group.items() if key not in NOT_READ}
    # One tensor needs no foreach, and some foreach implementations refuse a tensor for a learning rate.
    return entries | ({"foreach": False} if "foreach" in entries else {})


def step_proxy(
    proxy: type, attributes: Entries, group: Entries, rate: Any, masters: torch.Tensor, state: State
) -> tuple[Entries, State]:
    """Step a new proxy on `masters`, in place by their `.grad`. Returns the group and the state afterwards."""
    optimizer: Any = proxy()
    for key, value in attributes.items():
        setattr(optimizer, key, value)
    own = {**group, "params": [masters]}
    if rate is not None:
        own["lr"] = rate
    optimizer.param_groups = [own]
    optimizer.state = {masters: state}
    optimizer.step()
    return {key: own[key] for key in group}, optimizer.state[masters]


def keeps_state(optimizer: Optimizer, group: Entries, device: torch.device) -> bool:
    """Return whether a first step of `optimizer` creates state for a parameter; tries it on one of a few zeros."""
    masters = torch.zeros(1, dtype=torch.float32, device=device)
    masters.grad = torch.zeros(1, dtype=torch.float32, device=device)
    own = proxy_class(type(optimizer)), instance_attributes(optimizer)
    with restored_afterwards(optimizer, group):
        return bool(step_proxy(*own, read_entries(group), group.get("lr"), masters, {})[1])


def instance_attributes(optimizer: Optimizer) -> Entries:
    """Return what a step may read of the instance except groups and state, without what torch's schedules put there."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups")
        and not key.startswith(("_optimizer_", "_zero_grad_", "_warned_"))
        and not is_counted_step(value)
    }


def proxy_class(cls: type[Optimizer]) -> type:
    """Return a class with the functions of `cls` and its bases that is no Optimizer, without what torch wraps them in."""
    members: Entries = {}
    for base in reversed(cls.__mro__[:-1]):
        for name, value in vars(base).items():
            if not name.startswith("__"):
                members[name] = unwrapped(value) if inspect.isfunction(value) else value
    return type(cls.__name__, (), members)


class Kernel:
    """The compiled step of optimizers of the class and attributes of `optimizer`, which is not touched.

    One Kernel is for one size and dtype. ways: how states are packed, by name. Raises, at a call, whatever the compiler raises
    for what it cannot trace; nothing has changed then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        format: Format,
        dtype: torch.dtype,
        encodings: Mapping[str, Encoding],
    ) -> None:
        proxy = proxy_class(type(optimizer))
        attributes = instance_attributes(optimizer)

        def update(
            group: Entries,
            state: State,
            rate: Any,
            ratio: torch.Tensor,
            residual: list[torch.Tensor],
            weights: torch.Tensor,
            grads: torch.Tensor,
            codes: dict[str, torch.Tensor],
            factors: dict[str, torch.Tensor | None],
            lanes: dict[str, torch.Tensor],
            present: torch.Tensor | None,
        ) -> tuple[Entries, State, dict[str, torch.Tensor | None]]:
            masters = join(format, weights, residual)
            masters.grad = grads.float() * ratio
            for name, each in codes.items():
                divisor = codes.get(DIVISOR.get(encodings[name], ""))
                state = {**state, name: dequantize(encodings[name], each, factors[name], divisor)}
            group, state = step_proxy(proxy, attributes, group, rate, masters, state)
            rounded, kept = split(format, masters, dtype, lanes.get(WEIGHTS))
            weights.copy_(rounded)
            for old, new in zip(residual, kept, strict=True):
                old.copy_(new)
            scales = {}
            for name in ratios_last(codes):
                divisor = codes.get(DIVISOR.get(encodings[name], ""))
                code, scales[name] = quantize(encodings[name], state.pop(name), lanes[name], present, divisor)
                codes[name].copy_(code)
            return group, state, scales

        self._update: Callable[..., tuple[Entries, State, dict[str, torch.Tensor | None]]] = compile_alone(
            update, fullgraph=True, backend=scalars_first
        )

    def step(
        self,
        group: Entries,
        state: State,
        grad_scale_inverse: float,
        residual: list[torch.Tensor],
        weights: torch.Tensor,
        grads: torch.Tensor,
        lanes: dict[str, torch.Tensor],
        present: torch.Tensor | None = None,
    ) -> None:
        """Update everything in place, `group` and `state` included. `weights` and `grads`: flat.

        lanes: random numbers of this step, by the name of what they round. present: where the bucket has elements, None for
        everywhere; packed states are zero elsewhere.
        """
        rate = group.get("lr")
        if isinstance(rate, (int, float)):  # a number would be compiled in
            rate = torch.full((), rate, dtype=torch.float32, device=weights.device)
        # For the same reason: a number would be a graph for each scale.
        ratio = torch.full((), grad_scale_inverse, dtype=torch.float32, device=weights.device)
        entries = read_entries(group)
        packed = {name: value for name, value in state.items() if isinstance(value, QuantizedState)}
        wide = {name: value for name, value in state.items() if name not in packed}
        codes = {name: value.codes for name, value in packed.items()}
        factors = {name: value.factors() for name, value in packed.items()}
        arguments = entries, wide, rate, ratio, residual, weights, grads, codes, factors, lanes, present
        written, after, scales = self._update(*arguments)
        for name, kept in packed.items():
            new = scales[name]
            if kept.scales is not None and new is not None:
                kept.scales.copy_(new)
        for key, value in after.items():
            if state.get(key) is not value:
                state[key] = value
        for key, value in written.items():
            # What the step wrote to its group goes into the user's; `foreach` was set here.
            if entries.get(key) is not value and key not in ("foreach", *NOT_READ):
                group[key] = value


# ---------------------------------------------------------------------- what is one number for all elements


def scalars_first(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile `graph` with inductor, for torch.compile, except operations among 0-dim tensors, which run eagerly before."""
    from torch.fx.passes.split_module import split_module

    inductor = functools.partial(compile_graph(), options=COMPILER_OPTIONS)
    scalars = _scalars(graph)
    if not scalars:
        return inductor(graph, inputs)
    whole: Any = split_module(graph, graph, lambda node: 0 if node in scalars else 1, keep_original_order=False)
    # Bias corrections are powers of the step count. Torch's compiler for CPUs puts them into the loop over the elements, once
    # for each vector, where they take longer than the update itself.
    elementwise = whole.submod_1
    values = {node.name: node.meta.get("example_value") for node in graph.graph.nodes}
    examples: Any = [values[node.name] for node in elementwise.graph.nodes if node.op == "placeholder"]
    whole.submod_1 = _Compiled(inductor(elementwise, examples))
    return whole.forward


class _Compiled(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


def _scalars(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the operations among 0-dim tensors; none if moving them to the front would change what another operation reads."""
    scalars: set[fx.Node] = set()
    read: set[fx.Node] = set()  # by operations that stay
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        inputs = node.all_input_nodes
        if _is_scalar(node) and all(a in scalars or (a.op == "placeholder" and _is_scalar(a)) for a in inputs):
            if _writes(node) and not read.isdisjoint(inputs):
                return set()
            scalars.add(node)
        else:
            if _writes(node) and any(_is_scalar(written) for written in inputs[:1]):
                return set()
            read.update(inputs)
    return scalars


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or name.startswith(("i", "setitem"))


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() == 0


_logger = logging.getLogger(__name__)


class CompiledMasterStep(MasterStep):
    """Steps buckets of elementwise optimizers through `Kernel`; build it where `can_compile_masters` says so.

    The first step of a bucket runs eagerly, as it creates the optimizer's state. Float32 parameters always do, and those
    without dimensions: their states look like the counters of a flat bucket. What the compiler does not understand is
    stepped eagerly from then on, after one WARNING.
    """

    def __init__(self, masters: Masters) -> None:
        super().__init__(masters)
        self._kernels: dict[Any, Kernel] = {}
        self._understood = True
        self._copies: dict[Any, torch.Tensor] = {}

    def _step_buckets(
        self, plain: Sequence[Sequence[torch.Tensor]], buckets: Sequence[Bucket], scalars: StepScalars
    ) -> None:
        try:
            super()._step_buckets(plain, buckets, scalars)
        finally:
            self._copies = {}

    def _step_bucket(self, bucket: Bucket, scratch: Any, scalars: StepScalars) -> None:
        optimizer = self.masters.optimizer
        group, state = optimizer.param_groups[0], optimizer.state.get(bucket.handles[0])
        eager = not self._understood or bucket.whole or not fuses(bucket.format)
        if eager or (not state and keeps_state(optimizer, group, bucket.device)):
            super()._step_bucket(bucket, scratch, scalars)
            return
        state = {} if state is None else state
        encodings = {name: value.encoding for name, value in state.items() if isinstance(value, QuantizedState)}
        key = (bucket.size, bucket.dtype, bucket.device, *encodings.items())
        if key not in self._kernels:
            self._kernels[key] = Kernel(optimizer, bucket.format, bucket.dtype, encodings)
        rng = self.masters.rng
        drawn = [*encodings, *([WEIGHTS] if isinstance(bucket.format, Split24) else [])]
        lanes = {name: rng.lanes(name, bucket.device) for name in drawn}
        working, gradients = bucket.working(), bucket.gradients(self.masters.gradient_of)
        weights = self._joined(bucket, working, "weights")
        grads = self._joined(bucket, gradients, "gradients")
        try:
            self._kernels[key].step(
                group,
                state,
                inverse(scalars.number),
                rows(bucket.residual),
                weights,
                grads,
                lanes,
                bucket.present() if encodings else None,
            )
        except Exception as error:
            self._understood = False
            _logger.warning(
                'fused_optimizer="compile" does not apply to this %s: torch.compile does not understand it (%s); it is '
                "stepped without a compiler from here on",
                type(optimizer).__name__,
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            )
            super()._step_bucket(bucket, scratch, scalars)
            return
        # Pieces were copied together, so that one graph serves buckets of any division.
        if weights is not working[0]:
            torch._foreach_copy_(working, bucket.pieces_of(weights))
        if bucket.quantizer is not None:  # what the step has added to the state
            bucket.quantizer.quantize(bucket, state)

    def _joined(self, bucket: Bucket, pieces: list[torch.Tensor], name: str) -> torch.Tensor:
        """Return the pieces as one tensor of the bucket's size: themselves where there is one of this size, else a copy."""
        if len(pieces) == 1 and pieces[0].numel() == bucket.size and pieces[0].dtype == bucket.dtype:
            return pieces[0]
        key = (bucket.size, bucket.dtype, bucket.device, name)
        # The next bucket of the size uses the memory again.
        if key not in self._copies:
            self._copies[key] = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
        # The compiled kernel takes one flat tensor: one of pieces would be compiled for every division.
        torch._foreach_copy_(bucket.pieces_of(self._copies[key]), pieces)
        return self._copies[key]


def can_compile_masters(optimizer: Optimizer, options: MasterOptions) -> bool:
    """Return whether a step on masters of `optimizer` can be compiled, if there is a compiler; one WARNING says why not."""
    reason = None
    if granularity_of(optimizer) != "elementwise":
        reason = not_elementwise(optimizer, "would be stepped on flat buckets", "choose fused_optimizer=True")
    elif options.states != "fp32" and StateSigns(optimizer).unsigned_in_trials:
        names = sorted(StateSigns(optimizer).unsigned_in_trials)
        reason = (
            f"its states {names} were never negative in trial steps, and every step is to look whether they still are not; "
            f"declare them: register_elementwise({type(optimizer).__name__}, states={{{names[0]!r}: 'unsigned', ...}})"
        )
    elif options.rounding == "stochastic":
        reason = 'rounding="stochastic" draws random numbers, which are not compiled'
    return is_compilable(optimizer, reason)
