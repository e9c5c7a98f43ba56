"""The float32 numbers behind half weights go with them: of every model of a checkpoint, and under every name of a tied one."""

import pytest
import torch
from comparing import same
from safetensors.torch import load_file
from torch import nn

from booster import Booster
from booster.cli.reading_commands import checkpoint as command
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision, FP16NaiveMixedPrecision

HALF = {
    "bf16_naive": BF16NaiveMixedPrecision,
    "bf16_naive fp32": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10),
    "O2": lambda: FP16ApexMixedPrecision("O2", max_loss_scale=2.0**10, verbosity=0),
}
WIDE = ["fp32", "bf16", "fp16"]


class Tied(nn.Module):
    """One table with two names, of which optimizers and masters know the first alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.between = nn.Linear(6, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.between(self.table(x)))


class Job:
    """Tied models with the same names of parameters, as many as `names`, each with its own optimizer."""

    def __init__(self, precision, names=("g", "d"), seed=0, steps=3, frozen=False):
        self.booster = Booster("cpu", HALF[precision]() if precision in HALF else precision)
        self.models, self.optimizers = {}, {}
        for number, name in enumerate(names):
            torch.manual_seed(seed + number)
            model = Tied()
            model.table.requires_grad_(not frozen)
            made = torch.optim.AdamW(model.parameters(), lr=1e-2)
            # The optimizer of one model may well bear the name of the other.
            self.models[name], self.optimizers[name[::-1]], *_ = self.booster.boost(model, made)
        for step in range(steps):
            self.step(step)

    def step(self, seed):
        torch.manual_seed(seed)
        x = torch.randint(0, 8, (5,))
        for model, optimizer in zip(self.models.values(), self.optimizers.values(), strict=True):
            self.booster.backward(nn.functional.cross_entropy(model(x).float(), x), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    def save(self, folder):
        return self.booster.save(folder, self.models, self.optimizers, step=1)

    def load(self, folder):
        self.booster.load(folder, self.models, self.optimizers)
        return self

    def masters(self):
        """The float32 weights, by model and every name."""
        found = {}
        for (name, model), optimizer in zip(self.models.items(), self.optimizers.values(), strict=True):
            weights = optimizer.state_dict()["booster"].get("masters", {}).get("weights", {})
            names = {param: key for key, param in model.named_parameters()}
            found[name] = {
                key: weights.get(names[param], param.detach()).float()
                for key, param in model.named_parameters(remove_duplicate=False)
            }
        return found


NUMBERS = [("0",), ("g", "d")]


@pytest.mark.slow_cases("O2-one model")
@pytest.mark.crossed
@pytest.mark.parametrize("names", NUMBERS, ids=["one model", "two"])
@pytest.mark.parametrize("half", HALF)
def test_masters_of_every_model_reach_wide_weights_under_all_names(tmp_path, half, names):
    source = Job(half, names)
    source.save(tmp_path)
    want = source.masters()
    assert all(len(weights) == 4 for weights in want.values())
    for wide in [*WIDE, *HALF]:
        loaded = Job(wide, names, seed=7, steps=0).load(tmp_path)
        for name in names:
            assert same(loaded.masters()[name], want[name]), f"{half} into {wide}: {name}"
        with_weights_alone = Job(wide, names, seed=7, steps=0)
        with_weights_alone.booster.load(tmp_path, with_weights_alone.models)
        for name in names:
            assert same(with_weights_alone.masters()[name], want[name]), f"{half} into {wide}, no optimizer: {name}"


@pytest.mark.parametrize("half", HALF)
def test_wide_weights_of_every_model_become_masters(tmp_path, half):
    source = Job("fp32")
    source.save(tmp_path)
    assert all(
        same(Job(half, seed=7, steps=steps).load(tmp_path).masters()[name], weights)
        for steps in (0, 2)
        for name, weights in source.masters().items()
    )


@pytest.mark.crossed
@pytest.mark.parametrize("names", NUMBERS, ids=["one model", "two"])
@pytest.mark.parametrize("half", HALF)
def test_convert_writes_the_masters_of_the_model_that_is_asked_for(tmp_path, half, names):
    source = Job(half, names)
    folder = source.save(tmp_path / "saved")
    for name in names:
        written = tmp_path / f"{name}.safetensors"
        assert command(["convert", str(folder), str(written), "--masters", "--model", name]) == 0
        assert same(load_file(written), source.masters()[name])
        assert command(["convert", str(folder), str(written), "--model", name]) == 0
        assert same(load_file(written), dict(source.models[name].state_dict()))


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("given", ["table.weight", "head.weight", "both", "second half"])
def test_float32_weights_loaded_under_any_name_of_a_tied_one_reach_its_master(half, given):
    job = Job(half, ("0",))
    torch.manual_seed(3)
    value = torch.randn(8, 6)
    state = {"table.weight": value, "head.weight": value}
    if given == "second half":  # as rounded as the first will be
        state["head.weight"] = value.to(job.models["0"].head.weight.dtype)
    elif given != "both":
        state = {given: value}
    job.models["0"].load_state_dict(state, strict=False)
    assert torch.equal(job.masters()["0"]["table.weight"], value)


def test_of_two_names_with_different_weights_the_last_counts_as_in_torch():
    job = Job("bf16_naive", ("0",))
    one, two = torch.randn(8, 6), torch.randn(8, 6)
    for state in ({"table.weight": one, "head.weight": two}, {"head.weight": two, "table.weight": one}):
        job.models["0"].load_state_dict(state, strict=False)
        assert torch.equal(job.masters()["0"]["head.weight"], two)


class Doubled(Tied):
    """Writes twice the weights of a layer into its state dict, and halves what it loads."""

    def __init__(self, of_all):
        super().__init__()
        layer = self if of_all else self.between

        def times(factor):
            def change(module, state, prefix, *args):
                for key in (f"{prefix}between.weight" if of_all else f"{prefix}weight",):
                    state[key] = state[key] * factor

            return change

        layer.register_state_dict_post_hook(times(2.0))
        layer.register_load_state_dict_pre_hook(times(0.5))


@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize("half", HALF)
def test_masters_are_what_a_model_makes_of_a_file_where_its_hooks_change_what_it_holds(tmp_path, half, of_all):
    jobs = []
    for precision, seed in (("fp32", 0), (half, 1)):
        torch.manual_seed(seed)
        model, booster = Doubled(of_all), Booster("cpu", HALF.get(precision, lambda: "fp32")())
        jobs.append((booster, *booster.boost(model, torch.optim.AdamW(model.parameters()))[:2]))
    (first, model, optimizer), (second, *target) = jobs
    first.save(tmp_path, model, optimizer, step=1)
    second.load(tmp_path, *target)
    masters = target[1].state_dict()["booster"]["masters"]["weights"]
    for name, param in model.named_parameters():
        # What a layer halves after the model's own hooks comes to masters as its rounded weight.
        eps = 2**-7 if name == "between.weight" and not of_all else 0.0
        torch.testing.assert_close(masters[name], param.detach(), rtol=eps, atol=0.0)


@pytest.mark.parametrize("half", ["bf16_naive", "bf16_naive fp32", "fp16_naive"])
def test_a_half_parameter_of_no_model_has_its_master_in_a_checkpoint(tmp_path, half):
    def job(seed):
        torch.manual_seed(seed)
        dtype = torch.float16 if "fp16" in half else torch.bfloat16
        layer, stranger = nn.Linear(4, 4), nn.Parameter(torch.randn(3).to(dtype))
        made = torch.optim.AdamW([{"params": layer.parameters()}, {"params": [stranger], "lr": 1e-4}], lr=1e-2)
        model, optimizer, *_ = (b := Booster("cpu", HALF[half]())).boost(layer, made)
        return b, model, optimizer, stranger

    def step(b, model, optimizer, stranger):
        b.backward(model(torch.ones(2, 4)).float().square().mean() + stranger.float().square().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    one, other = job(0), job(1)
    step(*one)
    one[0].save(tmp_path, *one[1:3])
    other[0].load(tmp_path, *other[1:3])
    with torch.no_grad():
        other[3].copy_(one[3])  # no model's, so nothing but its user keeps it
    for _ in range(3):
        step(*one)
        step(*other)
    assert torch.equal(one[3], other[3])
    ours, theirs = (each[2].state_dict()["booster"]["masters"]["weights"] for each in (one, other))
    assert "group 1, parameter 0" in ours
    assert same(ours, theirs)


@pytest.mark.parametrize(("source", "precision"), [*((each, each) for each in HALF), ("fp32", "bf16_naive")])
def test_layers_that_are_frozen_at_a_load_train_on_to_the_bit_once_they_are_not(tmp_path, source, precision):
    first = Job(source)
    first.save(tmp_path)
    again = Job(precision, seed=5, steps=0, frozen=True).load(tmp_path)
    for model, other in zip(first.models.values(), again.models.values(), strict=True):
        table = other.unwrap().table.weight
        assert torch.equal(model.unwrap().table.weight.to(table), table)
        table.requires_grad_(True)
    assert all(map(same, first.masters().values(), again.masters().values()))
    if source == precision:
        for job in (first, again):
            job.step(7)
        assert all(map(same, first.masters().values(), again.masters().values()))
