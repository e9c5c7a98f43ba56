"""What autograd keeps of a product that is computed in float32: the halves that were multiplied, as of a product in half."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from booster.common.torch_internals.tensor_internals import storage_key, version
from booster.model.dtensors import is_dtensor


class SavedOperand:
    """A half that products read in float32, for the backward passes that need it again."""

    __slots__ = ("_uses", "_wide", "half")

    def __init__(self, half: torch.Tensor) -> None:
        self.half = half.detach()
        self._uses = 0
        self._wide: torch.Tensor | None = None

    def keep(self) -> SavedOperand:
        """A reference for one backward pass, which `widen` ends."""
        self._uses += 1
        return self

    def widen(self) -> torch.Tensor:
        """In float32, laid out as before; the same tensor from the first to the last backward pass that refers to it."""
        self._uses -= 1
        wide = self.half.float() if self._wide is None else self._wide
        self._wide = wide if self._uses > 0 else None
        return wide


class SaveOperandsInHalf(saved_tensors_hooks):
    """While active, autograd keeps an operand's half where it would save it in float32, and a backward pass widens it again.

    As for what torch saves itself, a backward pass raises RuntimeError where it was written to in between.
    """

    def __init__(self) -> None:
        self._operands: dict[int, tuple[SavedOperand, torch.Tensor]] = {}
        super().__init__(partial(_pack, self._operands), _unpack)

    def add(self, operand: SavedOperand, wide: torch.Tensor) -> None:
        """Know `wide`, and views of it, as that operand in float32."""
        self._operands[storage_key(wide)] = operand, wide

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._operands.clear()  # the graph refers to these hooks, and must not to what they knew


def _pack(operands: dict[int, tuple[SavedOperand, torch.Tensor]], tensor: torch.Tensor) -> Any:
    # By storage, not by tensor: products save transposes and views of what they are given.
    known = operands.get(storage_key(tensor))
    if known is None:
        return tensor, version(tensor), None, None
    operand, wide = known
    whole = tensor.shape == wide.shape and tensor.stride() == wide.stride()
    if not whole and is_dtensor(tensor):  # of which torch takes no view by strides
        return tensor, version(tensor), None, None
    view = None if whole else (tensor.shape, tensor.stride(), tensor.storage_offset())
    return operand.half, version(operand.half), operand.keep(), view


def _unpack(kept: Any) -> torch.Tensor:
    saved, written, operand, view = kept
    # torch checks versions of the tensors that it saves itself, and not of what a hook returns.
    if version(saved) != written:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{saved.type()} {list(saved.shape)}] is at version {version(saved)}; expected version {written} instead"
        )
    if operand is None:
        return saved
    wide = operand.widen()
    return wide if view is None else wide.as_strided(*view)
