"""Records of what modules return: counted in sampled steps alone, over all passes, with hooks that change nothing."""

import copy
from functools import partial

import pytest
import torch
from comparing import flat
from small_job import backward, batch, boost, train
from test_underflow import spread
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.numerics import read_run

SCALE = 2.0**8


def fp16():
    return boost(FP16TorchMixedPrecision(init_scale=SCALE))


def rows(folder, of):
    return [row for row in read_run(folder).samples["0"] if row.of == of]


def test_outputs_and_their_gradients_are_counted_in_sampled_steps(tmp_path):
    booster, model, optimizer = fp16()
    seen = []
    booster.unwrap(model)[0].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    with booster.record(tmp_path, every=2, activations="0"):
        train(booster, model, optimizer, steps=5)
    found = rows(tmp_path, "activation")
    assert [(row.name, row.step, row.format, row.scale) for row in found] == [
        ("0", n, "float16", 1.0) for n in (1, 2, 4)
    ]
    assert [row.exponents for row in found] == [spread(seen[n - 1]) for n in (1, 2, 4)]
    gradients = rows(tmp_path, "activation gradient")
    assert [(row.step, row.scale) for row in gradients] == [(n, SCALE) for n in (1, 2, 4)]
    assert gradients[0].exponents.total == seen[0].numel()
    assert gradients[0].norm < 1 < gradients[0].largest * SCALE


def test_passes_of_one_step_add_up_and_evaluation_does_not_count(tmp_path):
    booster, model, optimizer = fp16()
    with booster.record(tmp_path, every=1, activations=["*"]):
        with booster.accumulate(model, optimizer, 2):
            for seed in (1, 2):
                backward(booster, model, optimizer, seed)
                with torch.no_grad():
                    model(batch()[0])
        optimizer.step()
    found = {row.name: row.exponents.total for row in rows(tmp_path, "activation")}
    assert found == {"0": 2 * 16 * 16, "1": 2 * 16 * 16, "2": 2 * 16 * 4}


def test_counting_changes_no_bit_and_closing_takes_the_hooks_off(tmp_path):
    weights = []
    for counted in ("**", ()):
        booster, model, optimizer = fp16()
        record = booster.record(tmp_path / str(bool(counted)), every=1, activations=counted)
        train(booster, model, optimizer)
        weights.append(flat(model))
        record.close()
        assert not any(module._forward_hooks for module in booster.unwrap(model).modules())
    assert torch.equal(*weights)


def test_models_boosted_later_are_counted_and_copies_are_not(tmp_path):
    booster, model, optimizer = fp16()
    record = booster.record(tmp_path, every=1, activations="**")
    late = torch.nn.Sequential(torch.nn.Linear(8, 4))
    late, second, *_ = booster.boost(late, torch.optim.SGD(late.parameters(), lr=0.1))
    x, y = batch()
    copy.deepcopy(booster.unwrap(late))(x)
    booster.backward(F.cross_entropy(late(x), y), second)
    second.step()
    record.close()
    found = [row for row in read_run(tmp_path).samples["1"] if row.of == "activation" and row.name == "Sequential-1.0"]
    assert [row.exponents.total for row in found] == [16 * 4]


def test_names_without_a_module_and_activations_without_samples_are_refused(tmp_path):
    booster, *_ = fp16()
    with pytest.raises(
        ValueError, match=r"activations='blocks.\*' names no module of the boosted models; there are \['0', '1', '2'\]"
    ):
        booster.record(tmp_path, activations="blocks.*")
    with pytest.raises(ValueError, match="every=None takes none; pass a number"):
        booster.record(tmp_path, every=None, activations="0")


class Critic(nn.Sequential):
    pass


def test_modules_of_two_models_are_told_apart_though_they_bear_one_name(tmp_path):
    booster = Booster("cpu")
    made = [kind(nn.Linear(8, 8)) for kind in (nn.Sequential, Critic)]
    (model, optimizer), (critic, other) = (
        booster.boost(each, torch.optim.SGD(each.parameters(), 0.1))[:2] for each in made
    )
    with booster.record(tmp_path, every=1, activations="*"):
        booster.backward(critic(model(batch()[0])).mean(), [optimizer, other])
        optimizer.step()
        other.step()
    samples = [row for rows in read_run(tmp_path).samples.values() for row in rows if row.of == "activation"]
    assert [(row.name, row.exponents.total) for row in samples] == [("0", 16 * 8), ("Critic.0", 16 * 8)]


def loss_of(model):
    x, y = batch()
    return F.cross_entropy(model(x), y)


def test_what_is_computed_besides_steps_is_not_counted(tmp_path):
    found = []
    for diagnose in (None, "every"):
        booster, model, optimizer = boost(FP16TorchMixedPrecision(init_scale=2.0**24), diagnose=diagnose)
        with booster.record(tmp_path / str(diagnose), every=1, activations="*"):
            for seed in range(3):
                train(booster, model, optimizer, 1, seed)
                if diagnose:
                    booster.diagnose(partial(loss_of, model), optimizer)
                    booster.capturable(partial(train, booster, model, optimizer, 1))
        assert optimizer.num_skipped == 3
        run = read_run(tmp_path / str(diagnose))
        found.append([(row.step, row.name, row.of, row.exponents) for row in run.samples["0"]])
    assert found[0] == found[1]


class Recomputing(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.use_reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.layers(x)
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


def test_what_is_computed_again_for_a_backward_pass_is_counted_once(tmp_path):
    found = {}
    for use_reentrant in (None, False, True):
        inner = Recomputing(use_reentrant)
        booster = Booster("cpu")
        model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), 0.1))
        with booster.record(tmp_path / str(use_reentrant), every=1, activations="layers.*"):
            booster.backward(model(batch()[0].requires_grad_()).square().mean(), optimizer)
            optimizer.step()
        samples = read_run(tmp_path / str(use_reentrant)).samples["0"]
        found[use_reentrant] = {
            (row.of, row.name): (row.exponents, row.norm) for row in samples if row.of != "gradient"
        }
    assert len(found[None]) == 6
    assert found[None] == found[False] == found[True]
