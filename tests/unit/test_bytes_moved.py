"""Bytes that a low-precision layer reads and writes: those of the formula in docs/design/kernels.md, on either road."""

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from booster.mixed_precision.low_precision import operands
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.operands import QuantizedWeights
from booster.mixed_precision.low_precision.recipes import FP8_RECIPES, DelayedScale


class Moved(TorchDispatchMode):
    """Bytes that operations read and write, of those that make a tensor."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_mm_v2.default:  # which torch 2.11 has not on a CPU
            out = args[0].new_empty(len(args[0]), args[1].shape[1], dtype=torch.bfloat16)
        else:
            out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if out.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in given}:
            self.bytes += sum(each.nbytes for each in (*given, out))
        return out


# Of a layer in bfloat16, tensorwise, for each number of its input, its weight and the gradient of its output. Products
# read them twice as a byte each and write them once as two: 4. Compiled, one pass reads an operand for its largest number,
# one writes it by rows and one turned: 2 + (2 + 1) + (2 + 1). One operation after the other: float32 6, magnitudes 8, the
# largest 4, the quotient 8, the cast 5, and the turned copy 2. See docs/design/kernels.md.
MOVED = {"compiled": 4 + 8, "one by one": 4 + 33}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler about itself
@pytest.mark.parametrize("way", [pytest.param("compiled", marks=pytest.mark.slow), "one by one"])
def test_a_layer_moves_the_bytes_of_the_table(way, monkeypatch):
    torch.compiler.reset()
    tokens, inputs, outputs = 96, 64, 32
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    layer = LowPrecisionLinear.of(linear, FP8_RECIPES["tensorwise"], kernels=True)
    layer.weights = QuantizedWeights()
    x, g = (torch.randn(tokens, n, dtype=torch.bfloat16, requires_grad=True) for n in (inputs, outputs))
    moved, run = Moved(), layer
    if way == "compiled":
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, *source: lambda *args: None)
        run = torch.compile(layer, fullgraph=True, dynamic=False)

        def note(nodes):
            moved.bytes += sum(each.get_read_write_buffers_sizes() for node in nodes for each in node.get_nodes())
            return nodes

        with config.patch(force_disable_caches=True, _post_fusion_custom_pass=note):
            run(x).backward(g)
    else:
        with moved:
            run(x).backward(g.detach())
    numbers = tokens * inputs + inputs * outputs + tokens * outputs
    assert moved.bytes == pytest.approx(MOVED[way] * numbers, abs=500)  # of scalars


class EnoughSeenError(Exception):
    pass


# Of an operand that is written by rows and turned, bytes of each number: read for the largest; read, and written by rows;
# turned from there. Where the host knows that a scale is there, one kernel finds the largest and rounds.
ROUNDED = {"its own": (2, 3, 2), "delayed, not known": (2, 3, 2), "delayed, known": (3, 2)}


@pytest.mark.slow_cases("delayed, not known")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler about itself
@pytest.mark.parametrize("scale", ROUNDED)
def test_a_graph_that_knows_a_delayed_scale_reads_an_operand_once_less(scale):
    """As Inductor fuses for a GPU; what it would write for Triton is not written."""
    torch.compiler.reset()
    recipe, x = FP8_RECIPES["tensorwise"], torch.zeros(512, 1024, dtype=torch.bfloat16)
    if scale != "its own":
        each = [DelayedScale(torch.ones(()), torch.zeros(()), scale == "delayed, known") for _ in range(3)]
        recipe = recipe.delayed(*each)
    seen, how, other = [], recipe.output, recipe.weight_gradient

    def note(nodes):
        seen.extend(round(each.get_read_write_buffers_sizes() / x.numel()) for each in nodes)
        raise EnoughSeenError

    def both(x):
        made, transposed = operands.quantize_with_transpose(x, how.left, other.right)
        return made.values, made.scale, transposed.values

    with config.patch(cpu_backend="triton", force_disable_caches=True, _post_fusion_custom_pass=note):
        with pytest.raises(Exception, match="EnoughSeenError"):
            torch.compile(both, fullgraph=True, dynamic=False)(x)
    assert tuple(each for each in seen if each) == ROUNDED[scale]
