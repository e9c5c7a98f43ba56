"""One bucket: some elements of the working weights, what is kept of their masters, and the handle that is stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from booster.masters.formats import Format
from booster.masters.offload import HostMemory
from booster.masters.quantized_state import StateQuantizer, dequantized
from booster.model.params import dtensor_around, empty_handle, inner_tensor, is_dtensor, local_shard
from booster.tensors.flat import ALIGNMENT, Piece, aligned, flat_like, renumber

_ADDRESS = torch.Tensor.data_ptr


class Bucket:
    """Some elements of the working weights of one group, laid one after another, each piece from a multiple of 64 on::

        pieces    | embedding 0..5 |  | bias 0..3 |          working weights, in the parameters' own memory
        residual  | ...................................  |   bits that weights lack to be masters, in the bucket's order
        handle    | one flat float32 parameter           |   what the optimizer steps, or one for each piece if `whole`

    A handle is a float32 parameter without storage, which is given data and gradient while it is stepped.

    Attributes:
        group: index of the optimizer's group.
        pieces, params: what of which parameter, in order; of one dtype, on one device.
        whole: each piece is a parameter with a handle of its shape, a DTensor for a DTensor; else there is one flat handle.
        quantizer: how states of a flat handle are quantized between steps; None: they are not.
        host: the host memory of residual bits and states between steps; None: they stay on the device.
        residual: what is kept besides weights, flat, or None.
    """

    def __init__(
        self,
        group: int,
        pieces: Sequence[Piece],
        format: Format,
        *,
        whole: bool,
        quantizer: StateQuantizer | None,
        host: HostMemory | None,
    ) -> None:
        self.group = group
        self.pieces = list(pieces)
        self.params = [piece.param for piece in pieces]
        self.whole = whole
        self.quantizer = None if whole else quantizer
        self.host = None if whole else host
        self.size = aligned(pieces[-1].offset + pieces[-1].size)
        first = pieces[0].param
        self.device, self.dtype = first.device, first.dtype
        self.format = format
        self.residual = format.allocate(self.size, self.dtype, self.device)
        likes = self.params if whole else [torch.empty(self.size, dtype=torch.float32, device="meta")]
        self.handles = [empty_handle(like, self.device) for like in likes]
        self._filled = [inner_tensor(handle) for handle in self.handles]
        self._empty = [tensor.data for tensor in self._filled]
        self._given: Sequence[torch.Tensor] = ()  # what handles are views of
        self._divided = any(map(is_dtensor, self.params))
        self.layouts = [
            torch.empty_strided(p.shape, p.stride(), dtype=torch.float32, device="meta")
            for p in map(local_shard, self.params)
        ]
        self._bounds = [(piece.offset, piece.offset + piece.size) for piece in pieces]
        self._present: torch.Tensor | None = None
        self._addresses: list[int] = []
        self._views: list[torch.Tensor] = []

    def is_laid(self, group: int, pieces: Sequence[Piece], whole: bool) -> bool:
        """Return whether a bucket that was made of these now would be like this one."""
        one, other = ([(id(p.param), p.start, p.stop, p.offset) for p in each] for each in (self.pieces, pieces))
        return (self.group, self.whole) == (group, whole) and one == other

    # ------------------------------------------------------------------ working weights

    def working(self) -> list[torch.Tensor]:
        """Return flat views of the working weights, piece by piece."""
        held = self._parts() if self._divided else self.params
        # A load, `model.to` or a plugin may have given a parameter other memory.
        if list(map(_ADDRESS, held)) != self._addresses:
            self.find_working()
        return self._views

    def find_working(self) -> None:
        """Find the working weights in memory again; those in another memory order than the bucket's are copied."""
        held = self._parts() if self._divided else self.params
        for param, layout in zip(held, self.layouts, strict=True):
            if (param.shape, param.dtype, param.device) != (layout.shape, self.dtype, self.device):
                # A master of other numbers would be stepped.
                raise RuntimeError(
                    f"a parameter of shape {tuple(layout.shape)}, {self.dtype} on {self.device}, became one of "
                    f"{tuple(param.shape)}, {param.dtype} on {param.device} after boost(); its master and optimizer state "
                    "are of what it was. Convert the model before boost(); where its own forward casts it, as routers of "
                    "experts do, keep its module in float32 (keep_fp32=...)"
                )
        self._addresses = [param.data_ptr() for param in held]
        self._views = [
            flat_like(param.detach(), layout)[piece.start : piece.stop]
            for piece, param, layout in zip(self.pieces, held, self.layouts, strict=True)
        ]

    def _parts(self) -> list[torch.Tensor]:
        """Return what this rank holds of the working weights, piece by piece."""
        return list(map(local_shard, self.params))

    def gradients(self, gradient_of: Callable[[torch.Tensor], torch.Tensor | None]) -> list[torch.Tensor]:
        """Return flat views of the gradients, piece by piece; none of them may be missing."""
        views = []
        for piece in self.pieces:
            param = piece.param
            grad: Any = gradient_of(param)
            if self._divided:
                param, grad = local_shard(param), local_shard(grad)
            # Any other pair may differ in memory order, which `flat_like` translates.
            alike = grad.is_contiguous() and param.is_contiguous()
            flat = grad.view(-1) if alike else flat_like(grad, param)
            views.append(flat[piece.start : piece.stop])
        return views

    def gather(self, gradient_of: Callable[[torch.Tensor], torch.Tensor | None], grads: torch.Tensor) -> None:
        """Copy `gradients` to their places in flat `grads`."""
        places = []
        for start, stop in self._bounds:
            places.append(grads[start:stop])
        torch._foreach_copy_(places, self.gradients(gradient_of))

    # ------------------------------------------------------------------ masters

    def read_masters(self, values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Return the masters as float32, in `values` or in the bucket's own storage. Overwrites `scratch`."""
        residual = self.residual if self.host is None else self.host.residual_on_device(self)
        masters: torch.Tensor = values if self.format.needs_values or residual is not self.residual else residual  # type: ignore[assignment]
        # Weights that somebody else wrote are taken over.
        self.format.read(self.working(), residual, masters, scratch)
        return masters

    def commit_masters(self, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Take `values` as the masters, and write the working weights. Overwrites both, except a float32 master."""
        residual = self.residual if self.host is None else self.host.residual_on_device(self)
        self.format.write(self.working(), residual, values, scratch)
        if residual is not self.residual:
            self.residual.copy_(residual)  # type: ignore[union-attr, arg-type]

    def scratch(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.float32, device=self.device)

    def copy_masters(self) -> torch.Tensor:
        """Return a float32 copy of the masters."""
        # Foreign writes count, and nothing is written: they may be averages for a validation, and be taken out again.
        values, scratch = self.scratch(), self.scratch()
        self.format.read(
            self.working(), self.residual if self.host is None else self.host.residual_on_device(self), values, scratch
        )
        return values

    def masters(self) -> torch.Tensor:
        """Return the masters as float32, for reading: themselves where that is how they are kept, else as `copy_masters`."""
        values, residual = self.copy_masters(), self.residual
        if self.format.needs_values or self.host is not None or residual is None:
            return values
        return residual if torch.equal(values.view(torch.int32), residual.view(torch.int32)) else values

    def attach(self, values: torch.Tensor, grads: torch.Tensor | None) -> None:
        """Give the handles `values` for data and `grads` for gradients."""
        self._given = self.handles_of(values) if self.whole else (values,)
        for tensor, value in zip(self._filled, self._given, strict=True):
            tensor.data = value
        if grads is not None:
            for handle, grad in zip(self.handles, self.handles_of(grads) if self.whole else (grads,), strict=True):
                handle.grad = dtensor_around(grad, handle) if self._divided else grad

    def detach(self) -> None:
        """Take data and gradients from the handles. What an optimizer put in the place of the data is copied to it."""
        for tensor, value in zip(self._filled, self._given, strict=True):
            if tensor.data_ptr() != value.data_ptr():
                value.copy_(tensor)
        self._given = ()
        for handle, tensor, empty in zip(self.handles, self._filled, self._empty, strict=True):
            handle.grad = None
            tensor.data = empty

    def pieces_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return flat views of flat `values`, piece by piece."""
        return [values[start:stop] for start, stop in self._bounds]

    def handles_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return views of flat `values` in the shapes of the handles, or of this rank's shards of them."""
        return self.shaped(values) if self.whole else [values]

    def shaped(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return views of flat `values` in the shapes of this rank's shards of the parameters; pieces are whole ones."""
        return [
            flat.as_strided(layout.shape, layout.stride(), flat.storage_offset())
            for flat, layout in zip(self.pieces_of(values), self.layouts, strict=True)
        ]

    @contextmanager
    def with_shaped_params(self, optimizer: Optimizer) -> Iterator[None]:
        """For its length, have whole parameters in the place of the flat handle, in the one group and the state of `optimizer`.

        They are views of its data, gradient and states, as DTensors where the parameters are.
        """
        (handle,), (group,), state = self.handles, optimizer.param_groups, optimizer.state

        def shaped(values: torch.Tensor) -> list[torch.Tensor]:
            return list(map(dtensor_around, self.shaped(values), self.params))

        own, made = state.pop(handle, {}), [each.requires_grad_() for each in shaped(handle.detach())]
        try:
            for matrix, grad in zip(made, shaped(handle.grad), strict=True):  # type: ignore[arg-type]
                matrix.grad = grad
            for name, values in own.items():
                for matrix, value in zip(made, shaped(values), strict=True):
                    state[matrix][name] = value
            group["params"][:] = made
            yield
            for name in {name: None for matrix in made for name in state[matrix]}:
                values = own.setdefault(name, self.scratch())
                for place, matrix in zip(self.shaped(values), made, strict=True):
                    place.copy_(local_shard(state[matrix][name]))
        finally:
            for matrix in made:
                state.pop(matrix, None)
            if own:
                state[handle] = own

    def present(self) -> torch.Tensor | None:
        """Return where there are elements, as bool; None where pieces leave no gaps."""
        if all(piece.size % ALIGNMENT == 0 for piece in self.pieces):
            return None
        if self._present is None:
            self._present = torch.zeros(self.size, dtype=torch.bool, device=self.device)
            for piece in self.pieces_of(self._present):
                piece.fill_(True)
        return self._present

    def clear_padding(self, values: torch.Tensor) -> None:
        """Make zero what flat `values` has between and behind the pieces, where others' leftovers may be."""
        ends = [piece.offset + piece.size for piece in self.pieces if piece.size % ALIGNMENT]
        if ends:
            torch._foreach_zero_([values[end : aligned(end)] for end in ends])

    # ------------------------------------------------------------------ division

    def divide(self, gradient_of: Callable[[torch.Tensor], torch.Tensor | None], state: Any) -> list[Bucket]:
        """Return two buckets, of pieces with a gradient and without, as there are both; entries of `state` move along."""
        inside = [piece for piece in self.pieces if gradient_of(piece.param) is not None]
        outside = [piece for piece in self.pieces if gradient_of(piece.param) is None]
        if self.host is not None:
            # Copies between host and device may be under way, of memory that is cut here.
            self.host.sync()
        divided = []
        # Quantized states have scales of groups of elements, which pieces do not keep.
        shared = {} if self.whole else dequantized(state.get(self.handles[0], {}))
        for pieces in (inside, outside):
            bucket = Bucket(
                self.group, renumber(pieces), self.format, whole=self.whole, quantizer=self.quantizer, host=self.host
            )
            if bucket.residual is not None:
                bucket.residual.copy_(_select(self.residual, pieces))  # type: ignore[arg-type]
            if self.whole:
                for handle, piece in zip(bucket.handles, pieces, strict=True):
                    old = self.handles[self.pieces.index(piece)]
                    if old in state:
                        state[handle] = state.pop(old)
            elif self.handles[0] in state:
                state[bucket.handles[0]] = own = {
                    key: _select(value, pieces)
                    if is_elementwise(value, self.size)
                    else value.clone()
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in shared.items()
                }
                if bucket.quantizer is not None:
                    bucket.quantizer.quantize(bucket, own)
            if self.host is not None:
                self.host.keep_residual(bucket)
                self.host.keep_states(bucket, state)
            divided.append(bucket)
        if not self.whole:
            state.pop(self.handles[0], None)
        return divided


def is_elementwise(value: Any, size: int) -> bool:
    """Return whether a state entry of a flat bucket of `size` elements holds one number for each."""
    return isinstance(value, torch.Tensor) and value.shape == (size,)


def _select(values: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    moved = renumber(pieces)
    taken = values.new_zeros(*values.shape[:-1], aligned(moved[-1].offset + moved[-1].size))
    for old, new in zip(pieces, moved, strict=True):
        taken[..., new.offset : new.offset + new.size] = values[..., old.offset : old.offset + old.size]
    return taken
