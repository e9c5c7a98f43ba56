"""`booster.numerics.advise`: what it measures, what it takes, and that it leaves nothing changed."""

import json
import math
import random
import sys
from contextlib import contextmanager, nullcontext

import numpy
import pytest
import torch
from torch import nn

from booster.cli import main
from booster.memory import estimate
from booster.mixed_precision import FP32, BF16MixedPrecision, FP16TorchMixedPrecision, hardware
from booster.numerics import Budget, advise
from booster.numerics.choosing import trained_subject
from booster.numerics.choosing.advice import Row, ranked
from booster.numerics.choosing.trained_subject import gradient_error

INPUTS = torch.linspace(-1, 1, 32 * 16).view(32, 16)
LABELS = torch.arange(32) % 4


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def advised(*precisions, model_fn=mlp, steps=3, **options):
    return advise(
        model_fn,
        (INPUTS, LABELS),
        nn.CrossEntropyLoss(),
        sgd,
        device="cpu",
        precisions=precisions,
        steps=steps,
        **options,
    )


# ---- which is taken ----


def row(name, ratio, error=0.0, status="measured", **more):
    return Row(name=name, ratio=ratio, gradient_error=error, loss_error=error, status=status, **more)


ROWS = [row("fp32", 1.0), row("bf16", 0.5, 0.01), row("fp16", 0.49, 0.001), row("int8", 0.2, 0.3)]


def test_the_fastest_within_the_bounds_is_taken():
    best, ordered, reasons = ranked(ROWS, Budget(), 0.01)
    assert best == "fp16"
    assert [(each.name, each.rank) for each in ordered] == [("fp16", 1), ("bf16", 2), ("fp32", 3), ("int8", None)]
    assert ordered[-1].note == "gradient error above 0.1"
    assert reasons[0] == "Take fp16: 0.49 of float32's time, gradient error 0.001."


def test_of_those_as_fast_within_the_noise_the_most_exact_is_taken():
    slower = [row("fp32", 1.0), row("bf16", 0.96, 0.01)]
    assert ranked(slower, Budget(), 0.01)[0] == "bf16"
    assert ranked(slower, Budget(), 0.1)[0] == "fp32"


def test_bounds_of_memory_and_losses_rule_out_what_exceeds_them():
    rows = [row("fp32", 1.0, peak=400), row("bf16", 0.5, 0.01, peak=300), row("bf16_naive", 0.8, 0.02, peak=200)]
    assert ranked(rows, Budget(), 0.0)[0] == "bf16"
    assert ranked(rows, Budget(max_memory=250), 0.0)[0] == "bf16_naive"
    assert ranked(rows, Budget(max_loss_error=0.001), 0.0)[0] == "fp32"
    nothing, ordered, reasons = ranked(rows, Budget(max_memory=100), 0.0)
    assert nothing is None
    assert all(each.rank is None for each in ordered)
    assert reasons[0] == "Nothing that was measured is within the bounds of the budget."


def test_what_is_rehearsed_or_not_finite_is_never_taken():
    rows = [row("fp32", 1.0), row("fp8", None, 0.01, "rehearsed"), row("fp16", 0.1, math.inf, finite=False)]
    best, ordered, _ = ranked(rows, Budget(max_gradient_error=None), 0.0)
    assert best == "fp32"
    assert [each.name for each in ordered] == ["fp32", "fp16", "fp8"]


def test_it_says_when_a_lower_precision_is_not_worth_it():
    rows = [row("fp32", 1.0), row("bf16", 1.01, 0.01), row("fp16", 15.0, 0.001, product=14.0)]
    best, _, reasons = ranked(rows, Budget(), 0.02)
    assert best == "fp32"
    assert reasons[0].startswith("Take fp32: no lower precision")
    assert "bf16 is no faster than fp32 here: 1.01 of its time, within the noise." in reasons
    assert any("fp16 is not worth it here" in said and "this processor does not have it" in said for said in reasons)


# ---- what is measured ----


class Clock:
    """Time that passes only where a precision says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(trained_subject, "clock", lambda device: self.now)
        monkeypatch.setattr("booster.numerics.choosing.advise.product_ratio", lambda dtype, device: 1.0)

    @contextmanager
    def takes(self, seconds, inner):
        self.now += seconds
        with inner:
            yield


@pytest.fixture
def clock(monkeypatch):
    own = Clock(monkeypatch)
    exact = FP32.forward_context
    monkeypatch.setattr(FP32, "forward_context", lambda self: own.takes(1.0, exact(self)))
    monkeypatch.setattr(FP32, "backward_context", lambda self: nullcontext())  # which enters that of the forward pass
    return own


def lasting(clock, seconds, base=BF16MixedPrecision, **options):
    class Lasting(base):
        def forward_context(self):
            return clock.takes(seconds, super().forward_context())

    return Lasting(**options)


def test_the_time_of_a_step_is_measured_beside_that_of_float32(clock):
    quick, slow = lasting(clock, 0.25), lasting(clock, 3.0, FP16TorchMixedPrecision)
    found = advised("fp32", quick, slow)
    # Model and criterion enter the context once each.
    assert [(each.seconds, each.ratio) for each in found.rows] == [(0.5, 0.25), (2.0, 1.0), (6.0, 3.0)]
    assert found.best == found.rows[0].name == "Lasting"
    assert found["Lasting 2"].ratio == 3.0
    assert found.precision is quick
    assert found.noise == 0.0
    assert quick._device is None, "the object is given back as it came"


def raw_gradients(weights, dtype):
    """The gradients of a plain loop under torch's own autocast."""
    torch.manual_seed(0)
    model = mlp()
    model.load_state_dict(weights)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(INPUTS)
    loss = nn.functional.cross_entropy(output.float(), LABELS)
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("seed", [0, 2], ids=["worse at first", "worse after five steps"])
def test_errors_are_those_of_a_plain_loop(seed):
    torch.manual_seed(seed)
    first = mlp().state_dict()
    trained = mlp()
    trained.load_state_dict(first)
    optimizer = sgd(trained)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(INPUTS), LABELS).backward()
        optimizer.step()
    worst = []
    for weights in (first, trained.state_dict()):
        (loss, exact), (half_loss, half) = raw_gradients(weights, None), raw_gradients(weights, torch.bfloat16)
        a = torch.cat([grad.double().flatten() for grad in exact.values()])
        b = torch.cat([grad.double().flatten() for grad in half.values()])
        cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
        worst.append((float((b - a).norm() / a.norm()), cosine, abs(half_loss - loss) / loss))
    assert (worst[0][0] > worst[1][0]) is (seed == 0)
    found = advised("bf16", seed=seed)["bf16"]
    error, cosine, _ = max(worst)
    assert found.gradient_error == pytest.approx(error, rel=1e-3)
    assert 1e-3 < error < 2e-2
    assert found.cosine == pytest.approx(cosine, abs=1e-6)
    assert found.loss_error == pytest.approx(max(entry[2] for entry in worst), rel=1e-2)
    assert {layer.name for layer in found.layers} == {"0", "2", "4"}


def test_the_error_of_a_layer_is_that_of_its_parameters_together():
    exact = {"a.weight": torch.tensor([3.0, 4.0]), "a.bias": torch.zeros(1), "b.weight": torch.tensor([1.0])}
    found = gradient_error({**exact, "a.weight": torch.tensor([3.0, 0.0])}, exact)
    assert [(layer.name, layer.relative) for layer in found.layers] == [("a", 0.8), ("b", 0.0)]
    assert found.layers[0].cosine == pytest.approx(0.6)
    assert found.relative == pytest.approx(4 / math.sqrt(26))


def test_a_layer_whose_gradient_is_rounding_alone_is_not_the_worst():
    exact = {"keys.bias": torch.full((4,), 1e-12), "w.weight": torch.tensor([1.0])}
    found = gradient_error({"keys.bias": -exact["keys.bias"], "w.weight": torch.tensor([1.01])}, exact)
    assert [layer.name for layer in found.layers] == ["w", "keys"]


def test_gradients_that_are_not_finite_or_not_there_are_errors_too():
    exact = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    assert gradient_error({"a.weight": torch.tensor([math.inf, 1.0])}, exact).relative == math.inf
    assert [layer.relative for layer in gradient_error({"a.weight": torch.ones(2)}, exact).layers] == [1.0, 0.0]


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.inner, self.factor = mlp(), factor

    def forward(self, x):
        return self.inner(x * self.factor) / self.factor


def test_a_loss_scale_that_is_too_large_is_lowered_before_gradients_are_compared():
    found = advised(FP16TorchMixedPrecision(init_scale=2.0**30))["FP16TorchMixedPrecision"]
    assert found.finite
    assert found.loss_scale < 2.0**30
    assert found.gradient_error < 0.01


def test_a_forward_pass_that_overflows_float16_rules_it_out(clock):
    quick = lasting(clock, 0.1, FP16TorchMixedPrecision)
    found = advised("bf16", quick, model_fn=lambda: Times(1e7))
    assert not found["Lasting"].finite
    assert found["Lasting"].note == "its loss or gradients are not finite"
    assert found["Lasting"].rank is None
    assert found.best in ("bf16", "fp32")


def test_what_the_machine_lacks_is_rehearsed_without_a_time():
    found = advised("fp8", "tf32", "nvfp4")
    for name in ("fp8", "tf32", "nvfp4"):
        assert (found[name].status, found[name].ratio, found[name].rank) == ("rehearsed", None, None)
    assert 0 < found["tf32"].gradient_error < found["fp8"].gradient_error < found["nvfp4"].gradient_error < 1
    assert found.best == "fp32"
    assert repr(found.precision) == "FP32(device='cpu')"
    assert "rehearsed: this device lacks the format" in str(found)


def test_a_precision_that_refuses_the_model_says_why():
    found = advised("int8", "mxfp8", model_fn=lambda: nn.Linear(16, 4))
    assert found["int8"].status == found["mxfp8"].status == "refused"
    assert "finds no linear layer" in found["int8"].note
    assert "finds no linear layer" in found["mxfp8"].note
    assert str(found).count("finds no linear layer") == 1
    assert str(found).count("refused; as int8") == 1


def test_what_does_not_fit_beside_the_float32_model_says_so():
    made = []

    def model_fn():
        made.append(mlp())
        if len(made) > 2:  # after both of float32
            raise torch.OutOfMemoryError("a long text of the allocator")
        return made[-1]

    found = advised("bf16", model_fn=model_fn)
    assert (found["bf16"].status, found["bf16"].note) == ("refused", "out of memory, next to the float32 model")
    with pytest.raises(KeyError, match=r"'fp16' was not measured; there are \['fp32', 'bf16'\]"):
        found["fp16"]


def test_what_comes_after_the_budget_of_time_is_left_out():
    found = advised("bf16", budget=Budget(seconds=1e-9))
    assert found["bf16"].status == "left out"
    assert found.best == "fp32"
    assert "Not measured, because the budget of time was used up: bf16." in found.reasons


@pytest.mark.parametrize("kinds", [frozenset(), hardware.KINDS], ids=["units", "no units"])
def test_the_peak_is_that_of_an_estimate(kinds, monkeypatch):
    """With what a step keeps for the next: in the last two, scratch of half weights, which the first step makes."""
    monkeypatch.setattr(hardware, "slow_products", lambda dtype: kinds)

    def wide():
        return nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))

    halves = ("bf16", "fp16", "bf16_naive", "fp16_naive")
    found = advised(*halves, model_fn=wide)
    for name in ("fp32", *halves):
        model = wide()
        expected = estimate(model, sgd(model), (INPUTS, LABELS), nn.CrossEntropyLoss(), precision=name)
        assert found[name].peak == pytest.approx(expected.peak, rel=0.05), name
        assert found[name].held == pytest.approx(expected.held - expected.inputs, rel=0.05), name


# ---- what is left alone ----


class Noisy(nn.Module):
    """Draws from every generator, when it is made and when it is called."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.shift = random.random() + numpy.random.rand()

    def forward(self, x):
        return self.inner(nn.functional.dropout(x, 0.1) + 1e-3 * self.shift * random.random())


def test_random_states_grad_mode_and_arguments_are_as_before():
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    batch = {"input": INPUTS.clone().requires_grad_()}
    criterion = Counting()
    with torch.no_grad():
        advise(lambda: Keyword(), batch, criterion, sgd, device="cpu", precisions=["bf16", "fp16_naive"], steps=3)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (numpy.random.get_state()[1] == before[2]).all()
    assert batch["input"].grad is None
    assert torch.equal(batch["input"].detach(), INPUTS)
    assert criterion.calls == 0


class Keyword(Noisy):
    def forward(self, input):
        return super().forward(input)


class Counting(nn.Module):
    calls = 0

    def forward(self, output, batch):
        self.calls += 1
        return output.square().mean()


def test_the_same_seed_gives_the_same_numbers():
    def errors(seed):
        torch.rand(3), random.random(), numpy.random.rand()
        found = advised("bf16", model_fn=Noisy, seed=seed)["bf16"]
        return found.gradient_error, found.loss_error

    assert errors(1) == errors(1) != errors(2)
    assert errors(1)[0] < 0.02, "dropout drops the same in both precisions, at both points"


# ---- arguments, and the command ----


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"precisions": "bf16"}, TypeError, "names or MixedPrecision objects, in a list"),
        ({"precisions": []}, TypeError, "names or MixedPrecision objects"),
        ({"precisions": ["bf16", "bf16"]}, ValueError, "twice"),
        ({"precisions": ["b16"]}, ValueError, "unknown; choose one of"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(options, error, says):
    with pytest.raises(error, match=says):
        advise(mlp, (INPUTS, LABELS), nn.CrossEntropyLoss(), sgd, **options)


def test_wrong_functions_are_errors_that_name_them():
    with pytest.raises(TypeError, match=r"what model_fn\(\) returned"):
        advise(lambda: 3, (INPUTS, LABELS), nn.CrossEntropyLoss(), sgd, device="cpu")
    with pytest.raises(TypeError, match=r"what optimizer_fn\(model\) returned"):
        advise(mlp, (INPUTS, LABELS), nn.CrossEntropyLoss(), lambda model: model, device="cpu")


SCRIPT = """
import torch
from torch import nn
def model_fn(): return nn.Linear(4, 2)
batch = (torch.ones(3, 4), torch.zeros(3, 2))
criterion = nn.MSELoss()
def optimizer_fn(model): return torch.optim.SGD(model.parameters(), lr=0.1)
def task(): return dict(model_fn=model_fn, batch=batch, criterion=criterion, optimizer_fn=optimizer_fn)
def wrong(): return 3
assert __name__ != "__main__", "it would train"
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train_advised.py").write_text(SCRIPT)
    return str(tmp_path / "train_advised.py")


@pytest.mark.parametrize("function", ["", ":task"])
def test_the_command_measures_what_a_script_or_its_function_defines(script, function, capsys):
    assert (
        main(["advise", "--json", "--precisions", "fp32,bf16", "--steps", "3", "--device", "cpu", script + function])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert {entry["name"] for entry in found["rows"]} == {"fp32", "bf16"}
    assert found["best"] in ("fp32", "bf16")


def test_the_command_draws_a_table(script, capsys):
    pytest.importorskip("rich", reason="the table is drawn by rich")
    bound = ["--max_memory_mib", "0.000001"]
    assert main(["advise", "--precisions", "bf16", "--steps", "3", "--device", "cpu", *bound, script]) == 1
    said = capsys.readouterr().out
    assert "x fp32" in said
    for line in (
        "x fp32: its time over that of a float32 step",
        "grad err, cosine: of loss and gradients",
        "docs/guides/choose.md",
    ):
        assert line in " ".join(said.split())
    assert "rehearsed:" not in said, "nothing was"
    assert "Nothing that was measured is within the bounds of the budget." in said


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("--device=bf16", "'cuda:N'; bf16 is a precision"),
        ("x", "names no job; give FILE.py"),
        ("{script}:wrong", "returned int"),
        ("{script}:absent", "no function 'absent'"),
    ],
)
def test_the_command_says_what_a_script_lacks(script, end, says, capsys):
    assert main(["advise", end.format(script=script)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--precisions=bf16", "--steps=20", "--seconds=60", "--max_gradient_error=0.1"])
def test_what_is_of_precisions_is_refused_beside_layers(option, capsys):
    assert main(["advise", "--layers", option, "script.py"]) == 2
    assert f"{option.partition('=')[0]} is of the measurement of precisions" in capsys.readouterr().err


def test_the_command_names_what_is_not_defined(tmp_path, capsys):
    (tmp_path / "empty_advised.py").write_text("batch = 3\n")
    assert main(["advise", str(tmp_path / "empty_advised.py")]) == 2
    assert "does not define model_fn, criterion, optimizer_fn" in capsys.readouterr().err


FORMS = {
    "job.py": "",
    "job.py:parts": "\n\ndef parts():\n    return {'model_fn': model_fn, 'batch': batch, 'criterion': criterion, "
    "'optimizer_fn': optimizer_fn}\n",
    "job.py:four": "\n\ndef four():\n    model = model_fn()\n    return model, optimizer_fn(model), batch, criterion\n",
}
JOB = """
import torch
from own_layers import Layer


def model_fn():
    return torch.nn.Sequential(Layer(8, 4), torch.nn.Tanh(), Layer(4, 2))


def optimizer_fn(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


batch, criterion = (torch.ones(4, 8), torch.tensor([0, 1, 0, 1])), torch.nn.CrossEntropyLoss()
if __name__ == "__main__":
    raise SystemExit("trained")
"""


@pytest.mark.parametrize("what", FORMS)
def test_advise_and_estimate_take_the_same_jobs(what, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_layers.py").write_text("from torch.nn import Linear as Layer\n")
    (tmp_path / "job.py").write_text(JOB + FORMS[what])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_layers", raising=False)
    assert main(["advise", "--precisions", "bf16", "--steps", "3", "--device", "cpu", "--json", what]) in (0, 1)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["fp32"]["loss_error"] == 0.0, "all models of one seed have the same weights"
    assert 0 < rows["bf16"]["gradient_error"] < 0.1
    monkeypatch.delitem(sys.modules, "own_layers", raising=False)
    assert main(["estimate", "--precision", "fp32", "--json", what]) == 0
    assert json.loads(capsys.readouterr().out)


# ---- CPUs without units for halves ----


def test_named_precisions_are_measured_in_float32_products_where_a_cpu_has_no_units(monkeypatch):
    monkeypatch.setattr(hardware, "half_units", lambda: ())
    _, bf16 = sorted(advised("bf16").rows, key=lambda each: each.name == "bf16")
    assert bf16.note == "products in float32"
    assert bf16.product is None
