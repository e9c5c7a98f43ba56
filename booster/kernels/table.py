"""What a step by kernels reads and writes, by address, in memory of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from booster.common.devices import DeviceCopies
from booster.kernels.arithmetic import BFLOAT16, FLOAT16, FLOAT32
from booster.kernels.launch_cache import CompiledKernels
from booster.kernels.launches import BLOCK, COLUMNS, SCALARS, TILE, measure
from booster.kernels.rule import MOST_STATES
from booster.kernels.weights import NO_STATE, StateForm, WeightForm
from booster.masters.quantized_state import QuantizedState

RESIDUAL, GRADIENT, STATES = 1, 2, 3  # columns: of an address, of another, and the first of the addresses of states
_ADDRESS = torch.Tensor.data_ptr
_SIZES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}
_NOISE = {FLOAT32: 0, BFLOAT16: 2, FLOAT16: 4}  # bytes of a random number for each element


@dataclass(frozen=True, eq=False)
class Stretch:
    """Elements `start` to `start + size` of `param` in memory order, and what is stepped with them; addresses are numbers.

    codes, scales: of its states, called `names` and kept in `encodings`. clock: index of what counts its steps. copies: how
    many ranks hold it. bucket: that it lies in, if any, at `offset`, and its states at `states_offset`.
    """

    param: torch.Tensor
    start: int
    size: int
    weights: int
    residual: int
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    clock: int
    form: WeightForm
    encodings: tuple[StateForm, ...]
    names: tuple[str, ...]
    flags: int
    half: int
    copies: int
    bucket: Any = None
    offset: int = 0
    states_offset: int = 0

    @property
    def travels(self) -> bool:
        """Whether states and rest lie in the host's memory between steps."""
        return self.bucket is not None and self.bucket.host is not None


@dataclass(frozen=True, eq=False)
class Kind:
    """Stretches that one launch updates: `tiles` of them from `first` on, with what is compiled into the kernel.

    names: of their states. stochastic: whether anything is rounded so. bucket: whose stretches these are, where states travel.
    """

    first: int
    tiles: int
    names: tuple[str, ...]
    stochastic: bool
    constants: dict[str, Any]
    bucket: Any = None


class Table:
    """The rows of `stretches`, in an order of kinds, with their tiles, clocks, and the numbers that are made for each clock.

    gradients: what a stretch has for a gradient, by the code of its dtype. clocks: (address of a count or 0, group) for each,
    of which these are those that count here.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        gradients: Sequence[int],
        addresses: Sequence[int],
        clocks: Sequence[tuple[int, int]],
        device: torch.device,
        copies: DeviceCopies,
    ) -> None:
        self.device, self.compiled, self._copies = device, CompiledKernels(), copies
        self.buckets = {each.bucket for each in stretches}
        counted = {clock: place for place, clock in enumerate(sorted({each.clock for each in stretches}))}
        clocks = [clocks[clock] for clock in counted]
        apart = {id(each.bucket): place for place, each in enumerate(stretches) if each.travels}
        keyed = [
            (
                (
                    apart.get(id(each.bucket), -1),
                    each.flags,
                    id(each.form),
                    tuple(map(id, each.encodings)),
                    each.names,
                    each.half,
                    dtype,
                ),
                place,
            )
            for place, (each, dtype) in enumerate(zip(stretches, gradients, strict=True))
        ]
        order = [place for _, place in sorted(keyed)]
        self.order = order
        self.params = [stretches[place].param for place in order]
        self._stretches = [stretches[place] for place in order]
        self._placed: dict[Any, list[int]] = {}  # where what moves of a bucket lies in the rows
        rows: list[list[int]] = []
        tiles: list[tuple[int, int]] = []
        self.kinds: list[Kind] = []
        for _, places in groupby(order, key=lambda place: keyed[place][0]):
            first = len(tiles)
            for place in places:
                each = stretches[place]
                tiles += [(len(rows), index) for index in range(-(-each.size // TILE))]
                rows.append(self._row(each, counted[each.clock], gradients[place], addresses[place]))
            chance = each.form.stochastic or any(encoding.stochastic for encoding in each.encodings)
            constants = _constants(each, gradients[place])
            travelling = each.bucket if each.travels else None
            self.kinds.append(Kind(first, len(tiles) - first, each.names, chance, constants, travelling))
        self.here = [kind for kind in self.kinds if kind.bucket is None]
        """Kinds whose states lie on the device."""
        self.num_tiles = len(tiles)
        self._bytes = sum(map(_bytes, stretches, gradients))
        self._rows = torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
        self.rows = self._there(self._rows)
        self._tile_rows = [row for row, _ in tiles]
        self.tiles = self._there(torch.tensor(tiles, dtype=torch.int32).view(-1, 2))
        self.num_clocks = len(clocks)
        self.clocks = self._there(torch.tensor(clocks, dtype=torch.int64).view(-1, 2))
        self.scalars = torch.zeros(-(-len(clocks) // BLOCK) * BLOCK, SCALARS, dtype=torch.float32, device=device)

    def _row(self, each: Stretch, clock: int, dtype: int, address: int) -> list[int]:
        missing = (0,) * (MOST_STATES - len(each.codes))
        states = (*each.codes, *missing, *each.scales, *missing)
        return [each.weights, each.residual, address, *states, each.size, clock, dtype, each.copies]

    @property
    def bytes_of_a_step(self) -> float:
        """What `measure` and `update` read and write of tensors: gradients twice, all else there and back."""
        return self._bytes

    def _there(self, values: torch.Tensor) -> torch.Tensor:
        return self._copies(values, self.device)

    def follow_gradients(self, addresses: Sequence[int]) -> None:
        """The gradients of the stretches, in the order in which they were given, lie at `addresses` now."""
        self._rows = self._rows.clone()  # the last copy may be under way
        self._rows[:, GRADIENT] = torch.tensor([addresses[place] for place in self.order], dtype=torch.int64)
        self.rows = self._there(self._rows)

    def move(self, bucket: Any, residual: torch.Tensor | None, states: Sequence[Any] | None = None) -> None:
        """In this step `residual` is kept beside the weights of `bucket`, and its states are `states`; None: as they were."""
        tensors = [] if residual is None else [residual]
        for value in states or ():
            tensors += value.tensors if isinstance(value, QuantizedState) else [value]
        there = list(map(_ADDRESS, tensors))
        if self._placed.get(bucket) == there:
            return
        self._placed[bucket] = there
        self._rows = self._rows.clone()
        for row, each in zip(self._rows, self._stretches, strict=True):
            if each.bucket is bucket:
                row[RESIDUAL] = beside(residual, each.offset)
                if states is not None:
                    codes, scales = places_of(states, each.states_offset)
                    row[STATES : STATES + len(codes)] = torch.tensor(codes, dtype=torch.int64)
                    row[STATES + MOST_STATES : STATES + MOST_STATES + len(scales)] = torch.tensor(
                        scales, dtype=torch.int64
                    )
        self.rows = self._there(self._rows)

    def measure(self, *, counts_zeros: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch what reads all gradients; returns sums of squares, float64, one for each tile, and, where they are counted,
        how many elements are zero, int32. On the current device."""
        partials = torch.empty(self.num_tiles, dtype=torch.float64, device=self.device)
        zeros = torch.empty(self.num_tiles, dtype=torch.int32, device=self.device) if counts_zeros else None
        if self.num_tiles:
            constants = {"COLUMNS": COLUMNS, "TILE": TILE}
            self._copies.hold(self.rows, self.tiles)
            args = self.rows, self.tiles, partials, zeros
            self.compiled.launch(measure, counts_zeros, self.num_tiles, args, constants)
        return partials, zeros

    def squares_of_params(self, partials: torch.Tensor) -> dict[torch.Tensor, float]:
        """Return what `measure` found by parameter; waits for the device."""
        found: dict[torch.Tensor, float] = {}
        for row, value in zip(self._tile_rows, partials.tolist(), strict=True):
            found[self.params[row]] = found.get(self.params[row], 0.0) + value
        return found


class Tables:
    """The tables of one step, one a device. On that of the first is decided, whether or not there is anything to step."""

    def __init__(self, each: Sequence[Table], places: Sequence[Sequence[int]]) -> None:
        """places: of the stretches in each table, among all."""
        self.each, self.device, self.first, self._places = each, each[0].device, each[0], places
        self.params = [param for table in each for param in table.params]

    def follow_gradients(self, addresses: Sequence[int]) -> None:
        """The gradients of all stretches lie at `addresses` now."""
        for table, places in zip(self.each, self._places, strict=True):
            table.follow_gradients([addresses[place] for place in places])


def beside(residual: torch.Tensor | None, offset: int) -> int:
    """The address of what is kept of the element at `offset` of a bucket; 0 for nothing."""
    return 0 if residual is None else residual.data_ptr() + offset * residual.element_size()


def places_of(states: Sequence[Any], offset: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The addresses of codes and of scales of the element at `offset`, a multiple of 32 where there are scales."""
    codes, scales = [], []
    for value in states:
        tensor = value.codes if isinstance(value, QuantizedState) else value
        codes.append(tensor.data_ptr() + offset * tensor.element_size())
        there = isinstance(value, QuantizedState) and value.scales is not None
        scales.append(value.scales.data_ptr() + offset // 32 * 2 if there else 0)
    return tuple(codes), tuple(scales)


def _constants(each: Stretch, dtype: int) -> dict[str, Any]:
    encodings = (*each.encodings, *(NO_STATE,) * (MOST_STATES - len(each.encodings)))
    constants = {"FLAGS": each.flags, "LOAD": each.form.load, "STORE": each.form.store, "HALF": each.half}
    for index, encoding in enumerate(encodings):
        constants |= {f"OPEN{index}": encoding.open, f"CLOSE{index}": encoding.close}
    return {**constants, "GRADIENT": dtype}


def _bytes(each: Stretch, dtype: int) -> float:
    beside = _NOISE[each.half] if each.form.noise else each.form.bytes_kept
    kept = _SIZES[each.half] + beside + sum(encoding.bytes_kept for encoding in each.encodings)
    return each.size * (2 * _SIZES[dtype] + 2 * kept)
