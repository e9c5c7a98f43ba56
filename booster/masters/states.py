"""Optimizer state of flat buckets as state of single parameters, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from booster.common.torch_internals.autograd_internals import without_subclasses
from booster.common.torch_internals.tensor_internals import version
from booster.masters.bucket import Bucket, is_elementwise
from booster.masters.quantized_state import dequantized
from booster.model.params import dtensor_around, is_dtensor, local_shard
from booster.shards.base import State
from booster.tensors.flat import flat, flat_like, shaped_like
from booster.tensors.trees import HALF_DTYPES, map_tensors, tensors
from booster.update.context import Fill

Places = dict[torch.Tensor, list[tuple[Bucket, int]]]


def state_of_params(
    buckets: Iterable[Bucket], state: MutableMapping[Any, State], layouts: Mapping[torch.Tensor, torch.Tensor]
) -> dict[torch.Tensor, State]:
    """Return the state of every parameter in `buckets`, in the shape of its layout; `state` is the optimizer's, by handle.

    quantized states are float32 copies; counters are copies.
    """
    places = places_of(buckets)
    # Once for a bucket, not once for a parameter of it.
    unpacked_of = {id(bucket): _dequantized(bucket, state) for found in places.values() for bucket, _ in found}
    # Tensors are views of the optimizer's where a parameter is in one bucket, else copies.
    view = StateView(places, state, layouts, unpacked_of)
    return {param: view[param] for param in places if param in view}


def places_of(buckets: Iterable[Bucket]) -> Places:
    """Return the place of each parameter: which bucket, and which piece of it."""
    places: Places = {}
    for bucket in buckets:
        for index, piece in enumerate(bucket.pieces):
            places.setdefault(piece.param, []).append((bucket, index))
    return places


class StateView(Mapping[Any, State]):
    """The optimizer's state by working parameter, in shapes of the parameters, each made when it is asked for.

    A state is made at each read. A parameter without state is not in the mapping, and reads as an empty state, as in torch.
    unpacked: dequantized states of buckets by `id`, where they exist already. put: makes a state, or None, that of a
    parameter; with it, writes to copies reach the optimizer's own state, until the next of the `steps`.
    """

    def __init__(
        self,
        places: Places,
        state: MutableMapping[Any, State],
        layouts: Mapping[torch.Tensor, torch.Tensor],
        dequantized: Mapping[int, State] | None = None,
        put: Callable[[Any, State | None], None] | None = None,
        steps: Callable[[], int] = int,
    ) -> None:
        self._put, self._steps = put, steps
        self._places, self._state, self._layouts = places, state, layouts
        self._dequantized = {} if dequantized is None else dequantized

    def __contains__(self, param: object) -> bool:
        places = self._places.get(param)  # type: ignore[call-overload]
        return param in self._state if places is None else any(_handle(*place) in self._state for place in places)

    def __getitem__(self, param: Any) -> State:
        if param not in self._places:
            return self._state.get(param, {})
        places = [place for place in self._places[param] if _handle(*place) in self._state]
        if not places:
            return {}
        if places[0][0].whole:  # it has the user's own dict for its parameter: writes need no way back
            return self._state[_handle(*places[0])]
        own = self._assembled(param, places)
        if self._put is None or not own:
            return own
        shared = [self._state[bucket.handles[0]] for bucket, _ in self._places[param]]
        at = self._steps()

        def put(key: str, *now: Any) -> None:
            """Set the entry `key`, or delete it where nothing else is given."""
            # After a step this copy is old: writing it back would undo that step's state.
            if self._steps() != at:
                raise RuntimeError(
                    f"the state {key!r} was written to after another step, and what optimizer.state gave is a copy of before "
                    f"it; ask optimizer.state[param][{key!r}] for it again"
                )
            # All entries go back together, since packed states of one bucket are quantized together.
            own = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in self[param].items()}
            own.pop(key, None)
            self[param] = own | dict(zip([key], now, strict=False))

        return _Entries(
            put,
            {
                key: value
                if not isinstance(value, torch.Tensor)
                or is_dtensor(value)
                or _is_view(value, [own.get(key) for own in shared])
                else WrittenThrough.of(value, value, partial(put, key))
                for key, value in own.items()
            },
        )

    def __setitem__(self, param: Any, own: State) -> None:
        if param not in self._places or self._put is None:
            self._state[param] = own
        else:
            self._put(param, own)

    def __delitem__(self, param: Any) -> None:
        if param not in self._places or self._put is None:
            del self._state[param]
        elif param in self:
            self._put(param, None)
        else:
            raise KeyError(param)

    def get(self, param: Any, default: Any = None) -> Any:
        found = self[param]
        return found if param in self else default

    def clear(self) -> None:
        """Drop the state of every parameter, so that the next step begins as the first one did. Masters are no state."""
        self._state.clear()

    def __iter__(self) -> Iterator[Any]:
        handles = {_handle(*place) for places in self._places.values() for place in places}
        yield from (key for key in self._state if key not in handles)
        yield from (param for param in self._places if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _assembled(self, param: torch.Tensor, places: list[tuple[Bucket, int]]) -> State:
        """Return the state of `param`, which has `places` in flat buckets."""
        layout = local_shard(param) if is_dtensor(param) else self._layouts[param]
        # Large parameters are cut: their pieces are in several buckets, in any order.
        pieces = sorted(((bucket, bucket.pieces[index]) for bucket, index in places), key=lambda place: place[1].start)
        shared = [self._dequantized.get(id(bucket)) or _dequantized(bucket, self._state) for bucket, _ in pieces]
        assembled: State = {}
        for key, value in shared[0].items():
            if not is_elementwise(value, pieces[0][0].size):  # it is the same for every element
                assembled[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            values = [
                own[key][piece.offset : piece.offset + piece.size]
                for own, (_, piece) in zip(shared, pieces, strict=True)
            ]
            shaped = shaped_like(values[0] if len(values) == 1 else torch.cat(values), layout)
            if is_dtensor(param) and shaped.storage_offset():
                # Of a DTensor that begins within a storage `copy.deepcopy` raises, so it is given one that begins there.
                storage = shaped.untyped_storage()[shaped.storage_offset() * shaped.element_size() :]
                shaped = shaped.new_empty(0).set_(storage, 0, shaped.shape, shaped.stride())
            assembled[key] = dtensor_around(shaped, param)
        return assembled


class _Entries(dict[str, Any]):
    """The state of one parameter: what is set or deleted in it is set or deleted in the optimizer's."""

    def __init__(self, put: Callable[..., None], own: State) -> None:
        super().__init__(own)
        self._put = put

    def __setitem__(self, key: str, value: Any) -> None:
        self._put(key, value)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        if key in self:
            self._put(key)
        super().__delitem__(key)

    # By the two above, which those of a dict do not call.
    update = MutableMapping.update
    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear
    setdefault = MutableMapping.setdefault

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class WrittenThrough(torch.Tensor):
    """A copy of a state, or a view of one: writes to it in place are made to the state as well.

    What is computed of it is plain tensors."""

    _whole: torch.Tensor
    _seen: int
    _put: Callable[[torch.Tensor], None]

    @classmethod
    def of(cls, value: torch.Tensor, whole: torch.Tensor, put: Callable[[torch.Tensor], None]) -> WrittenThrough:
        """Return `value`, a view of the copy `whole`; put: is given that after a write."""
        made = value.as_subclass(cls)
        made._whole, made._seen, made._put = whole, version(value), put
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            result = func(*args, **(kwargs or {}))
            given = [own for own in tensors((args, kwargs or {})) if isinstance(own, cls)]
            for own in given:
                # In-place operations are many; the version counter counts every one of them.
                if version(own) != own._seen:
                    own._seen = version(own)
                    own._put(own._whole)

            def linked(made: torch.Tensor) -> torch.Tensor:
                if isinstance(made, cls) or made.layout != torch.strided:
                    return made
                # A view of the copy, such as `state["exp_avg"][0]`, has to write through as well.
                memory = made.untyped_storage().data_ptr()
                own = next((own for own in given if own.untyped_storage().data_ptr() == memory), None)
                return made if own is None else cls.of(made, own._whole, own._put)

            return map_tensors(linked, result)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        with without_subclasses():
            return self.detach().as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


def _is_view(value: torch.Tensor, shared: Iterable[Any]) -> bool:
    """Return whether `value` is in the memory of one of `shared`, so that writes to it are writes to that."""
    memory = value.untyped_storage().data_ptr()
    return any(isinstance(own, torch.Tensor) and own.untyped_storage().data_ptr() == memory for own in shared)


def _handle(bucket: Bucket, index: int) -> torch.Tensor:
    return bucket.handles[index if bucket.whole else 0]


def _dequantized(bucket: Bucket, state: Mapping[Any, State]) -> State:
    return {} if bucket.whole else dequantized(state.get(bucket.handles[0], {}))


def signature(param: torch.Tensor, state: State | None) -> tuple[Any, ...]:
    """Return a key that is equal for parameters with states that can share a flat bucket, and for no others."""
    return tuple(
        (key, "elementwise" if _has_shape_of(value, param) else _comparable(value))
        for key, value in sorted((state or {}).items())
    )


def write_pieces(
    bucket: Bucket, into: torch.Tensor, values: Iterable[torch.Tensor], key: str | None, fill: Fill | None
) -> None:
    """Write to `into`, flat as `bucket`, what its pieces have of `values`: the states `key` of its parameters, or masters."""
    places, given = [], []
    for piece, value, place in zip(bucket.pieces, values, bucket.pieces_of(into), strict=True):
        if value.is_meta and fill is not None:
            fill.read(piece.param, key, piece.start, place)
        else:
            places.append(place)
            given.append(flat_like(local_shard(value).detach(), local_shard(piece.param))[piece.start : piece.stop])
    if places:
        torch._foreach_copy_(places, given)


def copy_masters(bucket: Bucket, values: torch.Tensor, into: dict[torch.Tensor, torch.Tensor]) -> None:
    """Copy flat `values`, the masters of `bucket`, to where they belong in `into`: by parameter, in its shape, made anew."""
    for piece, own in zip(bucket.pieces, bucket.pieces_of(values), strict=True):
        if piece.param not in into:
            into[piece.param] = torch.empty_like(piece.param, dtype=torch.float32).detach()
        flat(local_shard(into[piece.param]))[piece.start : piece.stop] = own


def state_of_bucket(
    bucket: Bucket, states: Mapping[torch.Tensor, State], fill: Fill | None = None
) -> dict[torch.Tensor, State]:
    """Return the state of the handles of `bucket`, from those of its parameters."""
    if bucket.whole:
        return {
            handle: dict(states[piece.param])
            for handle, piece in zip(bucket.handles, bucket.pieces, strict=True)
            if piece.param in states
        }
    first = states.get(bucket.pieces[0].param)
    if not first:
        return {}
    own: State = {}
    old = {} if fill is None else fill.before.pop(bucket.handles[0], {})
    for key, value in first.items():
        if not _has_shape_of(value, bucket.pieces[0].param):
            own[key] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        device = value.device if not value.is_meta else bucket.device if bucket.host is None else torch.device("cpu")
        # What a load replaces is written over in place: two copies of all states might not fit.
        there = old.pop(key, None)
        if not isinstance(there, torch.Tensor) or (there.shape, there.dtype) != ((bucket.size,), dtype):
            there = torch.zeros(bucket.size, dtype=dtype, device=device)
        own[key] = there
        write_pieces(bucket, there, [states[piece.param][key] for piece in bucket.pieces], key, fill)
    if bucket.quantizer is not None:
        bucket.quantizer.quantize(bucket, own)
    return {bucket.handles[0]: own}


def give_back(bucket: Bucket, own: State, states: dict[torch.Tensor, State]) -> None:
    """Copy `own`, the state of the flat handle of `bucket`, to where its parameters' shares of it belong in `states`."""
    shared = dequantized(own)
    for piece, layout in zip(bucket.pieces, bucket.layouts, strict=True):
        mine = states.setdefault(piece.param, {}) if shared else {}
        for key, value in shared.items():
            if not is_elementwise(value, bucket.size):
                mine[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            if key not in mine:
                made = torch.empty_strided(layout.shape, layout.stride(), dtype=value.dtype, device=value.device)
                mine[key] = dtensor_around(made, piece.param)
            flat(local_shard(mine[key]))[piece.start : piece.stop] = value[piece.offset : piece.offset + piece.size]


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def as_of_master(own: State, param: torch.Tensor) -> State:
    """Return the state of a parameter that gets a master: what is of another precision, as that of a float64 parameter that was
    cast, becomes float32."""
    return {
        key: value.float()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        # What the optimizer keeps in half besides a master, a load and a step leave so.
        and (value.dtype in HALF_DTYPES or _has_shape_of(value, param))
        else value
        for key, value in own.items()
    }


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # By value: buckets are cut by what differs, such as the step of parameters that joined later.
        return str(value.dtype), str(value.tolist())
    return repr(value)
