"""The addresses that a step by kernels reads and writes, as rows of numbers in memory of the device."""

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
from booster.kernels.segments import Segment, addresses_of, residual_address
from booster.kernels.weights import NO_STATE
from booster.masters.quantized_state import QuantizedState

RESIDUAL, GRADIENT, STATES = 1, 2, 3  # columns: of an address, of another, and the first of the addresses of states
_ADDRESS = torch.Tensor.data_ptr
_SIZES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}
_NOISE = {FLOAT32: 0, BFLOAT16: 2, FLOAT16: 4}  # bytes of a random number for each element


@dataclass(frozen=True, eq=False)
class LaunchGroup:
    """Segments that one launch updates, since the same kernel is compiled for them.

    Attributes:
        first, tiles: `tiles` tiles from tile `first` of the table on.
        names: of their states.
        stochastic: whether anything in them is rounded stochastically.
        constants: what is compiled into the kernel.
        bucket: the one of these segments, where its states are offloaded.
    """

    first: int
    tiles: int
    names: tuple[str, ...]
    stochastic: bool
    constants: dict[str, Any]
    bucket: Any = None


class Table:
    """The rows of `segments` on one device, sorted into launch groups, with their tiles and step counts.

    gradients: the dtype of each gradient, by code. addresses: of the gradients. step_counts: (address of a count or 0, group)
    of all segments; those that are used here are copied.

    Attributes:
        groups: what is launched; `here` are those with states on the device.
        buckets: that segments are in.
        params: by row.
        bytes_of_a_step: what `measure` and `update` read and write of tensors: gradients twice, all else there and back.
        scalars: room for the numbers that a rule makes for each step count.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        gradients: Sequence[int],
        addresses: Sequence[int],
        step_counts: Sequence[tuple[int, int]],
        device: torch.device,
        copies: DeviceCopies,
    ) -> None:
        self.device, self.compiled, self._copies = device, CompiledKernels(), copies
        self.buckets = {each.bucket for each in segments}
        counted = {count: place for place, count in enumerate(sorted({each.step_count for each in segments}))}
        step_counts = [step_counts[count] for count in counted]
        offloaded = {id(each.bucket): place for place, each in enumerate(segments) if each.is_offloaded}

        def kernel_of(place: int) -> tuple[Any, ...]:
            """What tells which kernel a segment is stepped by; each offloaded bucket has its own launches."""
            each = segments[place]
            forms = id(each.form), tuple(map(id, each.encodings))
            # Its states arrive one bucket after another, so each is launched when its own are there.
            bucket = offloaded.get(id(each.bucket), -1)
            return bucket, each.flags, *forms, each.names, each.half, gradients[place]

        # Segments of one kernel next to each other are one launch; within it their order stays.
        self._order = sorted(range(len(segments)), key=lambda place: (kernel_of(place), place))
        self._segments = [segments[place] for place in self._order]
        self.params = [each.param for each in self._segments]
        self._placed: dict[Any, list[int]] = {}  # the addresses of an offloaded bucket that the rows have now
        rows: list[list[int]] = []
        tiles: list[tuple[int, int]] = []
        self.groups: list[LaunchGroup] = []
        missing = [0] * MOST_STATES
        for _, places in groupby(self._order, key=kernel_of):
            first = len(tiles)
            for place in places:
                each = segments[place]
                tiles += [(len(rows), index) for index in range(-(-each.size // TILE))]
                states = [*each.codes, *missing][:MOST_STATES] + [*each.scales, *missing][:MOST_STATES]
                of_tensors = each.weights, each.residual, addresses[place], *states
                rows.append([*of_tensors, each.size, counted[each.step_count], gradients[place], each.copies])
            stochastic = each.form.stochastic or any(encoding.stochastic for encoding in each.encodings)
            constants = _constants(each, gradients[place])
            bucket = each.bucket if each.is_offloaded else None
            self.groups.append(LaunchGroup(first, len(tiles) - first, each.names, stochastic, constants, bucket))
        self.here = [group for group in self.groups if group.bucket is None]
        self.num_tiles = len(tiles)
        self.bytes_of_a_step = sum(map(_bytes, segments, gradients))
        self._rows = torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)
        self.rows = self._there(self._rows)
        self._tile_rows = [row for row, _ in tiles]
        self.tiles = self._there(torch.tensor(tiles, dtype=torch.int32).view(-1, 2))
        self.num_step_counts = len(step_counts)
        self.step_counts = self._there(torch.tensor(step_counts, dtype=torch.int64).view(-1, 2))
        blocks = -(-len(step_counts) // BLOCK)
        self.scalars = torch.zeros(blocks * BLOCK, SCALARS, dtype=torch.float32, device=device)

    def _there(self, values: torch.Tensor) -> torch.Tensor:
        return self._copies(values, self.device)

    def set_gradients(self, addresses: Sequence[int]) -> None:
        """The gradients of the segments, in the order in which they were given, are at `addresses` now."""
        self._rows = self._rows.clone()  # the last copy may be under way
        self._rows[:, GRADIENT] = torch.tensor([addresses[place] for place in self._order], dtype=torch.int64)
        self.rows = self._there(self._rows)

    def move(self, bucket: Any, residual: torch.Tensor | None, states: Sequence[Any] | None = None) -> None:
        """In this step `residual` is kept besides the weights of `bucket`, and its states are `states`; None: as they were."""
        tensors = [] if residual is None else [residual]
        for value in states or ():
            tensors += value.tensors if isinstance(value, QuantizedState) else [value]
        there = list(map(_ADDRESS, tensors))
        if self._placed.get(bucket) == there:
            return
        self._placed[bucket] = there
        self._rows = self._rows.clone()
        own = [(place, each) for place, each in enumerate(self._segments) if each.bucket is bucket]
        moved = [(each, *addresses_of(states or (), each.states_offset)) for _, each in own]
        new = [[residual_address(residual, each.offset), *codes, *scales] for each, codes, scales in moved]
        columns = [RESIDUAL, *(STATES + part + i for part in (0, MOST_STATES) for i in range(len(states or ())))]
        at = (torch.tensor(each, dtype=torch.int64) for each in ([[place] for place, _ in own], columns))
        # One indexed write on the host, then one copy: a copy for each address would be a launch each.
        self._rows[tuple(at)] = torch.tensor(new, dtype=torch.int64)
        self.rows = self._there(self._rows)

    def measure(self, *, counts_zeros: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch what reads all gradients; returns sums of squares, float64, and counts of zeros, int32 or None, one for each
        tile."""
        # In float64, which no sum of squares of float32 numbers overflows.
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
    """The tables of one step, one a device. The decision is made on that of the first, even where it has nothing to step.

    places: of the segments in each table, among all.
    """

    def __init__(self, each: Sequence[Table], places: Sequence[Sequence[int]]) -> None:
        self.each, self.device, self.first, self._places = each, each[0].device, each[0], places
        self.params = [param for table in each for param in table.params]

    def set_gradients(self, addresses: Sequence[int]) -> None:
        """The gradients of all segments are at `addresses` now."""
        for table, places in zip(self.each, self._places, strict=True):
            table.set_gradients([addresses[place] for place in places])


def _constants(each: Segment, dtype: int) -> dict[str, Any]:
    constants = {"FLAGS": each.flags, "LOAD": each.form.load, "STORE": each.form.store, "HALF": each.half}
    for index in range(MOST_STATES):
        encoding = each.encodings[index] if index < len(each.encodings) else NO_STATE
        constants |= {f"OPEN{index}": encoding.open, f"CLOSE{index}": encoding.close}
    return {**constants, "RATIO": each.encodings[0].ratio if each.encodings else 0, "GRADIENT": dtype}


def _bytes(each: Segment, dtype: int) -> float:
    residual = _NOISE[each.half] if each.form.noise else each.form.bytes_kept
    kept = _SIZES[each.half] + residual + sum(encoding.bytes_kept for encoding in each.encodings)
    return each.size * (2 * _SIZES[dtype] + 2 * kept)
