"""Linear layers timed one by one, in bfloat16 and in the low precisions that a device runs: which of them gain by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from booster.common import arguments
from booster.common.arguments import columns
from booster.common.devices import resolve_device
from booster.common.snapshot import seeded
from booster.mixed_precision import (
    FP8MixedPrecision,
    Int8MixedPrecision,
    LowPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
)
from booster.mixed_precision.low_precision.conversion import seconds, timed
from booster.mixed_precision.low_precision.operands import for_device
from booster.numerics.choosing.trained_subject import copied_batch, made_model

_PRECISIONS: dict[str, Callable[[], LowPrecision]] = {
    "fp8 tensorwise": FP8MixedPrecision,
    "fp8 rowwise": lambda: FP8MixedPrecision("rowwise"),
    "fp8 blocks": lambda: FP8MixedPrecision("blocks"),
    "mxfp8": MXFP8MixedPrecision,
    "nvfp4": NVFP4MixedPrecision,
    "int8": Int8MixedPrecision,
}


@dataclass(frozen=True, kw_only=True)
class TimedShape:
    """Layers of one shape, timed.

    names: of the layers.
    tokens: rows that the batch has for each.
    in_features: of each.
    out_features: of each.
    bf16: seconds of a forward and a backward pass of one in bfloat16, the shortest of some.
    low: the same by precision, without those that do not convert such features.
    """

    names: tuple[str, ...]
    tokens: int
    in_features: int
    out_features: int
    bf16: float
    low: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TimedLayers:
    """The linear layers of a model by shape, as they were timed. `str()` of it is a table.

    shapes: in the order of the forward pass.
    precisions: what the device runs.
    device: its name.
    """

    shapes: tuple[TimedShape, ...]
    precisions: tuple[str, ...]
    device: str

    def slower(self, precision: str) -> tuple[str, ...]:
        """Return the names of the layers that are not faster in `precision` than in bfloat16, for its `keep=`.

        precision: one of `precisions`.
        """
        arguments.choice("precision", precision, self.precisions)
        return tuple(
            name
            for shape in self.shapes
            for name in shape.names
            # A shape that the precision does not convert counts as slower.
            if not shape.low.get(precision, shape.bf16) < shape.bf16
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain containers."""
        return {**asdict(self), "slower": {name: list(self.slower(name)) for name in self.precisions}}

    def __str__(self) -> str:
        heading = ("layers", "tokens", "in", "out", "bf16 us", *(f"{name} us" for name in self.precisions))
        rows = [heading]
        for each in self.shapes:
            more = f" and {len(each.names) - 1} more" if len(each.names) > 1 else ""
            times = [each.low.get(name) for name in self.precisions]
            shown = ["-" if time is None else f"{time * 1e6:.0f}" for time in times]
            size = f"{each.tokens:,}", str(each.in_features), str(each.out_features), f"{each.bf16 * 1e6:.0f}"
            rows.append((each.names[0] + more, *size, *shown))
        said = []
        for name in self.precisions:
            count = len(self.slower(name))
            layers = "1 layer is" if count == 1 else f"{count} layers are"
            said.append(f"{name}: {layers} no faster than in bfloat16; keep=(Ends(), *slower({name!r}))")
        said = said or [f"{self.device} runs no low precision; nothing is to be gained by one here"]
        return "\n".join([columns(rows, right=range(1, len(heading))), "", *said])


def time_layers(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    *,
    device: str | torch.device | None = None,
    rounds: int = 10,
    seed: int = 0,
) -> TimedLayers:
    """Time each shape of linear layer in the model that `model_fn` makes, in bfloat16 and in every low precision.

    model_fn: makes the model.
    batch: as for `advise`; one forward pass says how many rows it has for each layer. A layer that is called several times
        counts with the most.
    device: as for `Booster`; None means a GPU, where there is one. What it emulates is not timed: that says nothing of a GPU.
    rounds: passes of each, of which the shortest counts.
    seed: of weights and random numbers.

    Raises ValueError for a model in which the batch meets no linear layer. Random states are afterwards what they were.
    """
    arguments.function("model_fn", model_fn, "a function that makes a torch.nn.Module")
    arguments.count("rounds", rounds)
    where = resolve_device(device)
    with seeded(arguments.count("seed", seed, least=0, most=2**63 - 2), where):
        shapes = _shapes(made_model(model_fn).to(where), batch, where)
        # What the device runs, by name
        recipes = {}
        for name, make in _PRECISIONS.items():
            conversion = make().conversion
            try:
                conversion.runs(where)
            except ValueError:
                continue
            recipes[name] = for_device(conversion.recipe, where)
        rows = [
            TimedShape(
                names=tuple(names), tokens=shape[0], in_features=shape[1], out_features=shape[2], bf16=wide, low=low
            )
            for shape, names in shapes.items()
            for wide, low in [timed(shape, recipes, where, rounds=rounds, timer=seconds)]
        ]
    return TimedLayers(shapes=tuple(rows), precisions=tuple(recipes), device=str(where))


def _shapes(model: nn.Module, batch: Any, device: torch.device) -> dict[tuple[int, int, int], list[str]]:
    """Names of linear layers by rows, features in and features out."""
    tokens: dict[str, int] = {}
    linears = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    for name, each in linears.items():

        def count(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            tokens[name] = max(tokens.get(name, 0), args[0].numel() // max(1, args[0].shape[-1]))

        each.register_forward_pre_hook(count)
    inputs = copied_batch(batch, device)
    with torch.no_grad():
        model(*inputs.args, **inputs.kwargs)
    if not tokens:
        raise ValueError(f"the batch meets no linear layer of {type(model).__name__}; there is nothing to time")
    shapes: dict[tuple[int, int, int], list[str]] = {}
    for name, rows in tokens.items():
        shapes.setdefault((rows, linears[name].in_features, linears[name].out_features), []).append(name)
    return shapes
