"""Sequence (context) parallelism: ranks that share sequences, each with some of the tokens.

The idea: all layers but attention work token by token, so a rank runs the user's own forward on its tokens. Parameters are
placed as for data parallelism over these ranks too, gradients are averaged over them, and the loss is one over the tokens of
all ranks, so nothing but attention, the batch and the loss knows of it. No precision does.

    batch = b.shard_sequence(batch)        `shard_batch`: cut, padded; how, a `SequenceCut` keeps for the forward pass
    output = model(...)                    `SequenceMode` sees the functions of torch that forward calls
      attention by torch                   "all_to_all": heads for tokens and back; "ring_attn": keys go round
      what else reads several tokens       raises, by name
    loss = b.token_mean(losses, counted)   sum over all ranks by their number; its gradient suits an average over ranks

Files, in reading order:

    sequence_cut.py            which tokens a rank has; padding, documents; a batch cut by it; the loss
    all_to_all.py              attention by heads (Ulysses); masks of a rank's tokens made whole
    ring.py                    attention in a ring, joined by log-sum-exp
    attention_mode.py          what a forward pass calls: joined, refused, or left alone; modules that cannot run so. Masks are
                               refused where they are read: here, in all_to_all.py and in transformers_attention.py
    transformers_attention.py  masks of transformers models, for all tokens
    sequence_parallel.py       `SequenceParallel`, which plugins make: all of it for one group of ranks

torch's own `torch.distributed.tensor.experimental` context parallelism replaces `F.scaled_dot_product_attention` for the whole
process, takes no masks, drops the weight of padding, and wants a cut that is settled when a context begins; the zigzag cut and
the join in float32 are the same.
"""

from booster.plugin.sequence_parallel.sequence_cut import shard_batch, token_mean
from booster.plugin.sequence_parallel.sequence_parallel import CutMode, SequenceParallel, check_sizes

__all__ = ["CutMode", "SequenceParallel", "check_sizes", "shard_batch", "token_mean"]
