"""What each module of a model is stored in, was loaded from, computes in, and gets gradients in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from booster.common import arguments
from booster.common.arguments import columns
from booster.frozen import FrozenLinear, origins_of
from booster.interface.model import PrecisionModule, precision_of
from booster.mixed_precision.base import MixedPrecision
from booster.mixed_precision.half_products.product_choice import multiplies
from booster.mixed_precision.keep_fp32 import Float32Forward
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.policy import DtypePolicy
from booster.model.modules import bare, tensor_places, uncompiled
from booster.model.params import local_shard

_COLUMNS = ("module", "kind", "stored in", "loaded from", "computes in", "gradient in", "bytes")


@dataclass(frozen=True)
class DescribedModule:
    """A module that holds tensors, children aside; several dtypes have commas between them.

    Attributes:
        name: in the model; "(model)" for the model itself.
        kind: its class.
        stored: dtypes of its parameters and floating buffers, or the form of a frozen weight.
        loaded: the same in the file that `booster.load_weights` read, "" where it did not.
        computes: what its products or operations run in. For frozen layers that follow autocast or their input, and for modules
            other than products under autocast, "as its input".
        gradient: of what trains, "" where nothing does.
        bytes: of all its tensors on this rank; a tensor that several modules share counts with the first.
        numbers: how many numbers the parameters have, unpacked.
    """

    name: str
    kind: str
    stored: str
    loaded: str
    computes: str
    gradient: str
    bytes: int
    numbers: int


@dataclass(frozen=True)
class Description:
    """The modules of a model that hold tensors, in its order; `str()` is a table of them.

    Attributes:
        model: name of its class.
        precision: in which it runs.
        rows: one for each module.
    """

    model: str
    precision: str
    rows: tuple[DescribedModule, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parameters and buffers on this rank."""
        return sum(row.bytes for row in self.rows)

    @property
    def numbers(self) -> int:
        """How many numbers the parameters on this rank have, unpacked."""
        return sum(row.numbers for row in self.rows)

    def __str__(self) -> str:
        lines = [
            _COLUMNS,
            *((r.name, r.kind, r.stored, r.loaded, r.computes, r.gradient, f"{r.bytes:,}") for r in self.rows),
        ]
        table = columns(lines, right=[len(_COLUMNS) - 1])
        under = f" under {self.precision}" if self.precision else ""
        share = f", {self.bytes / self.numbers:.2f} bytes a parameter" if self.numbers else ""
        return "\n".join([f"{self.model}{under}: {self.bytes:,} bytes{share}", table])


def describe(model: nn.Module) -> Description:
    """Return what each module of `model` is stored in, was loaded from, computes in and gets gradients in, and its bytes.

    model: any module, boosted or not. What a precision will do to it is known after `boost` only. Of what a plugin divides,
    this rank's part is counted; masters and states that an optimizer holds are not. No collective, and nothing is run.
    """
    arguments.instance("model", model, nn.Module, "a torch.nn.Module, boosted or not")
    wrapper = uncompiled(model)
    boosted = wrapper if isinstance(wrapper, PrecisionModule) else None
    inner = bare(model if boosted is None else boosted.module)
    # What a precision will do to a model is known after `boost` only.
    precision = None if boosted is None else precision_of(boosted)
    policy = getattr(precision, "policy", None) or DtypePolicy()
    products = precision.products if isinstance(precision, MixedPrecision) else None
    in_float32 = {
        child
        for module in inner.modules()
        if isinstance(vars(module).get("forward"), Float32Forward)
        for child in module.modules()
    }
    # A tied tensor is in memory once, so its bytes count with one of its holders.
    first = {id(tensor): places[0].holder for tensor, places in tensor_places(inner, buffers=True).items()}
    rows = []
    for name, module in inner.named_modules():
        own = [*_own(module)]
        if not own:
            continue
        counted = [tensor for _, tensor in own if first[id(tensor)] is module]
        origins = origins_of(module)
        rows.append(
            DescribedModule(
                name=name or "(model)",
                kind=type(module).__name__,
                stored=_stored(module, own),
                loaded=_listed(origins.get(own_name) for own_name, _ in own),
                computes=_computes(module, own, policy, products, module in in_float32),
                gradient=_listed(tensor.dtype for _, tensor in own if tensor.requires_grad),
                bytes=sum(local_shard(tensor).numel() * tensor.element_size() for tensor in counted),
                numbers=sum(_numbers(module, tensor) for tensor in counted if isinstance(tensor, nn.Parameter)),
            )
        )
    return Description(type(inner).__name__, "" if precision is None else type(precision).__name__, tuple(rows))


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _numbers(module: nn.Module, param: torch.Tensor) -> int:
    local = local_shard(param)
    if isinstance(module, FrozenLinear) and module.form is not None and param is module.weight:
        # A row of a packed weight is bytes of codes and scales, not one number each.
        return local.shape[0] * module.in_features
    return local.numel()


def _stored(module: nn.Module, own: list[tuple[str, torch.Tensor]]) -> str:
    form = module.form if isinstance(module, FrozenLinear) else None
    packed = module.weight if isinstance(module, FrozenLinear) and form is not None else None
    return _listed(str(form) if tensor is packed else tensor.dtype for _, tensor in own)


def _computes(
    module: nn.Module, own: list[tuple[str, torch.Tensor]], policy: DtypePolicy, products: str | None, in_float32: bool
) -> str:
    floating = [tensor.dtype for _, tensor in own if tensor.is_floating_point()]
    wide = _listed(floating) if policy.param is None else _listed([policy.param])
    multiplying = isinstance(module, FrozenLinear) or multiplies(module)
    if in_float32:
        return "float32"
    if isinstance(module, LowPrecisionLinear) and not module.in_high_precision:
        return module.recipe.name
    if isinstance(module, FrozenLinear) and module.compute_dtype is not None:
        return _listed([module.compute_dtype])
    if multiplying and policy.compute is not None:
        return _listed([policy.compute])
    if multiplying and products is not None:
        return products
    # autocast leaves what is no product in the dtype that arrives.
    if policy.compute is not None or (isinstance(module, FrozenLinear) and policy.param is None):
        return "as its input"
    return wide


def _listed(values: Iterable[torch.dtype | str | None]) -> str:
    """The different ones, in order, with commas."""
    return ", ".join(dict.fromkeys(str(value).removeprefix("torch.") for value in values if value is not None))
