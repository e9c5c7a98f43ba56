"""An autopilot makes those products wide that rounding spoils, and no others; see benchmarks/planted.py for whole runs."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from switching import differences
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import planted
from booster import Booster
from booster.interface.model import extras_of
from booster.mixed_precision import Autopilot, MXFP8MixedPrecision, NVFP4MixedPrecision, PrecisionSchedule
from booster.mixed_precision.low_precision.autopilot import LIMIT
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import HighPrecision
from booster.numerics.record.recorded_run import read_run
from booster.numerics.reports.page import page
from booster.numerics.reports.terminal import show


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch, request):
    """A batch that is a quarter of the benchmark's, but where it is the benchmark that is run; `whole_flight` is none."""
    if request.node.get_closest_marker("slow") is None or "whole_flight" in request.fixturenames:
        monkeypatch.setattr(planted, "BATCH", 4)


def low():
    return NVFP4MixedPrecision(emulate=True)


def sizes(flight):
    """Numbers in the weight of each low-precision layer."""
    return [layer.weight.numel() for layer in flight.model.modules() if isinstance(layer, LowPrecisionLinear)]


class Flight:
    """A small GPT under an autopilot. flaw: what is planted before each step."""

    def __init__(self, flaw=planted.none, precision=None, **options):
        torch.manual_seed(0)
        self.own, self.flaw = planted.GPT(), flaw
        self.booster = Booster("cpu", precision or Autopilot(low(), **{"every": 4, **options}))
        optimizer = torch.optim.AdamW(self.own.parameters(), lr=3e-3)
        self.model, self.optimizer, *_ = self.booster.boost(self.own, optimizer)
        self.pilot = extras_of(self.model).pins

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
                found |= {(name, role) for role, product in products if isinstance(product, HighPrecision)}
        return found

    def state(self):
        return self.model.state_dict(), self.optimizer.state_dict(), self.pilot.state_dict(), sorted(self.wide())


def growing(model, step):
    """Outliers with a noise of 0.16, 0.30 and 0.94 of the signal at steps 8, 16 and 24."""
    for block in model.blocks:
        planted.plant_outliers(block, 2.0 ** (step / 4))


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


def test_an_autopilot_without_a_budget_looks_and_changes_nothing():
    flight = Flight(planted.outlier, budget=0.0)
    assert flight.steps(0, 5) == Flight(planted.outlier, low()).steps(0, 5)
    assert flight.pilot.looks == 2


def test_the_first_step_of_which_nothing_is_known_is_made_wide():
    flight = Flight(every=8)
    assert len(flight.wide()) == 3 * len(sizes(flight))
    assert flight.steps(0, 1)[0] == pytest.approx(Flight(precision="bf16").steps(0, 1)[0], rel=1e-3)
    assert flight.wide() == set()


def test_what_is_suspected_is_wide_in_the_step_of_the_second_look():
    flight = Flight(planted.outlier)
    flight.steps(0, 1)
    assert flight.pilot.names == []
    assert flight.wide() == {("blocks.0.up", "forward"), ("blocks.1.up", "forward")}


@pytest.mark.slow
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
    ((name, role, noise),) = flight.pilot.state_dict()["suspected"]
    assert noise > max(flight.pilot.noise.values()) > LIMIT
    flight.steps(1, 2)
    assert flight.wide() == {(name, role)}
    assert flight.pilot.share <= 0.05
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


@pytest.mark.slow
def test_it_looks_after_a_resume_at_what_it_would_have_looked_at(tmp_path):
    """Before and after looks at layers in turns, and at what grows."""
    whole = Flight(growing, every=8, sample=0.5)
    losses = whole.steps(0, 15)
    for saved in (15, 16, 17):
        whole.booster.save(tmp_path / str(saved), whole.model, whole.optimizer)
        losses += whole.steps(saved, saved + 1)
    losses += whole.steps(18, 20)
    assert whole.wide()
    for saved in (15, 16, 17):
        resumed = Flight(growing, every=8, sample=0.5)
        resumed.booster.load(tmp_path / str(saved), resumed.model, resumed.optimizer)
        assert resumed.steps(saved, 20) == losses[saved:]
        assert differences(resumed.state(), whole.state()) == []


@pytest.mark.slow
def test_a_run_repeats_to_the_bit():
    first, second = Flight(planted.outlier), Flight(planted.outlier)
    assert first.steps(0, 10) == second.steps(0, 10)
    assert differences(first.state(), second.state()) == []


def test_noise_is_that_of_the_product_beside_the_wide_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    booster = Booster(
        "cpu", Autopilot(MXFP8MixedPrecision(emulate=True, compute_dtype=torch.float32), every=1, budget=0.0)
    )
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    kept = {}
    model[1].register_forward_hook(lambda _, args, y: kept.update(x=args[0].detach(), y=y.detach()))
    booster.backward(model(torch.randn(32, 64)).square().sum(), optimizer)
    optimizer.step()
    wide = kept["x"] @ model[1].weight.detach().t()
    error = kept["y"] - wide
    error, wide = (each - each.mean(0) for each in (error, wide))
    assert extras_of(model).pins.noise["1", "forward"] == pytest.approx(float(error.norm() / wide.norm()), rel=1e-4)


def late(model, step):
    if step >= 49:
        planted.bad_weights(model, step)


@pytest.mark.parametrize(
    ("flaw", "again"),
    [
        *(pytest.param(flaw, False, marks=pytest.mark.slow) for flaw in (planted.none, planted.bad_weights)),
        (late, True),
    ],
)
def test_looking_every_50_steps_takes_at_most_3_percent_of_the_operations(flaw, again):
    """again: the second look at what the first suspects is among them."""
    flight = Flight(flaw, every=50)
    flight.steps(0, 3)

    plain = flight.operations(3)
    for _ in range(4, 49):  # steps that count, and change little
        for parameter in flight.own.parameters():
            parameter.grad = torch.zeros_like(parameter)
        assert flight.optimizer.step()
        flight.optimizer.zero_grad()
    looked, second = flight.operations(49), flight.operations(50)
    assert (second > plain) == again
    overhead = (looked - plain + second - plain) / 50 / plain
    assert 0 < overhead < 0.03, f"{overhead:.2%}"
    assert all(layer.watchers == () for layer in flight.model.modules() if isinstance(layer, LowPrecisionLinear))


def test_the_record_says_what_was_done_and_why(tmp_path):
    flight = Flight(planted.outlier)
    with flight.booster.record(tmp_path):
        flight.steps(0, 5)
    run = read_run(tmp_path)
    assert [(each.step, each.name, each.role, each.wide) for each in run.piloted] == [
        (2, "blocks.0.up", "forward", True),
        (2, "blocks.1.up", "forward", True),
    ]
    assert all(each.ahead == each.noise > LIMIT for each in run.piloted)
    assert "After step 2: forward of blocks.1.up wide, noise " in page(run)


@pytest.mark.slow
@pytest.mark.slow_cases("1.0")
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
    for said in (" ".join(capsys.readouterr().out.split()), page(run)):
        assert f"Autopilot: 2 looks at {run.looks[0].layers} layers, " in said
        assert "of the operations of their products; wide 0% of the products, at most 0%." in said


@pytest.mark.slow
def test_the_looks_at_each_of_two_models_are_told_apart(tmp_path, capsys):
    booster = Booster("cpu", Autopilot(low(), every=3))
    pairs = []
    for kind in (planted.GPT, planted.ViT):
        own = kind()
        pairs.append((own, *booster.boost(own, torch.optim.SGD(own.parameters(), lr=1e-3))[:2]))
    with booster.record(tmp_path):
        for step in range(3):
            for own, model, optimizer in pairs:
                planted.outlier(own, step)
                x, y = own.batch(torch.Generator().manual_seed(step))
                booster.backward(F.cross_entropy(model(x), y), optimizer)
                optimizer.step()
                optimizer.zero_grad()
    run = read_run(tmp_path)
    layers = [sum(isinstance(layer, LowPrecisionLinear) for layer in model.unwrap().modules()) for _, model, _ in pairs]
    assert layers[0] != layers[1]
    assert [(look.step, look.model, look.layers) for look in run.looks] == [
        (step, model, 2 if step == 2 else layers[model]) for step in (1, 2, 3) for model in (0, 1)
    ]
    assert [(each.model, each.name) for each in run.piloted if each.step == 2] == [
        (model, f"blocks.{block}.up") for model in (0, 1) for block in (0, 1)
    ]
    show(run)
    for said in (" ".join(capsys.readouterr().out.split()), page(run)):
        assert "forward of blocks.0.up of model 1 wide" in said
        for model in (0, 1):
            assert f"Autopilot of model {model}: 2 looks at {layers[model]} layers and 1 again, " in said


def test_noise_that_is_not_finite_can_be_read_back(tmp_path):
    def flaw(model, step):
        model.blocks[0].up.weight.data.fill_(0.0)  # no signal, and the channels of the bias no noise
        model.blocks[0].up.weight.data[0, 0] = math.inf

    flight = Flight(flaw)
    with flight.booster.record(tmp_path):
        flight.steps(0, 2)
    assert any(not math.isfinite(each.ahead) for each in read_run(tmp_path).piloted)


def test_layers_take_turns_and_all_are_found():
    flight = Flight(planted.outlier, every=2, sample=0.3, budget=0.05)  # 3 of 7 layers, of 21 products one
    seen = []
    for step in range(6):
        before = dict(flight.pilot.noise)
        flight.steps(step, step + 1)
        seen.append({name for (name, role), noise in flight.pilot.noise.items() if before.get((name, role)) != noise})
        assert flight.pilot.share <= 0.05
    assert [len(names) for names in seen] == [3, 4, 0, 3, 0, 3]  # the one that could be made wide a second time
    assert len(set().union(*seen)) == 7
    assert len(flight.wide()) == 1
    unlimited = Flight(planted.outlier, every=2, sample=0.3)
    unlimited.steps(0, 8)
    assert unlimited.pilot.names == ["blocks.0.up", "blocks.1.up"]


def test_noise_that_grows_is_made_wide_before_it_spoils():
    """What drifts is wide before a look finds it above the limit, and is looked at a second time before."""
    planted_ones = {("blocks.0.up", "forward"), ("blocks.1.up", "forward")}
    flight = Flight(growing, every=8)
    flight.steps(0, 16)
    assert flight.pilot.names == []
    before = dict(flight.pilot.noise)
    flight.steps(16, 17)
    assert {key for key, noise in flight.pilot.noise.items() if noise != before[key]} == planted_ones
    assert flight.wide() == planted_ones
    assert all(noise < LIMIT for noise in flight.pilot.noise.values())


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(16.0, marks=pytest.mark.slow), planted.HUGE])
def test_noise_of_a_single_batch_makes_nothing_wide(size):
    """Growth to the limit, or far above it, in a step that a look is at, and gone in the next."""

    def flaw(model, step):
        for block in model.blocks:
            planted.plant_outliers(block, size if step % 8 == 7 else 2.0)

    flight = Flight(flaw, every=8)
    flight.steps(0, 16)
    assert len(flight.pilot.state_dict()["suspected"]) == 2
    flight.steps(16, 26)
    assert flight.pilot.ever == []


def test_noise_that_stands_still_below_the_limit_stays_low():
    flight = Flight(lambda model, step: [planted.plant_outliers(block, 16.0) for block in model.blocks], every=8)
    flight.steps(0, 16)
    assert flight.wide() == set()
    assert flight.pilot.looks == 3


def test_second_looks_are_counted(tmp_path, capsys):
    flight = Flight(growing, every=8)
    with flight.booster.record(tmp_path):
        flight.steps(0, 26)
    run = read_run(tmp_path)
    assert [(look.step, look.layers, look.again) for look in run.looks] == [
        (1, 7, False),
        (8, 7, False),
        (16, 7, False),
        (17, 2, True),
        (24, 7, False),
    ]
    own, up = sum(3 * each for each in sizes(flight)), planted.DIM * 2 * planted.DIM
    assert run.looks[3].operations == pytest.approx(2 * up / own / 8)
    show(run)
    share = (4 * own + 2 * up) / own / 8 / 4
    assert f"4 looks at 7 layers and 1 again, {share:.1%} of the" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("table", "runs"),
    [(planted.table, "planted"), (planted.finished, "planted"), (planted.chosen, "planted_finish")],
)
def test_the_tables_of_the_page_are_those_of_the_runs(table, runs):
    root = Path(__file__).parents[2]
    run = json.loads((root / f"benchmarks/figures/{runs}.json").read_text())
    assert table(run) in (root / "benchmarks" / "results" / "quality.md").read_text()


def test_compiled_layers_are_refused_by_name():
    flight = Flight(every=2)
    flight.own.blocks[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks\.0 was compiled, and an Autopilot"):
        flight.pilot.begin_step(3)  # when the fourth step is to be looked at
    own = planted.GPT()
    own.blocks[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks\.1 was compiled, and an Autopilot"):
        Booster("cpu", Autopilot(low())).boost(own, torch.optim.SGD(own.parameters(), lr=0.1))


class Compiled:
    """Four linear layers under an autopilot, the second of them spoilt, run through torch.compile or not."""

    def __init__(self, *, compiled, **options):
        torch.manual_seed(0)
        torch.compiler.reset()
        self.own, self.graphs = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), 0
        self.booster = Booster("cpu", Autopilot(low(), every=4))
        optimizer = torch.optim.SGD(self.own.parameters(), lr=1e-2)
        self.model, self.optimizer, *_ = self.booster.boost(self.own, optimizer)
        self.run = torch.compile(self.model, backend=self._counted, **options) if compiled else self.model

    def _counted(self, graph, example_inputs):
        self.graphs += 1
        return graph

    def steps(self, count):
        """Losses, and how many graphs had been compiled after each step."""
        losses, graphs = [], []
        for step in range(count):
            with torch.no_grad():
                self.own[0].bias[::16], self.own[1].weight[:, ::16] = 300.0, 0.0
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            loss = (self.run(x) - 1).square().mean()
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            graphs.append(self.graphs)
        return losses, graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's compiler about itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_boosted_model_that_is_compiled_is_flown_as_one_that_is_not():
    plain, compiled = Compiled(compiled=False), Compiled(compiled=True)
    expected, _ = plain.steps(9)
    found, graphs = compiled.steps(9)
    assert found == expected
    assert extras_of(compiled.model).pins.state_dict() == extras_of(plain.model).pins.state_dict()
    assert extras_of(compiled.model).pins.names == ["1"]
    # Those of a step that is looked at, and those of one that is not, in which a layer has other products than the rest.
    assert graphs[2:] == [graphs[2]] * 7
    assert graphs[0] < graphs[2] <= 8


def test_an_autopilot_in_a_whole_graph_is_refused_by_name():
    flight = Compiled(compiled=True, fullgraph=True)
    with pytest.raises(Exception, match="an Autopilot or a record looks at products of linear layers in some steps"):
        flight.steps(1)


def test_what_is_no_autopilot_is_refused():
    with pytest.raises(ValueError, match="is no low precision"):
        Booster("cpu", Autopilot("bf16"))
    with pytest.raises(RuntimeError, match="in a run with an Autopilot"):
        Flight().booster.switch("bf16")
    assert math.isclose(LIMIT, 3**-0.5)


def test_a_copy_of_the_model_is_flown_by_nobody_and_can_be_pickled(tmp_path):
    flight = Flight(every=1)
    flight.steps(0, 1)
    with flight.booster.record(tmp_path, every=1):
        torch.save(flight.model, tmp_path / "model.pt")
        copies = [copy.deepcopy(flight.model), torch.load(tmp_path / "model.pt", weights_only=False)]
        x = flight.own.batch(torch.Generator().manual_seed(0))[0]
        for each in copies:
            layers = [layer for layer in each.modules() if isinstance(layer, LowPrecisionLinear)]
            assert layers
            assert not any(layer.watchers for layer in layers)
            assert extras_of(each).pins is None
            assert torch.equal(each(x), flight.model(x))
    assert all(layer.watchers for layer in flight.model.modules() if isinstance(layer, LowPrecisionLinear))


def test_a_sample_is_the_share_that_was_written():
    """0.28 of 25 layers are 7, which as a product of floats is a bit more."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(25)))
    booster = Booster("cpu", Autopilot(NVFP4MixedPrecision(emulate=True, keep=()), every=1, sample=0.28))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert len({name for name, _ in extras_of(model).pins._measured}) == 7


# ---------------------------------------------------------------------- as a phase of a schedule


def finished():
    """Flown, then with all forward products in bfloat16, then in bfloat16, and flown again."""
    phases = {
        0: Autopilot(low(), every=3),
        4: Autopilot(NVFP4MixedPrecision(emulate=True, forward="bf16"), every=3),
        6: "bf16",
        8: Autopilot(low(), every=5),
    }
    return PrecisionSchedule(phases)


SPOILT = [f"blocks.{block}.down" for block in (0, 1)]


def test_the_next_autopilot_goes_on_with_what_the_last_one_decided():
    flight = Flight(planted.bad_weights, finished())
    both = {(name, role) for name in SPOILT for role in ("forward", "input_grad")}
    flight.steps(0, 4)
    assert flight.wide() == both
    flight.steps(4, 5)
    forward = {
        (name, "forward") for name, layer in flight.model.named_modules() if isinstance(layer, LowPrecisionLinear)
    }
    assert flight.wide() == forward | {(name, "input_grad") for name in SPOILT}
    assert flight.pilot.share == pytest.approx(2 / 21)
    flight.steps(5, 7)
    assert not any(isinstance(layer, LowPrecisionLinear) for layer in flight.model.modules())
    assert flight.pilot.share == 0.0
    assert sorted(flight.pilot.names) == SPOILT


def test_an_autopilot_that_begins_later_looks_at_its_first_step_which_is_wide(tmp_path):
    flight = Flight(planted.outlier, PrecisionSchedule({0: "bf16", 2: Autopilot(low(), every=50)}))
    with flight.booster.record(tmp_path):
        flight.steps(0, 5)
    run = read_run(tmp_path)
    assert [(look.step, look.again) for look in run.looks] == [(3, False), (4, True)]
    assert flight.wide() == {("blocks.0.up", "forward"), ("blocks.1.up", "forward")}
    (switch,) = run.switches
    assert switch.precision.startswith("Autopilot(NVFP4MixedPrecision(")
    assert switch.why == "the schedule, after step 2"


@pytest.fixture(scope="module")
def whole_flight(tmp_path_factory):
    """Checkpoints of a run through all phases, by steps made; its losses; and its state after so many steps."""
    flight, folders, losses, states = Flight(planted.bad_weights, finished()), {}, [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted, "BATCH", 4)  # as in the tests
        for step in range(12):
            losses += flight.steps(step, step + 1)
            states[step + 1] = copy.deepcopy(flight.state())
            folders[step + 1] = tmp_path_factory.mktemp("flight")
            flight.booster.save(folders[step + 1], flight.model, flight.optimizer)
    return folders, losses, states


@pytest.mark.parametrize("made", [1, 4, 9, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 5, 7, 8, 10))])
def test_a_run_that_is_resumed_in_any_phase_goes_on_to_the_bit(made, whole_flight):
    folders, losses, states = whole_flight
    resumed = Flight(planted.bad_weights, finished())
    resumed.booster.load(folders[made], resumed.model, resumed.optimizer)
    assert resumed.steps(made, made + 2) == losses[made : made + 2]
    assert differences(resumed.state(), states[made + 2]) == []


def test_a_run_goes_back_to_what_its_autopilot_knew(whole_flight):
    """A checkpoint of an earlier phase, loaded when another one has begun."""
    folders, losses, states = whole_flight
    flight = Flight(planted.bad_weights, finished())
    flight.booster.load(folders[7], flight.model, flight.optimizer)
    flight.steps(7, 8)
    flight.booster.load(folders[3], flight.model, flight.optimizer)
    assert flight.steps(3, 5) == losses[3:5]
    assert differences(flight.state(), states[5]) == []


def test_layers_that_a_later_phase_alone_has_low_are_loaded_too(tmp_path):
    def flight():
        kept = NVFP4MixedPrecision(emulate=True, keep=("blocks.1", "head"))
        return Flight(planted.outlier, PrecisionSchedule({0: Autopilot(kept, every=2), 2: Autopilot(low(), every=2)}))

    whole, resumed = flight(), flight()
    whole.steps(0, 5)
    assert whole.pilot.names == ["blocks.0.up", "blocks.1.up"]
    whole.booster.save(tmp_path, whole.model, whole.optimizer)
    resumed.booster.load(tmp_path, resumed.model, resumed.optimizer)
    assert resumed.steps(5, 7) == whole.steps(5, 7)
    assert differences(resumed.state(), whole.state()) == []


def test_a_later_phase_with_a_smaller_budget_keeps_the_worst_products_wide_alone():
    phases = {0: Autopilot(low(), every=2), 3: Autopilot(low(), every=2, budget=0.1)}
    flight = Flight(planted.bad_weights, PrecisionSchedule(phases))
    flight.steps(0, 3)
    assert flight.wide() == {(name, role) for name in SPOILT for role in ("forward", "input_grad")}
    for step in range(3, 7):
        flight.steps(step, step + 1)
        assert flight.wide() == {(name, "input_grad") for name in SPOILT}  # 2 of 21


def test_a_checkpoint_of_a_larger_budget_is_loaded_within_this_one(tmp_path):
    flight, smaller = (Flight(planted.bad_weights, every=2, budget=budget) for budget in (0.5, 0.1))
    flight.steps(0, 3)
    flight.booster.save(tmp_path, flight.model, flight.optimizer)
    smaller.booster.load(tmp_path, smaller.model, smaller.optimizer)
    assert smaller.wide() == {(name, "input_grad") for name in SPOILT}
    assert smaller.pilot.share <= 0.1


def test_a_run_that_was_saved_without_an_autopilot_is_looked_at_in_its_first_step_here(tmp_path):
    plain, flight = Flight(planted.outlier, low()), Flight(planted.outlier, every=50)
    plain.steps(0, 2)
    plain.booster.save(tmp_path, plain.model, plain.optimizer)
    flight.booster.load(tmp_path, flight.model, flight.optimizer)
    flight.steps(2, 4)
    assert flight.wide() == {("blocks.0.up", "forward"), ("blocks.1.up", "forward")}


def test_what_an_autopilot_chose_is_told_where_none_flies(tmp_path, caplog):
    flight, plain = Flight(planted.outlier, every=2), Flight(planted.outlier, low())
    flight.steps(0, 3)
    flight.booster.save(tmp_path, flight.model, flight.optimizer)
    plain.booster.load(tmp_path, plain.model, plain.optimizer)
    assert "modules ['blocks.0.up', 'blocks.1.up'] had products in a wide dtype, as an Autopilot chose" in caplog.text


def test_a_model_that_is_boosted_in_a_later_phase_is_flown_from_then_on():
    flight = Flight(planted.outlier, PrecisionSchedule({0: "bf16", 1: Autopilot(low(), every=2)}))
    flight.steps(0, 2)
    own = planted.ViT()
    model, optimizer, *_ = flight.booster.boost(own, torch.optim.SGD(own.parameters(), lr=1e-3))
    for step in range(2):
        planted.outlier(own, step)
        x, y = own.batch(torch.Generator().manual_seed(step))
        flight.booster.backward(F.cross_entropy(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert extras_of(model).pins.names == ["blocks.0.up", "blocks.1.up"]


def test_the_estimate_of_a_schedule_of_autopilots_is_of_the_fullest_phase():
    batch = (torch.zeros(16, 64), torch.zeros(16, dtype=torch.long))

    def peak(precision):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        return Booster("cpu", precision).estimate_memory(model, optimizer, batch, nn.CrossEntropyLoss()).peak

    peaks = [peak("bf16_naive"), peak(low())]
    assert peak(PrecisionSchedule({0: Autopilot(low()), 5: "bf16_naive"})) == max(peaks)
    assert peaks[0] != peaks[1]


def test_a_schedule_refuses_what_no_phase_can_be():
    with pytest.raises(TypeError, match=r"phases\[0\].* the name of a precision, a MixedPrecision or an Autopilot"):
        PrecisionSchedule({0: 3})
    with pytest.raises(ValueError, match="is no low precision"):
        Booster("cpu", PrecisionSchedule({0: Autopilot("bf16")}))
    with pytest.raises(RuntimeError, match="in a run with a PrecisionSchedule"):
        Flight(precision=finished()).booster.switch("bf16")
