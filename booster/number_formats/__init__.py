"""Number formats as data, rounding to them, and the scales that go with them. Uses torch alone, on any device."""

from booster.number_formats.blocks import BLOCK, BLOCK_BYTES, decode_blocks, encode_blocks
from booster.number_formats.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    INT8,
    TF32,
    NumberFormat,
    decode,
    encode,
    noise_of,
    round_to,
)
from booster.number_formats.nf4 import NF4_LEVELS, decode_nf4, encode_nf4
from booster.number_formats.scaling import Scaled, Scaling, largest_under, power_of_two_above, scale_to
from booster.number_formats.tensorwise import decode_tensorwise, encode_tensorwise

__all__ = [
    "BLOCK",
    "BLOCK_BYTES",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "INT8",
    "NF4_LEVELS",
    "TF32",
    "NumberFormat",
    "Scaled",
    "Scaling",
    "decode",
    "decode_blocks",
    "decode_nf4",
    "decode_tensorwise",
    "encode",
    "encode_blocks",
    "encode_nf4",
    "encode_tensorwise",
    "largest_under",
    "noise_of",
    "power_of_two_above",
    "round_to",
    "scale_to",
]
