"""An autopilot makes those products wide that rounding spoils, and no others; see benchmarks/planted.py for whole runs."""

import math

import pytest
import torch
import torch.nn.functional as F
from switching import differences
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import planted
from booster import Booster
from booster.interface.model import pins_of
from booster.mixed_precision import Autopilot, MXFP8MixedPrecision, NVFP4MixedPrecision
from booster.mixed_precision.low_precision.autopilot import LIMIT
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import Wide
from booster.numerics.record.run import read_run
from booster.numerics.reports.page import page
from booster.numerics.reports.terminal import show


def low():
    return NVFP4MixedPrecision(emulate=True)


class Flight:
    """A small GPT under an autopilot. flaw: what is planted before each step."""

    def __init__(self, flaw=planted.none, precision=None, **options):
        torch.manual_seed(0)
        self.own, self.flaw = planted.GPT(), flaw
        self.booster = Booster("cpu", precision or Autopilot(low(), **{"every": 4, **options}))
        optimizer = torch.optim.AdamW(self.own.parameters(), lr=3e-3)
        self.model, self.optimizer, *_ = self.booster.boost(self.own, optimizer)
        self.pilot = pins_of(self.model)

    def backward(self, step):
        self.flaw(self.own, step)
        x, y = self.own.batch(torch.Generator().manual_seed(step))
        loss = F.cross_entropy(self.model(x), y)
        self.booster.backward(loss, self.optimizer)
        return loss.item()

    def steps(self, first, last):
        losses = []
        for step in range(first, last):
            losses.append(self.backward(step))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def operations(self, step):
        """How many floating-point operations forward and backward of this step take."""
        with FlopCounterMode(display=False) as counter:
            self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return counter.get_total_flops()

    def wide(self):
        """Layers and their products that are wide."""
        found = set()
        for name, layer in self.model.named_modules():
            if isinstance(layer, LowPrecisionLinear):
                recipe = layer.recipe
                products = zip(
                    ("forward", "input_grad", "weight_grad"),
                    (recipe.output, recipe.input_gradient, recipe.weight_gradient),
                    strict=True,
                )
                found |= {(name, role) for role, product in products if isinstance(product, Wide)}
        return found

    def state(self):
        return self.model.state_dict(), self.optimizer.state_dict(), self.pilot.state_dict(), sorted(self.wide())


def test_what_is_planted_is_found_and_nothing_else():
    flight = Flight(planted.outlier)
    flight.steps(0, 5)
    assert flight.wide() == {("blocks.0.up", "forward"), ("blocks.1.up", "forward")}
    assert flight.pilot.names == ["blocks.0.up", "blocks.1.up"]


def test_weights_that_are_bad_spoil_two_products():
    flight = Flight(planted.bad_weights)
    flight.steps(0, 5)
    layers = ("blocks.0.down", "blocks.1.down")
    assert flight.wide() == {(name, role) for name in layers for role in ("forward", "input_grad")}


def test_a_sound_run_stays_low():
    flight = Flight()
    flight.steps(0, 9)
    assert flight.wide() == set()
    assert flight.pilot.looks == 3


def test_the_run_learns_where_all_low_does_not():
    """Noise that is gone is gone from the loss, too: the first half of a run of the benchmark."""
    flights = {
        name: Flight(planted.outlier, precision) for name, precision in (("low", low()), ("bf16", "bf16"), ("", None))
    }
    last = {name: sum(flight.steps(0, 60)[-10:]) / 10 for name, flight in flights.items()}
    assert last["low"] > last["bf16"] + 0.1
    assert last[""] < (last["low"] + last["bf16"]) / 2


def test_a_product_is_low_again_after_two_calm_looks():
    healed = 6

    def flaw(model, step):
        if step < healed:
            planted.outlier(model, step)
        elif step == healed:
            for block in model.blocks:
                block.norm2.bias.data[planted.OUTLIERS] = 0.0

    flight = Flight(flaw)
    flight.steps(0, 8)
    assert len(flight.wide()) == 2  # one calm look, at step 8
    flight.steps(8, 12)
    assert flight.wide() == set()


def test_the_budget_is_kept_and_the_worst_come_first():
    flight = Flight(planted.bad_weights, budget=0.05)  # of 21 products one
    flight.steps(0, 1)
    (only,) = flight.wide()
    assert flight.pilot.share <= 0.05
    assert flight.pilot.noise[only] == max(flight.pilot.noise.values())
    none = Flight(planted.bad_weights, budget=0.0)
    none.steps(0, 5)
    assert none.wide() == set()


def test_it_goes_on_from_a_checkpoint_to_the_bit(tmp_path):
    whole = Flight(planted.bad_weights, every=5)
    whole.steps(0, 7)
    assert whole.wide()
    whole.booster.save(tmp_path, whole.model, whole.optimizer)
    expected = whole.steps(7, 14)
    resumed = Flight(planted.bad_weights, every=5)
    resumed.booster.load(tmp_path, resumed.model, resumed.optimizer)
    assert resumed.wide() == {(name, role) for name, role, _ in resumed.pilot.state_dict()["products"]}
    assert resumed.steps(7, 14) == expected
    assert differences(resumed.state(), whole.state()) == []


def test_a_run_repeats_to_the_bit():
    first, second = Flight(planted.outlier), Flight(planted.outlier)
    assert first.steps(0, 10) == second.steps(0, 10)
    assert differences(first.state(), second.state()) == []


def test_noise_is_that_of_the_product_beside_the_wide_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    booster = Booster("cpu", Autopilot(MXFP8MixedPrecision(emulate=True, compute_dtype=torch.float32), every=1))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    kept = {}
    model[1].register_forward_hook(lambda _, args, y: kept.update(x=args[0].detach(), y=y.detach()))
    booster.backward(model(torch.randn(32, 64)).square().sum(), optimizer)
    optimizer.step()
    wide = kept["x"] @ model[1].weight.detach().t()
    error = kept["y"] - wide
    error, wide = (each - each.mean(0) for each in (error, wide))
    assert pins_of(model).noise["1", "forward"] == pytest.approx(float(error.norm() / wide.norm()), rel=1e-4)


@pytest.mark.parametrize("flaw", [planted.none, planted.bad_weights])
def test_looking_every_50_steps_takes_at_most_3_percent_of_the_operations(flaw):
    flight = Flight(flaw, every=50)
    flight.steps(0, 3)

    plain = flight.operations(3)
    flight.steps(4, 49)
    looked = flight.operations(49)
    overhead = (looked - plain) / 50 / plain
    assert 0 < overhead < 0.03, f"{overhead:.2%}"
    assert all(layer.watchers == () for layer in flight.model.modules() if isinstance(layer, LowPrecisionLinear))


def test_the_record_says_what_was_done_and_why(tmp_path):
    flight = Flight(planted.outlier)
    with flight.booster.record(tmp_path):
        flight.steps(0, 5)
    run = read_run(tmp_path)
    assert [(each.step, each.name, each.role, each.wide) for each in run.piloted] == [
        (1, "blocks.0.up", "forward", True),
        (1, "blocks.1.up", "forward", True),
    ]
    assert all(each.ahead == each.noise > LIMIT for each in run.piloted)
    assert page(run)


@pytest.mark.parametrize("sample", [1.0, 0.3])
def test_the_record_and_the_report_say_what_looking_took(tmp_path, capsys, sample):
    flight = Flight(every=4, sample=sample)
    layers = [layer for layer in flight.model.modules() if isinstance(layer, LowPrecisionLinear)]
    own = sum(3 * 2 * planted.BATCH * planted.LENGTH * layer.in_features * layer.out_features for layer in layers)
    with flight.booster.record(tmp_path):
        flight.steps(0, 2)
        plain, looked = flight.operations(2), flight.operations(3)
    run = read_run(tmp_path)
    assert [(look.step, look.layers) for look in run.looks] == [
        (step, math.ceil(sample * len(layers))) for step in (1, 4)
    ]
    assert run.looks[-1].operations * 4 * own == pytest.approx(looked - plain)
    show(run)
    said = " ".join(capsys.readouterr().out.split())
    assert f"autopilot: 2 looks at {run.looks[0].layers} layers, " in said
    assert "of the operations of their products; wide 0% of the products, at most 0%" in said


def test_layers_take_turns_and_all_are_found():
    flight = Flight(planted.outlier, every=2, sample=0.3, budget=0.05)  # 3 of 7 layers, of 21 products one
    seen = []
    for step in range(6):
        before = dict(flight.pilot.noise)
        flight.steps(step, step + 1)
        seen.append({name for (name, role), noise in flight.pilot.noise.items() if before.get((name, role)) != noise})
        assert flight.pilot.share <= 0.05
    assert [len(names) for names in seen] == [3, 3, 0, 3, 0, 3]
    assert len(set().union(*seen)) == 7
    assert len(flight.wide()) == 1
    unlimited = Flight(planted.outlier, every=2, sample=0.3)
    unlimited.steps(0, 8)
    assert unlimited.pilot.names == ["blocks.0.up", "blocks.1.up"]


def test_noise_that_grows_is_made_wide_before_it_spoils():
    """What drifts is wide before a look finds it above the limit; what stands still below it stays low."""

    def flaw(model, step):
        for block in model.blocks:
            planted.plant_outliers(block, 2.0 ** (step / 4))  # its noise: 0.16, 0.30, 0.94 at steps 8, 16 and 24

    flight = Flight(flaw, every=8)
    flight.steps(0, 16)
    assert flight.wide() == {("blocks.0.up", "forward"), ("blocks.1.up", "forward")}
    assert all(noise < LIMIT for noise in flight.pilot.noise.values())
    still = Flight(lambda model, step: [planted.plant_outliers(block, 16.0) for block in model.blocks], every=8)
    still.steps(0, 16)
    assert still.wide() == set()


def test_compiled_layers_are_refused_by_name():
    flight = Flight(every=2)
    flight.own.blocks[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks\.0 was compiled, and an Autopilot"):
        flight.pilot.begin(3)  # when the fourth step is to be looked at
    own = planted.GPT()
    own.blocks[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks\.1 was compiled, and an Autopilot"):
        Booster("cpu", Autopilot(low())).boost(own, torch.optim.SGD(own.parameters(), lr=0.1))


def test_what_is_no_autopilot_is_refused():
    with pytest.raises(TypeError, match="low"):
        Autopilot(3)
    with pytest.raises(ValueError, match="is no low precision"):
        Booster("cpu", Autopilot("bf16"))
    with pytest.raises(ValueError, match="budget"):
        Autopilot("nvfp4", budget=1.5)
    with pytest.raises(ValueError, match="sample"):
        Autopilot("nvfp4", sample=0.0)
    with pytest.raises(RuntimeError, match="beside an Autopilot"):
        Flight().booster.switch("bf16")
    assert math.isclose(LIMIT, 3**-0.5)
