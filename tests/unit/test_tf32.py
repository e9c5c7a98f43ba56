"""tf32: torch's switch is on during forward and backward and nowhere else; elsewhere operands are rounded by hand."""

import low_reference
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.common.torch_internals.tensor_internals import FakeTensorMode
from booster.mixed_precision import FP32, TF32MixedPrecision
from booster.mixed_precision.hardware import CUDA, ONEDNN, missing_on_cpu, rounds_to_bfloat16, switched

SWITCHES = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


def settings():
    return [switch.fp32_precision for switch in SWITCHES]


def rounded(x):
    return torch.from_numpy(low_reference.tf32(x.detach().numpy()))


def emulated(model, **options):
    booster = Booster("cpu", TF32MixedPrecision(emulate=True))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    return booster, model, optimizer


def test_the_cpu_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"tf32 needs .* capability 8.0 \(Ampere or newer\), and this is a CPU; .*emulate=True"
    ):
        Booster("cpu", "tf32")
    Booster("cpu", TF32MixedPrecision(emulate="auto"))


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_runs_it_from_ampere_on(monkeypatch, capability, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Something")
    precision = TF32MixedPrecision()
    if not runs:
        with pytest.raises(ValueError, match="NVIDIA Something has 7.5"):
            precision.bind(torch.device("cuda", 0))
        return
    precision.bind(torch.device("cuda", 0))
    before = settings()
    with precision.forward_context():
        assert settings() == ["tf32"] * 3
    with precision.backward_context():
        assert settings() == ["tf32"] * 3
    assert settings() == before


@pytest.fixture
def all_off():
    """Recurrent layers have TF32 by torch's default."""
    before = settings()
    for switch in SWITCHES:
        switch.fp32_precision = "ieee"
    yield
    for switch, was in zip(SWITCHES, before, strict=True):
        switch.fp32_precision = was


@pytest.mark.usefixtures("all_off")
def test_the_switch_is_restored_after_an_error_too():
    before = settings()
    assert before == ["ieee"] * 3
    with pytest.raises(KeyError), switched(CUDA, "tf32"):
        assert settings() == ["tf32"] * 3
        raise KeyError
    assert settings() == before


class Spy(nn.Module):
    """A linear layer that notes the switch in forward and in backward."""

    def __init__(self, look=lambda: settings()[0]):
        super().__init__()
        self.linear, self.seen, self.look = nn.Linear(3, 2), [], look

    def forward(self, x):
        self.seen.append(self.look())
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.seen.append(self.look()))
        return y


def test_a_training_step_has_it_on_in_both_passes_and_off_between(monkeypatch):
    monkeypatch.setattr("booster.mixed_precision.fp32.missing", lambda *args, **kwargs: "")
    spy, before = Spy(), settings()
    booster = Booster("cpu", "tf32")
    model, optimizer, *_ = booster.boost(spy, torch.optim.SGD(spy.parameters(), lr=0.1))
    loss = model(torch.ones(1, 3)).sum()
    assert settings() == before
    booster.backward(loss, optimizer)
    assert settings() == before
    assert spy.seen == ["tf32", "tf32"]


def test_emulated_products_read_rounded_operands_in_both_passes():
    torch.manual_seed(0)
    linear = nn.Linear(40, 24)
    x, g = torch.randn(5, 7, 40), torch.randn(5, 7, 24)
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    booster, model, optimizer = emulated(linear)
    y = model(x.requires_grad_())
    booster.backward((y * g).sum(), optimizer)
    flat, g = rounded(x).flatten(0, 1), g.flatten(0, 1)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.detach().flatten(0, 1), flat @ rounded(weight).t() + bias, **close)
    torch.testing.assert_close(x.grad.flatten(0, 1), rounded(g) @ rounded(weight), **close)
    torch.testing.assert_close(linear.weight.grad, rounded(g).t() @ flat, **close)
    torch.testing.assert_close(linear.bias.grad, g.sum(0), **close)
    plain = x.detach().flatten(0, 1) @ weight.t() + bias
    assert 2.0**-13 < float((y.detach().flatten(0, 1) - plain).norm() / plain.norm()) < 2.0**-10


def test_emulated_convolutions_and_attention_are_rounded_too():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 8, 8)
    weight, bias = conv.weight.detach().clone(), conv.bias.detach().clone()
    booster, model, optimizer = emulated(conv)
    y = model(x)
    torch.testing.assert_close(y, F.conv2d(rounded(x), rounded(weight), bias), rtol=1e-5, atol=1e-5)
    booster.backward((y * y.detach()).sum(), optimizer)
    reference = rounded(weight).requires_grad_()
    (F.conv2d(rounded(x), reference) * rounded(y)).sum().backward()
    torch.testing.assert_close(conv.weight.grad, reference.grad, rtol=1e-4, atol=1e-4)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q * self.scale, k, v)

    q, k, v = torch.randn(3, 2, 4, 16, 32)
    _, model, _ = emulated(Attention())
    # torch multiplies both by the root of the scale; the smaller one is a power of two times a root of two.
    root = 32**-0.25
    weights = torch.softmax(rounded(q * root) @ rounded(k * root).mT, -1)
    torch.testing.assert_close(model(q, k, v).detach(), rounded(weights) @ rounded(v), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=1e-6, atol=1e-6)


def test_recomputed_activations_are_the_same_and_other_dtypes_are_left_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, recompute):
            def block(x):
                return self.b(torch.tanh(self.a(x)))

            return checkpoint(block, x, use_reentrant=False) if recompute else block(x)

    grads = []
    for recompute in (False, True):
        booster, model, optimizer = emulated(net := Net())
        booster.backward(model(torch.linspace(0, 1, 16).view(2, 8), recompute).square().sum(), optimizer)
        grads.append([param.grad for param in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    _, model, _ = emulated(nn.Linear(8, 8).double())
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(model(x), F.linear(x, model.weight, model.bias))


def test_a_rehearsal_says_so_once(caplog):
    precision = TF32MixedPrecision(emulate="auto")
    for _ in range(2):
        Booster("cpu", precision)
    assert [record.getMessage() for record in caplog.records] == [
        "tf32 is emulated on cpu: a rehearsal of its numbers, slower than float32"
    ]


# ---- float32 with products that oneDNN rounds to bfloat16 on a CPU ----

ON_CPU = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn)
runs_bfloat16 = pytest.mark.skipif(
    bool(missing_on_cpu("", torch.device("cpu"))), reason="needs a CPU on which oneDNN rounds to bfloat16"
)


def on_cpu():
    return [switch.fp32_precision for switch in ON_CPU]


@runs_bfloat16
def test_products_in_bfloat16_read_rounded_operands_in_both_passes_and_nowhere_else():
    torch.manual_seed(0)
    linear, before = nn.Linear(128, 96), on_cpu()
    x, g = torch.randn(64, 128, requires_grad=True), torch.randn(64, 96)
    booster = Booster("cpu", FP32(products="bfloat16"))
    model, optimizer, *_ = booster.boost(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    y = model(x)
    assert on_cpu() == before
    booster.backward((y * g).sum(), optimizer)
    assert on_cpu() == before

    def low(t):
        return t.detach().bfloat16().float()

    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y.detach(), low(x) @ low(linear.weight).t() + linear.bias.detach(), **close)
    torch.testing.assert_close(x.grad, low(g) @ low(linear.weight), **close)
    torch.testing.assert_close(linear.weight.grad, low(g).t() @ low(x), **close)
    plain = F.linear(x, linear.weight, linear.bias).detach()
    assert 2.0**-11 < float((y.detach() - plain).norm() / plain.norm()) < 2.0**-7
    assert y.dtype == torch.float32


def test_products_in_bfloat16_are_switched_on_in_both_passes_and_off_after_an_error(monkeypatch):
    monkeypatch.setattr("booster.mixed_precision.fp32.missing_on_cpu", lambda name, device: "")
    spy, before = Spy(lambda: on_cpu()[0]), on_cpu()
    booster = Booster("cpu", FP32(products="bfloat16"))
    model, optimizer, *_ = booster.boost(spy, torch.optim.SGD(spy.parameters(), lr=0.1))
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    assert spy.seen == ["bf16", "bf16"]
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 4))
    assert on_cpu() == before


def test_a_cpu_whose_products_stay_in_float32_refuses_bfloat16_whatever_it_says_of_itself(monkeypatch):
    """As with AVX512-BF16 and no AMX, where oneDNN does not take the permission to round."""
    monkeypatch.setattr("booster.mixed_precision.hardware.rounds_to_bfloat16", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "New", "avx512_bf16": True})
    with pytest.raises(
        ValueError,
        match=r"products in bfloat16 need a CPU .* and on this one, New, it computes them in float32; use FP32",
    ):
        Booster("cpu", FP32(products="bfloat16"))
    with pytest.raises(ValueError, match=r"products='fp8' is not legal; choose 'float32' or 'bfloat16'"):
        FP32(products="fp8")
    assert FP32().products is None


def test_a_cpu_is_said_to_round_to_bfloat16_exactly_where_a_product_of_another_size_is_rounded():
    """Also in a default dtype, on a default device and among fake tensors, none of which reach the look that is taken."""
    torch.manual_seed(0)
    x = torch.randn(384, 384)
    with switched(ONEDNN, "bf16"):
        computed = x @ x
    is_rounded = float((computed - x @ x).norm()) > 2.0**-12 * float((x @ x).norm())
    with torch.device("meta"), FakeTensorMode():
        assert rounds_to_bfloat16.__wrapped__() is is_rounded
