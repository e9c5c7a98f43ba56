"""Memory layouts under master weights: whatever order a weight, its gradient or its state is in, the numbers are the same."""

import pytest
import torch
from prescribed import loss_with
from test_masters_foreign import PRECISIONS
from torch import nn

from booster import Booster

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "an unregistered one": lambda p: type("Own", (torch.optim.RMSprop,), {})(p, lr=0.01),
}
ANY_OPTIMIZER = ("fp16, fp32 masters", "bf16, fp32 masters", "O2")  # the others are for elementwise ones
CASES = [(precision, "AdamW") for precision in PRECISIONS if precision != "bf16, stochastic"] + [
    (precision, name) for precision in ANY_OPTIMIZER for name in OPTIMIZERS if name != "AdamW"
]
cases = pytest.mark.parametrize(("precision", "optimizer"), CASES)
# With parameters that stay in float32 next to masters.
PINNED = [(precision, name) for name in ("AdamW", "SGD") for precision in ("fp16, fp32 masters", "bf16, split")]
PINS = {"keep_fp32": ["0", "2"]}
with_pins = pytest.mark.parametrize(
    ("precision", "optimizer", "pins"), [(*case, {}) for case in CASES] + [(*case, PINS) for case in PINNED]
)


def assert_alike(run, other):
    """Weights and masters are equal, also where an optimizer takes means of a tensor: up to the order of its sums."""
    if run.pinned:  # torch's fused kernels step the pinned ones, in another order of operations for another layout
        for ours, theirs in zip(run.weights(), other.weights(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        return
    exact = not isinstance(run.optimizer.unwrap(), torch.optim.Adafactor)
    for ours, theirs in zip(run.masters() or run.weights(), other.masters() or other.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    if exact:
        assert all(map(torch.equal, run.weights(), other.weights()))


class Run:
    """Convolutions and a square matrix under prescribed gradients; `layout` changes their memory."""

    def __init__(self, precision, optimizer, *, gaps=False, **options):
        torch.manual_seed(0)
        self.pinned = bool(options)
        self.net = nn.Sequential(
            nn.Conv2d(5, 33, 3), nn.Conv2d(33, 7, 2, bias=False), nn.Linear(40, 40), nn.Linear(9, 1)
        )
        if gaps:
            wide = torch.zeros(40, 90)
            wide[:, ::2][:, :40] = self.net[2].weight.detach()
            self.net[2].weight = nn.Parameter(wide[:, ::2][:, :40])
        self.booster = Booster("cpu", PRECISIONS[precision](**options))
        self.model, self.optimizer, *_ = self.booster.boost(self.net, OPTIMIZERS[optimizer](self.net.parameters()))
        self.generator = torch.Generator().manual_seed(1)
        self.params = list(self.net.parameters())

    def step(self, layout_of_gradients=lambda grad: grad):
        grads = [torch.randn(p.shape, generator=self.generator).to(p.dtype) for p in self.params]
        self.optimizer.zero_grad()
        self.booster.backward(loss_with(self.params, grads), self.optimizer)
        for param in self.params:
            param.grad = layout_of_gradients(param.grad)
        assert self.optimizer.step().applied

    def weights(self):
        return [param.detach() for param in self.params]

    def masters(self):
        state = self.optimizer.state_dict()["booster"].get("masters", {"weights": {}})["weights"]
        return [state[name] for name in sorted(state)]


def channels_last(run):
    run.model.to(memory_format=torch.channels_last)


def transposed(run):
    with torch.no_grad():
        for param in run.params:
            if param.dim() > 1:
                param.data = param.data.transpose(0, 1).contiguous().transpose(0, 1)


def with_gaps(run):
    with torch.no_grad():
        for param in run.params:
            param.data = param.data.repeat_interleave(2, dim=-1)[..., ::2]


def new_memory(run):
    for param in run.params:
        param.data = param.data.clone()


@pytest.mark.crossed
@pytest.mark.parametrize("change", [channels_last, transposed, with_gaps, new_memory])
@with_pins
def test_a_change_of_layout_between_steps_changes_no_number(precision, optimizer, pins, change):
    run, still = (Run(precision, optimizer, **pins) for _ in range(2))
    for step in range(4):
        if step:
            (change if step % 2 else new_memory)(run)
        run.step()
        still.step()
    assert_alike(run, still)


@cases
def test_the_same_memory_read_in_another_order_is_other_weights(precision, optimizer):
    run, still = (Run(precision, optimizer) for _ in range(2))
    for each in (run, still):
        each.step()
    run.params[3].data = run.params[3].data.t()  # neither address nor shape change
    still.params[3].data = run.params[3].data.clone(memory_format=torch.contiguous_format)
    for each in (run, still):
        each.step()
    assert_alike(run, still)


LAYOUTS = {
    "channels last": lambda g: g.contiguous(memory_format=torch.channels_last) if g.dim() == 4 else g,
    "transposed": lambda g: g.transpose(0, 1).contiguous().transpose(0, 1) if g.dim() > 1 else g,
    "gaps": lambda g: g.repeat_interleave(3, dim=-1)[..., ::3],
}


@pytest.mark.crossed
@pytest.mark.parametrize("layout", LAYOUTS)
@with_pins
def test_gradients_in_any_layout_are_the_same_gradients(precision, optimizer, pins, layout):
    if precision == "O2":
        pytest.skip("keeps gradients in its own sums; its .grad is not what is stepped on")
    run, still = (Run(precision, optimizer, **pins) for _ in range(2))
    for _ in range(3):
        run.step(LAYOUTS[layout])
        still.step()
    assert_alike(run, still)


@cases
def test_an_expanded_gradient_is_read_as_what_it_shows(precision, optimizer):
    if precision == "O2":
        pytest.skip("keeps gradients in its own sums; its .grad is not what is stepped on")
    run, still = (Run(precision, optimizer) for _ in range(2))
    run.step(lambda g: g.flatten()[0].expand(g.shape))
    still.step(lambda g: g.flatten()[0].expand(g.shape).clone())
    assert_alike(run, still)


@pytest.mark.parametrize("change", [channels_last, transposed])
@with_pins
def test_state_of_one_layout_loads_into_another(precision, optimizer, pins, change):
    writer, still = (Run(precision, optimizer, **pins) for _ in range(2))
    for each in (writer, still):
        each.step()
    reader = Run(precision, optimizer, **pins)
    change(reader)
    reader.model.load_state_dict(writer.model.state_dict())
    reader.optimizer.load_state_dict(writer.optimizer.state_dict())
    reader.generator.set_state(still.generator.get_state())
    for each in (reader, still):
        each.step()
        each.step()
    assert_alike(reader, still)


@cases
def test_a_parameter_with_gaps_trains_like_one_without(precision, optimizer):
    run, still = Run(precision, optimizer, gaps=True), Run(precision, optimizer)
    for _ in range(3):
        run.step()
        still.step()
    assert_alike(run, still)


# ---- parameters that stay in float32 next to masters ----


def test_the_pinned_parameters_are_float32():
    run = Run("bf16, split", "AdamW", **PINS)
    assert [str(param.dtype)[6:] for param in run.params] == ["float32"] * 2 + ["bfloat16"] + ["float32"] * 2 + [
        "bfloat16"
    ] * 2


@pytest.mark.parametrize(("precision", "optimizer"), PINNED)
def test_a_float32_parameter_with_gaps_is_stepped_where_it_lies_and_nothing_beside_it(precision, optimizer):
    run, still = Run(precision, optimizer, gaps=True, **PINS), Run(precision, optimizer, **PINS)
    wide = torch.full((40, 80), 7.0)
    wide[:, ::2] = run.params[3].detach()
    run.params[3].data = wide[:, ::2]
    for _ in range(3):
        run.step()
        still.step()
    assert_alike(run, still)
    assert (wide[:, 1::2] == 7.0).all()
    assert torch.equal(run.params[3], wide[:, ::2])
