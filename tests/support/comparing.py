"""Comparisons to the bit, whatever containers hold the numbers, and the weights of a model wherever ranks hold them."""

from collections.abc import Iterable

import torch

from booster.common.torch_internals.tensor_internals import gather_full


def difference(one, other, where=""):
    """The place of the first difference of two nested containers of tensors and plain values; None if there is none.

    Tensors are the same with equal dtypes, shapes and numbers; NaN is NaN.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype == other.dtype and torch.equal(one, other):
            return None
        if one.dtype != other.dtype or one.shape != other.shape or not one.is_floating_point():
            return where or "."
        nan = torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        return None if nan else where or "."
    if isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            return where or "."
        pairs = [(one[key], other[key], key) for key in one]
    elif isinstance(one, Iterable) and not isinstance(one, (str, bytes, set, torch.Tensor)):
        one, other = list(one), list(other) if isinstance(other, Iterable) else []
        if len(one) != len(other):
            return where or "."
        pairs = [(a, b, index) for index, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other or (one != one and other != other) else where or "."
    return next((found for a, b, key in pairs if (found := difference(a, b, f"{where}/{key}")) is not None), None)


def same(one, other):
    return difference(one, other) is None


def assert_same(one, other, where=""):
    place = difference(one, other, where)
    assert place is None, f"they differ at {place}"


def whole(tensor):
    """A copy of all of `tensor`; a collective for a DTensor."""
    tensor = tensor.detach()
    return (gather_full(tensor) if hasattr(tensor, "full_tensor") else tensor).clone()


def weights(model):
    """By name, all weights in float32, whole."""
    return {name: whole(param).float() for name, param in model.named_parameters()}


def flat(model):
    """All weights in float32, whole, end to end."""
    return torch.cat([param.flatten() for param in weights(model).values()])
