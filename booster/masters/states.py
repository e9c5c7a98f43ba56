"""Optimizer state of flat buckets as state of single parameters, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from booster.casting import HALF_DTYPES
from booster.flat import flat_like, shaped_like
from booster.masters.bucket import Bucket, is_elementwise
from booster.masters.packing import unpacked
from booster.masters.stand_in import State


def state_of_params(
    buckets: Iterable[Bucket], state: Mapping[Any, State], layouts: Mapping[torch.Tensor, torch.Tensor]
) -> dict[torch.Tensor, State]:
    """Return the state of every parameter in `buckets`, in the shape of its layout; `state` is the optimizer's, by handle.

    Tensors are views of the optimizer's where a parameter lies in one bucket, else copies; what is packed is a float32 copy;
    counters are copies.
    """
    found: dict[torch.Tensor, list[tuple[int, State]]] = {}
    for bucket in buckets:
        shared = {} if bucket.whole else unpacked(state.get(bucket.handles[0], {}))
        for index, piece in enumerate(bucket.pieces):
            handle = bucket.handles[index if bucket.whole else 0]
            if handle not in state:
                continue
            own = state[handle] if bucket.whole else shared
            if not bucket.whole:
                own = {
                    key: value[piece.offset : piece.offset + piece.size]
                    if is_elementwise(value, bucket.size)
                    else _Scalar(value)
                    for key, value in own.items()
                }
            found.setdefault(piece.param, []).append((piece.start if not bucket.whole else -1, own))
    return {
        param: _assemble(layouts[param], sorted(pieces, key=lambda piece: piece[0])) for param, pieces in found.items()
    }


def signature(param: torch.Tensor, state: State | None) -> tuple[Any, ...]:
    """Return what is equal for parameters whose states can share a flat bucket, and for no others."""
    return tuple(
        (key, "elementwise" if _has_shape_of(value, param) else _comparable(value))
        for key, value in sorted((state or {}).items())
    )


def state_of_bucket(bucket: Bucket, states: Mapping[torch.Tensor, State]) -> dict[torch.Tensor, State]:
    """Return the state of the handles of `bucket`, from those of its parameters; half-precision numbers become float32."""
    if bucket.whole:
        return {
            handle: {key: _widen(value) for key, value in states[piece.param].items()}
            for handle, piece in zip(bucket.handles, bucket.pieces, strict=True)
            if piece.param in states
        }
    first = states.get(bucket.pieces[0].param)
    if not first:
        return {}
    own: State = {}
    for key, value in first.items():
        if not _has_shape_of(value, bucket.pieces[0].param):
            own[key] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        dtype = torch.float32 if value.dtype in HALF_DTYPES else value.dtype
        own[key] = joined = torch.zeros(bucket.size, dtype=dtype, device=value.device)
        for piece in bucket.pieces:
            source = flat_like(states[piece.param][key], piece.param)[piece.start : piece.stop]
            joined[piece.offset : piece.offset + piece.size].copy_(source)
    if bucket.packing is not None:
        bucket.packing.pack(bucket, own)
    return {bucket.handles[0]: own}


class _Scalar:
    """A state entry that is the same for every element."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _assemble(param: torch.Tensor, pieces: list[tuple[int, State]]) -> State:
    first = pieces[0][1]
    if pieces[0][0] < 0:
        return first
    assembled: State = {}
    for key, value in first.items():
        if isinstance(value, _Scalar):
            assembled[key] = value.value.clone() if isinstance(value.value, torch.Tensor) else value.value
        else:
            values = [own[key] for _, own in pieces]
            assembled[key] = shaped_like(values[0] if len(values) == 1 else torch.cat(values), param)
    return assembled


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES:
        return value.float()
    return value


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(value.tolist())
    return repr(value)
