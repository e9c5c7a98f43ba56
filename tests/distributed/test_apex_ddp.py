"""fp16_apex on data-parallel ranks: equal to a split batch in one process, and never of two minds about an overflow."""

import pytest
import torch
from comparing import same
from small_job import batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.mixed_precision import apex_amp as amp
from booster.plugin import TorchDDPPlugin

SCALE = 2.0**10
STEPS = 12


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def strategy(level, **options):
    return FP16ApexMixedPrecision(level, max_loss_scale=SCALE, verbosity=0, **options)


def adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def outcome(model, optimizer, applied, losses):
    return {
        "weights": [param.detach().clone() for param in model.parameters()],
        "masters": [param.detach().clone() for param in amp.master_params(optimizer)],
        "applied": applied,
        "scaler": dict(optimizer.state_dict()["booster"]["loss_scaler"]),
        "losses": losses,
    }


def train(rank, world_size, level, accum, overflow):
    model = net(seed=rank)  # everybody is to start from rank 0's weights
    booster = Booster("cpu", strategy(level), TorchDDPPlugin())
    model, optimizer, criterion, *_ = booster.boost(model, adam(model.parameters()), nn.CrossEntropyLoss())
    applied, losses = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with booster.accumulate(model, optimizer, accum):
            for a in range(accum):
                x, y = (part.chunk(world_size)[rank] for part in batch(step * accum + a, rows=8))
                loss = criterion(model(x), y)
                losses.append(loss.item())
                if step in overflow and rank == world_size - 1:
                    loss = loss * float("inf")
                booster.backward(loss, optimizer)
        applied.append(bool(optimizer.step()))
    return outcome(model, optimizer, applied, losses)


def split_batch(level, accum, ranks=2):
    """The reference: one process, each rank's share of each batch as a micro-batch."""
    booster = Booster("cpu", strategy(level))
    model = net(0)
    model, optimizer, criterion, *_ = booster.boost(model, adam(model.parameters()), nn.CrossEntropyLoss())
    applied, losses = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with booster.accumulate(model, optimizer, accum * ranks):
            for rank in range(ranks):
                for a in range(accum):
                    x, y = (part.chunk(ranks)[rank] for part in batch(step * accum + a, rows=8))
                    loss = criterion(model(x), y)
                    losses.append(loss.item())
                    booster.backward(loss, optimizer)
        applied.append(bool(optimizer.step()))
    return outcome(model, optimizer, applied, losses)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_two_ranks_equal_a_split_batch_in_one_process(ranks2, level):
    first, second = ranks2(train, level, 1, ())
    reference = split_batch(level, 1)
    assert same(first["weights"], second["weights"])
    assert same(first["masters"], second["masters"])
    assert same(first["masters"], reference["masters"])
    assert same(first["weights"], reference["weights"])
    assert first["scaler"] == second["scaler"] == reference["scaler"]
    assert sorted(first["losses"] + second["losses"]) == sorted(reference["losses"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_on_two_ranks_synchronises_before_anything_is_unscaled(ranks2, level):
    first, second = ranks2(train, level, 3, ())
    reference = split_batch(level, 3)
    assert same(first["masters"], second["masters"])
    assert first["scaler"] == {"loss_scaler0": {"loss_scale": SCALE, "unskipped": STEPS, "dynamic": True}}
    for mine, theirs in zip(first["masters"], reference["masters"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)


def overflow_after_reduction(rank, world_size, level):
    """An inf that the reduction did not carry: as in a gradient of which every rank holds a part."""
    booster = Booster("cpu", strategy(level), TorchDDPPlugin())
    model = net(0)
    plain = model
    model, optimizer, *_ = booster.boost(model, adam(model.parameters()))
    update = optimizer._update.gradients
    loss = model(batch(0, rows=8)[0]).float().sum()
    scale = update.next_scale
    update.before_backward(scale)
    (loss * scale).backward()
    if rank == 1:
        plain[0].bias.grad[0] = torch.inf
    update.after_backward(loss)
    result = optimizer.step()
    return result.applied, result.culprit, optimizer.loss_scale


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_agree_on_an_inf_that_only_one_of_them_has(ranks2, level):
    assert ranks2(overflow_after_reduction, level) == [(False, ("0.bias",), SCALE / 2)] * 2


def losses_add_up(rank, world_size, as_view):
    """Two losses, each with its own pass and scale; their gradients meet in DDP's own memory."""
    booster = Booster("cpu", strategy("O1", num_losses=2), TorchDDPPlugin(gradient_as_bucket_view=as_view))
    model = net(0)
    model, optimizer, *_ = booster.boost(model, adam(model.parameters()))
    x = batch(0, rows=8)[0].chunk(world_size)[rank]
    for loss_id in range(2):
        booster.backward(model(x).float().sum() * (loss_id + 1), optimizer, loss_id=loss_id)
    return [param.grad.clone() for param in model.parameters()]


def test_gradients_set_aside_survive_when_ddp_reuses_its_buckets(ranks2):
    for plain, viewed in zip(ranks2(losses_add_up, False), ranks2(losses_add_up, True), strict=True):
        assert same(plain, viewed)


def ported_script(rank, world_size, level):
    torch.manual_seed(0)
    model = net(0)
    model, optimizer = amp.initialize(
        model, adam(model.parameters()), opt_level=level, verbosity=0, max_loss_scale=SCALE
    )
    model = DistributedDataParallel(model)
    for step in range(3):
        x, y = (part.chunk(world_size)[rank] for part in batch(step, rows=8))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    masters = [param.detach().clone() for param in amp.master_params(optimizer)]
    weights = [param.detach().clone() for param in model.parameters()]
    amp.shutdown()
    return masters, weights


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_ported_script_wraps_what_initialize_returned_and_masters_agree(ranks2, level):
    (masters, weights), (other_masters, _) = ranks2(ported_script, level)
    assert same(masters, other_masters)
    assert same(weights, [master.to(weight.dtype) for master, weight in zip(masters, weights, strict=True)])
