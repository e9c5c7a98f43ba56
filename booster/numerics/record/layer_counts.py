"""What layers compute, counted while a sampled step computes it: outputs of modules, and operands of low-precision products.

Lines of kind `sample` have the exponents of what modules return ("activation") and of its gradient ("activation gradient").

A line of kind `low` has, for one operand of one product of one layer, `product` ("forward", "input_grad" or "weight_grad"),
`operand` ("input", "weight" or "gradient"), `format`, and of `total` numbers how many became zero and were not (`underflow`),
were cut off by the largest number of the format under their scale (`saturated`), and became that number (`top`), as many do in
a block before training in it diverges.

Nothing here waits for a device. What several passes of one step bring is added up.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.common.arguments import dtype_name
from booster.common.torch_internals.autograd_internals import graph_task
from booster.interface.model import ModelWrapper
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.operands import padded_and_rotated, quantize
from booster.mixed_precision.low_precision.recipes import GemmConfig, HighPrecision
from booster.model.modules import matcher
from booster.model.params import local_shard
from booster.numerics.record.samples import NUM_COUNTS, PendingRows, count_exponents, exponents_of
from booster.tensors.trees import tensors

Line = dict[str, Any]
Key = tuple[str, ...]
_GRADIENT = "activation gradient"
_OPERANDS = {"forward": ("input", "weight"), "input_grad": ("gradient", "weight"), "weight_grad": ("gradient", "input")}
_COUNTS = ("total", "underflow", "saturated", "top")
_ABOVE = 1 + 2.0**-20  # the largest number of a block divided by its scale may be off by a rounding


class PendingCounts:
    """Counts of one step, on their way to the host. line_of: makes a line of a row's place, its key and its numbers."""

    def __init__(self, rows: Mapping[Key, torch.Tensor], line_of: Callable[[int, Key, list[float]], Line]) -> None:
        self._keys, self._rows, self._line_of = list(rows), PendingRows(rows.values()), line_of

    def ready(self) -> bool:
        """Whether `lines` would not wait for a device."""
        return self._rows.ready()

    def lines(self) -> list[Line]:
        """The lines of the record, without optimizer and step."""
        return list(map(self._line_of, range(len(self._keys)), self._keys, self._rows.rows()))


class Labels:
    """Prefixes for the names of modules of the second model and later ones, which may repeat those of the first."""

    def __init__(self) -> None:
        self._kinds: list[str] = []

    def of(self, model: nn.Module) -> str:
        """Return the prefix of one more model, as in `Discriminator.layers.0`."""
        kind, before = type(model).__name__, len(self._kinds)
        again = kind in self._kinds
        self._kinds.append(kind)
        return f"{kind}-{before}." if again else f"{kind}." if before else ""


class ActivationCounts:
    """Forward hooks on the modules that `patterns` name; they count while `on`, in training, and pass all through."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.on = True
        self._matchers = [matcher(pattern) for pattern in patterns]
        self._rows: dict[Key, torch.Tensor] = {}
        self._formats: dict[Key, str] = {}
        self._in_forward: set[str] = set()
        self._handles: list[Any] = []
        self._labels = Labels()

    def attach(self, model: ModelWrapper) -> None:
        """Hook the modules of a boosted model that the patterns name, if any."""
        label = self._labels.of(model.unwrap())
        for name, module in model.unwrap().named_modules():
            if name and any(matches(name) for matches in self._matchers):
                # Weakly, since the module holds the hook.
                hook = partial(self._count, f"{label}{name}", weakref.ref(module))
                self._handles.append(module.register_forward_hook(hook))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._labels = [], Labels()

    def collect(self, loss_scale: Any) -> PendingCounts:
        """Return what was counted since the last call. loss_scale: of the backward pass."""
        rows, formats = self._rows, self._formats
        self._rows, self._formats, self._in_forward = {}, {}, set()
        scales = {
            row.device: torch.as_tensor(loss_scale, dtype=torch.float64, device=row.device) for row in rows.values()
        }
        scaled = {key: torch.cat([row, scales[row.device].reshape(1)]) for key, row in rows.items()}
        return PendingCounts(scaled, partial(_activation_line, formats))

    def _count(self, name: str, hooked: weakref.ref[nn.Module], module: nn.Module, inputs: Any, output: Any) -> None:
        # A copy of a model brings its hooks along.
        if not self.on or not module.training or not torch.is_grad_enabled() or module is not hooked():
            return
        # No backward pass runs: this is the forward pass itself.
        if graph_task() == -1:
            self._in_forward.add(name)
        elif name in self._in_forward:
            return  # recomputed for a backward pass; what the forward pass did not count is counted here
        for tensor in tensors(output):
            if tensor.is_floating_point():
                self._add(name, "activation", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._add, name, _GRADIENT))

    @torch.no_grad()
    def _add(self, name: str, of: str, tensor: torch.Tensor) -> None:
        local = local_shard(tensor.detach())
        if not local.numel():
            return
        # Squares of halves overflow float16 and round in bfloat16.
        wide = None if local.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(local, dtype=wide).double().square()
        largest = torch.linalg.vector_norm(local, math.inf).double()
        row = torch.cat([count_exponents(local).double(), square[None], largest[None]])
        before = self._rows.get((of, name))
        if before is not None:
            # Counts and squares add up over micro-batches; the largest magnitude does not.
            row = torch.cat([row[:-1] + before[:-1], torch.maximum(row[-1:], before[-1:])])
        self._rows[of, name] = row
        self._formats[of, name] = dtype_name(local.dtype)


def _activation_line(formats: Mapping[Key, str], place: int, key: Key, numbers: list[float]) -> Line:
    of, name = key
    *counts, square, largest, loss_scale = numbers
    scale = loss_scale if of == _GRADIENT else 1.0
    line: Line = {"kind": "sample", "of": of, "name": name, "place": place, "format": formats[key]}
    line |= exponents_of(counts[:NUM_COUNTS]).as_dict()
    return {**line, "scale": scale, "largest": largest, "norm": math.sqrt(square) / scale}


def check_patterns(patterns: Sequence[str], models: Sequence[ModelWrapper]) -> None:
    """Raise ValueError if one of `patterns` names no module of any of `models`, of which there is one at least."""
    names = dict.fromkeys(name for model in models for name, _ in model.unwrap().named_modules() if name)
    for pattern in patterns:
        if not any(map(matcher(pattern), names)):
            raise ValueError(
                f"activations={pattern!r} names no module of the boosted models; there are "
                f"{list(names)[:8]}, and ** means any name"
            )


class OperandCounts:
    """Watchers of low-precision layers; they count while `on`."""

    def __init__(self) -> None:
        self.on = True
        self._rows: dict[Key, torch.Tensor] = {}
        self._watched: list[tuple[weakref.ref[LowPrecisionLinear], Any]] = []
        self._labels = Labels()

    def attach(self, model: ModelWrapper) -> None:
        """Watch the low-precision layers that a boosted model has now."""
        label = self._labels.of(model.unwrap())
        for name, module in model.unwrap().named_modules():
            if isinstance(module, LowPrecisionLinear) and not module.in_high_precision:
                watcher = partial(self._count, f"{label}{name}")
                module.watchers = (*module.watchers, watcher)
                self._watched.append((weakref.ref(module), watcher))

    def detach(self) -> None:
        """Take the watchers off."""
        for reference, watcher in self._watched:
            module = reference()
            if module is not None:
                module.watchers = tuple(each for each in module.watchers if each is not watcher)
        self._watched, self._labels = [], Labels()

    def collect(self, loss_scale: Any) -> PendingCounts:
        """Return what was counted since the last call."""
        rows, self._rows = self._rows, {}
        return PendingCounts(rows, _operand_line)

    @torch.no_grad()
    def _count(
        self,
        name: str,
        role: str,
        a: torch.Tensor,
        b: torch.Tensor,
        how: GemmConfig | HighPrecision,
        result: torch.Tensor,
    ) -> None:
        if not self.on or isinstance(how, HighPrecision) or not (a.numel() and b.numel()):
            return
        for given, operand, what in zip((a, b), (how.left, how.right), _OPERANDS[role], strict=True):
            matrix = padded_and_rotated(given.float(), operand)
            key = (name, role, what, str(operand.format))
            rounded = quantize(matrix, operand)
            scale = rounded.scale_of_each() if rounded.outer is None else rounded.scale_of_each() * rounded.outer
            size, largest = rounded.values.float().abs(), operand.format.largest
            counts = (
                ((size == 0) & (matrix != 0)).sum(),
                # Compared before rounding: afterwards what was cut off looks like the largest number itself.
                (matrix.abs() > scale * (largest * _ABOVE)).sum(),
                (size == largest).sum(),
            )
            row = torch.stack([torch.full((), matrix.numel(), dtype=torch.int64, device=matrix.device), *counts])
            self._rows[key] = self._rows[key] + row if key in self._rows else row


def _operand_line(place: int, key: Key, numbers: list[float]) -> Line:
    names = dict(zip(("name", "product", "operand", "format"), key, strict=True))
    return {"kind": "low", **names, **dict(zip(_COUNTS, map(int, numbers), strict=True))}
