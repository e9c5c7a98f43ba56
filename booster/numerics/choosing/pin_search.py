"""Which modules to keep in float32 so that gradients stay near float32's: the fewest that do, found by measuring."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.common import arguments
from booster.common.arguments import columns
from booster.common.devices import resolve_device
from booster.common.snapshot import seeded
from booster.mixed_precision import MixedPrecision, make
from booster.model.modules import bare, tensor_places
from booster.numerics.choosing.trained_subject import GradientError, LayerError, Subject, Task, gradient_error

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_SHOWN = 8


@dataclass(frozen=True)
class Contribution:
    """One candidate.

    names: of its module; of several where they share a parameter, which only together can be kept.
    alone: the gradient error where it is the only one not in float32; inf where that is not finite.
    kept: it is kept in float32, or a module inside of it.
    """

    names: tuple[str, ...]
    alone: float
    kept: bool


@dataclass(frozen=True, kw_only=True)
class Pins:
    """The modules to keep in float32, and what was measured. `str()` of it is a table.

    names: for `keep_fp32=`; none where nothing need be kept.
    precision: the precision that was asked about, with them kept.
    bound: the largest gradient error that was asked for.
    error, without: gradient error with and without them.
    table: the candidates, the largest contribution first; none where nothing had to be searched.
    layers: what is left, by layer, the worst first.
    passes: how many models were run.
    """

    names: tuple[str, ...]
    precision: MixedPrecision
    bound: float
    error: float
    without: float
    table: tuple[Contribution, ...]
    layers: tuple[LayerError, ...]
    passes: int

    def as_dict(self) -> dict[str, Any]:
        """Everything but the precision object, as plain containers."""
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "precision"
        }
        for name in ("table", "layers"):
            fields[name] = [dataclasses.asdict(entry) for entry in fields[name]]
        return fields

    def __str__(self) -> str:
        if not self.names:
            return f"No module need be kept in float32: the gradient error is {self.without:.2g}, and the bound {self.bound:g}."
        shown = [
            (", ".join(each.names), f"{each.alone:.2g}", "kept" if each.kept else "") for each in self.table[:_SHOWN]
        ]
        lines = [columns([("module", "error alone", ""), *shown])]
        if len(self.table) > _SHOWN:
            lines.append(f"and {len(self.table) - _SHOWN} more")
        kept = ", ".join(map(repr, self.names))
        said = f"With keep_fp32=[{kept}] the gradient error is {self.error:.2g}; without, {self.without:.2g}."
        return "\n".join([*lines, "", said])


def auto_pins(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    criterion: Callable[..., Any],
    precision: str | MixedPrecision,
    *,
    bound: float = 0.1,
    device: str | torch.device | None = None,
    seed: int = 0,
) -> Pins:
    """Find the smallest set of modules to keep in float32 so that the gradient error under `precision` is at most `bound`.

    model: a module, which is copied, with the weights that it has, or a function that makes one.
    batch: (inputs..., target), or a mapping that the model takes by keyword and the criterion whole.
    criterion: a function of output and target.
    precision: one with keep_fp32; what it keeps already, it keeps.
    bound: of the norm of the difference from float32's gradients, relative to their norm, as in `Budget`.
    device: as for `Booster`; None likewise.
    seed: of weights and random numbers.

    Each block is measured with all others in float32: what it contributes alone. The largest are kept until the bound
    holds, then each of them is given back if it holds without; of what is left, a single module inside a block that is enough
    takes the block's place. The set that is returned was measured last. Greedy, so no other set is proven to be larger.
    Cost: a forward and backward pass for each block and some more, each on a new model. Nothing of the arguments and of the
    random states changes.

    Raises RuntimeError where the bound does not hold even with all blocks in float32, TypeError for a precision without
    keep_fp32, and what the model raises in float32.
    """
    arguments.function("model", model, "a torch.nn.Module, or a function that makes one")

    def make_model() -> nn.Module:
        made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        return arguments.instance("what model() returned", made, nn.Module, "a torch.nn.Module")

    arguments.function("criterion", criterion, "a function of output and target")
    bound = float(arguments.number("bound", bound, above=0))
    arguments.count("seed", seed, least=0, most=2**63 - 2)
    where = resolve_device(device)
    own = make(precision, "precision")
    try:
        # Asked before any model is made: a precision without the option says so at once.
        own.keeping(())
    except TypeError as error:
        raise TypeError(f"precision={precision!r} can keep no module in float32: {error}") from None
    with seeded(seed, where) as begin, torch.enable_grad():
        task = Task(make_model, batch, criterion, _idle_optimizer, where, seed, begin)
        return _Search(task, own, bound).run()


def _idle_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that changes nothing, without states: gradients alone are compared."""
    # Boosting wants an optimizer, since masters and release depend on one.
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.0)


Unit = tuple[str, ...]  # names of modules that are kept together


class _Search:
    """Measures models with some modules in float32, first each block alone, then the smallest set that is enough."""

    def __init__(self, task: Task, precision: MixedPrecision, bound: float) -> None:
        self._task, self._precision, self._bound = task, precision, bound
        self._passes = 0
        exact = make("fp32")
        exact.bind(task.device)
        reference = self._subject(exact)
        self._exact = reference.gradients()
        self._model: nn.Module = bare(reference.model.unwrap())
        if not self._exact.finite:
            raise RuntimeError(
                f"the loss ({self._exact.loss:g}) or the gradients of {type(self._model).__name__} are not finite in float32, "
                "so there is nothing to compare with; Booster.diagnose says where that begins"
            )

    def run(self) -> Pins:
        without = self._error(())
        if without.relative <= self._bound:
            return self._pins((), without, without, ())
        # Searching blocks first, and inside of those that are needed later, keeps the number of passes small.
        units = list(_units(self._model, [name for name, _ in _blocks(self._model, "")]))
        alone = {unit: self._alone(unit, units) for unit in units}
        order = sorted(units, key=lambda unit: (-alone[unit], unit))
        chosen = self._pruned(self._reached(order))
        refined = [self._refined(unit, chosen) for unit in chosen]
        # A block that shrank to one module may have made another one superfluous.
        chosen = self._pruned(refined) if len(refined) > 1 else refined
        table = tuple(
            Contribution(unit, alone[unit], any(_inside(name, unit) for kept in chosen for name in kept))
            for unit in order
        )
        names = tuple(sorted(name for unit in chosen for name in unit))
        return self._pins(names, self._error(names), without, table)

    def _alone(self, unit: Unit, units: Sequence[Unit]) -> float:
        """The error where all blocks but `unit` are in float32."""
        # Not the other way round: with this unit alone in float32 the errors of all others would hide what it adds.
        others = [name for other in units if other is not unit for name in other]
        try:
            return self._error(others).relative
        except ValueError:
            if not others:
                raise
            return 0.0  # the precision has nothing to do in a model of this unit alone, as fp8 without linear layers

    def _reached(self, order: Sequence[Unit]) -> list[Unit]:
        """The first units of `order` that are enough."""
        chosen: list[Unit] = []
        for unit in order:
            chosen.append(unit)
            if self._holds(chosen):
                return chosen
        raise RuntimeError(
            f"with all of {[name for unit in order for name in unit][:10]} in float32 the gradient error is still above "
            f"bound={self._bound:g}: what causes it is computed outside of these modules, in the forward of "
            f"{type(self._model).__name__} itself, or in the criterion. Give it its own module, raise the bound, or take "
            "another precision"
        )

    def _pruned(self, chosen: Sequence[Unit]) -> list[Unit]:
        """What of `chosen` is needed; the last are tried first."""
        kept = list(chosen)
        for unit in reversed(chosen):
            rest = [other for other in kept if other is not unit]
            if rest and self._holds(rest):
                kept = rest
        return kept

    def _refined(self, unit: Unit, chosen: Sequence[Unit]) -> Unit:
        """A single module inside `unit` that is enough in its place, as deep inside as there is one; else `unit`."""
        # A shared parameter has to have one dtype, so its modules are kept together or not at all.
        if len(unit) > 1:
            return unit
        others = [name for other in chosen if other is not unit for name in other]
        inside = [name for name, _ in _blocks(self._model.get_submodule(unit[0]), f"{unit[0]}.")]
        units = list(_units(self._model, inside))
        errors = {each: self._error_or_inf([*others, *each]) for each in units}
        best = min(units, key=lambda each: errors[each], default=None)
        if best is None or errors[best] > self._bound:
            return unit
        return self._refined(best, [best if other is unit else other for other in chosen])

    def _holds(self, chosen: Sequence[Unit]) -> bool:
        return self._error_or_inf([name for unit in chosen for name in unit]) <= self._bound

    def _error_or_inf(self, names: Sequence[str]) -> float:
        try:
            return self._error(names).relative
        except ValueError:  # no part of the model is left to the precision, or a tied weight would have two dtypes
            return math.inf

    def _error(self, names: Sequence[str]) -> GradientError:
        precision = self._precision.keeping(names)
        precision.bind(self._task.device)
        result = self._subject(precision).gradients()
        error = gradient_error(result.grads, self._exact.grads, whole=type(self._model).__name__)
        return error if result.finite else dataclasses.replace(error, relative=math.inf, cosine=math.nan)

    def _subject(self, precision: MixedPrecision) -> Subject:
        self._passes += 1
        return Subject(self._task, precision)

    def _pins(
        self, names: tuple[str, ...], error: GradientError, without: GradientError, table: tuple[Contribution, ...]
    ) -> Pins:
        return Pins(
            names=names,
            precision=self._precision.keeping(names),
            bound=self._bound,
            error=error.relative,
            without=without.relative,
            table=table,
            layers=error.layers,
            passes=self._passes,
        )


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of `module`, and in place of containers what is in them."""
    for name, child in module.named_children():
        if type(child) in _CONTAINERS:
            yield from _blocks(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _units(model: nn.Module, names: Sequence[str]) -> Iterator[Unit]:
    """Group `names`: modules that share a parameter or buffer are one unit."""
    owner = {name: name for name in names}

    def first(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    for places in tensor_places(model, buffers=True).values():
        holders = {each for place in places for each in names if _inside(place.name, (each,))}
        for name in holders:
            # The smallest name stands for the set, so that the order of modules does not matter.
            owner[first(name)] = min(first(other) for other in holders)
    for name in names:
        if first(name) == name:
            yield tuple(other for other in names if first(other) == name)


def _inside(name: str, unit: Unit) -> bool:
    return any(name == own or name.startswith(f"{own}.") for own in unit)
