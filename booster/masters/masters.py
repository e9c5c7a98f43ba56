"""The master weights of one optimizer: buckets of its half-precision parameters, made, divided and made anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from booster.common.arguments import listed
from booster.common.torch_internals.tensor_internals import preserving_versions
from booster.masters.bucket import Bucket
from booster.masters.formats import Format, MasterOptions
from booster.masters.formats_compiled import compiled_format
from booster.masters.offload import HostMemory, can_offload
from booster.masters.rounding import RoundingRNG, rounded
from booster.masters.states import as_of_master, signature, state_of_bucket, state_of_params, write_pieces
from booster.model.optimizers import check_attributes, granularity_of, lies_flat
from booster.model.params import dtensor_around, is_dtensor, local_shard, num_shards, params_of
from booster.shards.base import State
from booster.tensors.flat import Piece, bucket_size, cut, cut_apart, flat_like, is_dense, pack, renumber, shaped_like
from booster.tensors.trees import HALF_DTYPES
from booster.update.context import Fill, name_of_stranger

Weights = Mapping[torch.Tensor, torch.Tensor]


def has_half_elements(param: torch.Tensor) -> bool:
    """Return whether `param` would have a master if it were trained: a half one of no elements has none."""
    return param.dtype in HALF_DTYPES and param.numel() > 0


own_gradient: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")
"""Returns `param.grad`, the gradient for its master by default. No Python function: a step calls it for every parameter."""


class Masters:
    """Master weights for the trainable half-precision parameters of `optimizer`, and how its states are kept.

    Between steps the optimizer's groups hold the user's parameters, and its state has the handles of the buckets for keys.
    `optimizer` is only ever stepped, by `MasterStep`, with handles in the place of parameters. Where states are quantized or
    offloaded, float32 parameters are in buckets too, as their own masters.

    Arguments:
        names: of the parameters, for checkpoints.
        sources: float32 values to start from; other parameters start from their own.
        compiled: keep residual bits as a compiled step wants them.
        released: cut buckets so that few gradients wait for others, for an optimizer in backward.

    Attributes:
        buckets: of all parameters with masters, in the order of the groups; another list whenever there are others.
        layouts: by parameter with a master, the memory order that its bucket knows, as a meta tensor.
        gradient_of: what a step takes for the gradient of a parameter, in any floating dtype; its `.grad` by default.
        half_only: whether buckets hold half-precision parameters alone.
        loaded_weights: gives, once, float32 values that `load_state_dict` brought for half-precision parameters, or None.
        hosts: the host memory of each device with offloaded states.
        num_removed: how many parameters with masters were in no group of the optimizer when `register_params` ran last.

    Raises ValueError for a form of masters that this optimizer cannot be stepped on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        options: MasterOptions,
        *,
        sources: MutableMapping[torch.Tensor, torch.Tensor] | None = None,
        compiled: bool = False,
        released: bool = False,
    ) -> None:
        options.check(optimizer)
        self.optimizer, self.names, self.options = optimizer, names, options
        self.granularity = granularity_of(optimizer)
        self.buckets: list[Bucket] = []
        self.layouts: dict[torch.Tensor, torch.Tensor] = {}
        self.gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = own_gradient
        self.loaded_weights: Callable[[Masters], Weights] | None = None
        self._compiled, self.released = compiled, released
        self.scratch: Any = None  # of the last step, where that kept it
        self.rng = RoundingRNG()
        self.quantizer = options.make_quantizer(optimizer, self.rng)
        self.half_only = self.quantizer is None and not options.offload
        self.hosts: dict[torch.device, HostMemory] = {}
        self.formats: dict[torch.dtype, Format] = {}
        self.num_removed = 0
        held = params_of(optimizer)
        stepped = [param for param in held if param.dtype in HALF_DTYPES or not self.half_only]
        check_attributes(optimizer, stepped, "would be stepped on float32 tensors that stand for them")
        self.register_params(sources)

    # ------------------------------------------------------------------ which parameters

    def offloads(self, device: torch.device) -> bool:
        """Return whether residual bits and states of parameters on `device` are kept in the host's memory."""
        return self.options.offload and can_offload(device)

    def may_have(self, param: torch.Tensor) -> bool:
        """Return whether `param` has a place in a bucket, or would have one if it were trained."""
        if param.dtype in HALF_DTYPES:
            return has_half_elements(param)
        own = param.dtype == torch.float32 and not param.is_sparse and param.dim() > 0 and param.numel() > 0
        return own and (self.quantizer is not None or self.offloads(param.device))

    def is_stepped(self, param: torch.Tensor) -> bool:
        """Return whether a step may change `param`: also one that was frozen since its gradient came."""
        return param.requires_grad or self.gradient_of(param) is not None

    def outside(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `params` that are in no bucket."""
        return list(filterfalse(self.layouts.__contains__, params))

    @property
    def size(self) -> int:
        """Elements of the largest bucket."""
        return max((bucket.size for bucket in self.buckets), default=0)

    def name_of(self, param: torch.Tensor) -> str:
        """What `param` is called in states and messages."""
        if param in self.names:
            return self.names[param]
        return next(
            name_of_stranger(index, place)
            for index, group in enumerate(self.optimizer.param_groups)
            for place, own in enumerate(group["params"])
            if own is param
        )

    # ------------------------------------------------------------------ buckets

    def register_params(self, sources: MutableMapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Make masters for half-precision parameters of the groups that have none yet; their states move along.

        sources: see the class; what is used of it is taken out.

        Raises RuntimeError for one of another shape, dtype or device.
        """
        for param, known in self.layouts.items():  # which loops without a call do for every parameter in every step
            if param.stride() != known.stride() or param.shape != known.shape:
                # Where a parameter with a master changed its memory order, as by `model.to(memory_format=...)
                self._refresh_layouts()
                break
        # Masters become the float32 values that were loaded into their weights, see `LoadedWeights`.
        loaded = None if self.loaded_weights is None else self.loaded_weights(self)
        if loaded:
            self._adopt_loaded(loaded)
        fresh: list[list[torch.Tensor]] = []
        self.num_removed = len(self.layouts)
        for group in self.optimizer.param_groups:
            lacking = []
            for p in group["params"]:
                if p in self.layouts:
                    self.num_removed -= 1
                    continue
                if self.half_only and p.dtype not in HALF_DTYPES:
                    continue
                if self.is_stepped(p) and self.may_have(p):
                    lacking.append(p)
            fresh.append(lacking)
        # The usual case: every step looks, and no parameter is new.
        if not any(fresh):
            return
        state = self.optimizer.state
        states = {p: as_of_master(state.pop(p), p) for params in fresh for p in params if p in state}
        self.buckets = [*self.buckets, *self._build(fresh, states, {} if sources is None else sources)]

    def refuse_removed(self) -> None:
        """Raise RuntimeError for parameters that are in buckets, and in no group of the optimizer any more."""
        held = set(params_of(self.optimizer))
        names = [self.names.get(p, f"a parameter of shape {tuple(p.shape)}") for p in self.layouts if p not in held]
        raise RuntimeError(
            f"{listed(names, 5)} {'was' if len(names) == 1 else 'were'} taken out of the groups of the optimizer after "
            "boost(), but masters or states of it lie in one piece with those of others; put it back, and stop training it by "
            "requires_grad_(False) and optimizer.zero_grad()"
        )

    def divide_by_gradients(self) -> list[Bucket]:
        """Divide buckets of which some parameters have a gradient and others none. Returns those with gradients; of an
        optimizer that steps everything at once those that have any."""
        gradient_of, stepped, made = self.gradient_of, [], {}
        for bucket in self.buckets:
            present = missing = False
            for piece in bucket.pieces:
                if gradient_of(piece.param) is None:
                    missing = True
                else:
                    present = True
            # An optimizer that steps everything at once skips handles without gradients itself.
            if present and missing and self.granularity != "whole":
                # Torch leaves a parameter without gradient alone: no decay, no momentum; in one flat handle it would be
                # stepped.
                made[bucket] = bucket.divide(gradient_of, self.optimizer.state)
                stepped.append(made[bucket][0])
            elif present:
                stepped.append(bucket)
        if made:
            self.buckets = [each for bucket in self.buckets for each in made.get(bucket, (bucket,))]
        return stepped

    def _adopt_loaded(self, values: Weights) -> None:
        """Make `values` the masters of the weights that they round to; others were written since."""
        for bucket in self.buckets:
            if bucket.residual is None or values.keys().isdisjoint(bucket.params):
                continue
            masters = bucket.read_masters(bucket.scratch(), bucket.scratch())
            for piece, working, master in zip(bucket.pieces, bucket.working(), bucket.pieces_of(masters), strict=True):
                if piece.param in values:
                    value = flat_like(local_shard(values[piece.param]), local_shard(piece.param))
                    value = value[piece.start : piece.stop].to(master)
                    torch.where(working == rounded(value, working.dtype), value, master, out=master)
            with preserving_versions(
                [local_shard(param) for param in bucket.params]
            ):  # a forward pass may have used them
                bucket.commit_masters(masters, bucket.scratch())

    def _refresh_layouts(self) -> None:
        """Lay masters and states anew in the memory order of their parameters."""
        for bucket in self.buckets:
            bucket.find_working()
        self.sync()
        states = self.states_of(self.buckets)
        values = self.values_of(self.layouts)
        self.rebuild(states, values)

    def rebuild(
        self,
        states: MutableMapping[Any, State],
        values: MutableMapping[torch.Tensor, torch.Tensor],
        fill: Fill | None = None,
    ) -> None:
        """Make buckets anew, of the parameters that are in `values`, which are their masters, and of their `states`; those that
        the buckets had are dropped."""
        for bucket in self.buckets:
            for handle in bucket.handles:
                self.optimizer.state.pop(handle, None)
        held = [[p for p in group["params"] if p in values] for group in self.optimizer.param_groups]
        old, self.buckets, self.layouts = self.buckets if fill is not None else [], [], {}
        self.buckets = self._build(held, states, values, fill, old)

    def _build(
        self,
        groups: list[list[torch.Tensor]],
        states: MutableMapping[Any, State],
        sources: MutableMapping[torch.Tensor, torch.Tensor],
        fill: Fill | None = None,
        old: Sequence[Bucket] = (),
    ) -> list[Bucket]:
        """Make the buckets. `states` and `sources` are emptied on the way: no more than a bucket of them is there twice."""
        laid = self._lay(groups, states)
        last = {piece.param: place for place, (_, pieces, _, _) in enumerate(laid) for piece in pieces}
        buckets = []
        if len(old) != len(laid) or not all(one.is_laid(*each[:3]) for one, each in zip(old, laid, strict=True)):
            old = ()
            if fill is not None:
                fill.before.clear()
        for place, (index, pieces, whole, host) in enumerate(laid):
            form = self._format(pieces[0].param.dtype)
            bucket = (
                old[place] if old else Bucket(index, pieces, form, whole=whole, quantizer=self.quantizer, host=host)
            )
            buckets.append(bucket)
            if host is not None and not old:
                host.keep_residual(bucket)
            self.optimizer.state.update(state_of_bucket(bucket, states, fill))
            in_residual = bucket.host is None and bucket.residual is not None and bucket.residual.dtype == torch.float32
            values: torch.Tensor = bucket.residual if in_residual else bucket.scratch()  # type: ignore[assignment]
            write_pieces(bucket, values, [sources.get(p.param, p.param) for p in bucket.pieces], None, fill)
            values.nan_to_num_(math.nan, math.inf, -math.inf)  # see `rounding.canonical_nan_`
            # A master made of its weight rounds to it. With released gradients that is between forward and backward.
            own = not any(piece.param in sources for piece in bucket.pieces)
            with preserving_versions([local_shard(p) for p in bucket.params]) if own else nullcontext():
                bucket.commit_masters(values, bucket.scratch())
            if bucket.host is not None:
                bucket.host.keep_states(bucket, self.optimizer.state)
            for param in bucket.params:
                if last[param] == place:
                    states.pop(param, None)
                    sources.pop(param, None)
        return buckets

    def _lay(
        self, groups: list[list[torch.Tensor]], states: Mapping[Any, State]
    ) -> list[tuple[int, list[Piece], bool, HostMemory | None]]:
        """Cut `groups` into buckets, and note how parameters lie in memory.

        Returns of each bucket its group, its pieces, whether they are whole, and the host's memory of its states.
        """
        # A bucket is at most a share of all elements, and so is the float32 scratch of a step.
        total = sum(p.numel() for params in groups for p in params) + sum(b.size for b in self.buckets)
        laid: list[tuple[int, list[Piece], bool, HostMemory | None]] = []
        for index, params in enumerate(groups):
            alike: dict[Any, list[torch.Tensor]] = {}
            for param in params:
                if not is_dtensor(param) and not is_dense(param):  # torch leaves no gaps in shards of DTensors
                    param.data = param.detach().clone(memory_format=torch.contiguous_format)
                whole = not lies_flat(self.optimizer) or param.dim() == 0
                # One flat handle has one step count: parameters with other histories get buckets of their own.
                kept = () if whole else signature(param, states.get(param))
                alike.setdefault((param.device, param.dtype, whole, kept), []).append(param)
                self.layouts[param] = torch.empty_strided(
                    param.shape, param.stride(), dtype=torch.float32, device="meta"
                )
            for (device, _, whole, _), several in alike.items():
                host = None if whole else self._host(device)
                packed = self.quantizer is not None or host is not None
                size = bucket_size(total, device, compiled=self._compiled, packed=packed, released=self.released)
                size = total if self.granularity == "whole" else size
                if self.granularity != "elementwise" or whole:
                    divided = _packed(several, size)
                else:
                    divided = _laid(cut_apart if self.released else cut, several, size)
                laid += [(index, pieces, whole, host) for pieces in divided]
        return laid

    def _format(self, dtype: torch.dtype) -> Format:
        if dtype not in self.formats:
            made = self.options.make_format(self.optimizer, dtype, self.rng)
            self.formats[dtype] = compiled_format(made) if self._compiled else made
        return self.formats[dtype]

    def _host(self, device: torch.device) -> HostMemory | None:
        if not self.offloads(device):
            return None
        if device not in self.hosts:
            self.hosts[device] = HostMemory(device)
        return self.hosts[device]

    # ------------------------------------------------------------------ values and states

    def sync(self) -> None:
        """Wait until what the last step sent to the host's memory has arrived there."""
        for host in self.hosts.values():
            host.sync()

    def values(self) -> Weights:
        """Return the masters by parameter, float32 in its shape: themselves where one is kept in one piece, else copies."""
        self.register_params()
        return self.values_of(self.layouts)

    def values_of(self, params: Mapping[torch.Tensor, Any]) -> dict[torch.Tensor, torch.Tensor]:
        """Return the masters of `params`, as `values`, without a look at parameters that have none yet."""
        pieces: dict[torch.Tensor, list[tuple[int, torch.Tensor]]] = {}
        for bucket in self.buckets:
            if any(piece.param in params for piece in bucket.pieces):
                for piece, master in zip(bucket.pieces, bucket.pieces_of(bucket.masters()), strict=True):
                    pieces.setdefault(piece.param, []).append((piece.start, master))
        values = {}
        for param in params:
            # Large parameters are cut: their pieces are in several buckets, in any order.
            own = [master for _, master in sorted(pieces[param], key=lambda found: found[0])]
            layout = local_shard(param) if is_dtensor(param) else self.layouts[param]
            values[param] = dtensor_around(shaped_like(own[0] if len(own) == 1 else torch.cat(own), layout), param)
        return values

    def states_of(self, buckets: Iterable[Bucket]) -> dict[torch.Tensor, State]:
        """Return the optimizer's state of every parameter in `buckets`, in its shape; see `state_of_params`."""
        return state_of_params(buckets, self.optimizer.state, self.layouts)

    def fits_buckets(self, states: Mapping[torch.Tensor, State]) -> bool:
        """Return whether the parameters of each flat bucket have `states` that can share it."""
        seen: dict[torch.Tensor, Any] = {}
        for bucket in self.buckets:
            for param in () if bucket.whole else bucket.params:
                if param not in seen:
                    seen[param] = signature(param, states.get(param))
                if seen[param] != seen[bucket.pieces[0].param]:
                    return False
        return True


@contextmanager
def replaced_params(optimizer: Optimizer, replacements: Weights) -> Iterator[None]:
    """Inside, groups of `optimizer` hold `replacements` in the place of the parameters that are its keys."""
    # In the lists themselves: LBFGS keeps one of them.
    lists = [group["params"] for group in optimizer.param_groups]
    before = [list(params) for params in lists]
    for params in lists:
        params[:] = [replacements.get(param, param) for param in params]
    try:
        yield
    finally:
        for params, held in zip(lists, before, strict=True):
            params[:] = held


def _packed(params: Sequence[torch.Tensor], size: int) -> list[list[Piece]]:
    """Put whole `params` into buckets of about `size` elements of this rank."""
    # By sizes that all ranks know, as those that hold shards of one parameter step its bucket together.
    parts = max((num_shards(param) for param in params), default=1)
    return [
        renumber([replace(piece, stop=local_shard(piece.param).numel()) for piece in pieces])
        for pieces in pack(params, size * parts)
    ]


def _laid(lay: Callable[..., list[list[Piece]]], params: Sequence[torch.Tensor], size: int) -> list[list[Piece]]:
    """`lay` for `params` of which this rank may hold shards: a piece is of a shard."""
    if not any(map(is_dtensor, params)):
        return lay(params, size)
    of_part = {local_shard(param): param for param in params}
    return [[replace(piece, param=of_part[piece.param]) for piece in pieces] for pieces in lay(of_part, size)]
