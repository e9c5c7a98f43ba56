"""Models that torch.compile has wrapped train on ranks as those that it has not."""

import pytest
import test_ddp
import test_fsdp
import test_zero_overlap
import torch

from booster import Booster
from booster.plugin import LowLevelZeroPlugin

# What the compiler imports takes each rank longer than all of these; so they share a file, and its ranks.


def under_ddp(rank, world_size, precision):
    return test_ddp.train(rank, world_size, precision, model=torch.compile(test_ddp.net(), backend="eager"))[0]


@pytest.mark.slow_cases("fp32", "bf16")
@pytest.mark.parametrize("precision", test_ddp.PRECISIONS)
def test_a_compiled_model_trains_under_ddp(ranks2, precision):
    losses, *_ = test_ddp.train(0, 1, precision)
    for other in ranks2(under_ddp, precision):
        assert (other - losses).abs().max() <= test_ddp.TOLERANCE[precision]


@pytest.mark.parametrize(
    "precision", [p if p == "fp16" else pytest.param(p, marks=pytest.mark.slow) for p in test_ddp.PRECISIONS]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile around DDP
def test_compiled_it_accumulates_with_a_short_last_group_as_the_whole_batch(ranks2, precision):
    expected = test_ddp.accumulate_reference(precision)
    for history in ranks2(test_ddp.accumulate, precision, True):
        for params, wanted in zip(history, expected, strict=True):
            assert (params - wanted).abs().max() <= test_ddp.TOLERANCE[precision]


def under_fsdp(rank, world_size, precision, compiled):
    model = test_fsdp.transformer(num_blocks=2)
    model = torch.compile(model, backend="eager") if compiled else model
    parts = test_fsdp.boost(world_size, precision, model)
    return torch.stack([test_fsdp.one_step(*parts, step, rank, world_size)[0] for step in range(3)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile around hooks
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "bf16_naive"])
def test_a_compiled_model_trains_under_fsdp(ranks2, precision):
    losses = under_fsdp(0, 1, precision, compiled=False)
    for other in ranks2(under_fsdp, precision, True):
        assert (other - losses).abs().max() <= test_fsdp.tolerance(precision)


def under_zero(rank, world_size):
    torch.manual_seed(0)
    net = torch.compile(test_zero_overlap.Net(), backend="eager")
    booster = Booster("cpu", "fp32", LowLevelZeroPlugin(overlap_allgather=True))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain = test_zero_overlap.Job("fp32")
    with test_zero_overlap.late():
        for number in range(2):
            x = torch.randn(8, test_zero_overlap.DIM, generator=torch.Generator().manual_seed(number + rank))
            booster.backward(model(x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            output = model(x)
        plain.net.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.allclose(output, plain.net(x), atol=1e-6)


@pytest.mark.slow
def test_a_compiled_model_waits_for_all_weights_on_their_way_when_forward_begins(ranks2):
    ranks2(under_zero)
