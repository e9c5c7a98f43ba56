"""Frozen weights in less memory than they are computed in, as under LoRA: how they are stored, and the layer that holds them.

The idea: a weight that does not train needs no gradient, no state and no float32 master; it is stored in 4 or 8 bits and
unpacked where a product reads it, in forward and again in backward. No high-precision copy of it is kept.

An example: a weight of 2 rows and 128 columns in "nf4", which has a scale for each block of 64 numbers::

    row 0   | 64 bytes: two codes of 4 bits each | 4 bytes: scale of 0..63 | 4 bytes: scale of 64..127 |
    row 1   | the same, 72 bytes                                                                     |

    layer.weight_nf4    uint8, (2, 72): a parameter that does not train, in state dicts under this name
    x @ W.t()           _unpacked: codes -> levels, times scales, in float32 -> the dtype of x

A row is whole in itself, so FSDP and ZeRO divide such a weight along its rows, and a cast of floating tensors leaves it alone.

`facade/frozen_weights.py` makes these layers, `checkpoint/` streams weights into them and exports them. The bytes of a
`Form` are in checkpoints: a change of one is a new form with a new name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from booster.number_formats.number_format import E4M3, INT8, decode_nf4, encode_nf4
from booster.number_formats.scaling import Scaling, largest_under, scale_to

_AT_ONCE = 2**18  # numbers that are wide at one time while a matrix is packed or unpacked
_TINY = 2.0**-126
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Form:
    """A form. bits: of a code. block: how many numbers of a row, one after another, share a scale; the last may be fewer.

    "int8" and "fp8" are whole numbers and e4m3 numbers times the scale, "nf4" is one of sixteen levels times the largest
    magnitude of the block.
    """

    name: Literal["int8", "fp8", "nf4"]
    bits: int
    block: int

    def row_bytes(self, columns: int) -> int:
        """Return how many bytes a row of `columns` numbers takes, with its scales."""
        return self._code_bytes(columns) + -(-columns // self.block) * _SCALE_BYTES

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the floating matrix `rows`, (m, n), as uint8 of shape (m, row_bytes(n)).

        Cost.
        """
        packed = rows.new_empty(rows.shape[0], self.row_bytes(rows.shape[1]), dtype=torch.uint8)
        for start, stop in self._pieces(*rows.shape):
            # Raises ValueError for inf or NaN, which have no code.
            packed[start:stop] = self._pack(rows[start:stop].float())
        return packed

    def unpack(self, packed: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix of `columns` columns that `pack` made `packed` of, in `dtype`; codes times scales in float32.

        Cost.
        """
        # Pieces bound the float32 copy: a large layer at once would take four times its size.
        if packed.shape[0] * columns <= _AT_ONCE:
            return self._unpack(packed, columns).to(dtype)
        rows = packed.new_empty(packed.shape[0], columns, dtype=dtype)
        for start, stop in self._pieces(packed.shape[0], columns):
            rows[start:stop] = self._unpack(packed[start:stop], columns)
        return rows

    def __str__(self) -> str:
        return self.name

    # ---------------------------------------------------------------------- inside

    def _pack(self, wide: torch.Tensor) -> torch.Tensor:
        if self.name == "nf4":
            scale = largest_under(wide, (1, self.block)).clamp(min=_TINY)
            codes = encode_nf4(wide / self._of_each(scale, wide.shape[1]))
        else:
            scaled = scale_to(wide, E4M3 if self.name == "fp8" else INT8, Scaling((1, self.block)))
            scale = scaled.scale
            codes = scaled.values.to(torch.float8_e4m3fn if self.name == "fp8" else torch.int8).view(torch.uint8)
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(f"{self.name} has no code for inf or NaN, and there is one among these weights")
        return torch.cat([codes, scale.contiguous().view(torch.uint8)], 1)

    def _unpack(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        split = self._code_bytes(columns)
        codes = packed[:, :split]
        # Copied, because a view of wider numbers wants them to begin at a multiple of their size.
        scale = packed[:, split:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        if self.name == "nf4":
            values = decode_nf4(codes, columns)
        else:
            values = codes.view(torch.float8_e4m3fn if self.name == "fp8" else torch.int8).float()
        return values * self._of_each(scale, columns)

    def _of_each(self, scale: torch.Tensor, columns: int) -> torch.Tensor:
        return scale.repeat_interleave(self.block, 1)[:, :columns]

    def _code_bytes(self, columns: int) -> int:
        return -(-columns * self.bits // 8)

    def _pieces(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        step = max(1, _AT_ONCE // max(1, columns))
        for start in range(0, rows, step):
            yield start, min(start + step, rows)


FORMS = {form.name: form for form in (Form("int8", 8, 128), Form("fp8", 8, 128), Form("nf4", 4, 64))}


class FrozenLinear(nn.Linear):
    """An `nn.Linear` with a weight that does not train, stored in a `Form` or in a floating dtype; made of one with `of`.

    The weight is unpacked in forward, and again in backward: no wide copy of it is kept, and no input. It is one uint8
    parameter under the name of its form, such as `weight_nf4`, so that a state dict says what it holds, and loads into
    layers of the same form only; `weight` is the same tensor. In a floating dtype it is the parameter `weight`.

    Inputs have any shape (..., in_features). compute_dtype: what is multiplied in; None means autocast's dtype where that is
    on, else the input's. The output has autocast's dtype, or the input's. The bias is as it was, and may train.
    """

    form: Form | None
    compute_dtype: torch.dtype | None

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        form: Form | torch.dtype,
        *,
        compute_dtype: torch.dtype | None = None,
        weight: torch.Tensor | None = None,
    ) -> FrozenLinear:
        """Return the layer that replaces `linear`, with its bias and hooks. weight: as stored; None: no values."""
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__)
        layer.form = form if isinstance(form, Form) else None
        layer.compute_dtype = compute_dtype
        stored = cls.memory(linear, form, linear.weight.device) if weight is None else weight
        layer._parameters = {
            layer.stored_name: nn.Parameter(stored, requires_grad=False),
            **{name: param for name, param in linear._parameters.items() if name != "weight"},
        }
        return layer

    @staticmethod
    def memory(linear: nn.Linear, form: Form | torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory without values for the weight of `linear`, stored in `form`."""
        rows, columns = linear.out_features, linear.in_features
        if isinstance(form, Form):
            return torch.empty(rows, form.row_bytes(columns), dtype=torch.uint8, device=device)
        return torch.empty(rows, columns, dtype=form, device=device)

    @property
    def stored_name(self) -> str:
        """The name of the stored weight among the parameters."""
        return "weight" if self.form is None else f"weight_{self.form.name}"

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight as it is stored."""
        return self._parameters[self.stored_name]  # type: ignore[return-value]

    def unpacked(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight as a matrix in `dtype`."""
        return _unpacked(self.weight, self.form, self.in_features, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        given = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        dtype = self.compute_dtype or given
        bias = None if self.bias is None else self.bias.to(dtype)
        y: torch.Tensor = _Product.apply(x.to(dtype), self.weight, bias, self.form, self.in_features)
        return y.to(given)

    def reset_parameters(self) -> None:
        """Raises RuntimeError: stored weights are loaded, not initialised."""
        raise RuntimeError(
            f"a {type(self).__name__} has a stored weight, which has no initial values; give the model its weights by "
            "booster.load_weights"
        )

    def extra_repr(self) -> str:
        stored = self.weight.dtype if self.form is None else self.form
        return f"{super().extra_repr()}, stored={stored}, compute_dtype={self.compute_dtype}"


def _unpacked(stored: torch.Tensor, form: Form | None, columns: int, dtype: torch.dtype) -> torch.Tensor:
    if form is None:
        return stored.to(dtype)
    if stored.dtype != torch.uint8:
        raise RuntimeError(
            f"a weight stored in {form} was cast to {stored.dtype}, which destroys it; leave the dtype of integer parameters"
        )
    return form.unpack(stored, columns, dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, stored: torch.Tensor, bias: torch.Tensor | None, form: Form | None, columns: int
    ) -> torch.Tensor:
        # The stored weight, not the unpacked one: unpacking again takes less memory than keeping it.
        ctx.save_for_backward(stored)
        ctx.form, ctx.columns = form, columns
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, _unpacked(stored, form, columns, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (g,) = grads
        (stored,) = ctx.saved_tensors
        of_x = of_bias = None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = (g.reshape(-1, g.shape[-1]) @ _unpacked(stored, ctx.form, ctx.columns, g.dtype)).view(
                    *g.shape[:-1], ctx.columns
                )
            if ctx.needs_input_grad[2]:
                of_bias = g.reshape(-1, g.shape[-1]).sum(0)
        return of_x, None, of_bias, None, None


_ORIGINS = "booster_loaded_from"


def remember_origin(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Note that the tensor `name` of `module` itself was loaded from a file that has it in `dtype`."""
    module.__dict__[_ORIGINS] = {**origins_of(module), name: dtype}


def origins_of(module: nn.Module) -> Mapping[str, torch.dtype]:
    """Return the dtypes, by name, in which files had the tensors that `module` itself holds."""
    origins: Mapping[str, torch.dtype] = module.__dict__.get(_ORIGINS, {})
    return origins
