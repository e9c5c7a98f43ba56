"""Tensor parallelism: the weights of single layers divided among ranks."""

from booster.plugin.tensor_parallel.apply import apply_tensor_parallel, check_tensor_parallel, fsdp_placement
from booster.plugin.tensor_parallel.styles import Colwise, EmbeddingParallel, Region, Rowwise

__all__ = [
    "Colwise",
    "EmbeddingParallel",
    "Region",
    "Rowwise",
    "apply_tensor_parallel",
    "check_tensor_parallel",
    "fsdp_placement",
]
