"""Expert parallelism: each rank has whole experts, and tokens are sent to the rank that has theirs.

The idea: experts are one module with parameters of shape (experts, ...), called with tokens and, for each, the numbers and the
weights of its experts. The ranks that share the batch are cut into groups of `ep_size`; in such a group each rank
keeps `experts / ep_size` of the experts, and the other groups keep copies, among which `fully_shard` divides them further.
The number of ranks stays the same, and so does everything that is not experts.

An example, 4 experts on 2 ranks (ep_size=2), two experts a token:

    rank 0 has tokens a, b, with experts (0, 3) and (1, 2)        rank 1 has token c, with experts (2, 3)
    rank 0 sends a for 0 and b for 1 to itself                    a for 3 and b for 2 go to rank 1
    rank 1 computes its experts 2 and 3 on b, c and a, c          and the outputs travel back
    rank 0 adds up the two outputs of a, and those of b

What a rank computes with its experts belongs to tokens of the whole group, so the gradient of an expert is a sum over that
group already; over its copies it is summed, and divided by all ranks that share the batch.

In reading order:

    experts.py    which modules are experts, and the forward that takes the place of theirs; rows of tokens moved to ranks and
                  back, with gradients; the mesh of experts, and their parameters as DTensors on it, for `fsdp/` and `hybrid.py`
    balancing.py  the loss that keeps experts evenly used
"""

from booster.plugin.expert_parallel.balancing import balancing_loss
from booster.plugin.expert_parallel.experts import ExpertSharding, check_experts, find_experts

__all__ = ["ExpertSharding", "balancing_loss", "check_experts", "find_experts"]
