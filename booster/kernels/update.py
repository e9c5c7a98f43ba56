"""Norms, decision and step by kernels: one launch reads the gradients, one decides, one for each kind of tensor updates.

Everything else is as on any device. What the kernels do not know, such as sparse gradients or a step with hooks, is stepped on
the same states, and gradients are read otherwise where a clip asks for more than a norm of order 2.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from booster.ground.device import DeviceCopies, HostCopy
from booster.ground.torch_internals import note_step, step_hooks
from booster.kernels.compiled import CompiledKernels, current, kinds_of
from booster.kernels.launches import BLOCK, COLUMNS, OUT, SCALARS, TILE, add_up, clip_by, decide, norm_of, update
from booster.kernels.released import KernelPass
from booster.kernels.rules.rule import MOST_NUMBERS, MOST_STATES, Rule
from booster.kernels.stretches import DTYPES, Stretches, Unfit, numbers_of, same
from booster.kernels.table import Kind, Table
from booster.loss_scaler import DeviceScale, LossScaler, NoScale
from booster.masters.bucket import Bucket
from booster.masters.formats import WEIGHTS, Stochastic
from booster.masters.rounding import Dither
from booster.masters.step import MasterStep
from booster.masters.update import MasterApplication
from booster.ranks import agreement
from booster.tensors.flat import ALIGNMENT, lies_like
from booster.update.application import Application, Told, laid_like
from booster.update.choice import release_by
from booster.update.device import DeviceDecision, DeviceGradients, DeviceNorms
from booster.update.gradients import Gradients
from booster.update.job import Job
from booster.update.kept import KeptState
from booster.update.outcome import Copy, DeviceFields, StepFields, StepResult
from booster.update.update import Update

_logger = logging.getLogger(__name__)
_GRAD, _DTYPE, _LAYOUT = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")
_SPARSE, _GROUP = attrgetter("is_sparse"), attrgetter("group")  # of a gradient; of a bucket
_ADDRESS, _CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_CPU = torch.device("cpu")
_UNSCALED = NoScale()
_SKIPPED, _DIVISOR = 5, 1  # places in what `decide` writes: of float32 and float64 numbers


class Covered:
    """What kernels step of one optimizer: parameters as they are."""

    def __init__(self, job: Job, rule: Rule) -> None:
        self._optimizer, self._shards = job.optimizer, job.shards
        self.sharded = job.shards.sharded
        self.steps = _Steps(rule, job.optimizer)

    def part(self, steps: _Steps, params: list[torch.Tensor]) -> Table | None:
        """Return that of `steps` of the gradients of `params`, which are stepped before the others of their step."""
        only = {id(param) for param in params}

        def collect(stretches: Stretches) -> None:
            for index, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    if id(param) in only:
                        stretches.add(index, param)

        return steps.table(params, (), self._shards, collect)

    def ready(self, params: list[torch.Tensor]) -> Table | None:
        """Return the table of the gradients of `params`, all that are there; None where this step is not for kernels."""
        if any(step_hooks(self._optimizer)):
            return None
        return self.steps.table(params, self._layout(params), self._shards, self._collect)

    def _collect(self, stretches: Stretches) -> None:
        """Add what is to be stepped. Raises Unfit."""
        for index, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    stretches.add(index, param)

    def _layout(self, params: list[torch.Tensor]) -> Any:
        """What is compared, by identity, to know whether stretches are what they were."""
        return ()

    @property
    def dither(self) -> Dither | None:
        """What gives random numbers to what is rounded by chance."""
        return None

    def draw(self) -> dict[Bucket, torch.Tensor]:
        """Make the random numbers of this step of buckets whose weights have one each."""
        return {}

    def visit(self, table: Table, noise: dict[Bucket, torch.Tensor]) -> Iterator[Bucket]:
        """Yield each bucket whose states lie on the host while they are on the device and `table` knows where."""
        return iter(())


class CoveredMasters(Covered):
    """The buckets of masters, and beside them float32 parameters. whole: what steps them otherwise."""

    def __init__(self, job: Job, rule: Rule, whole: MasterStep) -> None:
        super().__init__(job, rule)
        self._whole = whole

    def part(self, steps: _Steps, params: list[torch.Tensor]) -> Table | None:
        only = {id(param) for param in params}
        self._plain = [[param for param in group if id(param) in only] for group in self._whole.plain()]
        self._buckets = [b for b in self._whole.masters.buckets if not only.isdisjoint(map(id, b.params))]
        self._whole.refuse_sparse(self._buckets)
        return steps.table(params, tuple(self._buckets), self._shards, self._collect)

    def _collect(self, stretches: Stretches) -> None:
        for index, params in enumerate(self._plain):
            for param in params:
                if param.grad is not None:
                    stretches.add(index, param)
        for bucket in self._buckets:
            stretches.add_bucket(bucket)

    def _layout(self, params: list[torch.Tensor]) -> Any:
        if any(map(_SPARSE, map(_GRAD, params))):
            return ()
        self._plain, self._buckets = self._whole.prepare()
        return tuple(self._buckets)

    @property
    def dither(self) -> Dither | None:
        return self._whole.masters.dither

    def draw(self) -> dict[Bucket, torch.Tensor]:
        return {
            bucket: bucket.format.noise(bucket.size, bucket.dtype, bucket.device)
            for bucket in sorted(self._buckets, key=_GROUP)  # the order in which `MasterStep` steps them
            if isinstance(bucket.format, Stochastic)
        }

    def visit(self, table: Table, noise: dict[Bucket, torch.Tensor]) -> Iterator[Bucket]:
        if not self._whole.masters.hosts:
            return
        state, groups = self._optimizer.state, self._optimizer.param_groups
        journeys = self._whole.journeys(self._buckets)
        for bucket in sorted(self._buckets, key=_GROUP):
            if bucket.host is not None:
                with journeys[bucket.host].here(bucket):
                    own, names = state[bucket.handles[0]], self.steps.rule.states(groups[bucket.group])
                    table.move(bucket, noise.get(bucket, bucket.rest), [own[name] for name in names])
                    yield bucket


class KernelNorms(DeviceNorms):
    """Norms of order 2 are read by one launch. A clip that nobody asked for waits for the decision, which reads them then."""

    waits = True

    def __init__(self, job: Job, covered: Covered) -> None:
        super().__init__(job)
        self._covered = covered

    def read(self, gradients: Gradients, norm_type: float) -> tuple[Any, Any]:
        table = self._covered.ready(gradients.params()) if norm_type == 2.0 else None
        if table is None:
            return super().read(gradients, norm_type)
        with current(table.device):
            read = self.look(table, gradients.scale)
            scale, factor = _on_device(gradients.scale, table.device), _on_device(gradients.factor, table.device)
            return read, read.norm(scale, factor)

    def look(self, table: Table, carried: Any) -> _Measured:
        """Read the gradients in `table`, which are multiplied by `carried`."""
        partials = table.measure()
        sums = partials
        if self.shards.sharded:
            sums = agreement.shared(_added_up(partials), self.group, dist.ReduceOp.SUM).view(1)
        return _Measured(table, partials, sums, carried)

    def clipped(self, norm: torch.Tensor, max_norm: float, factor: Any) -> torch.Tensor:
        if norm.dtype != torch.float64 or not isinstance(max_norm, float):
            return super().clipped(norm, max_norm, factor)
        found = torch.empty_like(norm)
        bound = self._covered.steps.device_numbers("bound", (max_norm,), norm.device)
        with current(norm.device):
            clip_by[(1,)](norm, bound, _on_device(factor, norm.device), found, enable_fp_fusion=False)
        return found


class KernelDecision(DeviceDecision):
    """Decides and steps by kernels. Gradients are only read: after a step they carry the loss scale that they had, and no clip.
    What kernels do not know, `application` steps."""

    def __init__(self, gradients: DeviceGradients, application: Application, covered: Covered) -> None:
        super().__init__(gradients, application)
        self.covered = covered
        self.steps = covered.steps
        self._parts: list[_Steps] = []  # of what is stepped together within a backward pass, in its order
        self.begin_gradual()

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        gradients, bound = self.gradients, self.gradients.bound
        if gradients.release is not None and gradients.release.uncounted:
            return super().step(params)
        table = self.covered.ready(params)
        if table is not None:
            with current(table.device):
                return self._launch(table, bound)
        if bound is not None:
            self.gradients.clip_norm(bound)
        return super().step(params)

    def _launch(self, table: Table, bound: float | None) -> tuple[StepResult, Any]:
        """Step what is in `table`. bound: of a clip that waits for the step."""
        gradients = self.gradients
        norms: Any = gradients.norms
        carried, pending, seed = gradients.scale, gradients.factor, gradients.loss_scale
        checks, joint, sums, found_in = gradients.checks, gradients.joint, None, None
        alone = joint.found is None and len(joint.members) == 1
        if checks:
            last = gradients.read[-1] if len(gradients.read) == 1 and bound is None else None
            fresh = last if isinstance(last, _Measured) and last.carried is carried else None
            if fresh is None and (bound is not None or not gradients.read):
                gradients.read.append(fresh := norms.look(table, carried))
            sums = None if fresh is None else fresh.sums
            if not alone or (gradients.group is not None and not self.covered.sharded):
                found_in = self.agreed()
            elif gradients.read != [fresh]:
                found_in = gradients.found()
        scaler = gradients.scaler
        out = self.steps.run(table, self.covered, scaler, sums, found_in, carried, pending, seed, bound, checks)
        if checks and alone:
            joint.decide(out.view(torch.float32)[_SKIPPED])
        numbers = out.view(torch.float64)
        first = gradients.norm is None and sums is not None
        norm = numbers[0] if first else gradients.norm
        plain = bound is None and pending is None and (carried is None or _is_one(carried))
        scale = 1.0 if plain else numbers[_DIVISOR]
        if scaler.enabled:
            self._follow_scale(out)
        note_step(gradients.optimizer)
        if not checks:
            return StepResult(True, StepFields(loss_scale=1.0)), scale
        decided = _Decided(out)
        fields = _Fields(seed, norm, joint.report(), decided=decided, is_first=first)
        return StepResult(decided, fields, pending=fields.pending), scale

    # ------------------------------------------------------------------ within backward

    def released_pass(self, gradients: Gradients) -> KernelPass:
        return KernelPass(gradients)

    def begin_gradual(self) -> None:
        self._num_parts = 0
        self.found_along: torch.Tensor | None = None
        """Whether gradients that came so far are not finite, 0-dim; None: nobody looked."""

    def agree(self) -> bool:
        """Return whether the host knows that all who decide together skip this step: as a rule it does not ask."""
        joint, hooked = self.gradients.joint, any(step_hooks(self.gradients.optimizer))
        if self.gradients.checks:
            self.agreed()
        return bool(joint.found) if hooked or not isinstance(joint.found, torch.Tensor) else False

    @property
    def found_of_part(self) -> torch.Tensor | None:
        found = self.gradients.joint.found
        return found if isinstance(found, torch.Tensor) else self.found_along

    def step_part(self, params: Sequence[torch.Tensor]) -> bool:
        """Step `params` before the others of their step; return False, with nothing done, where kernels do not know them."""
        if self._num_parts == len(self._parts):
            self._parts.append(_Steps(self.steps.rule, self.gradients.optimizer))
        steps, self._num_parts = self._parts[self._num_parts], self._num_parts + 1
        table, gradients, found = self.covered.part(steps, list(params)), self.gradients, self.found_of_part
        if table is None:
            return False
        told = None, found, gradients.scale, gradients.factor, None, None, found is not None
        with current(table.device):
            steps.run(table, self.covered, _UNSCALED, *told, is_part=True)
        return True

    def _apply(self, params: list[torch.Tensor], told: Told) -> bool:
        release = self.gradients.release
        return True if release is not None and release.uncounted else super()._apply(params, told)

    def _follow_scale(self, out: torch.Tensor) -> None:
        single, scaler = out.view(torch.float32), self.gradients.scaler
        if type(scaler) is DeviceScale:
            scaler.follow(single[6], out[4], out[5])
        else:
            scaler.update(single[_SKIPPED])


def kernel_update(job: Job, rule: Rule, application: Application, kept: KeptState) -> Update:
    """Make an update that steps by kernels as `rule` says, and by `application` what they do not know."""
    masters = isinstance(application, MasterApplication)
    covered = CoveredMasters(job, rule, application.whole) if masters else Covered(job, rule)  # type: ignore[attr-defined]
    gradients = DeviceGradients(job, KernelNorms(job, covered))
    decision = KernelDecision(gradients, application, covered)
    release_by(job, gradients, decision)
    return Update(gradients, decision, kept)


class _Steps:
    """The launches of one optimizer's steps, and what they need from step to step."""

    def __init__(self, rule: Rule, optimizer: Any) -> None:
        self.rule, self._optimizer = rule, optimizer
        self._stretches: Stretches | None = None
        self._table: Table | None = None
        self._params: list[torch.Tensor] = []
        self._layout: Any = ()
        self._found: Any = None  # dtypes and addresses of the gradients in the table
        self._laid: list[torch.Tensor] = []
        self._values: dict[str, tuple[Any, torch.Tensor]] = {}
        self._compiled, self._copies = CompiledKernels(), DeviceCopies()
        self._said = False
        self._broken: str | None = None
        self.reason: str | None = None
        """Why the last step was none of kernels, None if it was one."""

    def __deepcopy__(self, memo: Any) -> _Steps:
        return _Steps(self.rule, copy.deepcopy(self._optimizer, memo))  # tables hold addresses

    def table(
        self, params: list[torch.Tensor], layout: Any, shards: Any, collect: Callable[[Stretches], None]
    ) -> Table | None:
        """Return the table for gradients of `params`; None where there is something among them that kernels do not know."""
        try:
            if self._broken is not None:
                raise Unfit(self._broken)
            grads = self._gradients(params)
            stretches = self._stretches
            known = stretches is not None and same(params, self._params) and same(layout, self._layout)
            if not known or not stretches.holds():  # type: ignore[union-attr]
                stretches = Stretches(self._optimizer, self.rule, shards)
                collect(stretches)
                stretches.complete()
                self._check(params, stretches)
                self._places = self._places_of(params, stretches)
                self._stretches, self._params, self._layout, self._found = stretches, params, layout, None
            assert stretches is not None
            self.reason = None
            return self._follow(grads, stretches, params[0].device if params else _CPU)
        except Unfit as unfit:
            self.reason, self._stretches = str(unfit), None
            if not self._said:
                self._said = True
                _logger.info("%s is stepped by torch, and not by kernels: %s", type(self._optimizer).__name__, unfit)
            return None

    def _gradients(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of `params`, each laid in memory as its parameter is."""
        grads = list(map(_GRAD, params))
        kinds, layouts = set(map(type, grads)), set(map(_LAYOUT, grads))
        if not (kinds <= {torch.Tensor} and layouts <= {torch.strided} and DTYPES.keys() >= set(map(_DTYPE, grads))):
            raise Unfit("a gradient is sparse, or not a plain tensor of float32, bfloat16 or float16")
        self._laid = []
        if not (all(map(_CONTIGUOUS, params)) and all(map(_CONTIGUOUS, grads))):
            pairs = zip(grads, params, strict=True)
            grads = self._laid = [g.detach() if lies_like(g, p) else laid_like(g, p) for g, p in pairs]
        return grads

    def _check(self, params: list[torch.Tensor], stretches: Stretches) -> None:
        covered = sum(each.size for each in stretches.all)
        if covered != sum(map(torch.Tensor.numel, params)):
            raise Unfit("there are gradients of parameters that it does not step")

    def _places_of(self, params: list[torch.Tensor], stretches: Stretches) -> list[tuple[int, int]]:
        index = {id(param): place for place, param in enumerate(params)}
        return [(index[id(each.param)], each.start) for each in stretches.all]

    def _follow(self, grads: list[torch.Tensor], stretches: Stretches, device: torch.device) -> Table:
        dtypes, addresses = list(map(_DTYPE, grads)), list(map(_ADDRESS, grads))
        before, self._found = self._found, (dtypes, addresses)
        if before == self._found and self._table is not None:
            return self._table
        sizes = [grad.element_size() for grad in grads]
        there = [addresses[place] + start * sizes[place] for place, start in self._places]
        if before is None or self._table is None or before[0] != dtypes:
            codes = [DTYPES[dtypes[place]] for place, _ in self._places]
            self._table = Table(stretches.all, codes, there, stretches.clocks, device, self._copies)
            if device.type == "cuda":
                with current(device):
                    self._try(self._table)
        else:
            self._table.follow_gradients(there)
        return self._table

    def _try(self, table: Table) -> None:
        """Compile what `table` needs, before anything is written. Raises Unfit, also at every later step, where that fails."""
        try:
            table.measure()
            for kind in table.kinds:
                args = self._arguments(table, kind, table.scalars.new_zeros(OUT), self._no_chances(table.device))
                constants = self._constants(kind, checks=True, divide=True)
                update.warmup(*args, grid=(1,), **constants, enable_fp_fusion=False)
        except Exception as error:
            self._broken = f"Triton does not compile kernels here: {str(error).strip().splitlines()[-1:]}"
            raise Unfit(self._broken) from error

    def device_numbers(self, name: str, values: Any, device: torch.device) -> torch.Tensor:
        """Return `values` as float64 on `device`, copied there only where they changed under `name`."""
        known = self._values.get(name)
        if known is None or known[0] != values or known[1].device != device:
            known = self._values[name] = values, self._copies(torch.tensor(values, dtype=torch.float64), device)
        return known[1]

    def _rows(self, device: torch.device) -> torch.Tensor:
        """Return the rows of numbers of all groups on `device`. Rates that are tensors are taken from where they are."""
        groups = self._optimizer.param_groups
        rows = [(*row, *(0.0,) * (MOST_NUMBERS - len(row))) for row in numbers_of(self.rule, groups)]
        found = self.device_numbers("rows", rows, device)
        for row, group in zip(found, groups, strict=True):
            if isinstance(group.get("lr"), torch.Tensor):
                row[0].copy_(group["lr"], non_blocking=True)
        return found

    def run(
        self,
        table: Table,
        covered: Covered,
        scaler: LossScaler,
        sums: torch.Tensor | None,
        found_in: torch.Tensor | None,
        carried: Any,
        pending: Any,
        seed: Any,
        bound: float | None,
        checks: bool,
        *,
        is_part: bool = False,
    ) -> torch.Tensor:
        """Decide and update; returns what was decided. is_part: of a step whose random numbers are those of its parts."""
        rule, device = self.rule, table.device
        carried, pending = _on_device(carried, device), _on_device(pending, device)
        scale = scaler if type(scaler) is DeviceScale else None
        options = (0.0 if bound is None else bound, *((0.0,) * 6 if scale is None else scale.rule))
        growth, hysteresis = (None, None) if scale is None else scale.trackers
        out = torch.empty(OUT, dtype=torch.int64, device=device)
        single = out.view(torch.float32)
        factor, seed = None if scale is None else scale.factor, seed if isinstance(seed, torch.Tensor) else None
        maybe = sums, found_in, carried, pending, factor, growth, hysteresis, seed
        args = (
            *(sums, 0 if sums is None else sums.numel(), found_in, carried, pending),
            *(self.device_numbers("options", options, device), factor, growth, hysteresis, seed),
            *(out.view(torch.float64), single, out, table.clocks, table.num_clocks),
            *(self._rows(device), table.scalars),
        )
        constants = {"CLIP": bound is not None, "PREPARE": rule.prepare, "NUMBERS": MOST_NUMBERS}
        constants |= {"SCALARS": SCALARS, "BLOCK": BLOCK}
        self._compiled.launch(decide, (bound is not None, *kinds_of(maybe)), 1, args, constants)
        if covered.dither is not None and not is_part:
            covered.dither.next()
        chances = self._chances(table, covered.dither)
        divide = carried is not None or pending is not None or bound is not None

        def launch(kinds: Iterable[Kind]) -> None:
            for kind in kinds:
                if kind.tiles:
                    args = self._arguments(table, kind, single, chances[kind.names])
                    constants = self._constants(kind, checks=checks, divide=divide)
                    table.compiled.launch(update, (kind.first, checks, divide), kind.tiles, args, constants)

        noise = covered.draw()  # memory that lives until the launch
        for bucket, drawn in noise.items():
            if bucket.host is None:
                table.move(bucket, drawn)
        launch(table.here)
        for bucket in covered.visit(table, noise):
            launch(kind for kind in table.kinds if kind.bucket is bucket)
        increment_version(self._params)
        return out

    def _arguments(self, table: Table, kind: Kind, out: torch.Tensor, chances: torch.Tensor) -> tuple[Any, ...]:
        return table.rows, table.tiles, kind.first, table.scalars, out, chances

    def _constants(self, kind: Kind, *, checks: bool, divide: bool) -> dict[str, Any]:
        own = {"RULE": self.rule.body, "CHECKED": checks, "DIVIDE": divide}
        return {**kind.constants, **own, "COLUMNS": COLUMNS, "SCALARS": SCALARS, "TILE": TILE}

    def _no_chances(self, device: torch.device) -> torch.Tensor:
        known = self._values.get("chances")
        if known is None or known[1].device != device:
            zeros = torch.zeros((1 + MOST_STATES) * ALIGNMENT, dtype=torch.int32, device=device)
            known = self._values["chances"] = None, zeros
        return known[1]

    def _chances(self, table: Table, dither: Dither | None) -> dict[tuple[str, ...], torch.Tensor]:
        """Return 64 random numbers of this step for weights and for each state, by the names of the states of a kind."""
        found = dict.fromkeys((kind.names for kind in table.kinds), self._no_chances(table.device))
        if dither is None:
            return found
        # Drawn on the host, and copied at once; what a graph reads is brought to the device by somebody else.
        place = table.device if dither.fixed else _CPU
        for kind in table.kinds:
            if kind.by_chance:
                drawn = [dither.lanes(name, place) for name in (WEIGHTS, *kind.names)]
                drawn += [torch.zeros_like(drawn[0])] * (MOST_STATES - len(kind.names))
                lanes = torch.cat(drawn)
                found[kind.names] = lanes if dither.fixed else self._copies(lanes, table.device)
        return found


class _Measured:
    """What one reading of the gradients found. sums: partial sums of squares, of all ranks where they hold shards.
    carried: what gradients were multiplied by then."""

    def __init__(self, table: Table, partials: torch.Tensor, sums: torch.Tensor, carried: Any) -> None:
        self._table, self._partials, self.sums, self.carried = table, partials, sums, carried

    def copied(self, copy: Copy) -> _Measured:
        """The same, of a copy of what names whose gradients are not finite."""
        return _Measured(self._table, copy(self._partials), self.sums, self.carried)

    @cached_property
    def params(self) -> list[torch.Tensor]:
        """Whose gradients were read."""
        return list(dict.fromkeys(self._table.params))

    def norm(self, carried: torch.Tensor | None, pending: torch.Tensor | None) -> torch.Tensor:
        """The norm, times `pending` and by `carried`, 0-dim on the device."""
        found = torch.empty((), dtype=torch.float64, device=self.sums.device)
        with current(found.device):
            norm_of[(1,)](self.sums, self.sums.numel(), carried, pending, found, BLOCK=BLOCK, enable_fp_fusion=False)
        return found

    @cached_property
    def total(self) -> torch.Tensor:
        """The norm of the gradients as they are, 0-dim on the device."""
        return self.norm(None, None)

    @cached_property
    def each(self) -> torch.Tensor:
        """The norms of `params`; waits for the device."""
        squares = self._table.squares_of_params(self._partials)
        return torch.tensor([squares.get(param, 0.0) for param in self.params], dtype=torch.float64).sqrt()


class _Decided(HostCopy):
    """What `decide` wrote, on its way to the host."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__(out)
        self._out = out

    def on_device(self) -> torch.Tensor:
        """Whether the step was made, 0-dim on the device."""
        return self._out.view(torch.float32)[_SKIPPED] == 0

    def copied(self, copy: Copy) -> _Decided:
        return _Decided(copy(self._out))

    def __call__(self) -> bool:
        return float(self.tensor().view(torch.float32)[_SKIPPED]) == 0.0


@dataclass(frozen=True, eq=False)
class _Fields(DeviceFields):
    """decided: has the loss scale where that lives on a device, and the norm where `is_first` says that it read it."""

    decided: _Decided | None = None
    is_first: bool = False

    def __call__(self, applied: bool) -> StepFields:
        assert self.decided is not None
        there = self.decided.tensor()
        on_device = isinstance(self.loss_scale, torch.Tensor)
        scale = there.view(torch.float32)[7] if on_device else self.loss_scale
        return DeviceFields(scale, there.view(torch.float64)[0] if self.is_first else self.grad_norm, self.report)(
            applied
        )

    def copied(self, copy: Copy) -> _Fields:
        assert self.decided is not None
        return _Fields(**vars(super().copied(copy)), decided=self.decided.copied(copy), is_first=self.is_first)


def _added_up(partials: torch.Tensor) -> torch.Tensor:
    total = torch.empty((), dtype=torch.float64, device=partials.device)
    add_up[(1,)](partials, partials.numel(), total, BLOCK=BLOCK)
    return total


def _on_device(value: Any, device: torch.device) -> torch.Tensor | None:
    """Return a factor as a tensor on `device`, None where it is 1."""
    if value is None or _is_one(value):
        return None
    return (
        value.to(device)
        if isinstance(value, torch.Tensor)
        else torch.full((), float(value), dtype=torch.float64, device=device)
    )


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == 1.0
