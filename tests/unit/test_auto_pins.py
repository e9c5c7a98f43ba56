"""`booster.numerics.auto_pins`: the modules that have to be kept in float32, and no others."""

import math

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16MixedPrecision, FP8MixedPrecision
from booster.numerics import auto_pins

PRECISIONS = ("bf16", "fp16", "bf16_naive", "fp16_naive")


class Block(nn.Module):
    """A residual block with its own product, times `factor`, to which `shift` is added and taken away again.

    Half precision overflows at the one and loses its digits at the other, and no module inside is to blame.
    """

    def __init__(self, width, shift=0.0, factor=1.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mix = nn.Parameter(torch.eye(width))
        self.shift, self.factor = shift, factor

    def forward(self, x):
        inner = self.down(nn.functional.gelu(self.up(self.norm(x))))
        inner = torch.matmul(inner, self.mix) * self.factor + self.shift - self.shift
        return x + inner / self.factor


class Model(nn.Module):
    def __init__(self, fragile=(), **how):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16, **(how if place in fragile else {})) for place in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shifted(nn.Linear):
    """One leaf that loses its digits."""

    def forward(self, x):
        return super().forward(x) + 3e4 - 3e4


torch.manual_seed(0)
BATCH = torch.randn(32, 8), torch.randint(0, 4, (32,))


def found(model_fn, precision, **options):
    return auto_pins(model_fn, BATCH, nn.CrossEntropyLoss(), precision, device="cpu", **options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sound_model_needs_no_pins(precision):
    pins = found(Model, precision)
    assert pins.names == ()
    assert pins.error == pins.without < 0.05
    assert "No module need be kept" in str(pins)


@pytest.mark.parametrize(("precision", "place"), [*zip(PRECISIONS, (2, 0, 1, 3), strict=True)])
def test_the_one_fragile_block_is_found_and_nothing_else(precision, place):
    pins = found(lambda: Model([place], shift=3e4), precision)
    assert pins.names == (f"blocks.{place}",)
    assert pins.without > 0.1 >= pins.error
    assert [entry.names for entry in pins.table if entry.kept] == [(f"blocks.{place}",)]
    assert pins.table[0].kept


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_blocks_that_overflow_are_found_though_one_alone_does_not_help(precision):
    pins = found(lambda: Model([1, 3], factor=1e6), precision)
    assert pins.names == ("blocks.1", "blocks.3")
    assert pins.without == math.inf
    assert pins.error < 0.05
    assert [entry.alone for entry in pins.table[:2]] == [math.inf, math.inf]


def test_a_single_module_inside_a_block_takes_its_place_where_it_is_enough():
    def model():
        made = Model()
        made.blocks[2].up = nn.Sequential(nn.Linear(16, 16), Shifted(16, 32))
        return made

    pins = found(model, "bf16")
    assert pins.names == ("blocks.2.up.1",)
    assert [entry.names for entry in pins.table if entry.kept] == [("blocks.2",)]


def test_the_weights_of_a_model_that_is_given_are_what_is_measured_and_stay():
    model = Model()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(3e5), model.blocks[1].down.weight.div_(3e5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    pins = found(model, "fp16")
    assert pins.names == ("blocks.1",)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_that_share_a_weight_are_kept_together():
    def model():
        made = nn.Sequential(Shifted(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
        made[2].weight = made[0].weight
        return Wrapped(made)

    pins = found(model, "bf16_naive")
    assert pins.names == ("inner.0", "inner.2")
    assert ("inner.0", "inner.2") in [entry.names for entry in pins.table]


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.after = inner, nn.Identity()

    def forward(self, x):
        return self.after(self.inner(x))


def test_what_comes_back_trains_within_the_bound():
    pins = found(lambda: Model([1], factor=1e6), "fp16")
    booster = Booster("cpu", pins.precision)
    model = Model([1], factor=1e6)
    boosted, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    )
    booster.backward(criterion(boosted(BATCH[0]), BATCH[1]), optimizer)
    assert optimizer.step().applied


class Wary(nn.Linear):
    """Loses its digits under autocast where its input is float32, as after a pinned module, and not where that is half."""

    def forward(self, x):
        wide = torch.is_autocast_enabled("cpu") and x.dtype == torch.float32
        return super().forward(x.bfloat16() + 3e4 - 3e4 if wide else x)


def test_a_block_that_is_not_needed_with_the_others_is_given_back():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.wary, self.fragile, self.head = nn.Linear(8, 8), Wary(8, 8), Shifted(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.fragile(self.wary(self.first(x))))

    pins = found(Two, "bf16", bound=0.5)
    assert pins.names == ("fragile",)
    assert pins.table[0].names == ("wary",)


def test_what_a_precision_keeps_already_it_keeps():
    precision = BF16MixedPrecision(keep_fp32="blocks.0")
    pins = found(lambda: Model([0, 2], shift=3e4), precision)
    assert pins.names == ("blocks.2",)
    assert found(lambda: Model([0, 2], shift=3e4), pins.precision).names == ()
    assert found(lambda: Model([0], shift=3e4), precision).names == ()


def test_a_loss_that_is_not_finite_is_an_error_too():
    def criterion(output, target):
        return nn.functional.cross_entropy(output, target) + (output.detach() @ output.detach().T * 1e6).max()

    with pytest.raises(RuntimeError, match="or in the criterion"):
        auto_pins(Model, BATCH, criterion, "fp16", device="cpu")


def test_a_low_precision_takes_pins_too():
    pins = found(lambda: Model([1], shift=3e4), FP8MixedPrecision(emulate=True), bound=0.15)
    assert pins.names == ("blocks.1",)
    assert isinstance(pins.precision, FP8MixedPrecision)


def test_an_error_outside_of_all_modules_is_told():
    class Outside(Model):
        def forward(self, x):
            return super().forward(x + 3e4 - 3e4)

    with pytest.raises(RuntimeError, match="in the forward of Outside itself, or in the criterion"):
        found(Outside, "bf16_naive")


def test_a_model_that_is_bad_in_float32_is_told():
    with pytest.raises(RuntimeError, match="are not finite in float32"):
        found(lambda: Model([0], factor=math.inf), "bf16")


@pytest.mark.parametrize(
    ("precision", "options", "error", "says"),
    [
        ("fp32", {}, TypeError, "FP32 takes no keep_fp32"),
        ("fp16_apex", {}, TypeError, "FP16ApexMixedPrecision takes no keep_fp32"),
        ("nothing", {}, ValueError, "unknown; choose one of"),
        (FP8MixedPrecision(emulate=True, compute_dtype=torch.float32), {}, ValueError, "says nothing under"),
        ("bf16", {"bound": 0.0}, ValueError, "bound"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(precision, options, error, says):
    with pytest.raises(error, match=says):
        found(Model, precision, **options)


def test_wrong_functions_are_errors_that_name_them():
    with pytest.raises(TypeError, match="model=3"):
        auto_pins(3, BATCH, nn.CrossEntropyLoss(), "bf16")
    with pytest.raises(TypeError, match="criterion=3"):
        auto_pins(Model, BATCH, 3, "bf16")
