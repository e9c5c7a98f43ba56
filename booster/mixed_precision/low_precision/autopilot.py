"""A low precision that looks at its own noise, and computes in a wide dtype what that noise would spoil."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from booster.common import arguments
from booster.common.arguments import as_fraction
from booster.common.torch_internals.autograd_internals import is_compiled
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear, low_layers, product
from booster.mixed_precision.low_precision.low_precisions import LowPrecision
from booster.mixed_precision.low_precision.recipes import GEMMS, GemmConfig, GemmDtype, HighPrecision, Recipe
from booster.ranks.agreement import all_names, reduced
from booster.update.context import StepListener

_logger = logging.getLogger(__name__)

LIMIT = 1 / math.sqrt(3)
"""Noise over signal from which on a product is made wide (arXiv 2505.19115: gradients below sqrt(3) of it train no more)."""
_CALM = 2  # looks in a row at less than half of it, until the product is low again
# Of the ordinary noise of a format, which differs by a tenth from batch to batch: less is no growth.
_LEAST = 0.5


class Autopilot:
    """A low precision that takes layers to a wide dtype, product by product, where rounding spoils them, and back.

    low: the name or object of a low precision.
    high: what products are made in where they are wide.
    every: optimizer steps between looks, of which the first step is one. In a look each product is made in the recipe and
        wide, of the same matrices.
    budget: the largest share of all products that may be wide, from 0 to 1.
    sample: the share of the layers that a look looks at, above 0; they take turns.

    The noise of a product is the norm of the difference, its signal that of the wide one; of a forward without what all tokens
    have in common. What exceeds the ordinary noise of the format, and grew since the last look at the product, is taken to grow
    on as fast until the next. A product with noise above 1 / sqrt(3) of the signal (arXiv 2505.19115), or will then be, is
    looked at once more in the next step, as a single batch may happen to be noisy: by the lesser noise of the two, if that is
    above too, it is made wide from then on, the worst first where the budget does not do for all. That step goes on with the
    wide product, and so does the first one of a run, of which nothing is known, unless the budget is 0. Where noise was below
    half of the bound in two looks in a row, it is low again. Ranks decide alike, on sums over all, stages of a pipeline too.
    Checkpoints hold what was decided; the record, and an INFO line, say it. A `PrecisionSchedule` may have it as a phase. A
    look makes each product that it looks at once more, and the record says what that took. torch.compile around a boosted model
    leaves out what a look looks at, and follows what it decides.
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
        self.high: GemmDtype = arguments.choice("high", high, ("bf16", "fp32"))
        self.every = arguments.count("every", every, what="of steps")
        self.budget = arguments.number("budget", budget, least=0, most=1)
        self.sample = arguments.number("sample", sample, above=0.0, most=1)

    def made(self, make: Callable[[str | MixedPrecision], MixedPrecision]) -> LowPrecision:
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


class Measurement(NamedTuple):
    """What came of looking at the step `step`.

    layers: looked at on this rank. operations: of the looks, as a share of those of all products of low-precision layers in
    `every` steps. wide: share of products that are wide from now on. again: only at what the look a step before suspected.
    """

    step: int
    layers: int
    operations: float
    wide: float
    again: bool
    changes: list[Change]


class PrecisionController(StepListener):
    """Measures the rounding noise of one boosted model's products in some steps, and changes the recipes of its layers.

    It listens to the model's optimizer. `enable` gives it a plan; after `disable` it measures nothing.

    A product is named by its layer and its role there, ("blocks.0.up", "input_grad").

    group: the ranks that decide together.
    report: called with each `Measurement`.

    Attributes:
        noise: noise over signal of each product, in the last measurement of it.
        looks: how many steps were measured.
        ever: layers of which a product was ever made wide in this process, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        report: Callable[[Measurement], None] = lambda look: None,
    ) -> None:
        self._group, self._report, self._model = group, report, model
        self._wide: dict[tuple[str, str], int] = {}  # by layer and role, with how many calm looks in a row
        self._suspected: dict[tuple[str, str], float] = {}  # with their noise, in the last step
        self.noise: dict[tuple[str, str], float] = {}
        self._number = 0  # of the step that comes
        self.looks = 0
        self.ever: list[str] = []
        self._forget_layers()

    def _forget_layers(self) -> None:
        self._plan: Autopilot | None = None
        self._layers: dict[str, LowPrecisionLinear] = {}
        self._recipes: dict[str, Recipe] = {}
        self._all: tuple[str, ...] = ()
        self._ordinary: dict[str, float] = {}
        self._measured: frozenset[tuple[str, str]] = frozenset()  # in that step
        self._trial: frozenset[tuple[str, str]] = frozenset()  # wide in that step alone, for want of a measurement
        self._first: int | None = None  # the step before which nothing was measured
        self._sums: dict[tuple[str, str], torch.Tensor] = {}  # squares of noise and of signal
        self._operations = [0, 0]  # of the look, and of the step itself

    def enable(self, plan: Autopilot, recipe: Recipe, num_steps: int | None) -> None:
        """Control the layers that the model has now by `plan`, after so many steps; None: no optimizer steps it. Products of
        these layers that were wide before are wide again.

        recipe: of the low precision. A collective.
        """
        self._forget_layers()
        self._plan = plan
        self._layers = low_layers(self._model)
        self._all = all_names(tuple(self._layers), self._group)  # stages of a pipeline have others
        # Raises RuntimeError for layers that were compiled.
        self._check_compiled()
        self._recipes = {name: layer.recipe for name, layer in self._layers.items()}
        # Bounds of recipes are twice what is expected.
        self._ordinary = {role: bound / 2 for role, bound in zip(GEMMS, recipe.bounds, strict=True)}
        made = {(name, role) for role in GEMMS if isinstance(recipe.products[role], GemmConfig) for name in self._all}
        self._wide = {key: calm for key, calm in self._wide.items() if key in made}
        self._suspected = {key: noise for key, noise in self._suspected.items() if key in made}
        self.noise = {key: noise for key, noise in self.noise.items() if key in made}
        self._keep_within(plan)
        self._apply(self._layers)
        if num_steps is not None:
            self._first = num_steps + 1 if self._knows_nothing else None
            self.begin_step(num_steps)

    def disable(self) -> None:
        """Measure nothing from now on. What was wide is remembered."""
        self._forget_layers()
        self._suspected, self.noise = {}, {}  # which say nothing of later steps

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a boosted model stays as it is

    # ---- what a listener of steps does

    def before_step(self, update: Any, number: int) -> None:
        self._measure_products(frozenset())

    def after_step(self, update: Any, number: int, result: Any) -> None:
        # Whatever number this step was to have: a load of the optimizer alone counts on elsewhere.
        if self._plan is not None and self._measured:
            self._decide(number, self._plan)
        self.begin_step(number)

    # ---- what a checkpoint holds, as it does of modules pinned during the run

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self._wide))

    @property
    def share(self) -> float:
        """How many of all products are wide that layers in low precision make."""
        return len(self._wide) / (len(GEMMS) * len(self._all)) if self._all else 0.0

    def count_skip(self, name: str, step: int) -> bool:
        return False

    def missing(self, state: Mapping[str, Any]) -> list[str]:
        # Those of a phase that keeps fewer layers wide than the present one are not low here.
        known = {*self._all, *(name for name, each in self._model.named_modules() if isinstance(each, nn.Linear))}
        return [name for name in state.get("names", []) if name not in known]

    def state_dict(self) -> dict[str, Any]:
        """Which products are wide or will be, and how noisy all were, as plain containers."""
        return {
            "names": self.names,
            "next": self._number,
            "products": [[name, role, calm] for (name, role), calm in self._wide.items()],
            "suspected": _as_rows(self._suspected),
            "noise": _as_rows(self.noise),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the products wide that were so when `state` was taken, and no others."""
        self._wide = {
            (str(name), arguments.choice("role", role, GEMMS)): arguments.count("calm", calm, least=0)
            for name, role, calm in state.get("products", [])
        }
        self.noise = _from_rows(state.get("noise", []))
        self._suspected = _from_rows(state.get("suspected", []))
        if self._plan is not None:
            self._keep_within(self._plan)
        self._apply(self._layers)
        if "next" in state:
            number = arguments.count("next", state["next"], least=0)
            self._first = number if self._knows_nothing else None
            self.begin_step(number - 1)

    def begin_step(self, num_steps: int) -> None:
        """Look at the step that follows `num_steps` of them, if that is one to be looked at."""
        self._sums, self._operations = {}, [0, 0]
        self._number = num_steps + 1
        self._measured = self._due(self._number)
        # Have `products` wide in the step that comes, and those of the last step no longer
        products = self._measured if self._number == self._first else frozenset(self._suspected)
        if self._plan is None or not self._plan.budget:
            products = frozenset()
        changed = {name for name, _ in products ^ self._trial} & self._layers.keys()
        self._trial = products
        self._apply(changed)
        self._measure_products(self._measured)

    # ---- inside

    @property
    def _knows_nothing(self) -> bool:
        return not (self.noise or self._suspected)

    def _due(self, number: int) -> frozenset[tuple[str, str]]:
        """Return the products to look at in the step `number`: of the layers that are due, and the suspected."""
        if self._plan is None:
            return frozenset()
        every = self._plan.every
        if self._is_whole(number, every):
            many = math.ceil(as_fraction(self._plan.sample) * len(self._all))
            # Layers take turns in the order of the model, so that each is looked at equally often.
            start = number // every * many
            names = {self._all[place % len(self._all)] for place in range(start, start + many)}
            return frozenset((name, role) for name in names for role in GEMMS) | self._suspected.keys()
        return frozenset(self._suspected)

    def _is_whole(self, number: int, every: int) -> bool:
        """Whether step `number` is one that looks at the layers that are due."""
        return number == self._first or number % every == 0

    def _measure_products(self, products: frozenset[tuple[str, str]]) -> None:
        """Look at `products`, and count the operations of all; with none, neither."""
        if products:
            self._check_compiled()
        for name, layer in self._layers.items():
            others = tuple(each for each in layer.watchers if not isinstance(each, _GemmWatcher))
            layer.watchers = (*others, _GemmWatcher(self._measure, name)) if products else others

    def _check_compiled(self) -> None:
        for name, module in self._model.named_modules():
            if is_compiled(module) and low_layers(module):
                raise RuntimeError(
                    f"{name or 'the model'} was compiled, and an Autopilot watches and changes layers in it, of which compiled "
                    "code would know nothing; give Booster the low precision by itself, or train without torch.compile"
                )

    @torch.no_grad()
    def _measure(
        self,
        name: str,
        role: str,
        a: torch.Tensor,
        b: torch.Tensor,
        how: GemmConfig | HighPrecision,
        result: torch.Tensor,
    ) -> None:
        recipe, layer = self._recipes[name], self._layers[name]
        operations = 2 * a.numel() * b.shape[0]
        self._operations[1] += operations
        key = (name, role)
        if key not in self._measured or isinstance(own := recipe.products[role], HighPrecision) or not operations:
            return
        self._operations[0] += operations
        if isinstance(how, GemmConfig):
            low, wide = result.float(), a.float() @ b.float().t()
        else:  # its own rounding is far below the limit
            wide = result.float()
            # The product is wide now: what the recipe would make of it is computed for the look alone.
            low = product(a, b, own, recipe, dtype=result.dtype, kernels=layer.kernels).float()
        error = low - wide
        # All tokens share a mean; noise is compared with what they carry apart from it.
        if role == "forward":
            wide, error = (each - each.mean(0, keepdim=True) for each in (wide, error))
        # In float64: sums of many squares of float32 numbers overflow.
        squares = torch.stack([error.double().square().sum(), wide.double().square().sum()])
        self._sums[key] = self._sums[key] + squares if key in self._sums else squares

    def _decide(self, step: int, plan: Autopilot) -> None:
        seen = dict(self._noise())
        if not seen:
            return
        self.looks += 1
        # The lesser of two measurements: one noisy batch makes nothing wide.
        seen = {key: min(noise, self._suspected.get(key, math.inf)) for key, noise in seen.items()}
        ahead = {key: _ahead(noise, self.noise.get(key), self._ordinary[key[1]]) for key, noise in seen.items()}
        changes = []
        for key in seen:
            if key in self._wide:
                self._wide[key] = self._wide[key] + 1 if ahead[key] < LIMIT / 2 else 0
                if self._wide[key] == _CALM:
                    del self._wide[key]
                    changes.append(Change(step, *key, False, seen[key], ahead[key]))
        most = self._most(plan)
        above = sorted(
            (key for key in seen.keys() - self._wide if ahead[key] > LIMIT), key=lambda key: (-ahead[key], key)
        )
        # The worst first, as far as the budget goes.
        for key in [key for key in above if key in self._suspected][: most - len(self._wide)]:
            self._wide[key] = 0
            self.ever += [key[0]] * (key[0] not in self.ever)
            changes.append(Change(step, *key, True, seen[key], ahead[key]))
        # No more than could be made wide are worth a look.
        suspected = [key for key in above if key not in self._suspected][: most - len(self._wide)]
        self._suspected = {key: seen[key] for key in suspected}
        self.noise |= {key: noise for key, noise in seen.items() if key not in self._suspected}
        self._apply({change.name for change in changes} & self._layers.keys())
        for change in changes:
            what = plan.high if change.wide else "low precision again"
            _logger.info(
                "autopilot: %s of %s in %s, noise %.2f of the signal, %.2f by the next look",
                change.role,
                change.name,
                what,
                change.noise,
                change.ahead,
            )
        extra, own = self._operations
        layers = len({name for name, _ in self._measured} & self._layers.keys())
        again = not self._is_whole(self._number, plan.every)
        self._report(Measurement(step, layers, extra / max(1, own) / plan.every, self.share, again, changes))

    def _most(self, plan: Autopilot) -> int:
        """How many products the budget of `plan` lets be wide."""
        return math.floor(as_fraction(plan.budget) * len(GEMMS) * len(self._all))

    def _keep_within(self, plan: Autopilot) -> None:
        """Have no more products wide than `plan` lets, which another one may have made so: the worst of them."""
        worst = sorted(self._wide, key=lambda key: (-self.noise.get(key, math.inf), key))
        for name, role in worst[self._most(plan) :]:
            del self._wide[name, role]
            _logger.info(
                "autopilot: %s of %s in low precision again, as budget=%s lets no more be wide", role, name, plan.budget
            )
        most = self._most(plan) - len(self._wide)
        self._suspected = dict([*self._suspected.items()][:most])

    def _noise(self) -> Iterator[tuple[tuple[str, str], float]]:
        keys = [(name, role) for name in self._all for role in GEMMS]
        rows = [self._sums.get(key) for key in keys]
        device = next((row.device for row in rows if row is not None), torch.device("cpu"))
        empty = torch.zeros(2, dtype=torch.float64, device=device)
        sums = torch.stack([empty if row is None else row for row in rows])
        if self._group is not None:
            sums = reduced(sums, dist.ReduceOp.SUM, self._group)
        for key, (noise, signal) in zip(keys, sums.tolist(), strict=True):
            if noise or signal:
                ratio = math.sqrt(noise / signal) if signal else math.inf
                # NaN compares as false with everything, and would never be above the bound.
                yield key, ratio if math.isfinite(ratio) else math.inf

    def _apply(self, names: Iterable[str]) -> None:
        """Have the layers of these `names` make in low precision what is not wide."""
        if self._plan is None:
            return
        for name in names:
            wide = [role for role in GEMMS if (name, role) in self._wide or (name, role) in self._trial]
            roles: list[GemmDtype] = [self._plan.high if role in wide else "recipe" for role in GEMMS]
            self._layers[name].recipe = self._recipes[name].with_dtypes(*roles)


class _GemmWatcher(partial[None]):
    """The watcher that a controller puts into a layer."""


def _ahead(noise: float, before: float | None, ordinary: float) -> float:
    """Return what `noise` will be by the next look at a product, given that of the last one and of any numbers, `ordinary`."""
    if before is None or not ordinary < noise:
        return noise
    # The rest is independent of it and has another cause, so it alone grows on.
    excess, least = math.sqrt(noise**2 - ordinary**2), ordinary * _LEAST
    old = max(least, math.sqrt(max(0.0, before**2 - ordinary**2)))
    return math.hypot(ordinary, excess * max(1.0, excess / old))


def _as_rows(noise: Mapping[tuple[str, str], float]) -> list[list[Any]]:
    """`noise` for a checkpoint; None for what is not finite."""
    return [[name, role, each if math.isfinite(each) else None] for (name, role), each in noise.items()]


def _from_rows(rows: Iterable[Sequence[Any]]) -> dict[tuple[str, str], float]:
    return {
        (str(name), arguments.choice("role", role, GEMMS)): (
            math.inf if noise is None else arguments.number("noise", noise, least=0)
        )
        for name, role, noise in rows
    }
