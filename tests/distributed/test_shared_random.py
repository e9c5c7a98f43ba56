"""Ranks that divide the layers of a model draw alike in its forward passes, whatever each of them drew before."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import booster
from booster import Booster
from booster.plugin import HybridParallelPlugin

SIZES = {"tp": {}, "sharded": {"zero_stage": 1}, "pipeline": {"pp_size": 2, "num_microbatches": 2}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.5, self.training)


def trained(kind, precision, draw, folder=None, steps=3):
    """(weights by name, masks of dropout) after some steps before each of which this rank draws `draw` numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Dropout(0.5), nn.Linear(8, 4))
    options = {"tp_size": 2, "pp_size": 1, **SIZES[kind]}
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    b = Booster("cpu", precision, HybridParallelPlugin(tp_plan=plan, **options))
    model, optimizer, criterion, *_ = b.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05), nn.MSELoss())
    seen = []
    if kind != "pipeline":
        b.unwrap(model)[3].register_forward_hook(lambda module, args, output: seen.append(output.detach().eq(0)))
    x, y = torch.ones(4, 8), torch.zeros(4, 4)
    for step in range(steps):
        torch.rand(draw + step)
        if kind == "pipeline":
            b.execute_pipeline(iter([(x, y)]), model, criterion, optimizer)
        else:
            b.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None and step == 0:
            b.save(folder, model, optimizer, step=1)
    return b, model, optimizer, seen


def own(b, model):
    found = {}
    for name, param in b.unwrap(model).named_parameters():
        if not param.is_meta and param.numel():
            found[name] = (param.full_tensor() if isinstance(param, DTensor) else param).detach().float().clone()
    return found


def drift(rank, world_size, kind, precision, by_rank):
    booster.seed_everything(7, by_rank=by_rank)
    before = torch.get_rng_state()
    b, model, _, seen = trained(kind, precision, draw=rank)
    torch.set_rng_state(before)
    return own(b, model), seen


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_whole_weights_stay_alike_under_dropout(ranks2, precision, by_rank):
    (one, masks), (other, masks_of_other) = ranks2(drift, "tp", precision, by_rank)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(map(torch.equal, masks, masks_of_other))
    assert not torch.equal(masks[0], masks[1]), "each pass draws anew"


@pytest.mark.parametrize("kind", ["sharded", "pipeline"])
def test_copies_draw_otherwise_and_ranks_of_one_copy_or_stage_alike(ranks4, kind):
    found = ranks4(drift, kind, "fp32", False)
    for first in (0, 2):
        (one, masks), (other, masks_of_other) = found[first : first + 2]
        assert one
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(map(torch.equal, masks, masks_of_other))
    if kind == "sharded":
        assert not torch.equal(found[0][1][0], found[2][1][0])


def resumed(rank, world_size, folder):
    booster.seed_everything(7, by_rank=True)
    b, model, _, seen = trained("tp", "fp32", rank, folder)
    right = own(b, model)
    torch.manual_seed(99)
    again, other, optimizer, _ = trained("tp", "fp32", 0, steps=1)
    again.load(folder, other, optimizer)
    for step in range(1, 3):
        torch.rand(rank + step)
        again.backward(nn.functional.mse_loss(other(torch.ones(4, 8)), torch.zeros(4, 4)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return all(torch.equal(value, right[name]) for name, value in own(again, other).items())


def test_a_resumed_run_draws_what_the_unbroken_one_did(ranks2, tmp_path):
    assert ranks2(resumed, str(tmp_path / "run")) == [True, True]


def outside(rank, world_size):
    """Forward passes leave the rank's own generator alone, also where they raise."""
    torch.manual_seed(rank)
    b, model, _, _ = trained("tp", "fp32", 0, steps=1)
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    model(torch.ones(4, 8))
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 5))
    model(torch.ones(4, 8))
    return torch.equal(before, torch.get_rng_state())


def test_a_rank_s_own_generator_is_left_alone(ranks2):
    assert ranks2(outside) == [True, True]
