"""Which functions O1 runs in which dtype, by name, where `torch.autocast` alone would decide otherwise.

autocast casts matrix products and convolutions to half on every device; on CPU it leaves most of apex's float32 functions
in half, and it never widens the operands of a few that want one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F


def _names(text: str) -> list[str]:
    return text.split()


FLOAT32_FUNCTIONAL = _names(
    "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm normalize "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss "
    "binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss gaussian_nll_loss"
)
FLOAT32_TORCH = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std sum var "
    "renorm"
)
FLOAT32_TENSOR = _names("__pow__ __ipow__ __rpow__ cpu")
HALF_TORCH = _names("_grouped_mm mv addmv addr rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell")
WIDEST_TORCH = _names("addcdiv addcmul atan2 bilinear cross dot equal")
IN_PLACE = _names("addmm_ addmv_ addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ atan2_")
RECURRENT_TORCH = _names("rnn_tanh rnn_relu lstm gru")

Function = Callable[..., Any]


def float32() -> Iterator[Function]:
    """Functions whose half arguments are widened."""
    yield from (getattr(F, name) for name in FLOAT32_FUNCTIONAL)
    yield from _torch_and_tensor(FLOAT32_TORCH)
    yield from (getattr(torch.Tensor, name) for name in FLOAT32_TENSOR)


def half() -> Iterator[Function]:
    """Functions whose float32 arguments are cast to half, which autocast leaves alone on CPU, or everywhere."""
    yield from _torch_and_tensor(HALF_TORCH)


def widest() -> Iterator[Function]:
    """Functions that want operands of one dtype: float32 if any is."""
    yield from _torch_and_tensor(WIDEST_TORCH)
    yield F.bilinear


def recurrent() -> Iterator[Function]:
    """Whole recurrent layers, which have no half kernel on CPU."""
    yield from (getattr(torch, name) for name in RECURRENT_TORCH)


def like_self() -> Iterator[Function]:
    """In-place functions whose other arguments are cast to the dtype of the first."""
    yield from _torch_and_tensor(IN_PLACE)


def in_place() -> Iterator[tuple[Function, str]]:
    """In-place forms of float32 functions, and what a half tensor gets for an answer."""
    for name in FLOAT32_TORCH:
        method, function = getattr(torch.Tensor, f"{name}_", None), getattr(torch, f"{name}_", None)
        if method is not None:
            yield method, f"Cannot call in-place method {name}_ on fp16 Tensors."
        if function is not None:
            yield function, f"Cannot call in-place function {name}_ with fp16 arguments."


def _torch_and_tensor(names: list[str]) -> Iterator[Function]:
    for name in names:
        for holder in (torch, torch.Tensor):
            if hasattr(holder, name):
                yield getattr(holder, name)
