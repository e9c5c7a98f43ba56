"""Number formats of 4 to 19 bits as data, rounding to them, and the scales that go with them. On any device, by torch alone.

The idea: a format is a handful of numbers (bits of exponent and mantissa, bias, the largest), so one function rounds to all of
them, and what it returns is float32 again: a rehearsal of hardware that has the format. A tensor meant for such hardware is
rounded under scales, so that its largest numbers fit.

An example: a matrix in mxfp8, which shares a power of two among each 32 numbers of a row.

    scaled = scale_to(x, E4M3, Scaling((1, 32), "power_of_two"))
    scaled.values        float8_e4m3fn, of the shape of x
    scaled.scale         float32, (rows, columns / 32): the least powers of two for which no number is cut off
    scaled.dequantize()  float32: values times scales; off by at most 1/16 of each number

The files, in reading order:

    number_format.py
                  `NumberFormat` and the formats, `round_to`, bit patterns (`encode`), noise for stochastic
                  rounding that is a hash of the tensor, and NF4, which is a table of 16 numbers.
    scaling.py    `Scaling` says what shares a scale; `scale_to` gives a `ScaledTensor`. Rotation by a Hadamard matrix before.
                  Numbers as e4m3 bytes to be sent between ranks.

Who depends on it: the recipes of mixed_precision/low_precision, frozen layers (NF4), what ranks send in fp8 (plugin/ddp,
shards), exports of weights. Kernels of Triton (kernels/matrices.py) make the same bits and are held to `scale_to`, so an order
of operations that rounds otherwise here is an error there. A new format is a line in number_format.py.
"""
