"""What kernels step: contiguous segments of parameters with their states, and their addresses as rows of numbers on the device.

A float32 parameter is one segment; a bucket of master weights is one segment for each piece of a parameter in it. States are
torch's own, in the optimizer's `state`: they are made here where there are none yet, so that a step by kernels, a step by torch
and a checkpoint find each other's. Addresses are kept as numbers; a step asks first whether they hold (`Segments.holds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from booster.common.devices import DeviceCopies
from booster.kernels.arithmetic import BFLOAT16, FLOAT16, FLOAT32
from booster.kernels.launch_cache import CompiledKernels
from booster.kernels.launches import BLOCK, COLUMNS, SCALARS, TILE, measure
from booster.kernels.rule import MOST_STATES, Rule
from booster.kernels.weights import ENCODINGS, FORMS, FULL, FULL_STATE, NO_STATE, StateForm, WeightForm
from booster.masters.bucket import Bucket
from booster.masters.quantized_state import DIVISOR, QuantizedState, ratios_last
from booster.shards import Shards
from booster.tensors.flat import is_dense
from booster.update.application import lay_states

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_ADDRESS = torch.Tensor.data_ptr


class Unsupported(Exception):
    """Kernels cannot step this; the text says why."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """Elements `start` to `start + size` of `param`, in memory order, and what is stepped with them. Addresses are numbers.

    Attributes:
        weights: address of the elements.
        residual: address of what is kept for them besides the half-precision weight; 0 for nothing.
        codes, scales: addresses of their states, and of the scales of quantized ones.
        names, encodings: of these states.
        step_count: index of the number that counts their steps.
        form: how the weight is kept.
        flags: of the group, in bits.
        half: code of the parameter's dtype.
        copies: how many ranks hold the segment.
        bucket: that it is in, if any, at `offset`, with its states at `states_offset`.
    """

    param: torch.Tensor
    size: int
    step_count: int
    names: tuple[str, ...]
    flags: int
    half: int
    copies: int
    start: int = 0
    weights: int = 0
    residual: int = 0
    codes: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    encodings: tuple[StateForm, ...] = ()
    form: WeightForm = FULL
    bucket: Bucket | None = None
    offset: int = 0
    states_offset: int = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether states and residual bits are in host memory between steps."""
        return self.bucket is not None and self.bucket.host is not None


class Segments:
    """All that one step updates, or one reading reads, by the groups of `optimizer`.

    Attributes:
        all: the segments, in the order in which they were added.
        step_counts: (address of a float32 count or 0, group) by index.
    """

    def __init__(self, optimizer: Optimizer, rule: Rule, shards: Shards) -> None:
        self.all: list[Segment] = []
        self.step_counts: list[tuple[int, int]] = []
        self._optimizer, self._rule, self._shards = optimizer, rule, shards
        self._state = optimizer.state
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._owners: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._flags = [flags_of(rule, group) for group in optimizer.param_groups]

    def holds(self) -> bool:
        """Return whether states, weights and flags are what and where they were."""
        state = self._optimizer.state
        # Cheapest first: this runs in every step, and `load_state_dict` replaces the whole state.
        if state is not self._state or list(map(_ADDRESS, self._tensors)) != self._addresses:
            return False
        # By identity, because a user may put other dicts, or other tensors at the same address, in their places.
        for owner, own in self._owners:
            if state.get(owner) is not own:
                return False
        for own, name, value in self._entries:
            if own.get(name) is not value:
                return False
        return self._flags == [flags_of(self._rule, group) for group in self._optimizer.param_groups]

    def complete(self) -> None:
        """All was added."""
        self._addresses = list(map(_ADDRESS, self._tensors))

    def add(self, group: int, param: torch.Tensor) -> None:
        """Add a float32 parameter that is stepped as it is. Raises Unsupported."""
        if type(param) not in (torch.Tensor, torch.nn.Parameter) or param.dtype != torch.float32:
            raise Unsupported(f"a parameter of shape {tuple(param.shape)} is {type(param).__name__} of {param.dtype}")
        if not is_dense(param):
            raise Unsupported(f"a parameter of shape {tuple(param.shape)} has gaps or overlaps in memory")
        own, count = self._own(group, param, param)
        lay_states(param, own)
        names = self._begun(group, own)
        codes = tuple(self._state_of(own, name, param).data_ptr() for name in names)
        self._tensors.append(param)
        scales, encodings = (0,) * len(codes), (FULL_STATE,) * len(codes)
        own_memory = {"weights": param.data_ptr(), "codes": codes, "scales": scales, "encodings": encodings}
        self._put(group, count, param, size=param.numel(), **own_memory)

    def add_reading(self, param: torch.Tensor) -> None:
        """Add the gradient of a parameter, which is only read."""
        if not self.step_counts:
            self.step_counts.append((0, 0))
        self._put(0, 0, param, size=param.numel())

    def add_bucket(self, bucket: Bucket) -> None:
        """Add all pieces in a bucket. Raises Unsupported."""
        if type(bucket.format) not in FORMS:
            raise Unsupported(f"weights in the form {type(bucket.format).__name__} have no kernel")
        residual = bucket.residual
        if residual is not None:
            self._tensors.append(residual)
        self._tensors += bucket.params
        of_bucket: Any = None
        for index, (piece, weights) in enumerate(zip(bucket.pieces, bucket.working(), strict=True)):
            # A flat bucket has one handle and one set of states for all pieces; a whole one has a handle for each parameter.
            if bucket.whole or of_bucket is None:
                handle = bucket.handles[index if bucket.whole else 0]
                own, count = self._own(bucket.group, handle, weights)
                names = self._begun(bucket.group, own)
                self._make_states(bucket, own, names)
                of_bucket = count, [self._kept(bucket, handle, own, name) for name in names]
                ratios = [value.encoding for value in of_bucket[1] if getattr(value, "encoding", None) in DIVISOR]
                if ratios and names[:2] != ("exp_avg", DIVISOR[ratios[0]]):
                    raise Unsupported(
                        f"a ratio to {DIVISOR[ratios[0]]} and that are not the first two states of its rule"
                    )
            count, kept = of_bucket
            offset = 0 if bucket.whole else piece.offset
            codes, scales = addresses_of(kept, offset)
            forms = [ENCODINGS[each.encoding] if isinstance(each, QuantizedState) else FULL_STATE for each in kept]
            own_memory: dict[str, Any] = {
                "weights": weights.data_ptr(),
                "residual": residual_address(residual, piece.offset),
            }
            own_memory |= {"codes": codes, "scales": scales, "encodings": tuple(forms), "states_offset": offset}
            places = {"start": piece.start, "size": piece.size, "bucket": bucket, "offset": piece.offset}
            self._put(bucket.group, count, piece.param, form=FORMS[type(bucket.format)], **places, **own_memory)

    def _put(self, group: int, count: int, param: torch.Tensor, **own: Any) -> None:
        names = self._rule.states(self._optimizer.param_groups[group])
        # Several ranks may hold the segment; its squares count once.
        (copies,), half = self._shards.num_replicas([param]), DTYPES[param.dtype]
        flags = self._flags[group]
        segment = Segment(param=param, step_count=count, names=names, flags=flags, half=half, copies=copies, **own)
        self.all.append(segment)

    def _own(self, group: int, owner: Any, param: torch.Tensor) -> tuple[dict[str, Any], int]:
        """The state of `owner`, a key of the optimizer's, and the index of its step count."""
        own: dict[str, Any] = self._optimizer.state[owner]
        self._owners.append((owner, own))
        address = 0
        if self._rule.counts:
            step = own.get("step")
            there = isinstance(step, torch.Tensor) and step.device == param.device and step.dtype == torch.float32
            if not there:  # torch's default implementation counts on the host
                given = 0.0 if step is None else float(step)
                own["step"] = step = torch.full((), given, dtype=torch.float32, device=param.device)
            assert isinstance(step, torch.Tensor)
            self._remember(own, "step", step)
            address = step.data_ptr()
        self.step_counts.append((address, group))
        return own, len(self.step_counts) - 1

    def _begun(self, group: int, own: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states in `own`. Raises Unsupported where torch has to make them."""
        names = self._rule.states(self._optimizer.param_groups[group])
        if self._rule.begins_by_torch(self._optimizer.param_groups[group]) and any(
            own.get(name) is None for name in names
        ):
            # Only torch knows what such states begin with; the second step is by kernels.
            raise Unsupported("a first step, which makes states that do not begin at zero")
        return names

    def _remember(self, own: dict[str, Any], name: str, value: Any) -> None:
        self._entries.append((own, name, value))
        self._tensors += value.tensors if isinstance(value, QuantizedState) else [value]

    def _state_of(self, own: dict[str, Any], name: str, param: torch.Tensor) -> torch.Tensor:
        value = own.get(name)
        if value is None:
            value = own[name] = torch.zeros_like(param, memory_format=torch.preserve_format).detach()
        alike = isinstance(value, torch.Tensor) and (value.dtype, value.device) == (torch.float32, param.device)
        if not alike or value.shape != param.shape:
            raise Unsupported(
                f"the state {name!r} of a parameter of shape {tuple(param.shape)} is no float32 tensor like it"
            )
        self._remember(own, name, value)
        return value

    def _make_states(self, bucket: Bucket, own: dict[str, Any], names: Sequence[str]) -> None:
        """Give a flat `bucket` the states that it lacks, zero, where they are between steps."""
        missing = [] if bucket.whole else [name for name in names if own.get(name) is None]
        # A ratio is encoded by another state, which has to be there first.
        for name in ratios_last(missing):
            encoding = None
            if bucket.quantizer is not None:
                # The quantizer asks for shape and dtype alone, so no memory is taken.
                like = torch.empty(bucket.size, dtype=torch.float32, device="meta")
                encoding = bucket.quantizer.encoding_of(name, like, bucket.size, own)
            if encoding is None:
                own[name] = torch.zeros(bucket.size, dtype=torch.float32, device=bucket.device)
            else:
                own[name] = QuantizedState(encoding, bucket.size, bucket.device)
        if missing and bucket.host is not None:
            bucket.host.keep_states(bucket, self._state)

    def _kept(self, bucket: Bucket, handle: torch.Tensor, own: dict[str, Any], name: str) -> Any:
        if bucket.whole:
            return self._state_of(own, name, handle)
        value = own[name]
        if not isinstance(value, QuantizedState) and (value.dtype, value.shape) != (torch.float32, (bucket.size,)):
            raise Unsupported(f"the state {name!r} of a bucket is no float32 tensor of its size")
        self._remember(own, name, value)
        return value


def flags_of(rule: Rule, group: dict[str, Any]) -> int:
    """Return the flags of a group in the bits of a number."""
    bits = 0
    for place, flag in enumerate(rule.flags(group)):
        bits |= bool(flag) << place
    return bits


def same(these: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists are of the same objects."""
    return len(these) == len(others) and all(map(is_, these, others))


def numbers_of(rule: Rule, groups: Iterable[dict[str, Any]]) -> list[tuple[float, ...]]:
    """Return the rows of numbers of all groups; 0 for a learning rate that is a tensor, which is not read here."""
    return [
        rule.numbers({**group, "lr": 0.0} if isinstance(group.get("lr"), torch.Tensor) else group) for group in groups
    ]


def residual_address(residual: torch.Tensor | None, offset: int) -> int:
    """The address of what is kept of the element at `offset` of a bucket; 0 for nothing."""
    return 0 if residual is None else residual.data_ptr() + offset * residual.element_size()


def addresses_of(states: Sequence[Any], offset: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The addresses of codes and of scales of the element at `offset`, a multiple of 32 where there are scales."""
    codes, scales = [], []
    for value in states:
        tensor = value.codes if isinstance(value, QuantizedState) else value
        codes.append(tensor.data_ptr() + offset * tensor.element_size())
        there = isinstance(value, QuantizedState) and value.scales is not None
        # A scale is two bytes for 32 codes.
        scales.append(value.scales.data_ptr() + offset // 32 * 2 if there else 0)
    return tuple(codes), tuple(scales)


RESIDUAL, GRADIENT, STATES = 1, 2, 3  # columns: of an address, of another, and the first of the addresses of states
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
        groups: what is launched; `resident` are those with states on the device.
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
        self.resident = [group for group in self.groups if group.bucket is None]
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
        squares: dict[torch.Tensor, float] = {}
        for row, value in zip(self._tile_rows, partials.tolist(), strict=True):
            squares[self.params[row]] = squares.get(self.params[row], 0.0) + value
        return squares


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
