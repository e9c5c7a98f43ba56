"""What updates ask of ranks, and what they refuse on each of them alike."""

import math
import warnings

import pytest
import torch
from choices import plugins
from matrix import TP_PLAN, Transformer, loss_of
from test_hybrid import batch

from booster import Booster

PLUGINS = plugins("ddp", "fsdp", "zero1", "zero2", "tp", "pp", tp_plan=TP_PLAN)


def begins_anew(rank, world_size, name, precision):
    torch.manual_seed(7)
    model = Transformer()
    booster = Booster("cpu", precision, PLUGINS[name]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, loss_of)

    def step():
        booster.execute_pipeline(iter([batch(0, booster)]), model, criterion, optimizer)
        assert optimizer.step()
        optimizer.zero_grad()
        return {float(own["step"]) for own in optimizer.state.values()}

    before = [step(), step()]
    optimizer.state.clear()
    return before, len(optimizer.state), step()


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("name", PLUGINS)
def test_a_cleared_state_begins_anew_on_every_rank(ranks2, name, precision):
    assert ranks2(begins_anew, name, precision) == [([{1.0}, {2.0}], 0, {1.0})] * 2


def relay(model):
    model.to(memory_format=torch.channels_last)


def changes_memory_format(rank, world_size, name, precision, moment, reads):
    """What is reported, and whether no weight changed since. moment: before the next of these the format changes."""
    torch.manual_seed(0)
    booster = Booster("cpu", precision, PLUGINS[name]())
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.Conv2d(6, 4, 1 if moment == "before" else 3)
    )
    if moment == "before":
        relay(model)
    model, made, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    data = torch.Generator().manual_seed(rank)
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")  # of DistributedDataParallel
    for step in range(2):
        made.zero_grad()
        before = [param.detach().clone() for param in model.parameters()]
        try:
            if step and moment == "forward":
                relay(model)
            loss = model(torch.randn(2, 3, 8, 8, generator=data)).float().square().mean() * 1e-3
            if step and moment == "backward":
                relay(model)
            booster.backward(loss, made)
            READS[reads](made)
            made.step()
        except RuntimeError as error:
            return step, str(error), all(map(torch.equal, before, model.parameters()))
    return torch.cat([param.detach().flatten() for param in model.parameters()])


# What looks at gradients before the step: under ZeRO weights are then put back into the order that they had.
READS = {
    "nothing": lambda made: None,
    "a clip": lambda made: made.clip_grad_by_norm(0.1),
    "unscaling": lambda made: made.unscale_grads(),
    "a state": lambda made: made.state_dict(),
}


@pytest.mark.crossed
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_a_memory_format_changed_after_boost_is_refused_by_the_next_pass(ranks2, name, precision, reads):
    # Averaged would be gradients of other elements: 3e-2 off after two steps of AdamW, in torch's own loop as well.
    for step, error, same in ranks2(changes_memory_format, name, precision, "forward", reads):
        assert (step, same) == (1, True)
        assert "0.weight changed its memory order after boost()" in error or "2.weight changed" in error


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_kernel_of_one_by_one_in_another_format_since_before_boost_trains_as_on_whole_ranks(ranks2, name):
    expected, _ = ranks2(changes_memory_format, "ddp", "fp32", "before", "nothing")
    for found in ranks2(changes_memory_format, name, "fp32", "before", "nothing"):
        torch.testing.assert_close(found, expected)


@pytest.mark.crossed
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_a_memory_format_changed_between_forward_and_backward_is_no_silent_wrong_step(ranks2, name, reads):
    expected, _ = ranks2(changes_memory_format, name, "fp32", "never", reads)
    for found in ranks2(changes_memory_format, name, "fp32", "backward", reads):
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, expected)
        else:
            assert found[0] == 1
            assert found[2]
            assert "changed its memory order after boost()" in found[1]


def largest_norm(rank, world_size, name, value):
    booster, model = Booster("cpu", "bf16", PLUGINS[name]()), torch.nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward((model(torch.ones(2, 4)).float() * (value if rank else 1.0)).sum(), optimizer)
    norm = float(optimizer.clip_grad_by_norm(1.0, norm_type=math.inf))
    return math.isnan(norm), norm == math.inf, optimizer.step().applied


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_nan_on_one_rank_makes_the_largest_norm_nan_and_an_inf_inf(ranks2, name):
    assert ranks2(largest_norm, name, math.nan) == [(True, False, False)] * 2
    assert ranks2(largest_norm, name, math.inf) == [(False, True, False)] * 2
