"""Weights that only autocast's products read, so that rounding them to half before they are gathered changes nothing."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from booster.mixed_precision.keep_fp32 import Float32Forward
from booster.model.modules import tensor_places

# The forward of each hands these parameters to functions that autocast runs in half, and to no others.
_PRODUCTS: tuple[tuple[Any, frozenset[str]], ...] = (
    *(
        (kind, frozenset({"weight", "bias"}))
        for kind in (
            nn.Linear,
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
            nn.ConvTranspose1d,
            nn.ConvTranspose2d,
            nn.ConvTranspose3d,
        )
    ),
    (
        nn.MultiheadAttention,
        frozenset({"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}),
    ),
)


def product_modules(model: nn.Module, *, placed: bool = False) -> frozenset[str]:
    """Return the names of modules of `model` with parameters that nothing reads but products which autocast runs in half.

    Linear and convolution layers, MultiheadAttention, and Conv1D of transformers, as long as their forward is that of the
    class; with float32 parameters that belong to no other kind of module as well. Not those inside a module that leaves
    autocast by `keep_fp32`. A forward that reads the weight of such a module by itself, or leaves autocast by itself, is not
    seen.
    placed: those, too, with a forward that a plugin wrapped to run it on a shard.
    """
    places = [(tensor, place) for tensor, found in tensor_places(model).items() for place in found]
    refused = {
        place.holder
        for tensor, place in places
        if tensor.dtype != torch.float32
        or not _is_product(place.holder, place.own, placed=placed)
        or any(isinstance(vars(module).get("forward"), Float32Forward) for module in place.path)
    }
    while True:
        # A parameter that two modules share follows the stricter one, and takes what else that module holds along.
        strict = {tensor for tensor, place in places if place.holder in refused}
        more = {place.holder for tensor, place in places if tensor in strict}
        # Attention that stays in float32 reads the weight of its output projection, and does not call that module.
        more |= {each.out_proj for each in refused if isinstance(each, nn.MultiheadAttention)}
        if more <= refused:
            break
        refused |= more
    holders = {place.holder for _, place in places} - refused
    return frozenset(name for name, module in model.named_modules() if module in holders)


def multiplies(module: nn.Module) -> bool:
    """Return whether `module` is a layer that multiplies by its weight, so that autocast runs it in half."""
    return _is_conv1d(module) or any(isinstance(module, base) for base, _ in _PRODUCTS)


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_product(module: nn.Module, own: str, *, placed: bool) -> bool:
    kind, forward = type(module), vars(module).get("forward")
    if placed and forward is not None:
        forward = None if getattr(inspect.unwrap(forward), "__func__", None) is kind.forward else forward
    if _is_conv1d(module):
        return own in {"weight", "bias"}
    for base, names in _PRODUCTS:
        if isinstance(module, base):
            same = kind.forward is base.forward
            same &= getattr(kind, "_conv_forward", None) is getattr(base, "_conv_forward", None)
            return same and forward is None and own in names
    return False
