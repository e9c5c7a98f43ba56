"""The launches of one optimizer's steps, and what is kept for them from step to step.

A step needs the addresses of everything it reads and writes, in a table on the device. Making one costs milliseconds of Python,
so tables are kept for the last few sets of parameters that had gradients, and used again while parameters, states and options
are where and what they were; of gradients, which move from step to step, only the addresses are copied again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from booster.common.devices import DeviceCopies
from booster.kernels.launch_cache import CompiledKernels, current, kinds_of
from booster.kernels.launches import BLOCK, COLUMNS, OUT, SCALARS, TILE, WARPS, decide, update
from booster.kernels.rule import MOST_NUMBERS, MOST_STATES, Rule
from booster.kernels.segments import DTYPES, LaunchGroup, Segments, Table, Tables, Unsupported, numbers_of, same
from booster.loss_scaler import DeviceScale, LossScaler, NoScale
from booster.masters.formats import WEIGHTS
from booster.masters.rounding import RoundingRNG
from booster.tensors.flat import ALIGNMENT, has_same_layout
from booster.update.application import laid_like
from booster.update.device import device_of

_logger = logging.getLogger(__name__)
_GRAD, _DTYPE, _LAYOUT = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")
_DEVICE = attrgetter("device")  # of a parameter, by which segments go into tables
_ADDRESS, _CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_CPU = torch.device("cpu")
UNSCALED, _HERE = NoScale(), nullcontext()
_MOST_SETS = 4  # of parameters with gradients, as where two losses train other layers by turns


class DecisionInputs(NamedTuple):
    """What `decide` reads of one step, besides its table and the loss scale; None where there is nothing of that kind.

    Attributes:
        sums: partial sums of squares of the gradients.
        zeros: counts of zeros in them.
        found_in: float32, not 0 where the step is skipped whatever the sums say.
        current_scale: what gradients are multiplied by.
        pending: the factor of clips that wait.
        seed: the scale of this step's loss.
        bound: the norm to clip to.
    """

    sums: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    found_in: torch.Tensor | None = None
    current_scale: Any = None
    pending: Any = None
    seed: Any = None
    bound: float | None = None

    def to(self, device: torch.device) -> DecisionInputs:
        there: Any = (each.to(device) if isinstance(each, torch.Tensor) else each for each in self)
        return DecisionInputs(*there)


@dataclass(eq=False)
class _Set:
    """Parameters that are stepped together, and what is known of them.

    Attributes:
        layout: what is compared besides, by identity.
        dtypes: of the gradients.
        places: of each segment: the index of its parameter, and where it begins in that.
        addresses: of the gradients in the tables.
    """

    params: list[torch.Tensor]
    layout: Any
    dtypes: list[torch.dtype]
    segments: Segments
    places: list[tuple[int, int]]
    tables: Tables | None = None
    addresses: list[int] = field(default_factory=list)


class KernelSteps:
    """The launches of one optimizer's steps. only_reads: there are none but those that read gradients.

    Attributes:
        reason: why the last step was none of kernels; None if it was one.
    """

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
        self._warned = only_reads
        self._broken: str | None = None
        self.reason: str | None = None

    def __deepcopy__(self, memo: Any) -> KernelSteps:
        options = {"counts_zeros": self.counts_zeros, "only_reads": self._only_reads}
        optimizer = copy.deepcopy(self._optimizer, memo)
        return KernelSteps(self.rule, optimizer, self._group, **options)  # tables hold addresses of the original

    # ------------------------------------------------------------------ tables

    def tables(
        self, params: list[torch.Tensor], layout: Any, shards: Any, collect: Callable[[Segments], None]
    ) -> Tables | None:
        """Return the tables for gradients of `params`; None where there is something among them that kernels do not know."""
        try:
            if self._broken is not None:
                raise Unsupported(self._broken)
            grads = self._gradients(params)
            dtypes = list(map(_DTYPE, grads))
            kept = None
            for each in self._sets:  # the first, in nearly every step
                if dtypes == each.dtypes and same(params, each.params) and same(layout, each.layout):
                    kept = each
                    self._sets.remove(kept)
                    break
            if kept is None or not kept.segments.holds():
                # Others would keep states alive that were replaced.
                self._sets = [each for each in self._sets if each.segments.holds()]
                kept = self._new_set(params, layout, dtypes, shards, collect)
            self._sets = [kept, *self._sets[: _MOST_SETS - 1]]
            self.reason, self._params = None, params
            return self._current_tables(grads, kept)
        except Unsupported as unsupported:
            self.reason = str(unsupported)
            if not self._warned:
                self._warned = True
                name = type(self._optimizer).__name__
                level = logging.INFO if self._broken is None else logging.WARNING
                _logger.log(level, "%s is stepped by torch, and not by kernels: %s", name, unsupported)
            return None

    def _gradients(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of `params`, each laid in memory as its parameter is."""
        grads = list(map(_GRAD, params))
        kinds, layouts = set(map(type, grads)), set(map(_LAYOUT, grads))
        if not (kinds <= {torch.Tensor} and layouts <= {torch.strided} and DTYPES.keys() >= set(map(_DTYPE, grads))):
            raise Unsupported("a gradient is sparse, or not a plain tensor of float32, bfloat16 or float16")
        self._laid = []
        if not (all(map(_CONTIGUOUS, params)) and all(map(_CONTIGUOUS, grads))):
            for place, (grad, param) in enumerate(zip(grads, params, strict=True)):
                if not has_same_layout(grad, param):
                    grads[place] = laid_like(grad, param)
                    self._laid.append(grads[place])
        return grads

    def _new_set(
        self,
        params: list[torch.Tensor],
        layout: Any,
        dtypes: list[torch.dtype],
        shards: Any,
        collect: Callable[[Segments], None],
    ) -> _Set:
        segments = Segments(self._optimizer, self.rule, shards)
        collect(segments)
        segments.complete()
        if sum(each.size for each in segments.all) != sum(map(torch.Tensor.numel, params)):
            raise Unsupported("there are gradients of parameters that it does not step")
        index = {id(param): place for place, param in enumerate(params)}
        places = [(index[id(each.param)], each.start) for each in segments.all]
        return _Set(params, layout, dtypes, segments, places)

    def _current_tables(self, grads: list[torch.Tensor], kept: _Set) -> Tables:
        """Return the tables of `kept` with the addresses that gradients have now."""
        addresses = list(map(_ADDRESS, grads))
        if kept.tables is None or kept.addresses != addresses:
            sizes = [grad.element_size() for grad in grads]
            there = [addresses[place] + start * sizes[place] for place, start in kept.places]
            if kept.tables is None:
                dtypes = [DTYPES[kept.dtypes[place]] for place, _ in kept.places]
                kept.tables = self._make_tables(kept.segments, dtypes, there)
            else:
                kept.tables.set_gradients(there)
            kept.addresses = addresses
        return kept.tables

    def _make_tables(self, segments: Segments, dtypes: list[int], addresses: list[int]) -> Tables:
        """Return tables of `segments`, with gradients of `dtypes` at `addresses`; one for each device."""
        home, tables = device_of(self._optimizer, self._group), []
        by_device: dict[Any, list[int]] = {}
        for place, each in enumerate(segments.all):
            by_device.setdefault(_DEVICE(each.param), []).append(place)
        first = next((_DEVICE(param) for group in self._optimizer.param_groups for param in group["params"]), home)
        all_places = [by_device.pop(first, []), *by_device.values()]
        for places in all_places:
            own = [segments.all[place] for place in places]
            device = own[0].param.device if own else home
            gradients = [dtypes[place] for place in places], [addresses[place] for place in places]
            table = Table(own, *gradients, segments.step_counts, device, self._copies)
            if device.type == "cuda":
                with current(device):
                    self._try(table)
            tables.append(table)
        return Tables(tables, all_places)

    def _try(self, table: Table) -> None:
        """Compile and load what `table` needs, before anything is written. Raises Unsupported, then and later, if it fails."""
        try:
            sums, zeros = table.measure(counts_zeros=self.counts_zeros)
            for group in () if self._only_reads else table.groups:
                scratch = table.scalars.new_zeros(OUT), self._no_random_bits(table.device)
                args = table.rows, table.tiles, group.first, table.scalars, *scratch
                constants = self._constants(group, checks=True, divide=True)
                made = update.warmup(*args, grid=(1,), **constants, enable_fp_fusion=False, num_warps=WARPS)
                getattr(made, "run", None)  # loads it; nothing where it is interpreted
            if not self._only_reads:
                inputs = DecisionInputs(sums, zeros, bound=1.0)
                _, _, args, constants = self._deciding(table, UNSCALED, inputs)
                made = decide.warmup(*args, grid=(1,), **constants, enable_fp_fusion=False, num_warps=4)
                getattr(made, "run", None)
        except Exception as error:
            self._broken = f"Triton compiles or loads no kernels here: {' '.join(str(error).split())[-200:]}"
            raise Unsupported(self._broken) from error

    # ------------------------------------------------------------------ numbers on the device

    def device_numbers(self, name: str, values: Any, device: torch.device) -> torch.Tensor:
        """Return `values` as float64 on `device`, copied there only where they changed under `name`."""
        kept = self._values.get((name, device))
        if kept is None or kept[0] != values:
            kept = self._values[name, device] = values, self._copies(torch.tensor(values, dtype=torch.float64), device)
        if self._copies.held is not None:
            self._copies.hold(kept[1])
        return kept[1]

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
        """Return the rows of numbers of all groups on `device`. Learning rates that are tensors are copied on the device."""
        groups = self._optimizer.param_groups
        rows = [(*row, *(0.0,) * (MOST_NUMBERS - len(row))) for row in numbers_of(self.rule, groups)]
        rows_there = self.device_numbers("rows", rows, device)
        for place, group in enumerate(groups):
            if isinstance(group.get("lr"), torch.Tensor):
                rows_there[place, 0].copy_(group["lr"], non_blocking=True)
        return rows_there

    # ------------------------------------------------------------------ launches

    def run(
        self,
        tables: Tables,
        supported: Any,
        scaler: LossScaler,
        inputs: DecisionInputs,
        *,
        checks: bool,
        is_part: bool = False,
    ) -> torch.Tensor:
        """Decide and update what `supported`, a `SupportedParams`, has; returns what was decided."""
        if supported.rng is not None and not is_part:
            # Parts of one step, as in a release, go on in the stream of the first.
            supported.rng.next()
        # Drawn for all devices first: a generator must not depend on which of them launches first.
        noise = supported.draw()  # memory that lives until the launches
        current_scale = self.factor_on("current_scale", inputs.current_scale, tables.device)
        pending = self.factor_on("pending", inputs.pending, tables.device)
        inputs = inputs._replace(current_scale=current_scale, pending=pending)
        divide, decided = inputs.bound is not None or current_scale is not None or pending is not None, None
        # Each device decides by itself, from the same numbers: a launch costs less than to wait for another device.
        for table in tables.each:
            with _HERE if table is tables.first else current(table.device):
                if table is not tables.first:  # the loss scale moves once, and zeros are counted once
                    scaler, inputs = UNSCALED, inputs._replace(seed=None, zeros=None)
                    inputs = inputs.to(table.device)
                out, key, args, constants = self._deciding(table, scaler, inputs)
                # A recorded graph reads these addresses again in every replay.
                if self._copies.held is not None:
                    self._copies.hold(*args)
                self._compiled.launch(decide, key, 1, args, constants)
                decided = out if decided is None else decided
                random_bits = self._random_bits(table, supported.rng)
                for bucket, drawn in noise.items():
                    if bucket.host is None and bucket in table.buckets:
                        table.move(bucket, drawn)
                self._update(table, table.resident, out, random_bits, checks, divide)
                for bucket in supported.bring_in(table, noise):
                    own = [group for group in table.groups if group.bucket is bucket]
                    self._update(table, own, out, random_bits, checks, divide)
        # Kernels write through addresses, of which autograd knows nothing: a graph that saved these weights must not run.
        increment_version(self._params)
        self._laid = []
        assert decided is not None
        return decided

    def _deciding(
        self, table: Table, scaler: LossScaler, inputs: DecisionInputs
    ) -> tuple[torch.Tensor, Any, tuple[Any, ...], dict[str, Any]]:
        """Return the output of `decide`, the key of its compiled kernel, its arguments and its constants, all on the device of
        `table`."""
        device, scale = table.device, scaler if type(scaler) is DeviceScale else None
        sums, zeros, found_in, current_scale, pending, seed, bound = inputs
        options = (0.0 if bound is None else bound, *((0.0,) * 6 if scale is None else scale.rule))
        growth, hysteresis = (None, None) if scale is None else scale.trackers
        out = torch.empty(OUT, dtype=torch.int64, device=device)
        factor, seed = None if scale is None else scale.factor, seed if isinstance(seed, torch.Tensor) else None
        maybe = sums, zeros, found_in, current_scale, pending, factor, growth, hysteresis, seed
        args = (
            *(sums, 0 if sums is None else sums.numel(), zeros, 0 if zeros is None else zeros.numel()),
            *(found_in, current_scale, pending),
            *(self.device_numbers("options", options, device), factor, growth, hysteresis, seed),
            *(out.view(torch.float64), out.view(torch.float32), out, table.step_counts, table.num_step_counts),
            *(self._rows(device), table.scalars),
        )
        constants = {"CLIP": bound is not None, "PREPARE": self.rule.prepare, "NUMBERS": MOST_NUMBERS}
        # A None argument is another kernel: Triton specializes on it.
        key = device, bound is not None, *kinds_of(maybe)
        return out, key, args, {**constants, "SCALARS": SCALARS, "BLOCK": BLOCK}

    def _update(
        self,
        table: Table,
        groups: Iterable[LaunchGroup],
        out: torch.Tensor,
        random_bits: dict[tuple[str, ...], torch.Tensor],
        checks: bool,
        divide: bool,
    ) -> None:
        """Launch the updates of `groups` of `table`, as `out` was decided."""
        single = out.view(torch.float32)
        for group in groups:
            if group.tiles:
                args = table.rows, table.tiles, group.first, table.scalars, single, random_bits[group.names]
                constants = self._constants(group, checks=checks, divide=divide)
                if self._copies.held is not None:
                    self._copies.hold(*args)
                table.compiled.launch(update, (group.first, checks, divide), group.tiles, args, constants, WARPS)

    def _constants(self, group: LaunchGroup, *, checks: bool, divide: bool) -> dict[str, Any]:
        own = {"RULE": self.rule.body, "CHECKED": checks, "DIVIDE": divide}
        return {**group.constants, **own, "COLUMNS": COLUMNS, "SCALARS": SCALARS, "TILE": TILE}

    def _no_random_bits(self, device: torch.device) -> torch.Tensor:
        kept = self._values.get(("random_bits", device))
        if kept is None:
            zeros = torch.zeros((1 + MOST_STATES) * ALIGNMENT, dtype=torch.int32, device=device)
            kept = self._values["random_bits", device] = None, zeros
        return kept[1]

    def _random_bits(self, table: Table, rng: RoundingRNG | None) -> dict[tuple[str, ...], torch.Tensor]:
        """Return 64 random numbers of this step for weights and for each state, by the names of the states of a group."""
        by_names = dict.fromkeys((group.names for group in table.groups), self._no_random_bits(table.device))
        if rng is None:
            return by_names
        # Drawn on the host, and copied at once; what a graph reads is brought to the device by `capture`.
        place = table.device if rng.fixed else _CPU
        for group in table.groups:
            if group.stochastic:
                drawn = [rng.lanes(name, place) for name in (WEIGHTS, *group.names)]
                drawn += [torch.zeros_like(drawn[0])] * (MOST_STATES - len(group.names))
                lanes = torch.cat(drawn)
                by_names[group.names] = lanes if rng.fixed else self._copies(lanes, table.device)
        return by_names
