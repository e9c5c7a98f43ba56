"""Flat buckets of ZeRO: parameters end to end in one tensor, of which each rank owns a slice.

Pieces and slices begin at multiples of 64 elements, so that a fused kernel finds aligned memory, and stochastic rounding the
same random bits for an element however many ranks there are. `PendingAllGathers` are weights on their way to this rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.common.torch_internals.autograd_internals import is_compiled
from booster.common.torch_internals.tensor_internals import storage_key
from booster.ranks.agreement import all_gather_flat
from booster.tensors.flat import ALIGNMENT, aligned, flat, is_dense, shaped_like, starts


class PendingAllGathers:
    """Flat stretches of weights that other ranks are sending, each with the works to wait for.

    Whoever reads a weight outside of `in_forward` calls `wait` first; it costs nothing where nothing is on its way.
    """

    def __init__(self) -> None:
        self._works: dict[int, list[Any]] = {}  # by memory
        self._in_forward = False

    def add(self, data: torch.Tensor, works: list[Any]) -> None:
        """Note that `works` write to the memory of `data`."""
        self._works.setdefault(storage_key(data), []).extend(works)

    def wait(self) -> None:
        """Wait until everything is there."""
        while self._works:
            self._wait_for(next(iter(self._works)))

    @contextmanager
    def in_forward(self, module: nn.Module) -> Iterator[None]:
        """Inside, every torch function waits for the weights that it is given, and for no others; afterwards all are there.

        A compiled module's graph calls no functions, so that all are waited for at its beginning.
        """
        # A function mode is slow, and a compiled graph calls no functions that it could see.
        if not self._works or any(map(is_compiled, module.modules())):
            self.wait()
            yield
            return
        self._in_forward = True
        try:
            with _WaitOnUseMode(self):
                yield
        # What runs outside of forward knows nothing of weights on their way.
        finally:
            self._in_forward = False
            self.wait()

    def wait_unless_in_forward(self) -> None:
        """`wait`, unless called from within `in_forward`."""
        if not self._in_forward:
            self.wait()

    def wait_for_args(self, tree: Any) -> None:
        """Wait for what tensors in `tree`, arguments of a torch function, share memory with."""
        for value in tree:
            if isinstance(value, torch.Tensor):
                if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided:
                    self._wait_for(storage_key(value))
            elif isinstance(value, (list, tuple)):
                self.wait_for_args(value)
            elif isinstance(value, dict):
                self.wait_for_args(value.values())

    def __bool__(self) -> bool:
        return bool(self._works)

    def _wait_for(self, key: int) -> None:
        for work in self._works.pop(key, ()):
            work.wait()


class _WaitOnUseMode(TorchFunctionMode):
    def __init__(self, pending_all_gathers: PendingAllGathers) -> None:
        super().__init__()
        self._arriving = pending_all_gathers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._arriving:
            self._arriving.wait_for_args(args)
            if kwargs:
                self._arriving.wait_for_args(kwargs.values())
        return func(*args, **kwargs)


class AllGatherHook:
    """A hook of the user's own module, for calls that do not come through the boosted one. Copies of it wait for nothing."""

    def __init__(self, pending_all_gathers: PendingAllGathers | None = None) -> None:
        self._arriving = None if pending_all_gathers is None else weakref.ref(pending_all_gathers)

    def __call__(self, *_: Any, **__: Any) -> None:
        pending_all_gathers = None if self._arriving is None else self._arriving()
        if pending_all_gathers is not None:
            pending_all_gathers.wait_unless_in_forward()

    def __reduce__(self) -> Any:
        return AllGatherHook, ()

    def register(self, module: nn.Module) -> list[Any]:
        """Be called before the forward of `module`, and before its state dict is made or loaded; returns what has `remove`."""
        return [
            module.register_forward_pre_hook(self),
            module.register_state_dict_pre_hook(self),
            module.register_load_state_dict_pre_hook(self),
        ]


# What every step asks of every parameter, without a Python call for each.
_POINTER, _STRIDE, _DTYPE = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("dtype")


class FlatParameters:
    """Some parameters of one dtype and device, and how they are divided among ranks.

    rank: this one, of `world_size`.
    owners: the rank of each parameter, where parameters are dealt whole; None: slices of one size.

    Attributes:
        params: in the order of the bucket; `offsets` has where each begins.
        bounds: `bounds[r]` to `bounds[r + 1]` is the slice of rank r.
        by_elements: slices have one size, and may cut through a parameter.
        data: the flat tensor, once the parameters are views of it (`flatten_params`).
        gradient: this rank's slice of the gradients, where they are not left in `.grad`.
        reduced: indices of the parameters that have a gradient there.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], world_size: int, rank: int, owners: Sequence[int] | None = None
    ) -> None:
        self.rank = rank
        self.by_elements = owners is None
        ranks = [0] * len(params) if owners is None else list(owners)
        order = sorted(range(len(params)), key=ranks.__getitem__)
        self.params = [params[index] for index in order]
        sizes = [aligned(param.numel()) for param in self.params]
        self.offsets = starts(sizes)
        if self.by_elements:
            share = -(-sum(sizes) // (ALIGNMENT * world_size)) * ALIGNMENT
            self.bounds = [rank * share for rank in range(world_size + 1)]
        else:
            loads = [0] * world_size
            for index, size in zip(order, sizes, strict=True):
                loads[ranks[index]] += size
            self.bounds = [0, *itertools.accumulate(loads)]
        self.size = self.bounds[-1]
        # Of the whole bucket and of this rank's slice: lengths of parameters and gaps, and which of these a parameter is.
        self._pieces, self._places = self._cut(0, self.size)
        self._gaps = set(range(len(self._pieces))).difference(self._places.values())
        self._own_pieces, self._own_places = self._cut(self.bounds[rank], self.bounds[rank + 1])
        self.dtype, self.device = self.params[0].dtype, self.params[0].device
        self.data: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        # Of `_views`: by these a parameter is known to be one of them.
        self._pointers: list[int] = []
        self._strides: list[tuple[int, ...]] = []
        self._orders = [
            torch.empty_strided(
                p.shape,
                p.stride() if is_dense(p) else torch.empty(p.shape, dtype=torch.float32, device="meta").stride(),
                dtype=torch.float32,
                device="meta",
            )
            for p in self.params
        ]
        self._shapes = [tuple(order.shape) if order.is_contiguous() else None for order in self._orders]
        self.gradient = None
        self.reduced: set[int] = set()
        self._stale: set[int] = set()  # not in `reduced`, with what a gradient left behind

    @property
    def gradient(self) -> torch.Tensor | None:
        return self._gradient

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        self._gradient = value
        self._shards: dict[int, torch.Tensor] | None = None  # views of it by index, once somebody asked

    def overlap(self, index: int, rank: int) -> tuple[int, int]:
        """Return (start, stop) of the elements of `params[index]`, in memory order, that are in the slice of `rank`."""
        return self._overlap(index, self.bounds[rank], self.bounds[rank + 1])

    def _overlap(self, index: int, begin: int, end: int) -> tuple[int, int]:
        offset, length = self.offsets[index], self.params[index].numel()
        start = min(max(begin - offset, 0), length)
        return start, max(min(end - offset, length), start)

    def _cut(self, begin: int, end: int) -> tuple[list[int], dict[int, int]]:
        """Return the lengths of parameters and gaps from `begin` to `end`, and the place among them of each index."""
        sizes: list[int] = []
        places = {}
        filled = begin
        for index, offset in enumerate(self.offsets):
            start, stop = self._overlap(index, begin, end)
            # Nothing empty is among them: a view costs as much as a call, also when it is freed.
            if start == stop:
                continue
            gap = offset + start - filled
            sizes += [gap, stop - start] if gap else [stop - start]
            places[index] = len(sizes) - 1
            filled = offset + stop
        return [*sizes, end - filled] if filled < end else sizes, places

    def slice_of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the slice of `rank` of a flat `tensor` of this size."""
        return tensor[self.bounds[rank] : self.bounds[rank + 1]]

    def view(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return the elements of a flat `tensor` of this size at the place of `params[index]`, 1-dim."""
        return tensor[self.offsets[index] : self.offsets[index] + self.params[index].numel()]

    def shaped_view(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return the same in the shape of `params[index]`, in the memory order that it had when it was laid out here."""
        return self.shaped(self.view(tensor, index), index)

    def shaped(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Return 1-dim `values` in the shape and memory order of `params[index]`, as a view."""
        shape = self._shapes[index]
        return shaped_like(values, self._orders[index]) if shape is None else values.view(shape)

    def zero_gaps(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Zero the elements of a flat `tensor` of this size between parameters; returns `view` of every index."""
        pieces = tensor.split_with_sizes(self._pieces)
        for place in self._gaps:
            pieces[place].zero_()
        return [pieces[place] for place in self._places.values()]

    @torch.no_grad()
    def flatten_params(self) -> list[torch.Tensor]:
        """Make every parameter a view of `data`, shape, strides and identity kept; returns those that were not.

        Raises RuntimeError if its shape or dtype is another.
        """
        if self.data is None:
            self.data = torch.zeros(self.size, dtype=self.dtype, device=self.device)
            self._views = [self.shaped_view(self.data, index) for index in range(len(self.params))]
            self._pointers = list(map(_POINTER, self._views))
            self._strides = list(map(_STRIDE, self._views))
        pointers, strides, dtypes = (
            list(map(_POINTER, self.params)),
            list(map(_STRIDE, self.params)),
            set(map(_DTYPE, self.params)),
        )
        # Nearly always; three maps over all parameters, without a Python call for each.
        if pointers == self._pointers and strides == self._strides and dtypes == {self.dtype}:
            return []
        moved = []
        # Somebody may give a parameter other memory at any time.
        for index, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            place = pointers[index], strides[index], param.dtype
            if place == (self._pointers[index], self._strides[index], self.dtype):
                continue
            if param.dtype != view.dtype or param.shape != view.shape or param.device != view.device:
                raise RuntimeError(
                    f"a parameter of shape {tuple(view.shape)}, {view.dtype} on {view.device}, became one of "
                    f"{tuple(param.shape)}, {param.dtype} on {param.device} after boost(); masters and optimizer states "
                    "are divided among ranks as it was. Convert the model before boost()"
                )
            view.copy_(param.detach())
            param.data = view
            moved.append(param)
        return moved

    def grad_shard(self, index: int) -> torch.Tensor | None:
        """Return this rank's shard of the gradient of `params[index]`, 1-dim, perhaps empty; None if it has no gradient."""
        return self._grad_shard(index) if index in self.reduced else None

    def grad_shards(self) -> Mapping[int, torch.Tensor]:
        """Return `grad_shard` by index, of those that have one which is not empty."""
        if not self.reduced:
            return {}
        shards = self._grad_shards()
        if len(self.reduced) == len(self.params):
            return shards
        return {index: shard for index, shard in shards.items() if index in self.reduced}

    def add_gradient(self, own: torch.Tensor, indices: set[int]) -> None:
        """Add `own`, this rank's slice, which is zero outside of the parameters at `indices`; it may be kept and written to."""
        # Of one pass it is the sum already: no copy.
        if self.gradient is None:
            self.gradient = own
        else:
            self._clear(self._stale)
            self.gradient.add_(own)
        self.reduced |= indices

    def start_gradient(self, index: int) -> None:
        """Give `params[index]`, which has none, a gradient of zeros."""
        if self.gradient is None:
            self.gradient = torch.zeros(sum(self._own_pieces), dtype=self.dtype, device=self.device)
        self._clear(self._stale & {index})
        self.reduced.add(index)

    def clear_gradient(self, index: int) -> None:
        """Drop the gradient of `params[index]`, and the memory with the last one. Writes nothing."""
        if index in self.reduced:
            self.reduced.remove(index)
            self._stale.add(index)
            if not self.reduced:
                self.clear_gradients()

    def clear_gradients(self) -> None:
        """Drop all gradients, and their memory."""
        self.gradient = None
        self.reduced.clear()
        self._stale.clear()

    def clear_gradients_of(self, ids: set[int]) -> None:
        """Drop the gradients of the parameters of these `ids`; the others belong to other optimizers."""
        if self.reduced and ids.issuperset(map(id, self.params)):
            self.clear_gradients()
            return
        for index in [index for index in self.reduced if id(self.params[index]) in ids]:
            self.clear_gradient(index)

    def _clear(self, indices: set[int]) -> None:
        for index in indices:
            self._grad_shard(index).zero_()
        self._stale = self._stale - indices

    def _grad_shard(self, index: int) -> torch.Tensor:
        shard = self._grad_shards().get(index)
        return self.gradient[:0] if shard is None else shard  # type: ignore[index]

    def _grad_shards(self) -> dict[int, torch.Tensor]:
        if self._shards is None:  # all at once, since most are asked for, and twice in a step
            sizes = self._own_pieces
            pieces: Any = self.gradient.split_with_sizes(sizes) if sizes else ()  # type: ignore[union-attr]
            self._shards = {index: pieces[place] for index, place in self._own_places.items()}
        return self._shards

    def gather(self, group: dist.ProcessGroup) -> list[Any]:
        """Give every rank the slices of all others, asynchronously; returns what to wait for."""
        data: Any = self.data
        if self.by_elements:
            return [all_gather_flat(data, self.slice_of(data, self.rank), group=group, async_op=True)]
        ranks = [rank for rank in range(len(self.bounds) - 1) if self.bounds[rank] < self.bounds[rank + 1]]
        return [dist.broadcast(self.slice_of(data, r), group=group, group_src=r, async_op=True) for r in ranks]


class ModuleBuckets:
    """The trainable parameters of one module in flat buckets, in about the order in which backward reaches them.

    bucket_bytes: of parameters in a bucket, at most, unless a single one is larger. Raises ValueError for parameters that are
    not floating point. `shard_params` shards them, which each of several optimizers calls for
    its own; a bucket holds parameters of one optimizer. pending_all_gathers: those that a step started.
    """

    def __init__(self, params: Iterable[torch.Tensor], *, group: dist.ProcessGroup, bucket_bytes: float) -> None:
        self.params = [param for param in params if param.requires_grad and param.numel()]
        wrong = sorted({str(param.dtype) for param in self.params if not param.is_floating_point()})
        if wrong:
            raise ValueError(
                f"parameters of {wrong} cannot be divided among ranks, only floating-point ones; use TorchDDPPlugin"
            )
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.buckets: list[FlatParameters] = []
        self.pending_all_gathers = PendingAllGathers()
        self._bucket_bytes = bucket_bytes
        self._by_tensors = False
        self._places: dict[torch.Tensor, tuple[FlatParameters, int]] = {}

    def shard_params(self, params: Collection[torch.Tensor], *, whole: bool) -> None:
        """Divide those of `params` that are of this layout among ranks: tensor by tensor if `whole`, else by elements.

        Raises RuntimeError if such are divided by elements and asked for whole.
        """
        if whole and any(param in self._places and self._places[param][0].by_elements for param in params):
            raise RuntimeError(
                "an optimizer that needs whole tensors came after the parameters of this model were divided by "
                "elements; boost the model together with that optimizer first"
            )
        # How those were divided that were divided before, stays.
        fresh = [param for param in self.params if param in params and param not in self._places]
        self._by_tensors |= whole
        owners = _deal(fresh, self.world_size) if whole else {}
        for members in bucketed(fresh, self._bucket_bytes):
            dealt = [owners[param] for param in members] if whole else None
            bucket = FlatParameters(members, self.world_size, self.rank, dealt)
            self.buckets.append(bucket)
            self._places |= {param: (bucket, index) for index, param in enumerate(bucket.params)}
        # Backward fills the bucket with the model's first parameter last.
        position = {param: index for index, param in enumerate(self.params)}
        self.buckets.sort(key=lambda bucket: -min(position[param] for param in bucket.params))

    def shard_remaining(self) -> None:
        """Divide what no optimizer asked for, so that any of those there are may ask for it later."""
        if len(self._places) < len(self.params):
            self.shard_params(set(self.params) - self._places.keys(), whole=self._by_tensors)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Drop or zero the gradients that are kept as slices."""
        for bucket in self.buckets:
            if set_to_none:
                bucket.clear_gradients()
            elif bucket.gradient is not None:
                bucket.gradient.zero_()

    def locate(self, param: torch.Tensor) -> tuple[FlatParameters, int] | None:
        """Return the bucket of `param` and its index there; None if it is not of this layout."""
        if param not in self._places:
            self.shard_remaining()
        return self._places.get(param)


def bucketed(params: Sequence[torch.Tensor], bucket_bytes: float) -> list[list[torch.Tensor]]:
    """Return `params`, last first, in buckets of one dtype and device, of at most `bucket_bytes` or a single parameter."""
    done: list[list[torch.Tensor]] = []
    growing: dict[Any, list[torch.Tensor]] = {}
    sizes: dict[Any, int] = {}
    for param in reversed(params):
        kind = (param.dtype, param.device)
        if kind in growing and sizes[kind] + param.nbytes > bucket_bytes:
            done.append(growing.pop(kind))
        if kind not in growing:
            growing[kind], sizes[kind] = [], 0
        growing[kind].append(param)
        sizes[kind] += param.nbytes
    return done + list(growing.values())


def _deal(params: Sequence[torch.Tensor], world_size: int) -> dict[torch.Tensor, int]:
    """Return the rank of each parameter: the largest are dealt first, each to the rank that has least."""
    loads = [0] * world_size
    owners = {}
    for param in sorted(params, key=lambda p: p.numel(), reverse=True):
        owners[param] = rank = loads.index(min(loads))
        loads[rank] += aligned(param.numel())
    return owners


def flat_slice(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements `start` to `stop` of a dense tensor in memory order, as a 1-dim view."""
    return flat(tensor.detach())[start:stop]
