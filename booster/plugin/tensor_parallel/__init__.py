"""Tensor parallelism: the weights of single layers sharded over the ranks of a group.

The idea is Megatron's: of two linear layers with elementwise work between them the first is sharded by columns, so every rank
computes some hidden features, and the second by rows, so every rank computes one summand of the output. One all-reduce follows,
and its mirror in backward. Attention is the same with heads for hidden features.

An example, an MLP on two ranks, `tp_plan={"up": "colwise", "down": "rowwise"}`, x of 8 features, 32 hidden ones:

    up     Colwise   weight (32, 8) -> (16, 8) on each rank; x is copied, its gradient summed
    act              16 hidden features on each rank, no communication
    down   Rowwise   weight (8, 32) -> (8, 16); outputs are summed over the ranks, then the bias is added once

Parameters become DTensors, so that optimizers, checkpoints and FSDP know what they are. The module computes on plain local
tensors, in a forward that replaces its own, so no operator needs to know DTensor. In reading order:

    local_style.py    `LocalStyle`, the base of all styles: what becomes of parameters, of inputs, of outputs; the collectives
                      that activations pass, with their gradients
    linear_styles.py  `Colwise`, `Rowwise`
    module_styles.py  embeddings, experts, torch's MultiheadAttention by heads, and `Region`: unsharded modules that read or
                      return sharded activations
    tp_plan.py        the user's `tp_plan`, patterns and names of styles, to one style for each module; refusals
    known_plans.py    plans for models that bring none, from classes, names and widths (and the source of a forward); a plan
                      changed so that activations between the blocks' branches are sharded along the sequence
    apply.py          `apply_tensor_parallel` carries a plan out, in place; tied parameters stay one parameter

A new style is a subclass of `LocalStyle` and a line in `STYLES`. `HybridParallelPlugin` is who calls `apply.py`.
"""

from booster.plugin.tensor_parallel.apply import apply_tensor_parallel, check_tensor_parallel, fsdp_placement
from booster.plugin.tensor_parallel.linear_styles import Colwise, Rowwise
from booster.plugin.tensor_parallel.module_styles import EmbeddingParallel, Region

__all__ = [
    "Colwise",
    "EmbeddingParallel",
    "Region",
    "Rowwise",
    "apply_tensor_parallel",
    "check_tensor_parallel",
    "fsdp_placement",
]
