"""A low precision that looks at its own noise, and computes in a wide dtype what that noise would spoil."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from booster.ground import arguments
from booster.ground.torch_internals import is_compiled
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear, product
from booster.mixed_precision.low_precision.recipes import ROLES, Product, Recipe, Role, Wide
from booster.mixed_precision.low_precision.strategy import LowPrecision
from booster.ranks.agreement import all_names
from booster.ranks.communicate import communication_device

_logger = logging.getLogger(__name__)

LIMIT = 1 / math.sqrt(3)
"""Noise over signal from which on a product is made wide (arXiv 2505.19115: gradients below sqrt(3) of it train no more)."""
_CALM = 2  # looks in a row at less than half of it, until the product is low again
# Noise that grows does so by a part of it alone, as the rest is that of any numbers: so it is taken to grow on by more than
# it did between two looks, by this power of it.
_AHEAD = 2


class Autopilot:
    """A low precision whose layers go over to a wide dtype, product by product, where rounding spoils them, and come back.

    low: the name or object of a low precision.
    high: what products are made in where they are wide.
    every: optimizer steps between looks, of which the first step is one. In a look each product is made in the recipe and,
        besides, wide, of the same matrices.
    budget: the largest share of all products that may be wide, from 0 to 1.
    sample: the share of the layers that a look looks at, above 0; they take turns.

    The noise of a product is the norm of the difference, its signal that of the wide one; of a forward without what all tokens
    have in common. Noise that grew since the last look at the product is taken to grow on until the next, and faster. Where it
    is, or will then be, above 1 / sqrt(3) of the signal (arXiv 2505.19115), that product of that layer is made wide from the
    next step on, the worst first where the budget does not do for all; where it was below half of that in two looks in a row,
    it is low again. Ranks decide alike, on sums over all, stages of a pipeline too. Checkpoints hold what was decided; the
    record, and an INFO line, say it. A look makes each product that it looks at once more, and the record says what that took.
    """

    def __init__(
        self,
        low: str | LowPrecision = "nvfp4",
        high: Literal["bf16", "fp32"] = "bf16",
        *,
        every: int = 50,
        budget: float = 0.5,
        sample: float = 1.0,
    ) -> None:
        if not isinstance(low, (str, LowPrecision)):
            raise TypeError(
                arguments.refusal("low", low, "the name of a low precision, or one such as NVFP4MixedPrecision()")
            )
        if isinstance(low, str):
            arguments.text("low", low, "the name of a low precision, such as 'nvfp4'")
        self.low = low
        self.high: Role = arguments.choice("high", high, ("bf16", "fp32"))
        self.every = arguments.count("every", every, what="of steps")
        self.budget = arguments.number("budget", budget, least=0, most=1)
        self.sample = arguments.number("sample", sample, above=0.0, most=1)

    def made(self, make: Callable[[str | MixedPrecision], MixedPrecision]) -> MixedPrecision:
        """Return what `make` makes of `low`. Raises ValueError for the name of another precision."""
        precision = make(self.low)
        if not isinstance(precision, LowPrecision):
            raise ValueError(f"low={self.low!r} is no low precision; choose 'nvfp4', 'mxfp8', 'fp8' or 'int8'")
        return precision

    def __repr__(self) -> str:
        sample = "" if self.sample == 1 else f", sample={self.sample}"
        return f"{type(self).__name__}({self.low!r}, {self.high!r}, every={self.every}, budget={self.budget}{sample})"


class Change(NamedTuple):
    """After the step `step` the product `role` of the layer `name` became wide, or low again.

    noise: over signal. ahead: what it was taken to be at the next look.
    """

    step: int
    name: str
    role: str
    wide: bool
    noise: float
    ahead: float


class Look(NamedTuple):
    """What came of looking at the step `step`.

    layers: looked at on this rank. operations: of the looks, as a share of those of all products of low-precision layers.
    wide: share of products that are wide from now on.
    """

    step: int
    layers: int
    operations: float
    wide: float
    changes: list[Change]


class Pilot:
    """Flies one boosted model by `plan`: listens to its optimizer, watches its layers, and changes their recipes.

    group: the ranks that decide together. told: is given what came of each look. names: layers of which any product is wide.
    Raises RuntimeError for layers that were compiled. A collective.
    """

    def __init__(
        self,
        plan: Autopilot,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        told: Callable[[Look], None] = lambda look: None,
    ) -> None:
        self._plan, self._group, self._told, self._model = plan, group, told, model
        self._layers = {name: each for name, each in model.named_modules() if isinstance(each, LowPrecisionLinear)}
        self._all = all_names(tuple(self._layers), group)  # stages of a pipeline have others
        self._check_compiled()
        self._recipes = {name: layer.recipe for name, layer in self._layers.items()}
        self._wide: dict[tuple[str, str], int] = {}  # by layer and role, with how many calm looks in a row
        self._sums: dict[tuple[str, str], torch.Tensor] = {}  # squares of noise and of signal
        self._operations = [0, 0]  # of the look, and of the step itself
        self.looks = 0
        self.ever: list[str] = []
        """Layers of which a product was ever made wide in this process, in order."""
        self.noise: dict[tuple[str, str], float] = {}
        """Noise over signal of each product, by layer and role, in the last look at it."""

    # ---- what a listener of steps does

    def after_backward(self, loss: torch.Tensor | None) -> None:
        pass

    def before_step(self, update: Any, number: int) -> None:
        self._watch(None)

    def after_step(self, update: Any, number: int, result: Any) -> None:
        if self._is_looked_at(number):
            self._decide(number)
        self.begin(number)

    # ---- what a checkpoint holds, as it does of modules pinned during the run

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self._wide))

    @property
    def share(self) -> float:
        """How many of all products are wide."""
        return len(self._wide) / max(1, len(ROLES) * len(self._all))

    def note(self, name: str, step: int) -> bool:
        return False

    def missing(self, state: Mapping[str, Any]) -> list[str]:
        return [name for name in state.get("names", []) if name not in self._all]

    def state_dict(self) -> dict[str, Any]:
        """Which products are wide, and how noisy all were, as plain containers."""
        return {
            "names": self.names,
            "products": [[name, role, calm] for (name, role), calm in self._wide.items()],
            "noise": [[name, role, noise] for (name, role), noise in self.noise.items() if math.isfinite(noise)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the products wide that were so when `state` was taken, and no others."""
        self._wide = {
            (str(name), arguments.choice("role", role, ROLES)): arguments.count("calm", calm, least=0)
            for name, role, calm in state.get("products", [])
        }
        self.noise = {
            (str(name), arguments.choice("role", role, ROLES)): arguments.number("noise", noise, least=0)
            for name, role, noise in state.get("noise", [])
        }
        for name in self._layers:
            self._fly(name)

    def begin(self, num_steps: int) -> None:
        """Look at the step that follows `num_steps` of them, if that is one to be looked at."""
        self._sums, self._operations = {}, [0, 0]
        number = num_steps + 1
        self._watch(self._turn(number) if self._is_looked_at(number) else None)

    # ---- inside

    def _is_looked_at(self, number: int) -> bool:
        return number == 1 or number % self._plan.every == 0

    def _turn(self, number: int) -> frozenset[str]:
        """Return the layers whose turn it is in the step `number`."""
        many = math.ceil(self._plan.sample * len(self._all))
        first = number // self._plan.every * many
        return frozenset(self._all[place % len(self._all)] for place in range(first, first + many))

    def _watch(self, turn: frozenset[str] | None) -> None:
        """Count the operations of all layers, and look at those of `turn`; None: neither."""
        if turn is not None:
            self._check_compiled()
        for name, layer in self._layers.items():
            others = tuple(each for each in layer.watchers if not isinstance(each, _Looking))
            layer.watchers = others if turn is None else (*others, _Looking(self._measure, name, name in turn))

    def _check_compiled(self) -> None:
        for name, module in self._model.named_modules():
            if is_compiled(module) and any(isinstance(each, LowPrecisionLinear) for each in module.modules()):
                raise RuntimeError(
                    f"{name or 'the model'} was compiled, and an Autopilot watches and changes layers in it, of which compiled "
                    "code would know nothing; give Booster the low precision by itself, or train without torch.compile"
                )

    @torch.no_grad()
    def _measure(
        self,
        name: str,
        measured: bool,
        role: str,
        a: torch.Tensor,
        b: torch.Tensor,
        how: Product | Wide,
        result: torch.Tensor,
    ) -> None:
        recipe, layer = self._recipes[name], self._layers[name]
        operations = 2 * a.numel() * b.shape[0]
        self._operations[1] += operations
        if not measured or isinstance(own := _of_role(recipe, role), Wide) or not (a.numel() and b.numel()):
            return
        self._operations[0] += operations
        if isinstance(how, Product):
            low, wide = result.float(), a.float() @ b.float().t()
        else:  # whose own rounding is far below the limit
            wide = result.float()
            low = product(a, b, own, recipe, dtype=result.dtype, kernels=layer.kernels).float()
        error = low - wide
        if role == "forward":
            wide, error = (each - each.mean(0, keepdim=True) for each in (wide, error))
        squares = torch.stack([error.double().square().sum(), wide.double().square().sum()])
        key = (name, role)
        self._sums[key] = self._sums[key] + squares if key in self._sums else squares

    def _decide(self, step: int) -> None:
        seen = dict(self._noise())
        if not seen:
            return
        self.looks += 1
        ahead = {key: _ahead(noise, self.noise.get(key)) for key, noise in seen.items()}
        self.noise |= seen
        changes = []
        for key in seen:
            if key in self._wide:
                self._wide[key] = self._wide[key] + 1 if ahead[key] < LIMIT / 2 else 0
                if self._wide[key] == _CALM:
                    del self._wide[key]
                    changes.append(Change(step, *key, False, seen[key], ahead[key]))
        most = math.floor(self._plan.budget * len(ROLES) * len(self._all))
        # Not finite is worst.
        for key in sorted(seen, key=lambda key: -ahead[key] if math.isfinite(ahead[key]) else -math.inf):
            if key not in self._wide and not ahead[key] <= LIMIT and len(self._wide) < most:
                self._wide[key] = 0
                self.ever += [key[0]] * (key[0] not in self.ever)
                changes.append(Change(step, *key, True, seen[key], ahead[key]))
        for name in dict.fromkeys(change.name for change in changes if change.name in self._layers):
            self._fly(name)
        for change in changes:
            what = self._plan.high if change.wide else "low precision again"
            _logger.info(
                "autopilot: %s of %s in %s, noise %.2f of the signal, %.2f by the next look",
                change.role,
                change.name,
                what,
                change.noise,
                change.ahead,
            )
        extra, own = self._operations
        layers = len(self._turn(step) & self._layers.keys())
        self._told(Look(step, layers, extra / max(1, own) / self._plan.every, self.share, changes))

    def _noise(self) -> Iterator[tuple[tuple[str, str], float]]:
        keys = [(name, role) for name in self._all for role in ROLES]
        rows = [self._sums.get(key) for key in keys]
        device = next((row.device for row in rows if row is not None), torch.device("cpu"))
        empty = torch.zeros(2, dtype=torch.float64, device=device)
        sums = torch.stack([empty if row is None else row for row in rows])
        if self._group is not None:
            sums = sums.to(communication_device(device, self._group))
            dist.all_reduce(sums, group=self._group)
        for key, (noise, signal) in zip(keys, sums.tolist(), strict=True):
            if noise or signal:
                yield key, math.sqrt(noise / signal) if signal else math.inf

    def _fly(self, name: str) -> None:
        roles: list[Role] = [self._plan.high if (name, role) in self._wide else "recipe" for role in ROLES]
        self._layers[name].recipe = self._recipes[name].in_roles(*roles)


class _Looking(partial[None]):
    """A watcher of an autopilot's."""


def _of_role(recipe: Recipe, role: str) -> Product | Wide:
    return {"forward": recipe.output, "input_grad": recipe.input_gradient, "weight_grad": recipe.weight_gradient}[role]


def _ahead(noise: float, before: float | None) -> float:
    """Return what `noise` will be by the next look at a product, given that of the last one, if there was one."""
    return noise * max(1.0, noise / before) ** _AHEAD if before else noise
