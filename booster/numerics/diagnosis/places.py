"""What is said of a bad number: the modules and the line of the user's code, its range, the parameter that holds it."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from booster.common.arguments import dtype_name
from booster.common.misuse import is_users
from booster.common.torch_internals.autograd_internals import (
    engine_starts,
    graph_task,
    module_call,
    newest_node_number,
    running_node,
)
from booster.common.torch_internals.tensor_internals import storage_key
from booster.tensors.trees import at_stage


@dataclass(frozen=True)
class Place:
    """Where one operation comes from.

    Attributes:
        modules: names of those being called, the outermost first.
        inside: one of them is of the boosted model.
        source: "file:line in function" of the user's code, "" if there is none.
        backward: inside autograd's engine, and not a forward pass that it computes again.
        node: the class of the autograd node then.
        of: the operation that made the node.
        stage, micro_batch: of a pipeline.
        is_loss: a pipeline's criterion computes.
    """

    modules: tuple[str, ...] = ()
    inside: bool = False
    source: str = ""
    backward: bool = False
    node: str = ""
    of: str = ""
    stage: int | None = None
    micro_batch: int | None = None
    is_loss: bool = False


class PlaceFinder:
    """Finds where each operation of one replay comes from.

    Python's own stack says which modules are being called, in order and with what their hooks do, so nothing is hooked. Of a
    backward pass it says nothing: there, the number of the autograd node leads back to the operation that made it.

    names: of the modules of boosted models.
    criteria: of those of boosted criteria.
    params: of parameters, with the module that has each.
    end: the code that starts the replay; what called it is not part of it.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        criteria: Mapping[nn.Module, str],
        params: Mapping[torch.Tensor, tuple[str, str]],
        end: CodeType,
    ) -> None:
        self._names = {id(module): name for module, name in names.items()}
        self._criteria = {id(module): name for module, name in criteria.items()}
        self._params = params
        self._forward_ends = frozenset({end})
        self._backward_ends = frozenset({end, *engine_starts()})
        self._call = module_call()
        self._made: dict[int, tuple[Place, str]] = {}  # by number of the autograd node

    def of(self, operation: str) -> Place:
        """Return the place of the operation that runs now, called `operation`. To be called once for each."""
        # -1 says that no backward pass runs in this thread.
        node = running_node() if graph_task() != -1 else None
        place = self._of_stack(self._forward_ends if node is None else self._backward_ends)
        if node is None or place.modules:
            # An operation without a node reads the number of an older one, which has its maker already.
            self._made.setdefault(newest_node_number(), (place, operation))
        if node is None or place.modules:  # with modules, activations are computed again
            return place
        name, number, leaf = node
        made, of = self._made.get(number, (Place(), ""))
        # The node that adds into a leaf's gradient was made by no operation: its parameter has the name.
        if leaf is not None and leaf in self._params:
            of, owner = self._params[leaf]
            made = Place((owner,), not owner.startswith("criterion"))
        # A custom backward of the user's is on the stack; that of torch has its forward's line alone.
        made = dataclasses.replace(made, source=place.source or made.source)
        if torch.is_grad_enabled():  # activations are computed again outside of a module, or gradients have a graph
            self._made.setdefault(newest_node_number(), (made, operation))
        return dataclasses.replace(made, backward=True, node=name, of=of)

    def _of_stack(self, ends: frozenset[CodeType]) -> Place:
        modules: list[str] = []
        inside, source = False, ""
        at: dict[str, Any] = {}
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code is self._call:
                module = frame.f_locals["self"]
                inside = inside or id(module) in self._names
                name = self._names.get(id(module)) or self._criteria.get(id(module)) or type(module).__name__
                if not modules or modules[-1] != name:
                    modules.append(name)
            elif code is at_stage.__code__:
                at = {name: frame.f_locals[name] for name in ("stage", "micro_batch", "is_loss")}
            elif code in ends:
                break
            elif not source and is_users(code):
                source = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
            frame = frame.f_back
        return Place(tuple(reversed(modules)), inside, source, **at)


@dataclass(frozen=True)
class Numbers:
    """The range of one tensor.

    dtype: without "torch.".
    shape: of the tensor.
    low, high: of its finite elements, 0 where there are none.
    num_nan: how many are NaN.
    num_inf: how many are infinite.
    """

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    num_nan: int
    num_inf: int

    @property
    def num_bad(self) -> int:
        return self.num_nan + self.num_inf

    def __str__(self) -> str:
        bad = [f"{count} {what}" for count, what in ((self.num_nan, "NaN"), (self.num_inf, "inf")) if count]
        finite = f"{self.low:.3g} to {self.high:.3g}" if self.num_bad < math.prod(self.shape) else "nothing finite"
        return f"{self.dtype} {list(self.shape)}: {', '.join([finite, *bad])}"

    @classmethod
    def read(cls, data: dict[str, Any]) -> Numbers:
        """Return what `dataclasses.asdict` made `data` of, also after a passage through JSON."""
        return cls(**{**data, "shape": tuple(data["shape"])})


def numbers_of(tensor: torch.Tensor) -> Numbers:
    """Read all of a real floating `tensor`; waits for its device."""
    values = tensor.detach()
    finite = values.isfinite()
    good = values[finite].double()
    low, high = (float(good.min()), float(good.max())) if good.numel() else (0.0, 0.0)
    num_nan = int(values.isnan().sum())
    num_inf = int(values.numel() - int(finite.sum())) - num_nan
    return Numbers(tuple(tensor.shape), dtype_name(tensor.dtype), low, high, num_nan, num_inf)


def bad_rows(tensor: torch.Tensor) -> list[int]:
    """Return where along its first dimension `tensor` holds an inf or NaN, at most eight places; none where all do."""
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return []
    bad = tensor.detach().isfinite().logical_not().flatten(1).any(1) if tensor.dim() > 1 else ~tensor.isfinite()
    return [] if bool(bad.all()) else bad.nonzero().flatten()[:8].tolist()


class MemoryNames:
    """Names of tensors by their memory on this rank, which several may share; of two in one place, the first."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int, str]]] = {}

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Give the memory of a plain `tensor` a name."""
        if tensor.numel():
            start = tensor.storage_offset()
            length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            size = tensor.element_size()
            self._spans.setdefault(storage_key(tensor), []).append(
                (int(start) * size, int(start + length) * size, name)
            )

    def of(self, tensor: torch.Tensor) -> str:
        """Return the name of the part that holds the first inf or NaN of a plain `tensor`; "" where none does."""
        spans = self._spans.get(storage_key(tensor), [])
        if len(spans) < 2:  # the usual case, without a search
            return spans[0][2] if spans else ""
        bad = tensor.detach().isfinite().logical_not().nonzero()
        if not len(bad):
            return ""
        place = tensor.storage_offset() + sum(
            int(i) * stride for i, stride in zip(bad[0], tensor.stride(), strict=True)
        )
        byte = place * tensor.element_size()
        return next((name for start, end, name in spans if start <= byte < end), "")
