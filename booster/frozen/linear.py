"""A linear layer with a frozen weight that is stored in another form than it is multiplied in; dtypes in loaded files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from booster.frozen.forms import Form


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
        """Return the layer that takes the place of `linear`, with its bias and hooks.

        weight: as it is stored, see `memory`; None means memory without values, where the old one is.
        """
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


def note_origin(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Note that the tensor `name` of `module` itself was loaded from a file that has it in `dtype`."""
    module.__dict__[_ORIGINS] = {**origins_of(module), name: dtype}


def origins_of(module: nn.Module) -> Mapping[str, torch.dtype]:
    """Return the dtypes, by name, in which files had the tensors that `module` itself holds."""
    origins: Mapping[str, torch.dtype] = module.__dict__.get(_ORIGINS, {})
    return origins
