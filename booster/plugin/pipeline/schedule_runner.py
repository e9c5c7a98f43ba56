"""Torch's pipeline schedules over stages that know their current micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.overrides import TorchFunctionMode

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import (
    computed_from,
    engine_backward,
    num_function_modes,
    with_function_modes,
    without_function_modes,
)
from booster.common.torch_internals.pipeline_internals import PipelineStage, backward_of_weights, computes_weights_apart
from booster.common.torch_internals.tensor_internals import is_view
from booster.plugin.pipeline.shape_inference import StageIO
from booster.plugin.pipeline.stage import Stage
from booster.tensors.trees import at_stage

Shape = tuple[int, ...]
STYLES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


def check_style(style: str, pp_size: int, num_model_chunks: int, *, name: str = "style") -> int:
    """Return the number of stages on each rank; raises ValueError if the three do not go together. name: of the option."""
    arguments.choice(name, style, tuple(STYLES))
    if pp_size < 1 or num_model_chunks < 1:
        raise ValueError(f"pp_size={pp_size} and num_model_chunks={num_model_chunks} must be at least 1")
    if style == "interleaved" and num_model_chunks < 2:
        raise ValueError(
            f"{name}='interleaved' puts several stages on each rank, and num_model_chunks is {num_model_chunks}; "
            f"choose at least 2, or {name}='1f1b'"
        )
    if style == "zbv" and num_model_chunks not in (1, 2):
        raise ValueError(f"{name}='zbv' has 2 model chunks, got num_model_chunks={num_model_chunks}; leave it out")
    if style in ("gpipe", "1f1b") and num_model_chunks > 1:
        raise ValueError(f"num_model_chunks={num_model_chunks} needs {name}='interleaved' or 'zbv', got {style!r}")
    return 2 if style == "zbv" else num_model_chunks


def stage_ranks(style: str, pp_size: int, num_model_chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of every stage: in rounds, or, for "zbv", there and back."""
    loop = range(pp_size)
    return (*loop, *reversed(loop)) if style == "zbv" else tuple(loop) * num_model_chunks


def check_count(style: str, pp_size: int, num_micro_batches: int) -> None:
    """Raise ValueError if the schedule cannot run so many micro-batches."""
    if style in ("1f1b", "interleaved") and num_micro_batches < pp_size:
        raise ValueError(
            f"{num_micro_batches} micro-batches are too few for {style!r} on {pp_size} pipeline ranks; use at least {pp_size}, "
            "or 'gpipe'"
        )
    rounds = max(1, num_micro_batches // pp_size)
    if style == "interleaved" and num_micro_batches % rounds:
        raise ValueError(
            f"'interleaved' cannot run {num_micro_batches} micro-batches on {pp_size} pipeline ranks; use a multiple of "
            f"{pp_size}"
        )


class ScheduleRunner:
    """A schedule of `num_micro_batches` micro-batches of one shape, forward and backward or forward alone.

    loss_of: (output, target) -> 0-dim loss to run backward from; called on the last stage.
    """

    def __init__(
        self,
        style: str,
        stages: Sequence[Stage],
        io: StageIO,
        num_micro_batches: int,
        *,
        loss_of: Callable[[Any, Any], torch.Tensor],
        backward: bool,
        boundary: Callable[[Shape], Shape] | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._backward = backward
        self._numbers = torch.arange(num_micro_batches, dtype=torch.int64)
        self._has_first = stages[0].index == 0
        chunks = [_ScheduledStage(stage, io, device, boundary, group, loss_of) for stage in stages]
        options = {"n_microbatches": num_micro_batches, "loss_fn": lambda output, target: output, "scale_grads": False}
        self._new = list(chunks)  # that never ran
        self._schedule = STYLES[style](chunks if style in ("interleaved", "zbv") else chunks[0], **options)

    def run(self) -> None:
        """Run it once, on what the stages were given; gradients accumulate."""
        # All that the schedule hands around is numbers of micro-batches; stages look up the rest.
        args = (self._numbers,) if self._has_first else ()
        run = self._schedule.step if self._backward else self._schedule.eval
        while self._new:
            self._new.pop().keep_gradients()
        # The precision's torch function modes are for what stages compute, not for what the schedule does with tensors.
        with without_function_modes():
            run(*args, target=self._numbers, return_outputs=False)


class _ScheduledStage(PipelineStage):
    """Sets the current micro-batch of its `Stage`, and computes the loss of the last stage.

    The schedule does not compute the loss, because torch expects a last stage to return tensors alone.
    """

    def __init__(
        self,
        stage: Stage,
        io: StageIO,
        device: torch.device,
        boundary: Callable[[Shape], Shape] | None,
        group: dist.ProcessGroup | None,
        loss_of: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        inputs, outputs = (_declared(io, number, boundary) for number in (stage.index - 1, stage.index))
        super().__init__(
            stage.module,
            stage.index,
            len(io.boundaries) + 1,
            device,
            input_args=inputs,
            output_args=outputs,
            group=group,
            # Given a builder, torch computes gradients of weights with those of inputs; nothing is left to do for them.
            dw_builder=None if computes_weights_apart() else lambda: lambda: None,
        )
        self._own = stage
        self._loss_of = loss_of
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._whole: set[int] = set()  # micro-batches with gradients of weights already

    def keep_gradients(self) -> None:
        """Keep the gradients of earlier passes, which torch 2.13 drops in the first run of a schedule."""
        self._kept = [(param, param.grad) for param in self._own.module.parameters() if param.grad is not None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        while self._kept:
            param, grad = self._kept.pop()
            if param.grad is None:
                param.grad = grad
        self._own.begin(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *received: torch.Tensor) -> Any:
        stage, number = self._own.index, self._own.current
        with with_function_modes():
            output = at_stage(stage, number, False, self._own.compute, received)
            if self.is_last:
                return _no_view(at_stage(stage, number, True, self._loss_of, output, self._own.target))
        return tuple(_no_view(value) for value in output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._own.begin(bwd_chunk_id)  # for what activation checkpointing computes again
        apart = self.has_backward and not full_backward and not self.is_first
        if apart and not self._comes_from_inputs(bwd_chunk_id, loss):
            full_backward = True
            self._whole.add(bwd_chunk_id)
        apart = not full_backward and num_function_modes() > 0
        with self._in_backward(), _GradientsInModes() if apart else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if bwd_chunk_id in self.bwd_cache:  # what is sent to the stage before
            self.bwd_cache[bwd_chunk_id] = tuple(
                grad.contiguous() if isinstance(grad, torch.Tensor) else grad for grad in self.bwd_cache[bwd_chunk_id]
            )

    def _comes_from_inputs(self, micro_batch: int, loss: torch.Tensor | None) -> bool:
        """Return whether all that the stage returns is computed from what it received, as far as that has gradients."""
        # Torch leaves for later the gradients of weights on the way from an output to an input, and drops all others: those
        # of a stage behind a `detach`, or of an output that comes from weights alone.
        outputs, inputs = self.fwd_cache[micro_batch]
        leaves = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        return all(computed_from(each, leaves) for each in (outputs if loss is None else [loss]) if each.requires_grad)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
            return
        self._own.begin(bwd_chunk_id)
        with self._in_backward():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if backward_type == "weight":
            return backward_of_weights(self.submod, bwd_kwargs["param_groups"]), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not hasattr(super(), "start_gradient_reduction"):
            self._own.before_reduction()
        super().perform_reduce_grad(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        # From torch 2.15 on schedules call this, and so does `perform_reduce_grad`.
        self._own.before_reduction()
        super().start_gradient_reduction()  # type: ignore[misc]

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Return the context of a backward pass without a pipeline: the precision's modes, and no autocast."""
        # What is recomputed enters its own.
        # The autocast around the schedule is for forward passes: in it the engine would cast products of float32.
        with with_function_modes(), torch.autocast(self.device.type, enabled=False):
            yield

    # Torch's V-shaped schedule passes gradients to the other stage of a rank in evaluation too, where there are none.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    # Where gradients of inputs and weights are computed apart, torch detaches what a stage returned in place.
    return tensor.clone() if is_view(tensor) else tensor


class _GradientsInModes(TorchFunctionMode):
    """Innermost mode, in which torch.autograd.grad runs in the modes around it.

    That function computes gradients of inputs and of weights apart. Torch passes it from mode to mode until none is left, so
    activations that it recomputes would be computed without the precision's modes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _grad(*args, **kwargs or {}) if func is torch.autograd.grad else func(*args, **kwargs or {})


def _grad(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Do what torch.autograd.grad does for schedules: with a gradient for every output, and without a graph of gradients."""
    outputs, grads = tuple(outputs), tuple(grad_outputs or ())
    return engine_backward(
        outputs, grads, bool(retain_graph), create_graph, tuple(inputs), bool(allow_unused), accumulate_grad=False
    )


def _declared(io: StageIO, number: int, boundary: Callable[[Shape], Shape] | None) -> tuple[torch.Tensor, ...]:
    """Return meta tensors for what crosses boundary `number`; at the ends of the pipeline, a number and a loss."""
    if number < 0:
        return (torch.empty(1, dtype=torch.int64, device="meta"),)
    if number == len(io.boundaries):
        return (torch.empty((), dtype=torch.float32, device="meta", requires_grad=True),)
    return tuple(
        torch.empty(
            spec.shape if boundary is None else boundary(spec.shape),
            dtype=spec.dtype,
            device="meta",
            requires_grad=spec.requires_grad,
        )
        for spec in io.boundaries[number].specs
    )
