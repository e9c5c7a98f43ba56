"""Linear layers that multiply in 4 to 8 bits, forward and backward, inside a model of a higher precision.

The idea: of a training step only the products of linear layers are worth 8 bits. Weights, gradients, states, norms and losses
stay as they are under bf16 or half weights; each `nn.Linear` is replaced by a layer that holds the same parameters, so that
optimizers, plugins and checkpoints see no difference. A layer has three products, `output = x @ weight.t()`, the gradient of
`x` and that of the weight; a recipe says of each in which format, and under which scales, both matrices are rounded.

An example: one layer in `fp8` with the recipe "tensorwise", one training step.

    forward        x -> e4m3 under one scale, weight -> e4m3 under one scale; multiplied, summed in float32, given back in
                   bfloat16. The bytes of the weight are kept for the micro-batches until the step.
    saved          x.t() in e4m3, a byte a number: what the weight's gradient reads
    backward       the gradient -> e5m2; times weight.t() (the same bytes, transposed), times x.t()
    step           float32 weights, as ever; the kept bytes are dropped

Files, in reading order:

    recipes.py       formats and scales as data: `CastConfig` of a matrix, `GemmConfig` of a product, `Recipe` of a layer
    operands.py      a matrix as a product reads it: padded, rotated, quantized, transposed; weights quantized once; and
                     the products on hardware that has the format, by torch's scaled products
    linear.py        `LowPrecisionLinear` and its autograd function; the emulation in a wide dtype; delayed scaling
    conversion.py    which layers of a model are converted, how, and back; each is checked against a plain one, and timed
    low_precisions.py
                     the precisions: options, and what is around the layers
    autopilot.py     products that go over to a high precision, and back, while a run goes on

What may be touched: a new recipe is data in recipes.py, and its own kernel in operands.py; the emulation defines its
numbers, and tests hold the kernel to it. `Recipe` is hashed by torch.compile, so it stays frozen. `numerics/record` watches
products through `LowPrecisionLinear.watchers`; plugins that gather weights in fp8 set `LowPrecisionLinear.arrived`.
"""
