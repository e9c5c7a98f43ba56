"""Number formats as data, rounding to them, and the scales that go with them. Uses torch alone, on any device."""

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
from booster.number_formats.scaling import Scaled, Scaling, scale_to

__all__ = [
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "INT8",
    "TF32",
    "NumberFormat",
    "Scaled",
    "Scaling",
    "decode",
    "encode",
    "noise_of",
    "round_to",
    "scale_to",
]
