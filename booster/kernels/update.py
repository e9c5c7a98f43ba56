"""Norms, decision and step by kernels: one launch reads the gradients, one decides, one for each kind of tensor updates.

Everything else is as on any device. What the kernels do not know, such as sparse gradients or a step with hooks, is stepped on
the same states, and gradients are read otherwise where a clip asks for more than a norm of order 2.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from booster.ground.device import DeviceCopies, HostCopy
from booster.ground.torch_internals import note_step, step_hooks
from booster.kernels.compiled import CompiledKernels, current, kinds_of
from booster.kernels.launches import BLOCK, COLUMNS, OUT, SCALARS, TILE, WARPS, add_up, clip_by, decide, norm_of, update
from booster.kernels.released import Along, KernelPass, LookByTorch
from booster.kernels.rule import MOST_NUMBERS, MOST_STATES, Rule
from booster.kernels.stretches import DTYPES, Stretches, Unfit, numbers_of, same
from booster.kernels.table import Kind, Table, Tables
from booster.loss_scaler import DeviceScale, LossScaler, NoScale
from booster.masters.bucket import Bucket
from booster.masters.formats import WEIGHTS, Stochastic
from booster.masters.rounding import Dither
from booster.masters.step import MasterStep
from booster.masters.update import MasterApplication
from booster.ranks import agreement
from booster.tensors.flat import ALIGNMENT, lies_like
from booster.tensors.grads import gradient_values, tensor_norms
from booster.update.application import Application, Told, laid_like
from booster.update.choice import release_by
from booster.update.device import DeviceDecision, DeviceGradients, DeviceNorms, device_of, nonfinite
from booster.update.gradients import Gradients
from booster.update.job import Job
from booster.update.kept import KeptState
from booster.update.outcome import Copy, DeviceFields, StepFields, StepResult
from booster.update.update import Update

_logger = logging.getLogger(__name__)
_GRAD, _DTYPE, _LAYOUT = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")
_PLACE = attrgetter("device")  # of a parameter, by which stretches go into tables
_SPARSE, _GROUP = attrgetter("is_sparse"), attrgetter("group")  # of a gradient; of a bucket
_VERSION = attrgetter("_version")  # of a gradient
_ADDRESS, _CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_CPU = torch.device("cpu")
_UNSCALED, _HERE = NoScale(), nullcontext()
_MOST_SETS = 4  # of parameters with gradients, as where two losses train other layers by turns
_SKIPPED, _DIVISOR = 5, 1  # places in what `decide` writes: of float32 and float64 numbers


class Covered:
    """What kernels step of one optimizer: parameters as they are."""

    def __init__(self, job: Job, rule: Rule, *, counts_zeros: bool = False) -> None:
        self._optimizer, self._shards = job.optimizer, job.shards
        self.sharded = job.shards.sharded
        self.steps = _Steps(rule, job.optimizer, job.group, counts_zeros=counts_zeros)

    def look(self, looks: _Steps, params: list[torch.Tensor]) -> Tables | None:
        """Return those of `looks` of the gradients of `params`, which are only read."""

        def collect(stretches: Stretches) -> None:
            for param in params:
                stretches.add_reading(param)

        return looks.table(params, (), self._shards, collect)

    def part(self, steps: _Steps, params: list[torch.Tensor]) -> Tables | None:
        """Return those of `steps` of the gradients of `params`, which are stepped before the others of their step."""
        only = {id(param) for param in params}

        def collect(stretches: Stretches) -> None:
            for index, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    if id(param) in only:
                        stretches.add(index, param)

        return steps.table(params, (), self._shards, collect)

    def ready(self, params: list[torch.Tensor]) -> Tables | None:
        """Return the tables of the gradients of `params`, all that are there; None where this step is not for kernels."""
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

    def __init__(self, job: Job, rule: Rule, whole: MasterStep, *, counts_zeros: bool = False) -> None:
        super().__init__(job, rule, counts_zeros=counts_zeros)
        self._whole = whole

    def part(self, steps: _Steps, params: list[torch.Tensor]) -> Tables | None:
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
            if bucket.host is not None and bucket in table.buckets:
                with journeys[bucket.host].here(bucket):
                    own, names = state[bucket.handles[0]], self.steps.rule.states(groups[bucket.group])
                    table.move(bucket, noise.get(bucket, bucket.rest), [own[name] for name in names])
                    yield bucket


class KernelNorms(DeviceNorms):
    """Norms of order 2 are read by one launch. A clip that nobody asked for waits for the decision, which reads them then."""

    waits = True

    def __init__(self, job: Job, covered: Covered) -> None:
        super().__init__(job)
        self._covered, self._counts_zeros = covered, covered.steps.counts_zeros

    def read(self, gradients: Gradients, norm_type: float) -> tuple[Any, Any]:
        tables = self._covered.ready(gradients.params()) if norm_type == 2.0 else None
        if tables is None:
            return super().read(gradients, norm_type)
        with current(tables.device):
            read = self.look(tables, gradients.scale)
            there = self._covered.steps.factor_on
            scale = there("carried", gradients.scale, tables.device)
            return read, read.norm(scale, there("pending", gradients.factor, tables.device))

    def found(self, read: Sequence[Any]) -> torch.Tensor:
        known = read[0].found if len(read) == 1 and isinstance(read[0], Along) else None
        return super().found(read) if known is None else known

    def look(self, tables: Tables, carried: Any) -> _Measured:
        """Read the gradients in `tables`, which are multiplied by `carried`. On their device."""
        sums, zeros = tables.first.measure(counts_zeros=self._counts_zeros)
        partials, counts = [sums], [zeros]
        if len(tables.each) > 1:
            totals = [_added_up(sums)]
            for table in tables.each[1:]:
                with current(table.device):
                    found, zeros = table.measure(counts_zeros=self._counts_zeros)
                    totals.append(_added_up(found).to(tables.device))
                partials.append(found)
                counts.append(zeros)
            sums = torch.stack(totals)
        if self.shards.sharded:
            sums = agreement.shared(_added_up(sums), self.group, dist.ReduceOp.SUM).view(1)
        if not self._counts_zeros:
            return _Measured(tables, partials, sums, carried)
        return _Measured(tables, partials, sums, carried, _together(counts, tables.device), self._versions(tables))

    def zeros(self, tables: Tables, read: _Measured | None) -> torch.Tensor | None:
        """Return how many elements of the gradients in `tables` are zero, by tiles. read: a reading of them, which tells unless
        they were written to since."""
        if read is not None and read.versions == self._versions(tables):
            return read.zeros
        counts = []
        for table in tables.each:
            with current(table.device):
                counts.append(table.measure(counts_zeros=True)[1])
        return _together(counts, tables.device)

    def look_by_torch(self, params: Sequence[torch.Tensor]) -> LookByTorch:
        """Read the gradients of `params` by operations of torch."""
        norms = torch.zeros(0, dtype=torch.float64, device=self.device)
        if params:
            norms = tensor_norms(gradient_values(params), 2.0, torch.float64)
        squares = norms.square()
        if self.shards.sharded:
            copies = torch.tensor(self.shards.copies_of(params), dtype=torch.float64).to(norms.device)
            squares = agreement.shared((squares / copies).sum(), self.group, dist.ReduceOp.SUM).view(1)
        return LookByTorch(list(params), norms, squares, self.zeros_by_torch(params) if self._counts_zeros else None)

    def zeros_by_torch(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Count zeros of what kernels do not measure: of each of `params`."""
        counts = [value.numel() - value.count_nonzero().to(self.device) for value in gradient_values(params)]
        return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64, device=self.device)

    def _versions(self, tables: Tables) -> list[int]:
        return list(map(_VERSION, map(_GRAD, tables.params)))

    def clipped(self, norm: torch.Tensor, max_norm: float, factor: Any) -> torch.Tensor:
        if norm.dtype != torch.float64 or not isinstance(max_norm, float):
            return super().clipped(norm, max_norm, factor)
        found = torch.empty_like(norm)
        bound = self._covered.steps.device_numbers("bound", (max_norm,), norm.device)
        with current(norm.device):
            pending = self._covered.steps.factor_on("pending", factor, norm.device)
            clip_by[(1,)](norm, bound, pending, found, enable_fp_fusion=False)
        return found


class KernelDecision(DeviceDecision):
    """Decides and steps by kernels. Gradients are only read: after a step they carry the loss scale that they had, and no clip.
    What kernels do not know, `application` steps."""

    def __init__(self, gradients: DeviceGradients, application: Application, covered: Covered) -> None:
        super().__init__(gradients, application)
        self.covered, self._counts_zeros = covered, covered.steps.counts_zeros
        self.steps = covered.steps
        self._parts: list[_Steps] = []  # of what is stepped together within a backward pass, in its order
        self._looks: list[_Steps] = []  # and of what is looked at together
        self.begin_gradual()

    def step(self, params: list[torch.Tensor]) -> tuple[StepResult, Any]:
        gradients, bound = self.gradients, self.gradients.bound
        if gradients.release is not None and gradients.release.uncounted:
            return super().step(params)
        tables = self.covered.ready(params)
        if tables is not None:
            with current(tables.device):
                return self._launch(tables, bound)
        if bound is not None:
            self.gradients.clip_norm(bound)
        return super().step(params)

    def _launch(self, tables: Tables, bound: float | None) -> tuple[StepResult, Any]:
        """Step what is in `tables`. bound: of a clip that waits for the step."""
        gradients = self.gradients
        norms: Any = gradients.norms
        carried, pending, seed = gradients.scale, gradients.factor, gradients.loss_scale
        checks, joint, sums, found_in = gradients.checks, gradients.joint, None, None
        fresh: _Measured | None = None
        alone = joint.found is None and len(joint.members) == 1
        if checks:
            last = gradients.read[-1] if len(gradients.read) == 1 and bound is None else None
            fresh = last if isinstance(last, _Measured) and last.carried is carried else None
            if fresh is None and (bound is not None or not gradients.read):
                gradients.read.append(fresh := norms.look(tables, carried))
            sums = None if fresh is None else fresh.sums
            if not alone or (gradients.group is not None and not self.covered.sharded):
                found_in = self.agreed()
            elif gradients.read != [fresh]:
                found_in = gradients.found()
        scaler, zeros = gradients.scaler, norms.zeros(tables, fresh) if self._counts_zeros else None
        out = self.steps.run(tables, self.covered, scaler, sums, zeros, found_in, carried, pending, seed, bound, checks)
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
        if not checks and zeros is None:
            return StepResult(True, StepFields(loss_scale=1.0)), scale
        decided, counted = _Decided(out), zeros is not None
        if not checks:
            return StepResult(True, _Fields(1.0, decided=decided, counted=counted)), scale
        fields = _Fields(seed, norm, joint.report(), decided=decided, is_first=first, counted=counted)
        return StepResult(decided, fields, pending=fields.pending), scale

    def held_by(self, graph: list[Any]) -> AbstractContextManager[None]:
        return self.steps.held_by(graph)

    # ------------------------------------------------------------------ within backward

    def released_pass(self, gradients: Gradients) -> KernelPass:
        return KernelPass(gradients)

    def begin_gradual(self) -> None:
        self._num_parts = self._num_looks = 0
        self._zeros_along: list[torch.Tensor] = []
        self._sums_along: list[torch.Tensor] = []  # of squares of gradients that no launch has decided by yet
        self._found_along: torch.Tensor | None = (
            None  # whether others that came are not finite, 0-dim; None: there are none
        )

    def look_along(self, params: list[torch.Tensor]) -> _Measured | LookByTorch:
        """Read the gradients of `params`, by which the parts that follow are stepped or not."""
        norms: Any = self.gradients.norms
        if self._num_looks == len(self._looks):
            steps = self.steps
            group, counts = self.gradients.group, self._counts_zeros
            self._looks.append(
                _Steps(steps.rule, self.gradients.optimizer, group, counts_zeros=counts, only_reads=True)
            )
        looks, self._num_looks = self._looks[self._num_looks], self._num_looks + 1
        tables = self.covered.look(looks, params) if params else None
        if tables is None:
            found = norms.look_by_torch(params)
        else:
            with current(tables.device):
                found = norms.look(tables, self.gradients.scale)
        self._sums_along.append(found.sums)
        if found.zeros is not None:
            self._zeros_along.append(found.zeros)
        return found

    def zeros_in(self, params: list[torch.Tensor]) -> torch.Tensor | None:
        if not self._counts_zeros:
            return None
        norms: Any = self.gradients.norms
        release = self.gradients.release
        if release is None or not release.uncounted:
            return norms.zeros_by_torch(params).sum()
        zeros = self._zeros_along
        return None if not zeros else zeros[0].sum() if len(zeros) == 1 else torch.cat(zeros).sum()

    def agree(self) -> bool:
        """Return whether the host knows that all who decide together skip this step: as a rule it does not ask."""
        joint, hooked = self.gradients.joint, any(step_hooks(self.gradients.optimizer))
        if self.gradients.checks:
            self.agreed()
        return bool(joint.found) if hooked or not isinstance(joint.found, torch.Tensor) else False

    @property
    def found_of_part(self) -> torch.Tensor | None:
        """Whether gradients that came so far are not finite, or the step is skipped whatever they are, 0-dim; None: nobody
        looked."""
        found = self.gradients.joint.found
        if isinstance(found, torch.Tensor):
            return found
        if self._sums_along:
            found, before = nonfinite(torch.cat(self._sums_along).sum()), self._found_along
            self._sums_along, self._found_along = [], found if before is None else torch.maximum(before, found)
        return self._found_along

    def _apply_divided(self, params: list[torch.Tensor], found: torch.Tensor, carried: Any, clip: Any) -> bool:
        release = self.gradients.release
        made = release is not None and release.uncounted
        return True if made else super()._apply_divided(params, found, carried, clip)

    def step_part(self, params: Sequence[torch.Tensor]) -> bool:
        """Step `params` before the others of their step; return False, with nothing done, where kernels do not know them."""
        if self._num_parts == len(self._parts):
            group, counts = self.gradients.group, self._counts_zeros
            self._parts.append(_Steps(self.steps.rule, self.gradients.optimizer, group, counts_zeros=counts))
        steps, self._num_parts = self._parts[self._num_parts], self._num_parts + 1
        tables, gradients, norms = self.covered.part(steps, list(params)), self.gradients, self.gradients.norms
        if tables is None:
            if self._counts_zeros and not self._num_looks:
                self._zeros_along.append(norms.zeros_by_torch(params))  # type: ignore[attr-defined]
            return False
        found, sums = gradients.joint.found, None
        if not isinstance(found, torch.Tensor):
            found = self._found_along
            if self._sums_along:
                sums = self._sums_along[0] if len(self._sums_along) == 1 else torch.cat(self._sums_along)
        checks = found is not None or sums is not None
        with current(tables.device):
            if self._counts_zeros and not self._num_looks:
                self._zeros_along.append(norms.zeros(tables, None))  # type: ignore[attr-defined]
            told = sums, None, found, gradients.scale, gradients.factor, None, None, checks
            out = steps.run(tables, self.covered, _UNSCALED, *told, is_part=True)
        if sums is not None:
            self._sums_along, self._found_along = [], out.view(torch.float32)[_SKIPPED]
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


def kernel_update(
    job: Job, rule: Rule, application: Application, kept: KeptState, *, counts_zeros: bool = False
) -> Update:
    """Make an update that steps by kernels as `rule` says, and by `application` what they do not know.

    counts_zeros: tell how many elements of gradients are zero."""
    masters = isinstance(application, MasterApplication)
    covered: Covered
    if masters:
        covered = CoveredMasters(job, rule, application.whole, counts_zeros=counts_zeros)  # type: ignore[attr-defined]
    else:
        covered = Covered(job, rule, counts_zeros=counts_zeros)
    gradients = DeviceGradients(job, KernelNorms(job, covered))
    decision = KernelDecision(gradients, application, covered)
    release_by(job, gradients, decision)
    return Update(gradients, decision, kept)


@dataclass(eq=False)
class _Set:
    """Parameters that are stepped together, with what is known of them while their states lie where they lay.

    layout: what is compared besides, by identity. dtypes: of the gradients. places: of each stretch, among the parameters, and
    in its own. addresses: of the gradients in the tables.
    """

    params: list[torch.Tensor]
    layout: Any
    dtypes: list[torch.dtype]
    stretches: Stretches
    places: list[tuple[int, int]]
    tables: Tables | None = None
    addresses: list[int] = field(default_factory=list)


class _Steps:
    """The launches of one optimizer's steps, and what they need from step to step.

    only_reads: there are none but those that read gradients."""

    def __init__(
        self,
        rule: Rule,
        optimizer: Any,
        group: dist.ProcessGroup | None,
        *,
        counts_zeros: bool = False,
        only_reads: bool = False,
    ) -> None:
        self.rule, self._optimizer, self._group = rule, optimizer, group
        self.counts_zeros, self._only_reads = counts_zeros, only_reads
        self._sets: list[_Set] = []  # the last that were stepped, the latest first
        self._laid: list[torch.Tensor] = []  # gradients that were copied, until they are read
        self._params: list[torch.Tensor] = []
        self._values: dict[tuple[str, torch.device], tuple[Any, torch.Tensor]] = {}
        self._compiled, self._copies = CompiledKernels(), DeviceCopies()
        self._said = only_reads
        self._broken: str | None = None
        self.reason: str | None = None
        """Why the last step was none of kernels, None if it was one."""

    def __deepcopy__(self, memo: Any) -> _Steps:
        options = {"counts_zeros": self.counts_zeros, "only_reads": self._only_reads}
        return _Steps(self.rule, copy.deepcopy(self._optimizer, memo), self._group, **options)  # tables hold addresses

    def table(
        self, params: list[torch.Tensor], layout: Any, shards: Any, collect: Callable[[Stretches], None]
    ) -> Tables | None:
        """Return the tables for gradients of `params`; None where there is something among them that kernels do not know."""
        try:
            if self._broken is not None:
                raise Unfit(self._broken)
            grads = self._gradients(params)
            dtypes = list(map(_DTYPE, grads))
            known = None
            for each in self._sets:  # the first, in nearly every step
                if dtypes == each.dtypes and same(params, each.params) and same(layout, each.layout):
                    known = each
                    self._sets.remove(known)
                    break
            if known is None or not known.stretches.holds():
                # Others would keep states that were replaced.
                self._sets = [each for each in self._sets if each.stretches.holds()]
                known = self._set_of(params, layout, dtypes, shards, collect)
            self._sets = [known, *self._sets[: _MOST_SETS - 1]]
            self.reason, self._params = None, params
            return self._follow(grads, known)
        except Unfit as unfit:
            self.reason = str(unfit)
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
            for place, (grad, param) in enumerate(zip(grads, params, strict=True)):
                if not lies_like(grad, param):
                    grads[place] = laid_like(grad, param)
                    self._laid.append(grads[place])
        return grads

    def _set_of(
        self,
        params: list[torch.Tensor],
        layout: Any,
        dtypes: list[torch.dtype],
        shards: Any,
        collect: Callable[[Stretches], None],
    ) -> _Set:
        stretches = Stretches(self._optimizer, self.rule, shards)
        collect(stretches)
        stretches.complete()
        self._check(params, stretches)
        return _Set(params, layout, dtypes, stretches, self._places_of(params, stretches))

    def _check(self, params: list[torch.Tensor], stretches: Stretches) -> None:
        covered = sum(each.size for each in stretches.all)
        if covered != sum(map(torch.Tensor.numel, params)):
            raise Unfit("there are gradients of parameters that it does not step")

    def _places_of(self, params: list[torch.Tensor], stretches: Stretches) -> list[tuple[int, int]]:
        index = {id(param): place for place, param in enumerate(params)}
        return [(index[id(each.param)], each.start) for each in stretches.all]

    def _follow(self, grads: list[torch.Tensor], known: _Set) -> Tables:
        addresses = list(map(_ADDRESS, grads))
        if known.tables is None or known.addresses != addresses:
            sizes = [grad.element_size() for grad in grads]
            there = [addresses[place] + start * sizes[place] for place, start in known.places]
            if known.tables is None:
                known.tables = self._made(
                    known.stretches, [DTYPES[known.dtypes[place]] for place, _ in known.places], there
                )
            else:
                known.tables.follow_gradients(there)
            known.addresses = addresses
        return known.tables

    def _made(self, stretches: Stretches, dtypes: list[int], there: list[int]) -> Tables:
        """Return tables of `stretches`, whose gradients are of `dtypes` and lie `there`."""
        home, tables = device_of(self._optimizer, self._group), []
        by_place: dict[Any, list[int]] = {}
        for place, each in enumerate(stretches.all):
            by_place.setdefault(_PLACE(each.param), []).append(place)
        first = next((_PLACE(param) for group in self._optimizer.param_groups for param in group["params"]), home)
        all_places = [by_place.pop(first, []), *by_place.values()]
        for places in all_places:
            own = [stretches.all[place] for place in places]
            device = own[0].param.device if own else home
            kept = [dtypes[place] for place in places], [there[place] for place in places]
            table = Table(own, *kept, stretches.clocks, device, self._copies)
            if device.type == "cuda":
                with current(device):
                    self._try(table)
            tables.append(table)
        return Tables(tables, all_places)

    def _try(self, table: Table) -> None:
        """Compile what `table` needs, before anything is written. Raises Unfit, also at every later step, where that fails."""
        try:
            sums, zeros = table.measure(counts_zeros=self.counts_zeros)
            for kind in () if self._only_reads else table.kinds:
                scratch = table.scalars.new_zeros(OUT), self._no_chances(table.device)
                args = table.rows, table.tiles, kind.first, table.scalars, *scratch
                constants = self._constants(kind, checks=True, divide=True)
                update.warmup(*args, grid=(1,), **constants, enable_fp_fusion=False, num_warps=WARPS)
            if not self._only_reads:
                _, _, args, constants = self._deciding(table, _UNSCALED, sums, zeros, None, None, None, None, 1.0)
                decide.warmup(*args, grid=(1,), **constants, enable_fp_fusion=False, num_warps=4)
        except Exception as error:
            self._broken = f"Triton does not compile kernels here: {str(error).strip().splitlines()[-1:]}"
            raise Unfit(self._broken) from error

    def device_numbers(self, name: str, values: Any, device: torch.device) -> torch.Tensor:
        """Return `values` as float64 on `device`, copied there only where they changed under `name`."""
        known = self._values.get((name, device))
        if known is None or known[0] != values:
            known = self._values[name, device] = values, self._copies(torch.tensor(values, dtype=torch.float64), device)
        if self._copies.held is not None:
            self._copies.hold(known[1])
        return known[1]

    def factor_on(self, name: str, value: Any, device: torch.device) -> torch.Tensor | None:
        """Return a factor as a tensor on `device`, None where it is 1; a number is copied there where it changed."""
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return None if value is None or value == 1.0 else self.device_numbers(name, (float(value),), device)

    @contextmanager
    def held_by(self, graph: list[Any]) -> Iterator[None]:
        """Inside, what launches read by its address is put into `graph`."""
        self._copies.held = graph
        try:
            yield
        finally:
            self._copies.held = None

    def _rows(self, device: torch.device) -> torch.Tensor:
        """Return the rows of numbers of all groups on `device`. Rates that are tensors are taken from where they are."""
        groups = self._optimizer.param_groups
        rows = [(*row, *(0.0,) * (MOST_NUMBERS - len(row))) for row in numbers_of(self.rule, groups)]
        found = self.device_numbers("rows", rows, device)
        for place, group in enumerate(groups):
            if isinstance(group.get("lr"), torch.Tensor):
                found[place, 0].copy_(group["lr"], non_blocking=True)
        return found

    def run(
        self,
        tables: Tables,
        covered: Covered,
        scaler: LossScaler,
        sums: torch.Tensor | None,
        zeros: torch.Tensor | None,
        found_in: torch.Tensor | None,
        carried: Any,
        pending: Any,
        seed: Any,
        bound: float | None,
        checks: bool,
        *,
        is_part: bool = False,
    ) -> torch.Tensor:
        """Decide and update; returns what was decided. is_part: of a step whose random numbers are those of its parts.

        Each device decides by itself, from the same numbers: a launch costs less than to wait for another device."""
        if covered.dither is not None and not is_part:
            covered.dither.next()
        noise = covered.draw()  # memory that lives until the launches
        carried = self.factor_on("carried", carried, tables.device)
        pending = self.factor_on("pending", pending, tables.device)
        divide, found = bound is not None or carried is not None or pending is not None, None
        for table in tables.each:
            with _HERE if table is tables.first else current(table.device):
                if table is not tables.first:
                    scaler, seed, zeros = _UNSCALED, None, None
                    sums, found_in, carried, pending = (
                        None if given is None else given.to(table.device)
                        for given in (sums, found_in, carried, pending)
                    )
                out = self._decide(table, scaler, sums, zeros, found_in, carried, pending, seed, bound)
                found = out if found is None else found
                chances = self._chances(table, covered.dither)
                for bucket, drawn in noise.items():
                    if bucket.host is None and bucket in table.buckets:
                        table.move(bucket, drawn)
                self._update(table, table.here, out, chances, checks, divide)
                for bucket in covered.visit(table, noise):
                    own = [kind for kind in table.kinds if kind.bucket is bucket]
                    self._update(table, own, out, chances, checks, divide)
        increment_version(self._params)
        self._laid = []
        assert found is not None
        return found

    def _decide(
        self,
        table: Table,
        scaler: LossScaler,
        sums: torch.Tensor | None,
        zeros: torch.Tensor | None,
        found_in: torch.Tensor | None,
        carried: torch.Tensor | None,
        pending: torch.Tensor | None,
        seed: Any,
        bound: float | None,
    ) -> torch.Tensor:
        """Launch what decides, and counts the clocks of `table`, whose device all tensors lie on."""
        given = table, scaler, sums, zeros, found_in, carried, pending, seed, bound
        out, key, args, constants = self._deciding(*given)
        if self._copies.held is not None:
            self._copies.hold(*args)
        self._compiled.launch(decide, key, 1, args, constants)
        return out

    def _deciding(
        self,
        table: Table,
        scaler: LossScaler,
        sums: torch.Tensor | None,
        zeros: torch.Tensor | None,
        found_in: torch.Tensor | None,
        carried: torch.Tensor | None,
        pending: torch.Tensor | None,
        seed: Any,
        bound: float | None,
    ) -> tuple[torch.Tensor, Any, tuple[Any, ...], dict[str, Any]]:
        """Return what `decide` is to write to, what tells which kernel is compiled, its arguments, and its constants."""
        device, scale = table.device, scaler if type(scaler) is DeviceScale else None
        options = (0.0 if bound is None else bound, *((0.0,) * 6 if scale is None else scale.rule))
        growth, hysteresis = (None, None) if scale is None else scale.trackers
        out = torch.empty(OUT, dtype=torch.int64, device=device)
        factor, seed = None if scale is None else scale.factor, seed if isinstance(seed, torch.Tensor) else None
        maybe = sums, zeros, found_in, carried, pending, factor, growth, hysteresis, seed
        args = (
            *(sums, 0 if sums is None else sums.numel(), zeros, 0 if zeros is None else zeros.numel()),
            *(found_in, carried, pending),
            *(self.device_numbers("options", options, device), factor, growth, hysteresis, seed),
            *(out.view(torch.float64), out.view(torch.float32), out, table.clocks, table.num_clocks),
            *(self._rows(device), table.scalars),
        )
        constants = {"CLIP": bound is not None, "PREPARE": self.rule.prepare, "NUMBERS": MOST_NUMBERS}
        key = device, bound is not None, *kinds_of(maybe)
        return out, key, args, {**constants, "SCALARS": SCALARS, "BLOCK": BLOCK}

    def _update(
        self,
        table: Table,
        kinds: Iterable[Kind],
        out: torch.Tensor,
        chances: dict[tuple[str, ...], torch.Tensor],
        checks: bool,
        divide: bool,
    ) -> None:
        """Launch the updates of `kinds` of `table`, as `out` was decided."""
        single = out.view(torch.float32)
        for kind in kinds:
            if kind.tiles:
                args = table.rows, table.tiles, kind.first, table.scalars, single, chances[kind.names]
                constants = self._constants(kind, checks=checks, divide=divide)
                if self._copies.held is not None:
                    self._copies.hold(*args)
                table.compiled.launch(update, (kind.first, checks, divide), kind.tiles, args, constants, WARPS)

    def _constants(self, kind: Kind, *, checks: bool, divide: bool) -> dict[str, Any]:
        own = {"RULE": self.rule.body, "CHECKED": checks, "DIVIDE": divide}
        return {**kind.constants, **own, "COLUMNS": COLUMNS, "SCALARS": SCALARS, "TILE": TILE}

    def _no_chances(self, device: torch.device) -> torch.Tensor:
        known = self._values.get(("chances", device))
        if known is None:
            zeros = torch.zeros((1 + MOST_STATES) * ALIGNMENT, dtype=torch.int32, device=device)
            known = self._values["chances", device] = None, zeros
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
    carried: what gradients were multiplied by then. zeros: how many elements of each tile are zero, of gradients of these
    `versions`, where that is counted."""

    def __init__(
        self,
        tables: Tables,
        partials: list[torch.Tensor],
        sums: torch.Tensor,
        carried: Any,
        zeros: torch.Tensor | None = None,
        versions: list[int] | None = None,
    ) -> None:
        self._tables, self._partials, self.sums, self.carried = tables, partials, sums, carried
        self.zeros, self.versions = zeros, versions

    def copied(self, copy: Copy) -> _Measured:
        """The same, of a copy of what names whose gradients are not finite."""
        return _Measured(self._tables, list(map(copy, self._partials)), self.sums, self.carried)

    @cached_property
    def params(self) -> list[torch.Tensor]:
        """Whose gradients were read."""
        return list(dict.fromkeys(self._tables.params))

    def norm(self, carried: torch.Tensor | None, pending: torch.Tensor | None) -> torch.Tensor:
        """The norm, times `pending` and by `carried`, 0-dim on the device."""
        found = torch.empty((), dtype=torch.float64, device=self.sums.device)
        with current(found.device):
            norm_of[(1,)](self.sums, self.sums.numel(), carried, pending, found, None, enable_fp_fusion=False)
        return found

    @cached_property
    def total(self) -> torch.Tensor:
        """The norm of the gradients as they are, 0-dim on the device."""
        return self.norm(None, None)

    @cached_property
    def each(self) -> torch.Tensor:
        """The norms of `params`; waits for the device."""
        squares = self.squares()
        return torch.tensor([squares.get(param, 0.0) for param in self.params], dtype=torch.float64).sqrt()

    def squares(self) -> dict[torch.Tensor, float]:
        """Return the squares of the norms by parameter; waits for the device."""
        squares: dict[torch.Tensor, float] = {}
        for table, partials in zip(self._tables.each, self._partials, strict=True):
            squares |= table.squares_of_params(partials)
        return squares


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
    """decided: has the loss scale where that lives on a device, the norm where `is_first` says that it read it, and the number
    of zeros where they are `counted`."""

    decided: _Decided | None = None
    is_first: bool = False
    counted: bool = False

    def __call__(self, applied: bool) -> StepFields:
        assert self.decided is not None
        there = self.decided.tensor()
        on_device = isinstance(self.loss_scale, torch.Tensor)
        scale = there.view(torch.float32)[7] if on_device else self.loss_scale
        norm = there.view(torch.float64)[0] if self.is_first else self.grad_norm
        return DeviceFields(scale, norm, self.report, there[6] if self.counted else None)(applied)

    def copied(self, copy: Copy) -> _Fields:
        assert self.decided is not None
        plain, decided = super().copied(copy), self.decided.copied(copy)
        fields = plain.loss_scale, plain.grad_norm, plain.report, plain.num_zeros
        return _Fields(*fields, decided, self.is_first, self.counted)


def _together(counts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return counts of several devices on `device`."""
    there = [each.to(device) for each in counts if each is not None]
    return there[0] if len(there) == 1 else torch.cat(there)


def _added_up(partials: torch.Tensor) -> torch.Tensor:
    total = torch.empty((), dtype=torch.float64, device=partials.device)
    add_up[(1,)](partials, partials.numel(), total, enable_fp_fusion=False)
    return total


def _is_one(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == 1.0
