"""What modules return, and the gradients of it, counted while a sampled step computes them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from booster.common.devices import HostCopy
from booster.common.torch_internals.autograd_internals import graph_task
from booster.interface.model import ModelWrapper
from booster.model.dtensors import is_dtensor
from booster.model.modules import matcher
from booster.numerics.record.samples import NUM_COUNTS, count_exponents, exponents_of
from booster.tensors.trees import tensors

Line = dict[str, Any]
_GRADIENT = "activation gradient"


class Labels:
    """What stands before the names of modules of the second model and later ones, which may bear those of the first."""

    def __init__(self) -> None:
        self._kinds: list[str] = []

    def of(self, model: nn.Module) -> str:
        """Return it for one more model, as in `Discriminator.layers.0`."""
        kind, before = type(model).__name__, len(self._kinds)
        again = kind in self._kinds
        self._kinds.append(kind)
        return f"{kind}-{before}." if again else f"{kind}." if before else ""


class Activations:
    """Forward hooks on the modules whose names `patterns` say; they count while `on`, in training, and pass all through.

    What several passes of one step bring is added up. Waits for no device.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.on = True
        self._matchers = [matcher(pattern) for pattern in patterns]
        self._rows: dict[tuple[str, str], torch.Tensor] = {}
        self._formats: dict[tuple[str, str], str] = {}
        self._in_forward: set[str] = set()
        self._handles: list[Any] = []
        self._labels = Labels()

    def attach(self, model: ModelWrapper) -> None:
        """Hook the modules of a boosted model that the patterns name, if any."""
        label = self._labels.of(model.unwrap())
        for name, module in model.unwrap().named_modules():
            if name and any(matches(name) for matches in self._matchers):
                self._handles.append(module.register_forward_hook(self._hook(f"{label}{name}", weakref.ref(module))))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._labels = [], Labels()

    def take(self, loss_scale: Any) -> Taken:
        """Return what was counted since the last call. loss_scale: of the backward pass."""
        rows, formats = self._rows, self._formats
        self._rows, self._formats, self._in_forward = {}, {}, set()
        return Taken(rows, formats, loss_scale)

    def _hook(self, name: str, of: weakref.ref[nn.Module]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A copy of a model brings its hooks along.
            if not self.on or not module.training or not torch.is_grad_enabled() or module is not of():
                return
            if graph_task() == -1:
                self._in_forward.add(name)
            elif (
                name in self._in_forward
            ):  # recomputed for a backward pass; what was not counted before is counted then
                return
            for tensor in tensors(output):
                if tensor.is_floating_point():
                    self._add(name, "activation", tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(lambda gradient: self._add(name, _GRADIENT, gradient))

        return hook

    @torch.no_grad()
    def _add(self, name: str, of: str, tensor: torch.Tensor) -> None:
        local = (tensor.to_local() if is_dtensor(tensor) else tensor).detach()  # type: ignore[attr-defined]
        if not local.numel():
            return
        wide = None if local.dtype == torch.float64 else torch.float32
        square = torch.linalg.vector_norm(local, dtype=wide).double().square()
        largest = torch.linalg.vector_norm(local, math.inf).double()
        row = torch.cat([count_exponents(local).double(), square[None], largest[None]])
        before = self._rows.get((of, name))
        if before is not None:
            row = torch.cat([row[:-1] + before[:-1], torch.maximum(row[-1:], before[-1:])])
        self._rows[of, name] = row
        self._formats[of, name] = str(local.dtype).removeprefix("torch.")


def check_patterns(patterns: Sequence[str], models: Sequence[ModelWrapper]) -> None:
    """Raise ValueError if one of `patterns` names no module of any of `models`, of which there is one at least."""
    names = dict.fromkeys(name for model in models for name, _ in model.unwrap().named_modules() if name)
    for pattern in patterns:
        if not any(map(matcher(pattern), names)):
            raise ValueError(
                f"activations={pattern!r} names no module of the boosted models; there are "
                f"{list(names)[:8]}, and ** stands for any name"
            )


class Taken:
    """Counts of one step, on their way to the host."""

    def __init__(
        self, rows: dict[tuple[str, str], torch.Tensor], formats: dict[tuple[str, str], str], loss_scale: Any
    ) -> None:
        self._formats = formats
        self._rows = {key: HostCopy(row) for key, row in rows.items()}
        self._scale = HostCopy(torch.as_tensor(loss_scale, dtype=torch.float64))

    def ready(self) -> bool:
        """Whether `lines` would not wait for a device."""
        return all(row.ready() for row in self._rows.values()) and self._scale.ready()

    def lines(self) -> list[Line]:
        """The lines of the record, without optimizer and step."""
        loss_scale = float(self._scale.tensor())
        found = []
        for place, ((of, name), copy) in enumerate(self._rows.items()):
            *counts, square, largest = copy.tensor().tolist()
            scale = loss_scale if of == _GRADIENT else 1.0
            line: Line = {"kind": "sample", "of": of, "name": name, "place": place, "format": self._formats[of, name]}
            line |= exponents_of(counts[:NUM_COUNTS]).as_dict()
            found.append({**line, "scale": scale, "largest": largest, "norm": math.sqrt(square) / scale})
        return found
