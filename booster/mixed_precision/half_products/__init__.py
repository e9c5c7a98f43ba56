"""Products of half-precision tensors on a CPU: multiplied in float32 where that is faster, to the numbers of hardware in half.

The idea: a product of two halves is exact in float32. Hardware with units for a half dtype rounds operands to it, sums in
float32 and rounds the result once. So does this room, by torch's float32 kernels: a CPU without such units multiplies halves 2
to 150 times slower than float32. The numbers differ from those of the hardware by the order of the sum alone, and an overflow
of float16 is an infinity in both.

An example: `F.linear(x, weight)` under autocast to bfloat16, `x` and `weight` in float32.

    Float32Products.__torch_function__     a torch function mode; it finds "linear" in `_PRODUCTS` as a matrix product
        x, weight -> bfloat16 -> float32   rounded once; the float32 copy of a weight is kept until the region ends
        F.linear in float32                with autocast off; autograd records this computation, and differentiates it
        result -> bfloat16                 what autocast would have returned
    backward                               needs no mode; autograd kept the bfloat16 operands, not the float32 ones

The files, in reading order:

    product_choice.py     `HalfProducts`: the choice of one precision ("auto", "native", "float32"), agreed among ranks, and the
                          contexts for forward and backward passes. What this CPU is slow in: `slow_products` of
                          `mixed_precision/hardware.py`.
    float32_products.py   `Float32Products`, the mode, and the table of products. It also casts products that autocast has no
                          rule for, such as those of experts, on every device.
    half_sums.py          losses, norms and other sums, which CPU kernels add up in half, computed in float32.
    probability_losses.py `binary_cross_entropy`, which all halves refuse.

What may be touched: a new function of torch that multiplies goes into `_products()`, one that sums into `FLOAT32_SUMS`. Each
line here runs for every torch function of a forward pass: `tests/unit/test_calls.py` counts the Python calls. What was measured
and tried is in docs/design/half_products.md. Every precision with a half dtype holds a `HalfProducts` as its `half_products`.
"""
