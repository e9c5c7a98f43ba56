"""Products of halves in float32 on several ranks: all agree on them, and every plugin trains with them."""

import functools
from contextlib import contextmanager

import pytest
import torch
from matrix import PRECISIONS, Transformer, loss_of
from test_hybrid import batch
from test_two_optimizers import BLOCKS, PLUGINS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.mixed_precision import hardware
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.plugin import HybridParallelPlugin, TorchDDPPlugin

HALVES = {torch.bfloat16, torch.float16}


class Products(TorchDispatchMode):
    """The dtypes that matrix products of this rank read."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            self.dtypes |= {each.dtype for each in args if type(each) is torch.Tensor and each.is_floating_point()}
        return func(*args, **(kwargs or {}))


def trained(rank, world_size, name, precision, choice, num_blocks):
    """The losses of three steps, and what products of this rank read in the last."""
    torch.manual_seed(7)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[name](), half_products=choice)
    model = Transformer(num_blocks=num_blocks)
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
    losses = []
    for step in range(3):
        products = Products()
        with products:
            loss = booster.execute_pipeline(iter([batch(step, booster)]), model, criterion, optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, products.dtypes


CHOICES = {"bf16": "float32", "fp16_naive": "auto"}
OF_RANKS = [name for name in PLUGINS if name != "single"]
QUICK = [(name, list(CHOICES)[i % 2]) for i, name in enumerate(OF_RANKS)]  # each plugin once, the precisions by turns
OTHERS = [(name, precision) for precision in CHOICES for name in OF_RANKS if (name, precision) not in QUICK]


@contextmanager
def unlike_cpus(rank):
    """Of which only the first rank's is slow in half."""
    own, hardware.slow_products = hardware.slow_products, lambda dtype: frozenset() if rank else hardware.KINDS
    try:
        yield
    finally:
        hardware.slow_products = own


def train_all(rank, world_size, cases):
    with unlike_cpus(rank):
        return {(name, p): trained(rank, world_size, name, p, CHOICES[p], BLOCKS.get(name, 2)) for name, p in cases}


@pytest.mark.parametrize("cases", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_every_plugin_trains_with_products_in_float32_as_asked_or_as_one_cpu_needs_and_as_one_process_does(
    ranks2, cases
):
    found = ranks2(train_all, cases)
    alone = functools.cache(lambda precision, num_blocks: trained(0, 1, "single", precision, "float32", num_blocks))
    for name, precision in cases:
        expected, _ = alone(precision, BLOCKS.get(name, 2))
        # Each data-parallel rank reports its own share of the batch.
        losses = torch.tensor([each[name, precision][0] for each in found]).mean(0)
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=0, atol=0.05, msg=f"{name} {precision}")
        for each in found:
            assert not each[name, precision][1] & HALVES, f"{name} {precision}"


def agreed(rank, world_size):
    """Of ranks that stand on unlike CPUs: what each widens."""
    with unlike_cpus(rank):
        booster = Booster("cpu", "bf16", TorchDDPPlugin(), half_products="auto")
    alone = sorted(booster.precision.half_products.kinds)
    booster.boost(nn.Linear(2, 2))
    together = sorted(booster.precision.half_products.kinds)
    native = Booster("cpu", "bf16", TorchDDPPlugin(), half_products="native")
    native.boost(nn.Linear(2, 2))
    return alone, together, sorted(native.precision.half_products.kinds)


def test_ranks_on_unlike_cpus_widen_what_any_of_them_is_slower_in(ranks2):
    everything = sorted(hardware.KINDS)
    assert ranks2(agreed) == [(everything, everything, []), ([], everything, [])]


def on_torchs_styles(rank, world_size):
    torch.manual_seed(7)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan=plan)
    booster = Booster("cpu", "bf16_naive", plugin, half_products="float32")
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 3, 8)).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_styles_of_torch_whose_layers_multiply_dtensors_train_too(ranks2):
    first, second = ranks2(on_torchs_styles)
    assert first == second
    assert first[-1] < first[0]


def summed(rank, world_size):
    """Gradients of a bias and of a row of embeddings that are DTensors, each of which is a sum of 4,096 ones."""
    mesh = init_device_mesh("cpu", (world_size,))
    products = HalfProducts(torch.bfloat16)
    products.choose("float32")

    def divided(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement]).requires_grad_()

    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = divided(torch.randn(4096, 8).bfloat16(), Shard(0))
        weight, bias = (divided(torch.ones(8, dtype=dtype), Replicate()) for _ in range(2))
        with products.forward_context("cpu"):
            out = F.layer_norm(x, (8,), weight, bias)
        out.backward(torch.ones_like(out))
        found.append(bias.grad.full_tensor().tolist())
    for placement in (Shard(0), Shard(1), Replicate()):
        table = divided(torch.ones(4, 8, dtype=torch.bfloat16), placement)
        index = distribute_tensor(torch.zeros(4096, dtype=torch.long), mesh, [Replicate()])
        with products.forward_context("cpu"):
            out = F.embedding(index, table).redistribute(placements=[Replicate()])
        out.backward(torch.ones_like(out))
        found.append(table.grad.full_tensor()[0].tolist())
    return found


def test_sums_over_dtensors_are_float32(ranks2):
    assert ranks2(summed) == [[[4096.0] * 8] * 5] * 2
