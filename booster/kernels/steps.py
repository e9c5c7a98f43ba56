"""The launches of one optimizer's steps: tables, kept while what is stepped lies where it lay, and what is given to kernels."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from booster.common.devices import DeviceCopies
from booster.kernels.launch_cache import CompiledKernels, current, kinds_of
from booster.kernels.launches import BLOCK, COLUMNS, OUT, SCALARS, TILE, WARPS, decide, update
from booster.kernels.rule import MOST_NUMBERS, MOST_STATES, Rule
from booster.kernels.stretches import DTYPES, Stretches, Unfit, numbers_of, same
from booster.kernels.table import Kind, Table, Tables
from booster.loss_scaler import DeviceScale, LossScaler, NoScale
from booster.masters.formats import WEIGHTS
from booster.masters.rounding import RoundingRNG
from booster.tensors.flat import ALIGNMENT, has_same_layout
from booster.update.application import laid_like
from booster.update.device import device_of

_logger = logging.getLogger(__name__)
_GRAD, _DTYPE, _LAYOUT = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")
_PLACE = attrgetter("device")  # of a parameter, by which stretches go into tables
_ADDRESS, _CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_CPU = torch.device("cpu")
UNSCALED, _HERE = NoScale(), nullcontext()
_MOST_SETS = 4  # of parameters with gradients, as where two losses train other layers by turns


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


class KernelSteps:
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

    def __deepcopy__(self, memo: Any) -> KernelSteps:
        options = {"counts_zeros": self.counts_zeros, "only_reads": self._only_reads}
        return KernelSteps(
            self.rule, copy.deepcopy(self._optimizer, memo), self._group, **options
        )  # tables hold addresses

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
                if not has_same_layout(grad, param):
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
                _, _, args, constants = self._deciding(table, UNSCALED, sums, zeros, None, None, None, None, 1.0)
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
        covered: Any,
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
        """Decide and update what `covered`, a `Covered`, has; returns what was decided.

        is_part: of a step whose random numbers are those of its parts.

        Each device decides by itself, from the same numbers: a launch costs less than to wait for another device."""
        if covered.rng is not None and not is_part:
            covered.rng.next()
        noise = covered.draw()  # memory that lives until the launches
        carried = self.factor_on("carried", carried, tables.device)
        pending = self.factor_on("pending", pending, tables.device)
        divide, found = bound is not None or carried is not None or pending is not None, None
        for table in tables.each:
            with _HERE if table is tables.first else current(table.device):
                if table is not tables.first:
                    scaler, seed, zeros = UNSCALED, None, None
                    sums, found_in, carried, pending = (
                        None if given is None else given.to(table.device)
                        for given in (sums, found_in, carried, pending)
                    )
                out = self._decide(table, scaler, sums, zeros, found_in, carried, pending, seed, bound)
                found = out if found is None else found
                random_bits = self._chances(table, covered.rng)
                for bucket, drawn in noise.items():
                    if bucket.host is None and bucket in table.buckets:
                        table.move(bucket, drawn)
                self._update(table, table.here, out, random_bits, checks, divide)
                for bucket in covered.visit(table, noise):
                    own = [kind for kind in table.kinds if kind.bucket is bucket]
                    self._update(table, own, out, random_bits, checks, divide)
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
        random_bits: dict[tuple[str, ...], torch.Tensor],
        checks: bool,
        divide: bool,
    ) -> None:
        """Launch the updates of `kinds` of `table`, as `out` was decided."""
        single = out.view(torch.float32)
        for kind in kinds:
            if kind.tiles:
                args = table.rows, table.tiles, kind.first, table.scalars, single, random_bits[kind.names]
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

    def _chances(self, table: Table, rng: RoundingRNG | None) -> dict[tuple[str, ...], torch.Tensor]:
        """Return 64 random numbers of this step for weights and for each state, by the names of the states of a kind."""
        found = dict.fromkeys((kind.names for kind in table.kinds), self._no_chances(table.device))
        if rng is None:
            return found
        # Drawn on the host, and copied at once; what a graph reads is brought to the device by somebody else.
        place = table.device if rng.fixed else _CPU
        for kind in table.kinds:
            if kind.stochastic:
                drawn = [rng.lanes(name, place) for name in (WEIGHTS, *kind.names)]
                drawn += [torch.zeros_like(drawn[0])] * (MOST_STATES - len(kind.names))
                lanes = torch.cat(drawn)
                found[kind.names] = lanes if rng.fixed else self._copies(lanes, table.device)
        return found
