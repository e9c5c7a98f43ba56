"""Frozen weights in less memory than they are computed in, as under LoRA: how they are stored, and the layer that holds them.

The idea: a weight that does not train needs no gradient, no state and no float32 master; it is stored in 4 or 8 bits and
unpacked where a product reads it, in forward and again in backward. No high-precision copy of it is kept.

An example: a weight of 2 rows and 128 columns in "nf4", which has a scale for each block of 64 numbers::

    row 0   | 64 bytes: two codes of 4 bits each | 4 bytes: scale of 0..63 | 4 bytes: scale of 64..127 |
    row 1   | the same, 72 bytes                                                                     |

    layer.weight_nf4    uint8, (2, 72): a parameter that does not train, in state dicts under this name
    x @ W.t()           _unpacked: codes -> levels, times scales, in float32 -> the dtype of x

A row is whole in itself, so FSDP and ZeRO divide such a weight along its rows, and a cast of floating tensors leaves it alone.

- `frozen_linear.py`: `Form`, its three instances in `FORMS`, packing and unpacking; `FrozenLinear`, an `nn.Linear` with such
  a weight; and in which dtype a file had the tensors of a module.

`facade/frozen_weights.py` makes these layers, `checkpoint/` streams weights into them and exports them. The bytes of a
`Form` are in checkpoints: a change of one is a new form with a new name.
"""

from booster.frozen.frozen_linear import FORMS, Form, FrozenLinear, note_origin, origins_of

__all__ = ["FORMS", "Form", "FrozenLinear", "note_origin", "origins_of"]
