"""The memory that a model and its optimizer hold now, by what it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.tensor_internals import dense_parts
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.masters.quantized_state import QuantizedState
from booster.tensors.trees import tensors


@dataclass(frozen=True)
class Measured:
    """Bytes on this rank.

    weights: with buffers.
    masters: float32 copies of half weights, or what is kept of them; for a small model on a CPU also the scratch of a step.
    gradients: that are there now.
    states: of the optimizer.
    peak: of the CUDA device since its statistics were reset; None on CPU.
    host: of states and masters that lie in the host's memory beside parameters on a device; they are in none of the others.
    """

    weights: int
    masters: int
    gradients: int
    states: int
    peak: int | None
    host: int = 0

    @property
    def held(self) -> int:
        return self.weights + self.masters + self.gradients + self.states

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {**dataclasses.asdict(self), "held": self.held}


def measure(model: nn.Module, optimizer: OptimizerWrapper) -> Measured:
    """Count the storages of a boosted model and its optimizer, each once; no collective, no copy.

    After a step, with gradients there, it stands beside what `estimate` said.
    """
    params = list(model.parameters())
    seen: set[int] = set()
    weights = _bytes([*params, *model.buffers()], seen)
    gradients = _bytes([param.grad for param in params if param.grad is not None], seen)
    update = update_of(optimizer)
    with update.shards.local():
        gradients += _bytes([param.grad for param in update.gradients.params() if param.grad is not None], seen)
    device = next((param.device for param in params), torch.device("cpu"))
    masters, of_optimizer = kept_tensors(optimizer)
    away = [t for t in (*masters, *of_optimizer) if t.dim() and t.device.type != device.type]
    host = _bytes(away, seen)
    kept, states = _bytes(masters, seen), _bytes(of_optimizer, seen)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Measured(weights, kept, gradients, states, peak, host)


def kept_tensors(optimizer: OptimizerWrapper) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what a boosted optimizer keeps from step to step: masters with scratch, and states."""
    kept = update_of(optimizer).optimizer_state
    of_each = optimizer.unwrap().state.values()
    states = [tensor for own in of_each for tensor in tensors(own)]
    states += [tensor for own in of_each for v in own.values() if isinstance(v, QuantizedState) for tensor in v.tensors]
    return [*kept.master_tensors(), *kept.scratch_tensors()], states


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        for part in dense_parts(local):
            storage = part.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total
